"""Latent attention equals attention over the keys and values that its expansion would make, however steps are cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from octavo._native import Act, Form, KvType, Plan
from tests.native.attention import Piece, kv_name, scattered_tables
from tests.native.harness import LEVELS, Array, Bench, Shape, make_weight, to_bf16


@dataclass(frozen=True)
class Sizes:
    """The shape of a latent attention."""

    heads: int
    nope: int
    rope: int
    rank: int
    value: int
    interleaved: bool = True

    @property
    def dim(self) -> int:
        return self.rank + self.rope

    @property
    def q_width(self) -> int:
        return self.heads * (self.nope + self.rope)


SIZES = [Sizes(3, 32, 32, 64, 64), Sizes(2, 128, 64, 512, 128), Sizes(60, 32, 32, 64, 64, False)]
SCALE = 0.11
EPS = 1e-6
STRIDE = 40  # blocks


class LatentBench:
    """A plan of one layer: expansion of queries, append, attention, expansion of values."""

    def __init__(self, level: str, sizes: Sizes, *, kv: KvType, tokens: int, threads: int = 2) -> None:
        self.sizes = sizes
        form, act = (Form.F32, Act.F32) if kv == KvType.F32 else (Form.BF16, Act.BF16)
        self.keys = [make_weight(Shape(form), sizes.rank, sizes.nope, seed=h) for h in range(sizes.heads)]
        self.values = [make_weight(Shape(form), sizes.value, sizes.rank, seed=50 + h) for h in range(sizes.heads)]
        rng = np.random.default_rng(9)
        self.norm = rng.uniform(0.5, 1.5, sizes.rank).astype(np.float32)
        angles = np.arange(STRIDE * 16)[:, None] * 100.0 ** (-np.arange(sizes.rope // 2) / (sizes.rope // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.bench = Bench(level, tokens, threads, sequences=4, table_stride=STRIDE)
        slot = self.bench.slot
        self.q, self.kv = slot(Act.F32, sizes.q_width), slot(Act.F32, 8 + sizes.dim)
        self.q_in, self.q_out = slot(act, sizes.q_width), slot(act, sizes.heads * sizes.dim)
        self.attended, self.out = slot(act, sizes.heads * sizes.dim), slot(Act.F32, sizes.heads * sizes.value)
        self.bench.add(self._add)
        self.blocks = 60
        self.kv_type = kv

    def _add(self, plan: Plan) -> None:
        s = self.sizes
        plan.add_rope_tables(self.cos.reshape(-1), self.sin.reshape(-1))
        packed = [weight.packed for weight in self.keys]
        plan.add_head_linear(
            "keys", packed, self.q_in.activation(), 0, s.nope + s.rope, self.q_out.activation(), s.rope, s.dim
        )
        plan.add_latent(
            "latent",
            0,
            self.q.activation(),
            s.nope,
            s.nope + s.rope,
            self.kv.activation(),
            8,
            s.heads,
            s.rank,
            s.rope,
            s.interleaved,
            0,
            self.norm,
            EPS,
            self.q_out.activation(),
        )
        shape = (0, s.heads, 1, s.dim)
        plan.add_attention("attention", self.q_out.activation(), *shape, SCALE, 0.0, 0, self.attended.activation())
        packed = [weight.packed for weight in self.values]
        plan.add_head_linear(
            "values", packed, self.attended.activation(), s.rope, s.dim, self.out.activation(), 0, s.value
        )
        plan.make_pool(self.blocks, self.kv_type)

    def step(self, pieces: list[Piece], q: Array, kv: Array) -> Array:
        plan, rows = self.bench.plan, len(q)
        self.q.raw[:rows], self.kv.raw[:rows, 8:] = q, kv
        self.q_in.write(q)
        plan.block_tables[:] = -1
        for i, (start, count, table) in enumerate(pieces):
            plan.starts[i], plan.counts[i] = start, count
            plan.block_tables[i, : -(-(start + count) // 16)] = table[: -(-(start + count) // 16)]
        plan.run(len(pieces), 0)
        result: Array = self.out.raw[:rows].copy()
        return result

    def expected(self, q: Array, kv: Array) -> Array:
        """The same in float64, over keys and values of every head."""
        s, tokens = self.sizes, len(q)
        heads = q.astype(np.float64).reshape(tokens, s.heads, -1)
        latent, rotated = kv[:, : s.rank].astype(np.float64), kv[:, s.rank :].astype(np.float64)
        latent = latent / np.sqrt((latent**2).mean(axis=1, keepdims=True) + EPS) * self.norm
        keys = np.stack([latent @ weight.values.astype(np.float64) for weight in self.keys], axis=1)
        values = np.stack([latent @ weight.values.T.astype(np.float64) for weight in self.values], axis=1)
        scores = np.einsum("qhd,khd->hqk", heads[..., : s.nope], keys)
        scores += np.einsum("qhd,kd->hqk", self._rotate(heads[..., s.nope :]), self._rotate(rotated[:, None])[:, 0])
        scores = np.where(np.tri(tokens, dtype=bool), scores * SCALE, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", p, values).reshape(tokens, -1)

    def _rotate(self, x: Array) -> Array:
        half = self.sizes.rope // 2
        a, b = (x[..., ::2], x[..., 1::2]) if self.sizes.interleaved else (x[..., :half], x[..., half:])
        cos, sin = self.cos[: len(x), None], self.sin[: len(x), None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def random_values(sizes: Sizes, tokens: int, seed: int = 0) -> tuple[Array, Array]:
    """Queries and latents that bf16 holds exactly; queries small, as keys of random weights are large."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens, sizes.q_width)) / sizes.rank**0.5
    return to_bf16(q), to_bf16(rng.standard_normal((tokens, sizes.dim)))


@pytest.mark.parametrize("kv_type", [KvType.F32, KvType.BF16, KvType.I8, KvType.E4M3], ids=kv_name)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_latent_attention_equals_numpy_and_itself_in_pieces(level: str, sizes: Sizes, kv_type: KvType) -> None:
    tokens = 530 if sizes.heads == 3 else 75
    bench = LatentBench(level, sizes, kv=kv_type, tokens=2 * tokens)
    table, other = scattered_tables([tokens, 90], bench.blocks)
    q, kv = random_values(sizes, tokens)
    whole = bench.step([Piece(0, tokens, table)], q, kv)
    expected = bench.expected(q, kv)
    error = np.abs(whole - expected).max()
    assert error < {KvType.F32: 2e-4, KvType.E4M3: 0.3}.get(kv_type, 5e-2) * np.abs(expected).max(), error
    # The same bits in pieces, beside another sequence, and by one thread.
    again = LatentBench(level, sizes, kv=kv_type, tokens=2 * tokens, threads=1)
    q2, kv2 = random_values(sizes, 3, seed=1)
    parts = []
    for start, stop in [(0, 1), (1, 40), (40, tokens - 1), (tokens - 1, tokens)]:
        both = np.concatenate([q[start:stop], q2]), np.concatenate([kv[start:stop], kv2])
        parts.append(again.step([Piece(start, stop - start, table), Piece(0, 3, other)], *both)[: stop - start])
    np.testing.assert_array_equal(np.concatenate(parts).view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("level", LEVELS)
def test_a_latent_that_is_no_number_is_not_lost(level: str) -> None:
    bench = LatentBench(level, SIZES[0], kv=KvType.BF16, tokens=4)
    (table,) = scattered_tables([4], bench.blocks)
    q, kv = random_values(SIZES[0], 4)
    kv[2, 70] = np.inf
    out = bench.step([Piece(0, 4, table)], q, kv)
    assert np.isnan(out[2]).all()
    assert np.isfinite(out[:2]).all()


def test_sizes_that_reach_across_heads_are_refused() -> None:
    for sizes in (
        Sizes(2, 48, 32, 64, 64),
        Sizes(2, 32, 32, 64, 48),
        Sizes(2, 32, 8, 64, 64),
        Sizes(2, 32, 96, 512, 64),
    ):
        with pytest.raises(ValueError, match=r"multiple|up to"):
            _ = LatentBench(LEVELS[-1], sizes, kv=KvType.F32, tokens=4).bench.plan
