"""Kernels that work row by row against numpy: embedding, norms, quantisation of activations, elementwise operations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo._native import Act, Elementwise, Form
from tests.native.harness import (
    EPS,
    FORMS,
    LEVELS,
    Array,
    Bench,
    Shape,
    Slot,
    bf16_bits,
    make_weight,
    pad,
    quantize,
    rotate,
)

WIDTHS = [1, 7, 16, 33, 64, 100, 576, 1000]
_erf = np.vectorize(math.erf, otypes=[np.float64])


@pytest.mark.parametrize("shape", FORMS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_embedding_gives_the_rows_of_the_matrix(level: str, shape: Shape) -> None:
    vocab = 75
    for k, scale in [(32, 1.0), (96, 1.0), (160, 8.5), (70, 1.0)]:
        weight = make_weight(shape, vocab, k, seed=k)
        k = weight.packed.k
        bench = Bench(level, vocab, vocab=vocab)
        out = bench.slot(Act.F32, k + 3)
        bench.add(lambda plan, w=weight.packed, s=scale, o=out: plan.add_embed("embedding", w, o.activation(), s))
        tokens = np.random.default_rng(k).permutation(vocab)
        bench.plan.tokens[:] = tokens
        out.raw[:] = 7
        bench.run()
        table = rotate(weight.values, shape.rotation) if shape.rotation else weight.values
        found = out.raw[:, :k]
        np.testing.assert_allclose(found, table[tokens] * scale, rtol=2e-6, atol=2e-6 * scale * np.abs(table).max())
        assert (out.raw[:, k:] == 7).all()
        if not shape.affine and scale == 1.0:
            np.testing.assert_array_equal(found, table[tokens])


def norm_bench(
    level: str,
    rows: int,
    width: int,
    form: Act,
    *,
    weight: Array | None = None,
    bias: Array | None = None,
    layer: bool = False,
    eps: float = 1e-5,
    group: int = 32,
    rotation: int = 0,
) -> tuple[Bench, Slot, Slot]:
    bench = Bench(level, rows)
    x = bench.slot(Act.F32, width)
    out = bench.slot(form, pad(width, max(group, 32)), group=group, rotation=rotation)
    bench.add(
        lambda plan: plan.add_norm("norm", x.activation(), width, weight, bias, eps, layer, out.activation(), False)
    )
    return bench, x, out


def norm_reference(x: Array, weight: Array, bias: Array | None, layer: bool, eps: float) -> Array:
    x = x.astype(np.float64)
    if layer:
        x = x - x.mean(axis=1, keepdims=True)
    y = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("kind", ["rms", "layer", "layer with bias"])
@pytest.mark.parametrize("level", LEVELS)
def test_norms_equal_numpy(level: str, kind: str) -> None:
    rng = np.random.default_rng(2)
    for width in WIDTHS:
        rows, layer = 5, kind != "rms"
        x = (rng.standard_normal((rows, width)) * [[1], [100], [1e-3], [1], [30]] + 0.3).astype(np.float32)
        weight = rng.uniform(0.5, 2, width).astype(np.float32)
        bias = rng.standard_normal(width).astype(np.float32) if kind == "layer with bias" else None
        bench, source, out = norm_bench(level, rows, width, Act.F32, weight=weight, bias=bias, layer=layer)
        source.write(x)
        bench.run()
        expected = norm_reference(x, weight, bias, layer, 1e-5)
        # A layer norm of nearly equal numbers amplifies their rounding.
        spread = np.abs(x).max(axis=1, keepdims=True) / np.sqrt(x.astype(np.float64).var(axis=1, keepdims=True) + 1e-5)
        np.testing.assert_array_less(
            np.abs(out.raw[:, :width] - expected), 4e-6 * (1 + np.abs(expected)) + 4e-7 * layer * (1 + spread)
        )
        assert not out.raw[:, width:].any()


@pytest.mark.parametrize("level", LEVELS)
def test_norm_outputs_are_the_float_output_rounded(level: str) -> None:
    rng = np.random.default_rng(3)
    for width, layer in [(64, False), (100, True), (576, False), (7, False)]:
        rows = 9
        x = rng.standard_normal((rows, width)).astype(np.float32)
        weight = rng.uniform(0.5, 2, width).astype(np.float32)
        bench, source, out = norm_bench(level, rows, width, Act.F32, weight=weight, layer=layer)
        source.write(x)
        bench.run()
        check_conversions(level, x, out.raw.copy(), weight=weight, layer=layer)


@pytest.mark.parametrize("level", LEVELS)
def test_a_norm_without_weight_only_converts(level: str) -> None:
    rng = np.random.default_rng(4)
    for rows, width in [(6, 33), (70, 96), (3, 1), (2, 1000)]:
        x = (rng.standard_normal((rows, width)) * 10 ** rng.uniform(-20, 20, (rows, 1))).astype(np.float32)
        expected = np.zeros((rows, pad(width)), np.float32)
        expected[:, :width] = x
        check_conversions(level, x, expected, weight=None, layer=False)


def check_conversions(level: str, x: Array, expected: Array, *, weight: Array | None, layer: bool) -> None:
    """bf16 and int8 outputs are bit for bit the rounding of the float output, rotated ones up to the rotation's own."""
    rows, width = x.shape
    padded = np.zeros((rows, pad(width, 192)), np.float32)
    padded[:, : expected.shape[1]] = expected
    for form, group in [(Act.F32, 32), (Act.BF16, 32), (Act.I8, 16), (Act.I8, 32), (Act.I8, 64), (Act.I8, 192)]:
        bench, source, out = norm_bench(level, rows, width, form, weight=weight, layer=layer, group=group)
        source.write(x)
        bench.run()
        if form == Act.I8:
            found, wanted = out.read_quantized(rows), quantize(padded[:, : out.width], group)
            np.testing.assert_array_equal(found.codes, wanted.codes)
            np.testing.assert_array_equal(found.scales, wanted.scales)
            np.testing.assert_array_equal(found.sums, wanted.sums)
            np.testing.assert_array_equal(found.scaled_sums, wanted.scaled_sums)
        else:
            np.testing.assert_array_equal(out.raw, expected if form == Act.F32 else bf16_bits(expected))
    for group, rotation in [(32, 32), (64, 64), (192, 64), (192, 32)]:
        options = {"weight": weight, "layer": layer, "group": group, "rotation": rotation}
        bench, source, out = norm_bench(level, rows, width, Act.I8, **options)
        source.write(x)
        bench.run()
        q, turned = out.read_quantized(rows), rotate(padded[:, : out.width], rotation)
        allowed = 0.5001 * np.repeat(q.scales, group, axis=1) + 4 * EPS * np.abs(turned).max(axis=1, keepdims=True)
        assert (np.abs(q.values() - turned) <= allowed).all()
        np.testing.assert_array_equal(q.sums, q.codes.reshape(rows, -1, group).sum(axis=2, dtype=np.int32))
        np.testing.assert_array_equal(q.scaled_sums, q.scales * q.sums.astype(np.float32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("group", [16, 32, 64])
def test_quantisation_of_difficult_groups(level: str, group: int) -> None:
    """Zeros, numbers too small to have an inverse, halves (rounded to even) and the largest floats."""
    x = np.zeros((6, 64), np.float32)
    x[1] = 1e-38
    x[1, ::3] = 0
    x[2] = np.linspace(-127, 127, 64)
    x[2, 0] = 127
    x[3] = np.arange(64) % 32 + 0.5
    x[3, ::16] = 127
    x[4] = np.finfo(np.float32).max
    x[4, 1::2] *= -1
    x[5] = 1e-45
    bench, source, out = norm_bench(level, 6, 64, Act.I8, group=group)
    source.write(x)
    bench.run()
    found, wanted = out.read_quantized(6), quantize(x, group)
    np.testing.assert_array_equal(found.codes, wanted.codes)
    np.testing.assert_array_equal(found.sums, wanted.sums)
    np.testing.assert_array_equal(found.scales, wanted.scales)
    assert not found.codes[1].any()
    assert not found.sums[5].any()
    assert set(np.abs(found.codes[4]).tolist()) == {127}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_not_lost_in_int8(level: str, bad: float) -> None:
    x = np.ones((3, 96), np.float32)
    x[1, 40] = bad
    for group, rotation in [(32, 0), (32, 32), (64, 0), (64, 64)]:
        bench, source, out = norm_bench(level, 3, 96, Act.I8, group=group, rotation=rotation)
        source.write(x)
        bench.run()
        scales = out.read_quantized(3).scales
        assert not np.isfinite(scales[1, 40 // group])
        scales[1, 40 // group] = 0
        assert np.isfinite(scales).all()


def test_a_norm_reads_rows_of_wider_buffers() -> None:
    bench = Bench(LEVELS[-1], 4)
    x, out = bench.slot(Act.F32, 50), bench.slot(Act.F32, 64)
    bench.add(lambda plan: plan.add_norm("norm", x.activation(), 40, None, None, 0.0, False, out.activation(), False))
    values = np.arange(200, dtype=np.float32).reshape(4, 50)
    x.write(values)
    out.raw[:] = 7
    bench.run()
    np.testing.assert_array_equal(out.raw[:, :40], values[:, :40])
    assert not out.raw[:, 40:].any()


def elementwise_reference(kind: Elementwise, a: Array, b: Array, scalar: float) -> Array:
    silu = a / (1 + np.exp(-a))
    gelu = a / 2 * (1 + _erf(a / math.sqrt(2)))
    gelu_tanh = a / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
    results: dict[Elementwise, Array] = {
        Elementwise.Add: a + b,
        Elementwise.Scale: a * scalar,
        Elementwise.Softcap: scalar * np.tanh(a / scalar),
        Elementwise.SiluMul: silu * b,
        Elementwise.GeluMul: gelu * b,
        Elementwise.GeluTanhMul: gelu_tanh * b,
        Elementwise.Gelu: gelu,
        Elementwise.GeluTanh: gelu_tanh,
        Elementwise.Silu: silu,
        Elementwise.Relu: np.maximum(a, 0),
        Elementwise.Relu2: np.maximum(a, 0) ** 2,
        Elementwise.Clip: np.clip(a, -scalar, scalar),
        Elementwise.SigmoidGate: a / (1 + np.exp(-b[:, :1])),
    }
    return results[kind]


@pytest.mark.parametrize("kind", list(Elementwise), ids=lambda each: each.name)
@pytest.mark.parametrize("level", LEVELS)
def test_elementwise_operations_equal_numpy(level: str, kind: Elementwise) -> None:
    products = (Elementwise.SiluMul, Elementwise.GeluMul, Elementwise.GeluTanhMul, Elementwise.SigmoidGate)
    two = kind == Elementwise.Add or kind in products
    rng = np.random.default_rng(6)
    for rows, width in [(1, 1), (3, 17), (40, 64), (2, 999)]:
        bench = Bench(level, rows)
        a, b, out = bench.slot(Act.F32, width + 5), bench.slot(Act.F32, width), bench.slot(Act.F32, width + 2)
        bench.add(
            lambda plan, a=a, b=b, out=out, width=width: plan.add_elementwise(
                "elementwise", kind, a.activation(), b.activation() if two else None, width, 30.0, out.activation()
            )
        )
        x = (rng.standard_normal((rows, width)) * rng.choice([0.01, 1, 8, 60], (rows, width))).astype(np.float32)
        y = rng.standard_normal((rows, width)).astype(np.float32)
        a.write(x)
        b.write(y)
        out.raw[:] = 7
        bench.run()
        expected = elementwise_reference(kind, x.astype(np.float64), y.astype(np.float64), 30.0)
        allowed = 1e-6 * (1 + np.abs(x)) * (1 + np.abs(y)) + EPS * np.abs(expected)
        allowed += 8e-6 if kind == Elementwise.Softcap else 0
        np.testing.assert_array_less(np.abs(out.raw[:, :width] - expected), allowed)
        assert (out.raw[:, width:] == 7).all()


@pytest.mark.parametrize("level", LEVELS)
def test_the_exponential_is_right_to_a_few_units_in_the_last_place(level: str) -> None:
    """Far below zero silu is x e^x, whose relative error is the exponential's."""
    x = np.linspace(-80, -18, 20001, dtype=np.float32)[None, :]
    bench = Bench(level, 1)
    a, out = bench.slot(Act.F32, x.size), bench.slot(Act.F32, x.size)
    bench.add(
        lambda p: p.add_elementwise("silu", Elementwise.Silu, a.activation(), None, x.size, 0.0, out.activation())
    )
    a.write(x)
    bench.run()
    expected = x.astype(np.float64) * np.exp(x.astype(np.float64))
    assert np.abs(out.raw / expected - 1).max() < 2.5 * EPS


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "kind",
    [
        Elementwise.Silu,
        Elementwise.Gelu,
        Elementwise.GeluTanh,
        Elementwise.Softcap,
        Elementwise.Clip,
        Elementwise.Relu,
    ],
)
def test_activations_keep_to_their_limits(level: str, kind: Elementwise) -> None:
    x = np.array([[-np.inf, -3e38, -1000, -89, -88, -0.0, 0, 1e-38, 88, 89, 1000, 3e38, np.nan]], np.float32)
    bench = Bench(level, 1)
    a, out = bench.slot(Act.F32, 13), bench.slot(Act.F32, 13)
    bench.add(lambda p: p.add_elementwise("act", kind, a.activation(), None, 13, 50.0, out.activation()))
    a.write(x)
    bench.run()
    y = out.raw[0]
    assert np.isnan(y[12])
    if kind in (Elementwise.Softcap, Elementwise.Clip):
        np.testing.assert_allclose(y[:3], -50, rtol=1e-6)
        np.testing.assert_allclose(y[10:12], 50, rtol=1e-6)
    else:
        # Far below zero nothing is left; far above, the number itself.
        np.testing.assert_allclose(y[1:5], 0, atol=1e-5 if kind == Elementwise.Gelu else 1e-30)
        np.testing.assert_allclose(y[8:12], x[0, 8:12], rtol=1e-6)
    np.testing.assert_allclose(y[5:8], 0, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_a_position_embedding_takes_the_rows_of_positions(level: str) -> None:
    weight = make_weight(Shape(Form.F32), 40, 32)
    bench = Bench(level, 9, sequences=2, table_stride=2)
    out = bench.slot(Act.F32, 32)
    bench.add(lambda plan: plan.add_embed("positions", weight.packed, out.activation(), 1.0, True, 3))
    plan = bench.plan
    plan.starts[:], plan.counts[:] = (5, 28), (6, 3)
    plan.block_tables[:] = 0
    plan.tokens[:] = 1
    plan.run(2, 0)
    rows = [*range(5 + 3, 11 + 3), *range(28 + 3, 31 + 3)]
    np.testing.assert_array_equal(out.raw, weight.values[rows])


def test_forms_cover_what_kernels_have() -> None:
    """The list the tests run over holds every form, group, scale type, minimum and rotation."""
    affine = [shape for shape in FORMS if shape.affine]
    for form in (Form.W8, Form.W4):
        mine = [shape for shape in affine if shape.form == form]
        assert {0, 16, 32, 64, 128} <= {shape.group for shape in mine}
        assert {True, False} == {shape.minimum for shape in mine} == {shape.scale_f16 for shape in mine}
        assert any(shape.rotation for shape in mine)
