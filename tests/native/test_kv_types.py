"""A KV cache of every type holds the nearest numbers of its type, and attention over them is numpy's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo._native import Act, KvType, Plan
from tests.native.attention import (
    KV_TYPES,
    AttentionBench,
    Heads,
    Piece,
    kv_name,
    query_form,
    reference,
    scattered_tables,
)
from tests.native.harness import LEVELS, Array, Bench
from tests.native.kv_types import as_cached, stored

NARROW = [kv for kv in KV_TYPES if kv not in (KvType.F32, KvType.BF16)]
FP8 = [KvType.E4M3, KvType.E5M2]


def random_qkv(heads: Heads, length: int, seed: int = 0) -> Array:
    """Heads whose dimensions differ in size by up to 50, as those of real keys do."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((length, heads.width)) * 7 ** rng.uniform(-1, 1, heads.width)).astype(np.float32)


@pytest.mark.parametrize("kv", KV_TYPES, ids=kv_name)
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_cached_is_the_nearest_number_of_the_type(level: str, kv: KvType) -> None:
    """A token that sees itself alone gets its value back: ties, numbers below the least normal one, and zeros too."""
    heads, n = Heads(1, 1, 96 if kv == KvType.I4 else 48, window=1), 64
    x = random_qkv(heads, n)
    rng = np.random.default_rng(1)
    x[:, : heads.dim] = 0  # for a probability of exactly 1
    v = x[:, 2 * heads.dim :]
    v[:20] *= 2.0 ** rng.integers(-24, 9, v[:20].shape)
    v[20:40] = np.clip(v[20:40], -3, 3)
    if kv != KvType.I4:  # where rotated ties would be zeros of either sign
        v[30:40] = np.round(v[30:40] * 64) / 64
    v[40:44] = 0
    v[44] = 3e-33
    attention = AttentionBench(level, heads, kv=kv, tokens=n, blocks=5, sequences=1, stride=4)
    found = attention.sequence(x, np.array([3, 0, 4, 1], np.int32), [7, 8, 40])
    if kv == KvType.I4:  # whose scale is rounded from sums, in another order here
        bound = 2**-7 * np.abs(v).max(axis=1, keepdims=True) + 1e-9
        assert (np.abs(found - stored(v, kv)) < bound).all()
    else:
        np.testing.assert_array_equal(found, stored(v, kv))


@pytest.mark.parametrize("kv", NARROW, ids=kv_name)
@pytest.mark.parametrize(
    "heads", [Heads(4, 2, 64), Heads(3, 1, 16, softcap=20.0), Heads(9, 3, 96, window=70), Heads(50, 1, 32)], ids=str
)
@pytest.mark.parametrize("level", LEVELS)
def test_attention_over_every_type_equals_numpy(level: str, heads: Heads, kv: KvType) -> None:
    """Prefilled in chunks, then decodes of several sequences together."""
    if kv == KvType.I4 and heads.dim % 32:
        heads = replace(heads, dim=64)
    lengths = [1, 17, 64, 130, 600]
    tables = scattered_tables(lengths, 60)
    attention = AttentionBench(level, heads, kv=kv, tokens=sum(lengths), blocks=60)
    values = [random_qkv(heads, n, i) / 3 for i, n in enumerate(lengths)]
    starts = [0 if n < 3 else n - 1 - i for i, n in enumerate(lengths)]
    work = list(zip(values, starts, lengths, tables, strict=True))
    first = [(x, start, table) for x, start, _, table in work if start]
    parts = attention.step([Piece(0, s, table) for _, s, table in first], np.concatenate([x[:s] for x, s, _ in first]))
    last = attention.step(
        [Piece(start, n - start, table) for _, start, n, table in work],
        np.concatenate([x[start:] for x, start, _, _ in work]),
    )
    ends, last_ends = np.cumsum([0, *starts]), np.cumsum([0, *(n - s for _, s, n, _ in work)])
    # Probabilities are multiplied as bf16, those times scales too; with 4 bits queries are rounded when rotated.
    inexact = 1e-5 if query_form(kv) == Act.F32 else 2**-5 if kv == KvType.I4 else 2**-8
    for i, (x, start, n, _) in enumerate(work):
        found = np.concatenate([parts[ends[i] : ends[i + 1]], last[last_ends[i] : last_ends[i + 1]]])
        rows = np.unique([*range(0, n, 13), *range(start, n)])
        expected, bound = reference(heads, as_cached(heads, x, kv), rows)
        if kv == KvType.I4:  # an error is spread over the head
            bound = np.repeat(bound.reshape(-1, heads.dim).max(axis=1), heads.dim).reshape(bound.shape)
        np.testing.assert_array_less(np.abs(found[rows] - expected), inexact * bound + 1e-6)


@pytest.mark.parametrize("kv", FP8, ids=kv_name)
@pytest.mark.parametrize("level", LEVELS)
def test_the_scales_of_fp8_are_those_of_the_layer(level: str, kv: KvType) -> None:
    heads, n = Heads(4, 2, 32, softcap=30.0), 100
    x = random_qkv(heads, n) * 40
    x[:, : 4 * 32] /= 400
    scales = np.array([0.37, 2.9], np.float32)
    attention = AttentionBench(level, heads, kv=kv, tokens=n, blocks=7, sequences=1, stride=7, scales=scales)
    found = attention.sequence(x, np.arange(7, dtype=np.int32), [60, 99])
    expected, bound = reference(heads, as_cached(heads, x, kv, *(float(s) for s in scales)), np.arange(n))
    np.testing.assert_array_less(np.abs(found - expected), 2**-8 * bound + 1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_too_large_for_e4m3_becomes_its_largest_number(level: str) -> None:
    """Nothing tells a saturated number from one that fits; f16 and e5m2, which have an infinity, make the token NaN."""
    heads = Heads(1, 1, 16, window=1)
    x = np.zeros((4, heads.width), np.float32)
    x[1, 40], x[2, 33] = 70000.0, -500.0
    table = np.zeros(1, np.int32)
    for kv, most in [(KvType.E4M3, 448), (KvType.F16, None), (KvType.E5M2, None)]:
        attention = AttentionBench(level, heads, kv=kv, tokens=4, blocks=1, sequences=1, stride=1)
        found = attention.sequence(x, table)
        if most is None:
            np.testing.assert_array_equal(np.isnan(found).all(axis=1), [False, True, False, False])
            assert found[2, 1] == stored(np.array([-500.0]), kv)[0]
        else:
            assert (found[1, 8], found[2, 1]) == (most, -most)


@pytest.mark.parametrize("kv", KV_TYPES, ids=kv_name)
def test_a_block_takes_what_its_type_takes_and_is_copied_whole(kv: KvType) -> None:
    """Two layers; a copy of the blocks serves another sequence with the bits of the first."""
    heads, n = Heads(2, 1, 32), 40
    bench = Bench("", n, sequences=1, table_stride=3)
    slots = [
        (bench.slot(Act.F32, heads.width), bench.slot(query_form(kv), 64), bench.slot(Act.F32, 64)) for _ in range(2)
    ]

    def add(plan: Plan) -> None:
        for layer, (qkv, q, out) in enumerate(slots):
            plan.add_rope("rope", qkv.activation(), layer, 2, 1, 32, 0, -1, None, None, 0.0, q.activation())
            plan.add_attention("attention", q.activation(), layer, 2, 1, 32, 0.2, 0.0, 0, out.activation())
        plan.make_pool(6, kv)

    bench.add(add)
    plan = bench.plan
    bits = {KvType.F32: 32, KvType.BF16: 16, KvType.F16: 16, KvType.I4: 4}.get(kv, 8)
    scales = 64 if kv in (KvType.I8, KvType.E4M3Scaled, KvType.I4) else 0
    assert plan.block_bytes == 2 * (2 * 32 * 16 * bits // 8 + scales)
    values = [random_qkv(heads, n, layer) for layer in range(2)]

    def run(start: int, table: list[int]) -> list[Array]:
        plan.starts[0], plan.counts[0], plan.block_tables[0] = start, n - start, table
        for (qkv, _, _), x in zip(slots, values, strict=True):
            qkv.write(x[start:])
        plan.run(1, 0)
        return [out.read(n - start) for _, _, out in slots]

    whole = run(0, [5, 2, 0])
    plan.copy_blocks(np.array([[5, 1], [2, 3]], np.int32))
    for expected, found in zip(whole, run(32, [1, 3, 4]), strict=True):
        np.testing.assert_array_equal(found, expected[32:])


def test_a_pool_whose_type_or_scales_do_not_fit_is_refused() -> None:
    def make(kv: KvType, q: KvType, scales: Array | None = None, dim: int = 32) -> None:
        bench = Bench("", 4, sequences=1, table_stride=1)
        qkv, queries = bench.slot(Act.F32, 4 * dim), bench.slot(query_form(q), 2 * dim)

        def add(plan: Plan) -> None:
            plan.add_rope("rope", qkv.activation(), 0, 2, 1, dim, 0, -1, None, None, 0.0, queries.activation())
            plan.make_pool(1, kv, scales)

        bench.add(add)
        assert bench.plan is not None  # which is built now

    with pytest.raises(ValueError, match="queries are f32"):
        make(KvType.F16, KvType.BF16)
    with pytest.raises(ValueError, match="queries are f32"):
        make(KvType.I8, KvType.F32)
    for scales in ([1.0], [1.0, 0.0], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="scale"):
            make(KvType.E4M3, KvType.BF16, np.array(scales, np.float32))
    with pytest.raises(ValueError, match="for fp8"):
        make(KvType.I8, KvType.BF16, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="multiple of 32"):
        make(KvType.I4, KvType.BF16, dim=48)
