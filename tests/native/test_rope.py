"""The rope operation norms and rotates queries and keys, each at its position, whatever part of a head is rotated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from octavo._native import Act, KvType, Plan
from tests.native import attention
from tests.native.attention import KV_TYPES, kv_name, query_form
from tests.native.harness import LEVELS, Array, Bench, Slot, to_bf16

POSITIONS = 96


@dataclass(frozen=True)
class Case:
    q: int
    kv: int
    dim: int
    rope: int
    q_norm: bool = False
    k_norm: bool = False
    layer: bool = False  # layer norms, not RMS norms
    own: bool = False  # every head has weights of its own
    wide: bool = False
    after: bool = False
    factors: bool = False


CASES = [
    Case(4, 2, 64, 64),
    Case(3, 1, 16, 16, q_norm=True, k_norm=True),
    Case(2, 2, 48, 20),
    Case(6, 3, 96, 0, k_norm=True),
    Case(8, 2, 128, 32, q_norm=True, k_norm=True),
    Case(2, 1, 256, 256, q_norm=True),
    Case(4, 2, 48, 16, q_norm=True, k_norm=True, layer=True, own=True),
    Case(3, 3, 32, 32, k_norm=True, layer=True),
    Case(2, 1, 16, 0, q_norm=True, own=True),
    Case(4, 2, 32, 32, q_norm=True, k_norm=True, wide=True),
    Case(3, 1, 48, 16, k_norm=True, wide=True, factors=True),
    Case(4, 2, 32, 24, q_norm=True, k_norm=True, after=True),
    Case(2, 1, 64, 0, factors=True),
]


def tables(dim: int) -> tuple[Array, Array]:
    """cos and sin [positions, dim / 2]; a factor other than 1, as yarn has, shows whether both are used."""
    angles = np.arange(POSITIONS)[:, None] / 1000.0 ** (np.arange(dim // 2) * 2 / max(dim, 1))
    return (1.1 * np.cos(angles)).astype(np.float32), (1.1 * np.sin(angles)).astype(np.float32)


def turned(x: Array, positions: Array, cos: Array, sin: Array) -> Array:
    """x [tokens, heads, dim] with pairs (i, i + half) rotated."""
    half = cos.shape[1]
    c, s = cos[positions].astype(np.float64)[:, None, :], sin[positions].astype(np.float64)[:, None, :]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * half :]], axis=-1)


def factors() -> Array:
    return np.linspace(0.5, 2, POSITIONS, dtype=np.float32)


def normed(x: Array, weight: Array | None, case: Case) -> Array:
    """The norm of each head of x [tokens, heads, dim], by weights of all heads or of each; or one norm of all heads."""
    if weight is None:
        return x
    rows = x.reshape(len(x), 1, -1) if case.wide else x
    centred = rows - rows.mean(axis=-1, keepdims=True) if case.layer else rows
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
    return (scaled * weight.reshape(-1, rows.shape[-1])).reshape(x.shape)


def prepared(x: Array, weight: Array | None, case: Case) -> Array:
    """Heads at positions 0, 1, ... as attention gets them."""
    positions, table = np.arange(len(x)), tables(case.rope)
    if case.after:
        return normed(turned(x, positions, *table), weight, case)
    return turned(normed(x, weight, case), positions, *table)


@dataclass
class RopeBench:
    """Two sequences of up to 6 blocks through rope and attention."""

    bench: Bench
    qkv: Slot
    q: Slot
    out: Slot
    weights: list[Array | None]


def rope_bench(level: str, case: Case, kv: KvType) -> RopeBench:
    bench = Bench(level, 64, sequences=2, table_stride=POSITIONS // 16)
    qkv = bench.slot(Act.F32, (case.q + 2 * case.kv) * case.dim)
    q = bench.slot(query_form(kv), case.q * case.dim)
    out = bench.slot(Act.F32, case.q * case.dim)
    rng = np.random.default_rng(1)
    weights = [
        rng.uniform(0.5, 2, case.dim * (heads if case.own or case.wide else 1)).astype(np.float32) if on else None
        for on, heads in ((case.q_norm, case.q), (case.k_norm, case.kv))
    ]

    def add(plan: Plan) -> None:
        cosines = plan.add_rope_tables(*(table.reshape(-1) for table in tables(case.rope))) if case.rope else -1
        shape = (0, case.q, case.kv, case.dim)
        more = (case.layer, case.wide, case.after, plan.add_query_factors(factors()) if case.factors else -1)
        plan.add_rope("rope", qkv.activation(), *shape, case.rope, cosines, *weights, 1e-6, q.activation(), *more)
        plan.add_attention("attention", q.activation(), *shape, case.dim**-0.5, 0.0, 0, out.activation())
        plan.make_pool(16, kv)

    bench.add(add)
    return RopeBench(bench, qkv, q, out, weights)


@pytest.mark.parametrize("kv", [KvType.F32, KvType.BF16], ids=kv_name)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_queries_and_keys_are_normed_and_rotated(level: str, case: Case, kv: KvType) -> None:
    rope = rope_bench(level, case, kv)
    plan = rope.bench.plan
    plan.block_tables[:] = np.random.default_rng(0).permutation(12).reshape(2, 6)
    x = np.random.default_rng(0).standard_normal((2, 70, rope.qkv.width)).astype(np.float32)
    queries, outputs = [np.zeros((2, 70, case.q * case.dim)) for _ in range(2)]
    for begin, end in [(0, 30), (30, 31), (31, 62), (62, 70)]:
        count = end - begin
        plan.starts[:], plan.counts[:] = begin, count
        rope.qkv.write(x[:, begin:end].reshape(2 * count, -1))
        plan.run(2, 0)
        queries[:, begin:end] = rope.q.read(2 * count).reshape(2, count, -1)
        outputs[:, begin:end] = rope.out.read(2 * count).reshape(2, count, -1)
    heads = attention.Heads(case.q, case.kv, case.dim)
    for i in range(2):
        q, k, v = heads.split(x[i].astype(np.float64))
        positions = np.arange(70)
        q, k = (prepared(x, weight, case) for x, weight in zip((q, k), rope.weights, strict=True))
        q = (q * (factors()[:70, None, None] if case.factors else 1)).reshape(70, -1)
        k = k.reshape(70, -1)
        if kv == KvType.F32:
            np.testing.assert_allclose(queries[i], q, rtol=2e-6, atol=3e-6)
        else:
            np.testing.assert_allclose(queries[i], q, rtol=2**-8, atol=3e-6)
            q, k = to_bf16(q.astype(np.float32)), to_bf16(k.astype(np.float32))
            # The nearest bf16, but for values that lie between two.
            assert (queries[i] == q).mean() > 0.995
        v = v.reshape(70, -1) if kv == KvType.F32 else to_bf16(v.astype(np.float32).reshape(70, -1))
        expected, bound = attention.reference(heads, np.concatenate([q, k, v], axis=1), positions)
        np.testing.assert_array_less(
            np.abs(outputs[i] - expected), (2e-5 if kv == KvType.F32 else 2**-6) * bound + 1e-6
        )


@pytest.mark.parametrize("level", LEVELS)
def test_without_rotation_or_norm_queries_are_copied(level: str) -> None:
    for kv in (KvType.F32, KvType.BF16):
        rope = rope_bench(level, Case(3, 1, 48, 0), kv)
        x = np.random.default_rng(0).standard_normal((5, rope.qkv.width)).astype(np.float32)
        rope.qkv.write(x)
        plan = rope.bench.plan
        plan.starts[0], plan.counts[0], plan.block_tables[0] = 0, 5, np.arange(6)
        plan.run(1, 0)
        wanted = x[:, : 3 * 48]
        np.testing.assert_array_equal(rope.q.read(5), wanted if kv == KvType.F32 else to_bf16(wanted))


@pytest.mark.parametrize("kv", KV_TYPES, ids=kv_name)
@pytest.mark.parametrize("level", LEVELS)
def test_a_token_whose_key_or_value_is_not_finite_attends_to_no_number(level: str, kv: KvType) -> None:
    case = Case(4, 2, 32, 32)
    x = np.random.default_rng(0).standard_normal((9, (case.q + 2 * case.kv) * case.dim)).astype(np.float32)
    key, value = case.q * case.dim + 40, (case.q + case.kv) * case.dim + 3
    for row, column, bad in [(2, key, np.nan), (5, value, np.nan), (6, key, -np.inf), (8, value, np.inf)]:
        x[row, column] = bad
    rope = rope_bench(level, case, kv)
    rope.qkv.write(x)
    plan = rope.bench.plan
    plan.starts[0], plan.counts[0], plan.block_tables[0] = 0, 9, np.arange(6)
    plan.run(1, 0)
    found = np.isfinite(rope.out.read(9))
    assert not found[[2, 5, 6, 8]].any()
    assert found[:2].all()
