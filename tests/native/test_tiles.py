"""Any legal choice of tiles gives the same bits, and no other choice is taken: nothing is read or written outside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo._native import Act, Epilogue, Plan
from tests.native.harness import FORMS, LEVELS, LinearBench, Shape, linear_bench, make_weight, random_input, row_bits

ROWS = 200
ANY_ROWS = (1, 1 << 24)


def random_tile(rng: np.random.Generator, plan: Plan, columns: int, least: int) -> tuple[int, int, int]:
    """Rows, columns and regions of a legal tile; `columns` is the padded number."""
    wide = int(rng.integers(1, -(-columns // least) + 1)) * least
    return int(rng.integers(1, 97)), wide, int(rng.integers(1, plan.threads + 1))


@pytest.mark.parametrize("shape", FORMS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_bits_do_not_depend_on_the_tiles(level: str, shape: Shape) -> None:
    rng = np.random.default_rng(3)
    for columns, k, epilogue in [(70, 288, Epilogue.Add), (600, 64, Epilogue.Store)]:
        weight = make_weight(shape, columns, k)
        x = random_input(weight, ROWS)
        residual = rng.standard_normal((ROWS, columns)).astype(np.float32)
        linear = linear_bench(level, weight, ROWS, columns, epilogue=epilogue, threads=3)
        linear.run(x, residual)
        expected = linear.out.bits(ROWS)
        for _ in range(12):
            plan = linear.bench.plan
            plan.clear_tiles()
            tile = random_tile(rng, plan, weight.packed.padded_columns, 32)
            plan.set_tile(0, *ANY_ROWS, *tile)
            linear.run(x, residual)
            assert linear.out.bits(ROWS) == expected, tile


@pytest.mark.parametrize(
    ("out", "group", "rotation"),
    [(Act.BF16, 32, 0), (Act.I8, 32, 0), (Act.I8, 32, 32), (Act.I8, 64, 64), (Act.I8, 192, 64)],
    ids=["bf16", "int8", "rotated", "wide", "widest"],
)
@pytest.mark.parametrize("level", LEVELS)
def test_bits_of_gated_outputs_do_not_depend_on_the_tiles(level: str, out: Act, group: int, rotation: int) -> None:
    rng = np.random.default_rng(4)
    weight = make_weight(FORMS[9], 768, 96)
    x = random_input(weight, ROWS)
    settings = {"epilogue": Epilogue.SiluMul, "out": out, "out_group": group, "out_rotation": rotation, "threads": 2}
    linear = linear_bench(level, weight, ROWS, 384, **settings)
    linear.run(x)
    expected = row_bits(linear.out, ROWS)
    for _ in range(12):
        plan = linear.bench.plan
        plan.clear_tiles()
        tile = random_tile(rng, plan, 768, 2 * group if out == Act.I8 else 32)
        plan.set_tile(0, *ANY_ROWS, *tile)
        linear.run(x)
        assert row_bits(linear.out, ROWS) == expected, tile


@pytest.fixture(scope="module")
def linear() -> LinearBench:
    return linear_bench(LEVELS[-1], make_weight(FORMS[2], 100, 64), ROWS, 100, threads=2)


WRONG = [
    ((1, 1, 1, 8, 64, 1), "linear 1 of a plan that has 1"),
    ((-1, 1, 1, 8, 64, 1), "linear -1"),
    ((0, 0, 8, 8, 64, 1), "first_rows of a tile must be 1 to 200, got 0"),
    ((0, 201, 300, 8, 64, 1), "first_rows of a tile must be 1 to 200, got 201"),
    ((0, 9, 8, 8, 64, 1), "last_rows of a tile must be 9 to"),
    ((0, 1, 8, 0, 64, 1), "row_tile of a tile must be 1 to 96, got 0"),
    ((0, 1, 8, 97, 64, 1), "row_tile of a tile must be 1 to 96, got 97"),
    ((0, 1, 8, 8, 0, 1), "column_tile of a tile must be 32 to 128 in steps of 32, got 0"),
    ((0, 1, 8, 8, 48, 1), "column_tile of a tile must be 32 to 128 in steps of 32, got 48"),
    ((0, 1, 8, 8, 160, 1), "column_tile of a tile must be 32 to 128 in steps of 32, got 160"),
    ((0, 1, 8, 8, 64, 0), "regions of a tile must be 1 to 2, got 0"),
    ((0, 1, 8, 8, 64, 3), "regions of a tile must be 1 to 2, got 3"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[str(values) for values, _ in WRONG])
def test_a_tile_out_of_bounds_is_refused(
    linear: LinearBench, values: tuple[int, int, int, int, int, int], message: str
) -> None:
    before = linear.bench.plan.tile_of(0, 8)
    with pytest.raises(ValueError, match=message):
        linear.bench.plan.set_tile(*values)
    assert linear.bench.plan.tile_of(0, 8) == before


def test_quantised_gated_outputs_need_tiles_that_hold_whole_groups() -> None:
    gated = linear_bench(LEVELS[-1], make_weight(FORMS[2], 320, 64), 8, 160, epilogue=Epilogue.SiluMul, out=Act.I8)
    with pytest.raises(ValueError, match="column_tile of a tile must be 64 to 320 in steps of 64, got 96"):
        gated.bench.plan.set_tile(0, 1, 8, 8, 96, 1)


def test_two_tiles_for_the_same_rows_are_refused(linear: LinearBench) -> None:
    plan = linear.bench.plan
    plan.set_tile(0, 2, 8, 8, 64, 1)
    plan.set_tile(0, 9, 32, 8, 32, 1)
    with pytest.raises(ValueError, match="two tiles for 8 rows"):
        plan.set_tile(0, 8, 8, 8, 64, 1)
    plan.clear_tiles()
    plan.set_tile(0, 8, 8, 8, 64, 1)
    plan.clear_tiles()


def test_more_tiles_than_can_be_counted_are_refused() -> None:
    weight = make_weight(FORMS[0], 70_000, 4)
    plan = linear_bench(LEVELS[0], weight, 8192, 32).bench.plan
    with pytest.raises(ValueError, match="more tiles than can be counted"):
        plan.set_tile(0, *ANY_ROWS, 1, 32, 1)
    plan.set_tile(0, *ANY_ROWS, 96, 32, 1)


def test_a_tile_holds_for_its_rows_only_and_shares_them_out_evenly(linear: LinearBench) -> None:
    plan = linear.bench.plan
    built_in = [plan.tile_of(0, rows) for rows in (8, 33)]
    plan.set_tile(0, 9, 32, 12, 96, 1)
    assert [plan.tile_of(0, rows) for rows in (8, 33)] == built_in
    assert plan.tile_of(0, 9) == (9, 96, 1)
    assert plan.tile_of(0, 13) == (12, 96, 1)
    assert plan.tile_of(0, 32) == (12, 96, 1)
    plan.clear_tiles()
    plan.set_tile(0, 97, 200, 96, 96, 2)
    assert plan.tile_of(0, 100) == (54, 96, 2)
    plan.clear_tiles()
    for rows in (0, 201):
        with pytest.raises(ValueError, match=f"must be 1 to 200, got {rows}"):
            plan.tile_of(0, rows)


def test_the_plan_describes_its_linears_and_times_them(linear: LinearBench) -> None:
    plan = linear.bench.plan
    (found,) = plan.linears()
    assert (found["name"], found["columns"], found["k"], found["group"], found["max_rows"]) == (
        "linear",
        128,
        64,
        32,
        ROWS,
    )
    plan.set_profiling(True)
    linear.bench.run(7)
    plan.set_profiling(False)
    ((rows, seconds),) = plan.linear_times()
    assert rows == 7
    assert seconds > 0


NUMBER = st.one_of(st.integers(-2, 200), st.integers(-(1 << 63), (1 << 63) - 1))


@given(NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)
@settings(max_examples=300, deadline=None)
def test_whatever_is_taken_gives_the_same_bits(
    linear: LinearBench, first: int, last: int, row_tile: int, column_tile: int, regions: int
) -> None:
    weight = make_weight(FORMS[2], 100, 64)
    x = random_input(weight, ROWS)
    plan = linear.bench.plan
    plan.clear_tiles()
    linear.run(x)
    expected = linear.out.bits(ROWS)
    try:
        plan.set_tile(0, first, last, row_tile, column_tile, regions)
    except ValueError:
        return
    linear.run(x)
    plan.clear_tiles()
    assert linear.out.bits(ROWS) == expected
