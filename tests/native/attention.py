"""A plan of rope and attention over a paged pool, driven step by step, and numpy's answer for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo._native import Act, KvType, Plan
from tests.native.harness import Array, Bench, Shape

KV_TYPES = list(KvType)


def kv_name(kv: KvType) -> str:
    """What a test's id says."""
    return str(kv.name)


def query_form(kv: KvType) -> Act:
    """What queries are, and what keys and values are multiplied as."""
    return Act.F32 if kv in (KvType.F32, KvType.F16) else Act.BF16


@dataclass(frozen=True)
class Heads:
    """The shape of an attention operation."""

    q: int
    kv: int
    dim: int
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    slopes: tuple[float, ...] = ()
    chunked: bool = False
    sinks: tuple[float, ...] = ()

    @property
    def factor(self) -> float:
        return self.scale or self.dim**-0.5

    @property
    def width(self) -> int:
        return (self.q + 2 * self.kv) * self.dim

    def split(self, qkv: Array) -> tuple[Array, Array, Array]:
        """q, k, v as [tokens, heads, dim]."""
        ends = [self.q * self.dim, (self.q + self.kv) * self.dim]
        parts = np.split(qkv, ends, axis=1)
        q, k, v = (part.reshape(len(qkv), -1, self.dim) for part in parts)
        return q, k, v

    def __str__(self) -> str:
        window = f"{'c' if self.chunked else 'w'}{self.window}"
        marks = [window] * bool(self.window) + [f"cap{self.softcap}"] * bool(self.softcap)
        marks += ["alibi"] * bool(self.slopes)
        marks += ["sinks"] * bool(self.sinks)
        return "-".join([f"{self.q}q{self.kv}kv{self.dim}", *marks])


class Piece(NamedTuple):
    """Positions [start, start + count) of a sequence whose blocks are `table`, computed in one step."""

    start: int
    count: int
    table: Array


class AttentionBench:
    """One layer of attention with its pool."""

    def __init__(
        self,
        level: str,
        heads: Heads,
        *,
        kv: KvType,
        tokens: int,
        blocks: int,
        sequences: int = 16,
        stride: int = 100,
        threads: int = 2,
        out: Shape | None = None,
        scales: Array | None = None,
    ) -> None:
        self.heads = heads
        self.bench = Bench(level, tokens, threads, sequences=sequences, table_stride=stride)
        self.qkv = self.bench.slot(Act.F32, heads.width)
        q = self.bench.slot(query_form(kv), heads.q * heads.dim)
        width = heads.q * heads.dim
        self.out = self.bench.slot(Act.F32, width) if out is None else out.slot(self.bench, width)

        def add(plan: Plan) -> None:
            shape = (0, heads.q, heads.kv, heads.dim)
            plan.add_rope("rope", self.qkv.activation(), *shape, 0, -1, None, None, 0.0, q.activation())
            slopes = np.array(heads.slopes, np.float32) if heads.slopes else None
            sinks = np.float32(math.log2(math.e)) * np.array(heads.sinks, np.float32) if heads.sinks else None
            caps = (heads.factor, heads.softcap, heads.window)
            out = self.out.activation()
            plan.add_attention("attention", q.activation(), *shape, *caps, out, slopes, heads.chunked, sinks)
            plan.make_pool(blocks, kv, scales)

        self.bench.add(add)

    @property
    def plan(self) -> Plan:
        return self.bench.plan

    def step(self, pieces: Sequence[Piece], qkv: Array) -> Array:
        """One step; qkv holds the rows of all pieces one after another. Returns the output rows."""
        plan = self.plan
        self.qkv.raw[: len(qkv)] = qkv
        plan.block_tables[:] = -1
        for i, (start, count, table) in enumerate(pieces):
            plan.starts[i], plan.counts[i] = start, count
            used = -(-(start + count) // 16)
            plan.block_tables[i, :used] = table[:used]
        plan.run(len(pieces), 0)
        result: Array = self.out.raw[: len(qkv)].copy()
        return result

    def sequence(self, qkv: Array, table: Array, cuts: Sequence[int] = ()) -> Array:
        """A whole sequence in steps that end at the given positions and at its own end."""
        ends = [*cuts, len(qkv)]
        starts = [0, *cuts]
        parts = [self.step([Piece(a, b - a, table)], qkv[a:b]) for a, b in zip(starts, ends, strict=True)]
        return np.concatenate(parts)


def reference(heads: Heads, qkv: Array, rows: Array) -> tuple[Array, Array]:
    """Outputs [rows, q heads * dim] of the given positions, and sum(p * |v|), which bounds what rounding p does."""
    q, k, v = heads.split(qkv.astype(np.float64))
    group = heads.q // heads.kv
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    q, k, v = (np.ascontiguousarray(x.transpose(1, 0, 2)) for x in (q[rows], k, v))
    # Not `@`: the threads of a BLAS wait for each other for seconds where other programs have the cores.
    scores = np.einsum("hqd,hkd->hqk", q, k) * heads.factor
    if heads.softcap:
        scores = np.tanh(scores / heads.softcap) * heads.softcap
    distance = rows[:, None] - np.arange(len(qkv))[None, :]
    if heads.slopes:
        scores = scores - np.array(heads.slopes, np.float32)[:, None, None] * distance
    visible = (distance >= 0) & ((distance < heads.window) if heads.window and not heads.chunked else True)
    if heads.chunked:
        visible &= rows[:, None] // heads.window == np.arange(len(qkv))[None, :] // heads.window
    scores = np.where(visible, scores, -np.inf)
    sinks = np.array(heads.sinks or [-np.inf] * heads.q)[:, None, None]
    largest = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
    p = np.exp(scores - largest)
    p /= p.sum(axis=-1, keepdims=True) + np.exp(sinks - largest)
    out, bound = (np.einsum("hqk,hkd->qhd", p, x).reshape(len(rows), -1) for x in (v, np.abs(v)))
    return out, bound


def scattered_tables(lengths: Sequence[int], blocks: int, seed: int = 0) -> list[Array]:
    """Distinct blocks in random order for sequences of the given lengths."""
    order = np.random.default_rng(seed).permutation(blocks).astype(np.int32)
    ends = np.cumsum([-(-n // 16) for n in lengths])
    assert ends[-1] <= blocks
    return np.split(order[: ends[-1]], ends[:-1])
