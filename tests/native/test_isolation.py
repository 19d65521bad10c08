"""Numbers that are not finite stay where they arose: in their own row, and out of blocks that others use later."""

from __future__ import annotations

import numpy as np
import pytest

from octavo._native import Act, Epilogue, KvType, Plan
from tests.native.attention import KV_TYPES, AttentionBench, Heads, Piece, kv_name
from tests.native.harness import FORMS, LEVELS, Bench, Quantized, Shape, linear_bench, make_weight, random_input

BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("shape", FORMS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_bad_row_of_a_linear_is_bad_alone(level: str, shape: Shape) -> None:
    weight = make_weight(shape, 70, 96)
    for rows, which, bad in [(7, 3, np.nan), (13, 0, np.inf), (13, 12, -np.inf)]:
        x = random_input(weight, rows)
        linear = linear_bench(level, weight, rows, 70)
        linear.run(x)
        expected = linear.out.read(rows)
        if isinstance(x, Quantized):
            x.scales[which, -1] = bad
            x.scaled_sums[which, -1] = bad
        else:
            x[which, 40] = bad
        linear.run(x)
        found = linear.out.read(rows)
        assert not np.isfinite(found[which]).any()
        others = np.arange(rows) != which
        np.testing.assert_array_equal(found[others], expected[others])


@pytest.mark.parametrize("epilogue", [Epilogue.SiluMul, Epilogue.GeluMul, Epilogue.GeluTanhMul])
@pytest.mark.parametrize("level", LEVELS)
def test_a_nan_is_not_lost_by_activations_or_int8(level: str, epilogue: Epilogue) -> None:
    weight = make_weight(FORMS[1], 64, 64)
    x = random_input(weight, 5)
    assert not isinstance(x, Quantized)
    x[2, 7] = np.nan
    for out in (Act.F32, Act.BF16, Act.I8):
        linear = linear_bench(level, weight, 5, 32, epilogue=epilogue, out=out)
        linear.run(x)
        found = linear.out.read(5)
        assert np.isnan(found[2]).all()
        assert np.isfinite(np.delete(found, 2, axis=0)).all()


@pytest.mark.parametrize("shape", [shape for shape in FORMS if shape.integer], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_bad_number_goes_through_quantisation_and_an_integer_linear(level: str, shape: Shape) -> None:
    weight = make_weight(shape, 70, 96)
    bench = Bench(level, 5)
    k = weight.packed.k
    x, quantized, out = bench.slot(Act.F32, k), shape.slot(bench, k), bench.slot(Act.F32, 70)

    def add(plan: Plan) -> None:
        plan.add_norm("norm", x.activation(), k, None, None, 0.0, False, quantized.activation())
        plan.add_linear("linear", weight.packed, quantized.activation(), None, Epilogue.Store, out.activation(), 70)

    bench.add(add)
    values = np.random.default_rng(0).standard_normal((5, k)).astype(np.float32)
    x.write(values)
    bench.run()
    expected = out.read(5)
    for bad in BAD:
        values[3, [0, 40, 41]] = bad
        x.write(values)
        bench.run()
        found = out.read(5)
        assert not np.isfinite(found[3]).any()
        np.testing.assert_array_equal(found[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])


@pytest.mark.parametrize("level", LEVELS)
def test_a_bad_row_of_a_norm_is_bad_alone(level: str) -> None:
    for form in (Act.F32, Act.BF16, Act.I8):
        bench = Bench(level, 6)
        x, out = bench.slot(Act.F32, 64), bench.slot(form, 64)
        bench.add(
            lambda plan, x=x, out=out: plan.add_norm(
                "norm", x.activation(), 64, np.ones(64, np.float32), None, 1e-5, False, out.activation(), False
            )
        )
        values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
        values[1, 5], values[4, 63] = np.nan, np.inf
        x.write(values)
        bench.run()
        found = out.read(6)
        assert np.isnan(found[1]).all()
        assert not np.isfinite(found[4]).all()
        assert np.isfinite(found[[0, 2, 3, 5]]).all()


@pytest.mark.parametrize("kv", KV_TYPES, ids=kv_name)
@pytest.mark.parametrize("level", LEVELS)
def test_a_block_left_by_a_bad_sequence_serves_the_next(level: str, kv: KvType) -> None:
    """Slots past the end of a sequence hold what was there before; they are multiplied with a probability of zero."""
    heads = Heads(4, 2, 32)
    rng = np.random.default_rng(0)
    clean = rng.standard_normal((40, heads.width)).astype(np.float32)
    table = np.array([3, 0, 2], np.int32)

    def run(dirty: float | None) -> np.ndarray:
        attention = AttentionBench(level, heads, kv=kv, tokens=48, blocks=4, sequences=2, stride=3)
        if dirty is not None:
            bad = np.full((48, heads.width), dirty, np.float32)
            bad[::2, ::3] = -dirty
            out = attention.step([Piece(0, 48, table)], bad)
            assert not np.isfinite(out).all()
        steps = [attention.step([Piece(0, 5, table)], clean[:5])]
        steps += [attention.step([Piece(i, 1, table)], clean[i : i + 1]) for i in range(5, 20)]
        steps.append(attention.step([Piece(20, 20, table)], clean[20:]))
        return np.concatenate(steps)

    expected = run(None)
    assert np.isfinite(expected).all()
    for bad in [*BAD, 3e38]:
        np.testing.assert_array_equal(run(bad), expected)


@pytest.mark.parametrize("kv", KV_TYPES, ids=kv_name)
@pytest.mark.parametrize("level", LEVELS)
def test_bad_queries_do_not_reach_other_tokens_of_the_step(level: str, kv: KvType) -> None:
    heads = Heads(4, 2, 32)
    x = np.random.default_rng(0).standard_normal((30, heads.width)).astype(np.float32)
    table = np.arange(4, dtype=np.int32)
    attention = AttentionBench(level, heads, kv=kv, tokens=60, blocks=8, sequences=2, stride=4)
    expected = attention.step([Piece(0, 30, table), Piece(0, 30, table + 4)], np.concatenate([x, x]))
    bad = x.copy()
    bad[10, : heads.q * heads.dim] = np.nan
    bad[20, 0] = np.inf
    found = attention.step([Piece(0, 30, table), Piece(0, 30, table + 4)], np.concatenate([bad, x]))
    assert np.isnan(found[10]).all()
    assert np.isnan(found[20, : heads.dim]).any()
    others = np.delete(np.arange(60), [10, 20])
    np.testing.assert_array_equal(found[others], expected[others])
