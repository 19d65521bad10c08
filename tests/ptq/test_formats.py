"""What the layouts hold, read back by the book, is exactly what the codes stand for."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.ptq.formats.awq import AwqLayout
from octavo.ptq.formats.bits import pack_stream, pack_words
from octavo.ptq.formats.compressed_tensors import CompressedTensorsLayout
from octavo.ptq.formats.gptq import GptqLayout
from octavo.ptq.grid import GridSpec, QuantizedMatrix, fit_grid, round_to_grid
from tests.ptq.unpacking import awq_weights, bits_of, gptq_weights, packed_weights


def matrix(spec: GridSpec, out: int = 64, k: int = 96) -> QuantizedMatrix:
    weights = (np.random.default_rng(spec.bits).standard_normal((out, k)) * 0.1).astype(np.float32)
    return round_to_grid(weights, fit_grid(weights, spec))


def arrays(stored: object) -> dict[str, np.ndarray]:
    return {name: tensor.values for name, tensor in stored.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_are_streams_of_bits(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (3, 64))
    words = pack_stream(codes, bits)
    assert words.shape == (3, 2 * bits)
    np.testing.assert_array_equal([bits_of(row, bits, 64) for row in words], codes)


def test_a_word_of_nibbles_begins_with_the_lowest() -> None:
    assert pack_words(np.array([1, 2, 3, 4, 5, 6, 7, 8]), 4)[0] == np.uint32(0x87654321).view(np.int32)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, symmetric: bool) -> None:
    found = matrix(GridSpec(bits, 32, symmetric, least_zero=1))
    stored = GptqLayout(bits).pack("m.weight", found, None)
    assert {name: (tensor.dtype, tensor.values.shape) for name, tensor in stored.items()} == {
        "m.qweight": ("I32", (96 * bits // 32, 64)),
        "m.qzeros": ("I32", (3, 64 * bits // 32)),
        "m.scales": ("F16", (3, 64)),
        "m.g_idx": ("I32", (96,)),
    }
    np.testing.assert_array_equal(gptq_weights(arrays(stored), "m", bits), found.dequantized())


def test_awq() -> None:
    found = matrix(GridSpec(4, 48))
    stored = AwqLayout().pack("m.weight", found, None)
    assert {name: (tensor.dtype, tensor.values.shape) for name, tensor in stored.items()} == {
        "m.qweight": ("I32", (96, 8)),
        "m.qzeros": ("I32", (2, 8)),
        "m.scales": ("F16", (2, 64)),
    }
    np.testing.assert_array_equal(awq_weights(arrays(stored), "m", 48), found.dequantized())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_packed(bits: int, symmetric: bool) -> None:
    found = matrix(GridSpec(bits, 32, symmetric, scale_dtype="bf16"))
    stored = CompressedTensorsLayout(bits, "bf16", integers=False).pack("m.weight", found, None)
    tensors = arrays(stored)
    assert stored["m.weight_scale"].dtype == "BF16"
    assert tensors["m.weight_packed"].shape == (64, 96 * bits // 32)
    assert ("m.weight_zero_point" in stored) is not symmetric
    if not symmetric:
        assert tensors["m.weight_zero_point"].shape == (64 * bits // 32, 3)
    tensors["m.weight_scale"] = (tensors["m.weight_scale"].astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(packed_weights(tensors, "m", bits), found.dequantized())


def test_compressed_tensors_integers() -> None:
    found = matrix(GridSpec(8, 96, symmetric=True))
    stored = CompressedTensorsLayout(8, "f16", integers=True).pack("m.weight", found, 0.25)
    tensors = arrays(stored)
    assert (stored["m.weight"].dtype, tensors["m.weight_scale"].shape) == ("I8", (64, 1))
    np.testing.assert_array_equal(
        tensors["m.weight"] * tensors["m.weight_scale"].astype(np.float32), found.dequantized()
    )
    assert tensors["m.input_scale"].tolist() == [0.25]


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (GptqLayout(4), (40, 64)),
        (GptqLayout(4), (64, 40)),
        (AwqLayout(), (12, 64)),
        (CompressedTensorsLayout(4, "f16", integers=False), (64, 12)),
    ],
)
def test_shapes_a_layout_cannot_hold_are_refused_by_name(layout: GptqLayout, shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"tensor m\.weight: has (40|12) (in|out)puts"):
        layout.check("m.weight", shape, 32)
