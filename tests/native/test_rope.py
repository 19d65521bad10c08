"""The rope operation norms and rotates queries. (Keys are seen only through attention: its tests cover them.)"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from octavo._native import Act, Plan
from tests.native.harness import LEVELS, Array, Bench, Slot, to_bf16


@dataclass(frozen=True)
class Heads:
    q: int
    kv: int
    dim: int
    rope: int
    normed: bool = False


CASES = [
    Heads(4, 2, 64, 64),
    Heads(3, 1, 16, 16, normed=True),
    Heads(2, 2, 48, 20),
    Heads(6, 3, 96, 0),
    Heads(8, 2, 128, 32, normed=True),
    Heads(2, 1, 256, 256),
]


def tables(positions: int, dim: int) -> tuple[Array, Array]:
    if dim == 0:
        return np.zeros((positions, 0), np.float32), np.zeros((positions, 0), np.float32)
    angles = np.arange(positions)[:, None] / 1000.0 ** (np.arange(dim // 2) * 2 / dim)
    # An attention factor other than 1, so that the tables are not just of a unit circle.
    return (1.1 * np.cos(angles)).astype(np.float32), (1.1 * np.sin(angles)).astype(np.float32)


def rotated(x: Array, positions: Array, cos: Array, sin: Array) -> Array:
    """x [tokens, heads, dim], pairs (i, i + half)."""
    half = cos.shape[1]
    c, s = cos[positions].astype(np.float64)[:, None, :], sin[positions].astype(np.float64)[:, None, :]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * half :]], axis=-1)


def normed(x: Array, weight: Array | None) -> Array:
    if weight is None:
        return x
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight


def rope_bench(level: str, heads: Heads, kv_f32: bool, weights: tuple[Array | None, Array | None]) -> tuple[Bench, Slot, Slot]:
    """Two sequences of up to 6 blocks. (That keys and values are found again is the matter of the attention tests.)"""
    bench = Bench(level, 64, sequences=2, table_stride=6)
    width = (heads.q + 2 * heads.kv) * heads.dim
    qkv = bench.slot(Act.F32, width)
    q = bench.slot(Act.F32 if kv_f32 else Act.BF16, heads.q * heads.dim)
    cos, sin = tables(96, heads.rope)

    def add(plan: Plan) -> None:
        tabled = (cos.reshape(-1), sin.reshape(-1)) if heads.rope else (None, None)
        plan.add_rope(
            "rope", qkv.activation(), 0, heads.q, heads.kv, heads.dim, heads.rope, *tabled, *weights, 1e-6, q.activation()
        )
        plan.make_pool(16, kv_f32)

    bench.add(add)
    return bench, qkv, q


@pytest.mark.parametrize("kv_f32", [True, False], ids=["f32", "bf16"])
@pytest.mark.parametrize("heads", CASES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_queries_are_normed_and_rotated(level: str, heads: Heads, kv_f32: bool) -> None:
    rng = np.random.default_rng(0)
    weights = (None, None)
    if heads.normed:
        weights = tuple(rng.uniform(0.5, 2, heads.dim).astype(np.float32) for _ in range(2))
    bench, qkv, q = rope_bench(level, heads, kv_f32, weights)
    x = rng.standard_normal((23, qkv.width)).astype(np.float32)
    qkv.write(x)
    plan = bench.plan
    plan.starts[:], plan.counts[:] = [0, 70], [13, 10]
    plan.block_tables[:] = np.arange(12).reshape(2, 6)
    plan.run(2, 0)
    positions = np.concatenate([np.arange(13), np.arange(70, 80)])
    split = x[:, : heads.q * heads.dim].reshape(23, heads.q, heads.dim).astype(np.float64)
    expected = rotated(normed(split, weights[0]), positions, *tables(96, heads.rope)).reshape(23, -1)
    found = q.read(23)
    if kv_f32:
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    else:
        np.testing.assert_allclose(found, expected, rtol=2**-8, atol=2e-6)
        # A bf16 query is the nearest one but for values that lie between two.
        assert (found == to_bf16(expected.astype(np.float32))).mean() > 0.995


@pytest.mark.parametrize("level", LEVELS)
def test_without_rotation_or_norm_queries_are_copied(level: str) -> None:
    heads = Heads(3, 1, 48, 0)
    for kv_f32 in (True, False):
        bench, qkv, q = rope_bench(level, heads, kv_f32, (None, None))
        x = np.random.default_rng(0).standard_normal((5, qkv.width)).astype(np.float32)
        qkv.write(x)
        plan = bench.plan
        plan.starts[0], plan.counts[0], plan.block_tables[0] = 0, 5, np.arange(6)
        plan.run(1, 0)
        wanted = x[:, : heads.q * heads.dim]
        np.testing.assert_array_equal(q.read(5), wanted if kv_f32 else to_bf16(wanted))
