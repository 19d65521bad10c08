"""Every form of a linear gives numpy's product at every level, for odd shapes, all epilogues and outputs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo._native import Act, Epilogue, Form
from tests.native.harness import (
    EPS,
    FORMS,
    LEVELS,
    WIDE_FORMS,
    Array,
    Quantized,
    Shape,
    Weight,
    bf16_bits,
    linear_bench,
    linear_reference,
    make_weight,
    pad,
    quantize,
    random_input,
    rotate,
)

# rows, columns, k
SHAPES = [
    (1, 40, 32),
    (2, 17, 40),
    (3, 16, 100),
    (4, 64, 96),
    (5, 100, 160),
    (6, 70, 4096),
    (7, 130, 36),
    (16, 33, 512),
    (33, 90, 352),
    (97, 1, 128),
    (200, 200, 64),
]
GATED = {
    Epilogue.SiluMul: Epilogue.Silu,
    Epilogue.GeluMul: Epilogue.Gelu,
    Epilogue.GeluTanhMul: Epilogue.GeluTanh,
    Epilogue.ClampedSiluMul: Epilogue.Silu,
}
MAIN_FORMS = [FORMS[0], FORMS[1], FORMS[2], FORMS[9], WIDE_FORMS[1]]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def activated(kind: Epilogue, x: Array) -> Array:
    if kind == Epilogue.Silu:
        return x / (1 + np.exp(-x))
    if kind in (Epilogue.Relu, Epilogue.Relu2):
        return np.maximum(x, 0) ** (2 if kind == Epilogue.Relu2 else 1)
    if kind == Epilogue.Gelu:
        return x / 2 * (1 + _erf(x / math.sqrt(2)))
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def tolerance(weight: Weight, magnitude: Array) -> Array:
    """Rounding of the sums: one error per term at the worst, far less in truth; integer forms have few terms."""
    k = weight.packed.k_padded
    terms = 2 * k / weight.shape.act_group + 2 if weight.shape.integer else 4 + 2 * math.sqrt(k)
    return magnitude * terms * EPS + 1e-30


@pytest.mark.parametrize("shape", FORMS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_product_equals_numpy(level: str, shape: Shape) -> None:
    for rows, columns, k in SHAPES:
        weight = make_weight(shape, columns, k, seed=rows)
        x = random_input(weight, rows)
        linear = linear_bench(level, weight, rows, columns)
        linear.out.raw[:] = np.nan
        linear.run(x)
        expected, magnitude = linear_reference(weight, x)
        error = np.abs(linear.out.read(rows) - expected)
        assert (error <= tolerance(weight, magnitude)).all(), (rows, columns, k, error.max())


@pytest.mark.parametrize("shape", [shape for shape in FORMS if shape.affine], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_integer_products_are_exact_at_the_extremes(level: str, shape: Shape) -> None:
    """Codes 0, 255 (or 15) and activations of +-127, where 16-bit intermediate sums would saturate."""
    k, rows = shape.fitting(128), 4
    weight = make_weight(shape, 64, k)
    assert weight.codes is not None
    assert weight.scales is not None
    highest = 255 if shape.form == Form.W8 else 15
    codes = np.where(np.arange(64)[:, None] % 2, highest, 0) * np.ones((1, k), np.int64)
    codes[32:] = np.random.default_rng(0).choice([0, 1, highest - 1, highest], (32, k))
    minimums = None if weight.minimums is None else np.zeros_like(weight.minimums)
    weight.codes, weight.scales = codes.astype(np.uint8), np.ones_like(weight.scales)
    weight.packed.pack_affine(np.arange(64, dtype=np.int32), weight.codes, weight.scales, minimums)
    a = np.array([[127] * k, [-127] * k, [127, -127] * (k // 2), [-127, -127, 127, 127] * (k // 4)], np.int32)
    sums = a.reshape(rows, -1, shape.act_group).sum(axis=2, dtype=np.int32)
    x = Quantized(a.astype(np.int8), np.ones(sums.shape, np.float32), sums.astype(np.float32), sums)
    linear = linear_bench(level, weight, rows, 64)
    linear.run(x)
    np.testing.assert_array_equal(linear.out.read(rows), a @ (codes.astype(np.int64) - shape.zero).T)


def interleaved(features: int) -> Array:
    """Packed columns of gate, then up: 16 by 16."""
    index = np.arange(features)
    gate = index // 16 * 32 + index % 16
    return np.concatenate([gate, gate + 16])


@pytest.mark.parametrize("epilogue", list(Epilogue), ids=lambda each: each.name)
@pytest.mark.parametrize("shape", MAIN_FORMS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_epilogues_equal_numpy(level: str, shape: Shape, epilogue: Epilogue) -> None:
    rng = np.random.default_rng(5)
    for rows, features, k, biased in [(1, 33, 64, True), (7, 96, 96, False), (50, 40, 160, True)]:
        gated = epilogue in GATED
        targets = interleaved(features) if gated else np.arange(features)
        weight = make_weight(shape, len(targets), k, targets=targets)
        bias, packed_bias = np.zeros(len(targets), np.float32), None
        if biased:
            bias = rng.standard_normal(len(targets)).astype(np.float32)
            packed_bias = np.zeros(weight.packed.columns, np.float32)
            packed_bias[targets] = bias
        x = random_input(weight, rows)
        product, magnitude = linear_reference(weight, x)
        product, allowed = product + bias, tolerance(weight, magnitude) + EPS * np.abs(product + bias)
        residual = None
        if epilogue == Epilogue.Add:
            residual = rng.standard_normal((rows, features)).astype(np.float32)
            expected = product + residual
            allowed = allowed + EPS * np.abs(expected)
        elif gated:
            gate, up = product[:, :features], product[:, features:]
            if epilogue == Epilogue.ClampedSiluMul:  # gpt-oss: what is activated is 1.702 times the gate
                gate, up = np.minimum(gate, 7) * 1.702, (np.clip(up, -7, 7) + 1) / 1.702
            expected = activated(GATED[epilogue], gate) * up
            act_error = 1.2 * allowed[:, :features] + 1e-6 * (1 + np.abs(gate))
            allowed = act_error * np.abs(up) + (np.abs(gate) + 0.2) * allowed[:, features:] + EPS * np.abs(expected)
        elif epilogue == Epilogue.Store:
            expected = product
        else:
            expected = activated(epilogue, product)
            slope = 2 * np.abs(product) + 2 * allowed if epilogue == Epilogue.Relu2 else 1.2
            allowed = slope * allowed + 1e-6 * (1 + np.abs(expected))
        linear = linear_bench(level, weight, rows, features, bias=packed_bias, epilogue=epilogue)
        linear.run(x, residual)
        error = np.abs(linear.out.read(rows) - expected)
        assert (error <= allowed).all(), (rows, features, error.max())


@pytest.mark.parametrize("epilogue", [e for e in Epilogue if e != Epilogue.Add], ids=lambda each: each.name)
@pytest.mark.parametrize("shape", [FORMS[1], FORMS[9]], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_other_outputs_are_the_float_output_rounded(level: str, shape: Shape, epilogue: Epilogue) -> None:
    """bf16 and int8 outputs hold bit for bit what the float32 output gives when it is rounded; padding is zero."""
    for rows, features in [(3, 40), (33, 70), (7, 16)]:
        width = pad(features)
        targets = interleaved(features) if epilogue in GATED else np.arange(features)
        weight = make_weight(shape, len(targets), 96, targets=targets)
        x = random_input(weight, rows)
        floats = linear_bench(level, weight, rows, features, epilogue=epilogue)
        floats.run(x)
        expected = np.zeros((rows, width), np.float32)
        expected[:, :features] = floats.out.read(rows)
        halves = linear_bench(level, weight, rows, features, epilogue=epilogue, out=Act.BF16)
        halves.run(x)
        np.testing.assert_array_equal(halves.out.raw, bf16_bits(expected))
        for group in (16, 32):
            bytes_ = linear_bench(level, weight, rows, features, epilogue=epilogue, out=Act.I8, out_group=group)
            bytes_.run(x)
            found, wanted = bytes_.out.read_quantized(rows), quantize(expected, group)
            np.testing.assert_array_equal(found.codes, wanted.codes)
            np.testing.assert_array_equal(found.scales, wanted.scales)
            np.testing.assert_array_equal(found.sums, wanted.sums)
            np.testing.assert_array_equal(found.scaled_sums, wanted.scaled_sums)
        rotated = linear_bench(level, weight, rows, features, epilogue=epilogue, out=Act.I8, out_rotation=32)
        rotated.run(x)
        found, turned = rotated.out.read_quantized(rows), rotate(expected)
        allowed = 0.5001 * np.repeat(found.scales, 32, axis=1) + 1e-6 * np.abs(turned).max()
        assert (np.abs(found.values() - turned) <= allowed).all()


@pytest.mark.parametrize("epilogue", [e for e in Epilogue if e != Epilogue.Add], ids=lambda each: each.name)
@pytest.mark.parametrize("level", LEVELS)
def test_wide_groups_are_the_float_output_rounded(level: str, epilogue: Epilogue) -> None:
    """Groups of outputs that are wider than what a kernel computes at once, in one row or many."""
    features = 384
    targets = interleaved(features) if epilogue in GATED else np.arange(features)
    weight = make_weight(WIDE_FORMS[0], len(targets), 64, targets=targets)
    for rows in (1, 7, 50, 200):
        x = random_input(weight, rows)
        floats = linear_bench(level, weight, rows, features, epilogue=epilogue)
        floats.run(x)
        expected = floats.out.read(rows)
        for group, rotation in [(64, 0), (128, 0), (192, 0), (192, 32), (192, 64), (128, 64)]:
            bytes_ = linear_bench(
                level, weight, rows, features, epilogue=epilogue, out=Act.I8, out_group=group, out_rotation=rotation
            )
            bytes_.run(x)
            found = bytes_.out.read_quantized(rows)
            if not rotation:
                np.testing.assert_array_equal(found.codes, quantize(expected, group).codes)
            turned = rotate(expected, rotation) if rotation else expected
            allowed = 0.5001 * np.repeat(found.scales, group, axis=1) + 1e-6 * np.abs(turned).max()
            assert (np.abs(found.values() - turned) <= allowed).all()
            np.testing.assert_array_equal(found.sums, found.codes.reshape(rows, -1, group).sum(axis=2, dtype=np.int32))
            np.testing.assert_array_equal(found.scaled_sums, found.scales * found.sums.astype(np.float32))


@pytest.mark.parametrize("shape", FORMS, ids=str)
def test_output_stays_inside_its_columns(shape: Shape) -> None:
    """Wider float rows keep what lies past the columns asked for, and rows past the step are not touched."""
    weight = make_weight(shape, 45, 64)
    linear = linear_bench(LEVELS[-1], weight, 8, 45)
    linear.out.raw[:] = 7
    linear.run(random_input(weight, 5))
    assert (linear.out.raw[5:] == 7).all()
    assert (linear.out.raw[:5] != 7).all()
