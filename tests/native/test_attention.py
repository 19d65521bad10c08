"""Paged attention equals numpy's over all shapes of heads, windows, caps, context lengths and ways to cut a step."""

from __future__ import annotations

import numpy as np
import pytest

from octavo._native import Act, Form, KvType, Plan
from tests.native.attention import AttentionBench, Heads, Piece, kv_name, query_form, reference, scattered_tables
from tests.native.harness import LEVELS, Array, Bench, Shape, row_bits, to_bf16

# Lengths on both sides of the ends of blocks, of chunks of 64 and of spans of 512.
LENGTHS = [1, 2, 15, 16, 17, 33, 63, 64, 65, 129, 511, 512, 513, 700, 1500]
SHAPES = [
    Heads(4, 2, 64),
    Heads(8, 1, 32),
    Heads(3, 3, 80),
    Heads(6, 2, 16, softcap=20.0),
    Heads(2, 1, 256),
    Heads(50, 1, 16),
    Heads(2, 2, 128, scale=0.3),
    Heads(4, 2, 32, window=1),
    Heads(4, 2, 32, window=20),
    Heads(4, 1, 48, window=64),
    Heads(4, 2, 32, slopes=(0.5, 0.1, 0.02, 0.003)),
    Heads(3, 1, 16, window=100, slopes=(0.25, 0.04, 1e-4), scale=0.5),
    Heads(2, 1, 32, window=50, chunked=True),
    Heads(4, 2, 16, window=520, chunked=True),
    Heads(2, 2, 32, window=600, softcap=5.0),
    Heads(6, 2, 32, window=90, sinks=(-2.0, 0.5, 3.0, 1.0, 40.0, -300.0)),
]


def random_qkv(heads: Heads, length: int, seed: int, kv: KvType) -> Array:
    """Values that the pool holds exactly."""
    x = np.random.default_rng(seed).standard_normal((length, heads.width)).astype(np.float32)
    return x if kv == KvType.F32 else to_bf16(x)


def assert_equals_reference(heads: Heads, qkv: Array, rows: Array, found: Array, kv: KvType) -> None:
    expected, bound = reference(heads, qkv, rows)
    # Probabilities are multiplied as bf16 when the values are; in float32 little but the exponential is inexact.
    allowed = (1e-5 if kv == KvType.F32 else 2**-8) * bound + 1e-6
    error = np.abs(found - expected)
    assert (error <= allowed).all(), (len(qkv), error.max())


@pytest.mark.parametrize("kv", [KvType.F32, KvType.BF16], ids=kv_name)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_mixed_batches_over_scattered_blocks_equal_numpy(level: str, heads: Heads, kv: KvType) -> None:
    """One step prefills most of every sequence; in the next each decodes one token or prefills a few."""
    lengths = LENGTHS if heads in (SHAPES[0], SHAPES[-1]) else LENGTHS[:13]
    counts = [min(n, 1 if i % 2 else 9) for i, n in enumerate(lengths)]
    blocks = sum(-(-n // 16) for n in lengths) + 5
    tables = scattered_tables(lengths, blocks)
    attention = AttentionBench(level, heads, kv=kv, tokens=sum(lengths), blocks=blocks)
    values = [random_qkv(heads, n, i, kv) for i, n in enumerate(lengths)]
    work = list(zip(values, lengths, counts, tables, strict=True))
    first = [(x, n - count, table) for x, n, count, table in work if n > count]
    prefilled = attention.step(
        [Piece(0, n, table) for _, n, table in first], np.concatenate([x[:n] for x, n, _ in first])
    )
    decoded = attention.step(
        [Piece(n - count, count, table) for _, n, count, table in work],
        np.concatenate([x[n - count :] for x, n, count, _ in work]),
    )
    at = 0
    for x, n, _ in first:
        rows = np.unique(np.random.default_rng(n).integers(0, n, 12))
        assert_equals_reference(heads, x[:n], rows, prefilled[at + rows], kv)
        at += n
    at = 0
    for x, n, count, _ in work:
        assert_equals_reference(heads, x, np.arange(n - count, n), decoded[at : at + count], kv)
        at += count


@pytest.mark.parametrize(
    "shape",
    [
        Shape(Form.BF16),
        Shape(Form.W8, 32, 128),
        Shape(Form.W8, 16, 128, act_group=16),
        Shape(Form.W4, 32, 8, rotation=32),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", LEVELS)
def test_an_output_in_the_form_of_a_linears_input_is_the_float_output_converted(level: str, shape: Shape) -> None:
    """In prefill, in decode, and where spans are merged."""
    for heads, n in [(Heads(6, 2, 64), 1100), (Heads(3, 3, 32), 40), (Heads(50, 1, 32), 530)]:
        x, (table,) = random_qkv(heads, n, 0, KvType.BF16), scattered_tables([n], 80)
        floats, formed = (
            AttentionBench(level, heads, kv=KvType.BF16, tokens=n, blocks=80, sequences=1, out=out)
            for out in (None, shape)
        )
        norm = Bench(level, n)
        source, converted = norm.slot(Act.F32, heads.q * heads.dim), shape.slot(norm, heads.q * heads.dim)
        norm.add(
            lambda plan, source=source, converted=converted, width=heads.q * heads.dim: plan.add_norm(
                "convert", source.activation(), width, None, None, 0.0, False, converted.activation(), False
            )
        )
        for start, end in [(0, n - 5), (n - 5, n - 1), (n - 1, n)]:
            piece = Piece(start, end - start, table)
            source.write(floats.step([piece], x[start:end]))
            norm.run(end - start)
            formed.step([piece], x[start:end])
            assert row_bits(formed.out, end - start) == row_bits(converted, end - start)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_one_long_sequence_is_split_over_spans_and_merged(level: str, threads: int) -> None:
    """A lone decode and short chunks have their spans computed apart, the more threads the finer."""
    heads, n = Heads(4, 2, 64), 1500
    attention = AttentionBench(level, heads, kv=KvType.F32, tokens=n, blocks=100, sequences=1, threads=threads)
    x, (table,) = random_qkv(heads, n, 0, KvType.F32), scattered_tables([n], 100)
    cuts = [1480, 1481, 1482, 1499]
    found = attention.sequence(x, table, cuts)
    rows = np.array([5, 600, 1200, *range(1479, 1500)])
    assert_equals_reference(heads, x, rows, found[rows], KvType.F32)


@pytest.mark.parametrize("level", LEVELS)
def test_large_scores_neither_overflow_nor_vanish(level: str) -> None:
    """Scores of several thousands that rise and fall along the sequence: maxima move between chunks and spans."""
    heads, n = Heads(2, 1, 16, scale=50.0), 600
    x = random_qkv(heads, n, 1, KvType.F32)
    x[:, 2 * heads.dim : 3 * heads.dim] *= np.sin(np.arange(n) / 40)[:, None] * 3
    attention = AttentionBench(level, heads, kv=KvType.F32, tokens=n, blocks=40, sequences=1)
    found = attention.sequence(x, scattered_tables([n], 40)[0], [300])
    rows = np.arange(0, n, 7)
    expected, bound = reference(heads, x, rows)
    # A score of thousands is itself rounded to a few 1e-4.
    np.testing.assert_array_less(np.abs(found[rows] - expected), 4e-3 * bound + 1e-3)


@pytest.mark.parametrize("kv", [KvType.F32, KvType.BF16], ids=kv_name)
@pytest.mark.parametrize("level", LEVELS)
def test_layers_have_pools_of_their_own_and_blocks_are_copied_in_all(level: str, kv: KvType) -> None:
    """Two layers written in one step; a copied block serves another sequence with the same history."""
    heads = Heads(2, 1, 32)
    bench = Bench(level, 40, sequences=2, table_stride=3)
    slots = [
        (
            bench.slot(Act.F32, heads.width),
            bench.slot(query_form(kv), 64),
            bench.slot(Act.F32, 64),
        )
        for _ in range(2)
    ]

    def add(plan: Plan) -> None:
        for layer, (qkv, q, out) in enumerate(slots):
            plan.add_rope("rope", qkv.activation(), layer, 2, 1, 32, 0, -1, None, None, 0.0, q.activation())
            plan.add_attention("attention", q.activation(), layer, 2, 1, 32, heads.factor, 0.0, 0, out.activation())
        plan.make_pool(9, kv)

    bench.add(add)
    plan = bench.plan
    assert plan.block_bytes == 2 * 2 * 32 * 16 * (4 if kv == KvType.F32 else 2)
    values = [random_qkv(heads, 40, layer, kv) for layer in range(2)]

    def run(start: int, table: list[int]) -> list[Array]:
        plan.starts[0], plan.counts[0] = start, 40 - start
        plan.block_tables[0] = table
        for (qkv, _, _), x in zip(slots, values, strict=True):
            qkv.write(x[start:])
        plan.run(1, 0)
        return [out.read(40 - start) for _, _, out in slots]

    whole = run(0, [7, 2, 5])
    for x, found in zip(values, whole, strict=True):
        assert_equals_reference(heads, x, np.arange(40), found, kv)
    plan.copy_blocks(np.array([[7, 0], [2, 8], [4, 4]], np.int32))
    run(0, [7, 2, 5])  # what was copied does not follow its source
    for x in values:
        x[32:] += 1
    for x, found in zip(values, run(32, [0, 8, 1]), strict=True):
        assert_equals_reference(heads, to_bf16(x) if kv != KvType.F32 else x, np.arange(32, 40), found, kv)
