"""The prefix index: what a digest stands for, and how far a chain matches."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.prefix_index import PrefixIndex, extend_chain, root_digest

tokens = st.lists(st.integers(0, 3), max_size=24)
names = st.one_of(st.none(), st.text(max_size=4))


def chain_of(ids: list[int], root: bytes = b"root", block: int = 4) -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(digests, root, np.asarray(ids, np.int32).tobytes(), block * 4)
    return digests


@given(tokens, tokens)
def test_digests_are_equal_exactly_where_everything_up_to_the_end_of_the_block_is(a: list[int], b: list[int]) -> None:
    for position, (left, right) in enumerate(zip(chain_of(a), chain_of(b), strict=False)):
        end = 4 * (position + 1)
        assert (left == right) == (a[:end] == b[:end])


@given(tokens)
def test_the_same_tokens_at_another_place_have_another_digest(ids: list[int]) -> None:
    digests = chain_of(ids[:4] * 6) if len(ids) >= 4 else []
    assert len(set(digests)) == len(digests)


@given(tokens, st.integers(0, 24))
def test_a_chain_can_be_made_in_pieces(ids: list[int], cut: int) -> None:
    data = np.asarray(ids, np.int32)
    digests: list[bytes] = []
    extend_chain(digests, b"root", data[: cut // 4 * 4].tobytes(), 16)
    extend_chain(digests, b"root", data[len(digests) * 4 :].tobytes(), 16)
    assert digests == chain_of(ids)


@given(names, names, names, names)
def test_adapter_and_salt_both_separate_and_never_read_as_one_another(
    adapter: str | None, salt: str | None, other_adapter: str | None, other_salt: str | None
) -> None:
    same = (adapter, salt) == (other_adapter, other_salt)
    assert (root_digest(adapter, salt) == root_digest(other_adapter, other_salt)) == same


def test_values_that_look_like_the_encoding_of_others_are_told_apart() -> None:
    values = [None, "", "-", "+0:", "+1:a", "a", "a-", "a+0:"]
    assert len({root_digest(a, b) for a, b in product(values, values)}) == len(values) ** 2


def test_a_match_ends_at_the_first_block_that_is_missing() -> None:
    index = PrefixIndex(8)
    digests = chain_of(list(range(16)))
    assert index.match(digests, 4) == 0
    for block, digest in enumerate(digests[:3]):
        index.add(digest, digests[block - 1] if block else None, block)
    assert index.match(digests, 4) == 3
    assert index.match(digests, 2) == 2
    index.remove(2)
    assert [index.match(digests, 4, hint) for hint in range(5)] == [2, 2, 2, 2, 2]
    index.remove(2)
    assert len(index) == 2
