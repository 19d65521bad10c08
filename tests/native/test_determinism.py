"""A row's result has the same bits whatever shares its batch, whatever the threads, however a sequence is cut."""

from __future__ import annotations

import numpy as np
import pytest

from octavo._native import Act, Epilogue, KvType
from tests.native.attention import KV_TYPES, AttentionBench, Heads, Piece, kv_name, scattered_tables
from tests.native.harness import (
    FORMS,
    LEVELS,
    WIDE_FORMS,
    Array,
    Bench,
    Quantized,
    Shape,
    linear_bench,
    make_weight,
    random_input,
    row_bits,
)

BATCHES = [1, 2, 3, 4, 5, 6, 7, 13, 16, 33, 96, 97, 130]


def some_rows(x: Array | Quantized, rows: Array) -> Array | Quantized:
    if isinstance(x, Quantized):
        return Quantized(x.codes[rows], x.scales[rows], x.scaled_sums[rows], x.sums[rows])
    return x[rows]


@pytest.mark.parametrize("shape", FORMS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_linear_rows_do_not_depend_on_the_batch_or_threads(level: str, shape: Shape) -> None:
    """Batches of every size get rows at random places of tiles of every height; the threads change the tiling again."""
    rng = np.random.default_rng(0)
    # Few and many columns: tiles of one row of panels, and runs of several hundred columns for one row.
    for columns, k in [(70, 288), (2000, 64)]:
        weight = make_weight(shape, columns, k)
        x = random_input(weight, 200)
        whole = linear_bench(level, weight, 200, columns)
        whole.run(x)
        expected = whole.out.read(200).view(np.uint32)
        for threads in (1, 2, 3):
            linear = linear_bench(level, weight, 200, columns, threads=threads)
            for size in BATCHES if columns == 70 else (1, 8, 9, 40):
                rows = rng.integers(0, 200, size)
                linear.run(some_rows(x, rows))
                np.testing.assert_array_equal(linear.out.read(size).view(np.uint32), expected[rows], err_msg=f"{size}")


@pytest.mark.parametrize("out", [Act.BF16, Act.I8], ids=["bf16", "int8"])
@pytest.mark.parametrize("shape", [FORMS[1], FORMS[2], FORMS[9], WIDE_FORMS[1]], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_gated_outputs_do_not_depend_on_the_batch_or_threads(level: str, shape: Shape, out: Act) -> None:
    weight = make_weight(shape, 768, 96)
    x = random_input(weight, 120)
    options = {"epilogue": Epilogue.SiluMul, "out": out}
    if shape in WIDE_FORMS:
        options |= {"out_group": 192, "out_rotation": 64}
    whole = linear_bench(level, weight, 120, 384, **options)
    whole.run(x)
    expected = row_bits(whole.out, 120)
    for threads in (1, 3):
        linear = linear_bench(level, weight, 120, 384, threads=threads, **options)
        for size in (1, 5, 40, 97):
            rows = np.random.default_rng(size).integers(0, 120, size)
            linear.run(some_rows(x, rows))
            assert row_bits(linear.out, size) == [expected[row] for row in rows]


@pytest.mark.parametrize("form", [Act.F32, Act.BF16, Act.I8], ids=["f32", "bf16", "int8"])
@pytest.mark.parametrize("level", LEVELS)
def test_norms_do_not_depend_on_the_batch_or_threads(level: str, form: Act) -> None:
    x = np.random.default_rng(0).standard_normal((300, 100)).astype(np.float32)
    weight = np.linspace(0.5, 2, 100).astype(np.float32)
    expected: list[bytes] = []
    for threads in (1, 2, 3):
        bench = Bench(level, 300, threads)
        source, out = bench.slot(Act.F32, 100), bench.slot(form, 128)
        bench.add(
            lambda plan, x=source, out=out: plan.add_norm(
                "norm", x.activation(), 100, weight, None, 1e-5, True, out.activation(), False
            )
        )
        source.write(x)
        bench.run()
        expected = expected or row_bits(out, 300)
        assert row_bits(out, 300) == expected
        for size in (1, 7, 50):
            rows = np.random.default_rng(size).integers(0, 300, size)
            source.write(x[rows])
            bench.run(size)
            assert row_bits(out, size) == [expected[row] for row in rows]


ATTENTION = [
    Heads(4, 2, 64),
    Heads(3, 1, 48, slopes=(0.5, 0.06, 0.002)),
    Heads(9, 3, 32, softcap=15.0),
    Heads(5, 1, 48, window=70),
    Heads(2, 2, 16, window=530),
    Heads(4, 2, 16, window=90, chunked=True),
    Heads(50, 1, 16),
]
CUTS = [[], [1], [64, 512], [17, 100, 511, 513], [3, 5, 8, 600], [*range(1, 1100, 47)], [600, *range(1090, 1100)]]


@pytest.mark.parametrize(
    ("heads", "kv"),
    [
        *((heads, kv) for heads in ATTENTION for kv in (KvType.F32, KvType.BF16)),
        *((Heads(9, 3, 32, softcap=15.0), kv) for kv in KV_TYPES if kv not in (KvType.F32, KvType.BF16)),
        *((heads, KvType.I8) for heads in ATTENTION if heads.slopes),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", LEVELS)
def test_attention_does_not_depend_on_how_a_sequence_is_cut(level: str, heads: Heads, kv: KvType) -> None:
    """Prefill in one step, in chunks, and token by token (the last ten), over other blocks and with 1 to 3 threads."""
    n = 1100 if heads.q < 50 else 560
    x = np.random.default_rng(0).standard_normal((n, heads.width)).astype(np.float32)
    expected: Array | None = None
    for i, ends in enumerate(CUTS):
        cuts = [end for end in ends if end < n]
        attention = AttentionBench(level, heads, kv=kv, tokens=n, blocks=80, sequences=1, stride=70, threads=1 + i % 3)
        found = attention.sequence(x, scattered_tables([n], 80, seed=i)[0], cuts).view(np.uint32)
        expected = found if expected is None else expected
        np.testing.assert_array_equal(found, expected, err_msg=f"cut at {cuts}")


@pytest.mark.parametrize("kv", KV_TYPES, ids=kv_name)
@pytest.mark.parametrize("level", LEVELS)
def test_attention_does_not_depend_on_other_sequences(level: str, kv: KvType) -> None:
    """Decodes and chunks of twelve sequences in one step have the bits they have alone."""
    heads = Heads(4, 2, 32)
    lengths = [1, 16, 17, 64, 100, 130, 512, 513, 514, 600, 1030, 1040]
    blocks = sum(-(-n // 16) for n in lengths)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((n, heads.width)).astype(np.float32) for n in lengths]
    tables = scattered_tables(lengths, blocks)
    together = AttentionBench(level, heads, kv=kv, tokens=sum(lengths), blocks=blocks, threads=2)
    alone = AttentionBench(level, heads, kv=kv, tokens=sum(lengths), blocks=blocks, threads=3)
    counts = [min(n, 1 + 5 * (i % 3)) for i, n in enumerate(lengths)]
    work = [(x, n - count, count, table) for x, n, count, table in zip(values, lengths, counts, tables, strict=True)]
    first = [(x, start, table) for x, start, _, table in work if start]
    together.step([Piece(0, start, table) for _, start, table in first], np.concatenate([x[:s] for x, s, _ in first]))
    pieces = [Piece(start, count, table) for _, start, count, table in work]
    found = together.step(pieces, np.concatenate([x[start:] for x, start, _, _ in work]))
    at = 0
    for x, start, count, table in work:
        expected = alone.sequence(x, table, [start] if start else [])[start:]
        np.testing.assert_array_equal(found[at : at + count].view(np.uint32), expected.view(np.uint32))
        at += count
