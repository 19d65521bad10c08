"""Values that live at the same time never share bytes of the arena, and those that do not may."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from octavo._native import Act
from octavo.backends.cpu.arena import Buffer, place


@st.composite
def buffers(draw: st.DrawFn) -> list[Buffer]:
    made = []
    for _ in range(draw(st.integers(0, 25))):
        form = draw(st.sampled_from([Act.F32, Act.BF16, Act.I8]))
        buffer = Buffer(form, 32 * draw(st.integers(1, 40)), draw(st.integers(1, 70)), draw(st.sampled_from([16, 32])))
        for operation in sorted(draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))):
            buffer.touch(operation)
        made.append(buffer)
    return made


def lives_meet(a: Buffer, b: Buffer) -> bool:
    return a.first <= b.last and b.first <= a.last


@given(buffers())
def test_buffers_alive_together_do_not_overlap(made: list[Buffer]) -> None:
    size = place(made)
    for buffer in made:
        assert buffer.offset % 64 == 0
        assert buffer.offset >= 0
        assert buffer.offset + buffer.nbytes <= size
    for a, b in itertools.combinations(made, 2):
        if lives_meet(a, b):
            assert a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset


@given(buffers())
def test_the_arena_is_between_the_largest_moment_and_the_sum(made: list[Buffer]) -> None:
    size = place(made)
    assert size <= sum(buffer.nbytes for buffer in made)
    for moment in range(13):
        assert size >= sum(buffer.nbytes for buffer in made if buffer.first <= moment <= buffer.last)


def test_a_chain_of_values_takes_turns() -> None:
    chain = [Buffer(Act.F32, 64, 10, first=i, last=i + 1) for i in range(20)]
    assert place(chain) == 2 * chain[0].nbytes


def test_parts_of_an_int8_value_lie_apart_inside_it() -> None:
    buffer = Buffer(Act.I8, 96, 5, 16, first=0, last=0)
    place([Buffer(Act.F32, 32, 3, first=0, last=0), buffer])
    activation = buffer.activation()
    starts = [activation.data, activation.scales, activation.scaled_sums, activation.sums]
    sizes = [5 * 96, *[5 * 6 * 4] * 3]
    assert starts[0] == buffer.offset
    for start, size, following in zip(starts, sizes, [*starts[1:], buffer.offset + buffer.nbytes], strict=True):
        assert start + size <= following


def test_no_values_need_no_arena() -> None:
    assert place([]) == 0
