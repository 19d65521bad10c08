"""Weights that others quantised are read as their layouts say, bit for bit, in pieces as well as whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import WeightsError
from octavo.weights import AffineTensor, open_checkpoint
from octavo.weights.tensors import TableTensor, Tensor
from tests.weights import layouts
from tests.weights.layouts import Array

N, K = 64, 128


def numbers(bits: int, group: int, seed: int = 0, n: int = N, k: int = K) -> tuple[Array, Array, Array]:
    """Codes, f16 scales and zero points of groups along k."""
    rng = np.random.default_rng(seed)
    groups = k // group
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.02, (n, groups)).astype(np.float16).astype(np.float32)
    return codes, scales, rng.integers(0, 1 << bits, (n, groups), dtype=np.uint8)


def expected(codes: Array, scales: Array, zeros: Array | int, index: Array) -> Array:
    """scale * (code - zero) in float64, which float32 holds exactly."""
    wide = zeros if isinstance(zeros, int) else zeros.astype(np.float64)[:, index]
    return scales.astype(np.float64)[:, index] * (codes.astype(np.float64) - wide)


def check_values(tensor: Tensor, values: Array) -> None:
    assert tuple(tensor.shape) == values.shape
    np.testing.assert_array_equal(tensor.read_f32().astype(np.float64), values)
    for start, stop in [(0, 1), (3, 17), (9, 48), (64, 64)]:
        np.testing.assert_array_equal(tensor.read_f32(start, stop), values[start:stop].astype(np.float32))
    tensor.release()
    np.testing.assert_array_equal(tensor.read_f32(5, 9), values[5:9].astype(np.float32))


def opened(folder: Path, tensors: dict[str, Any], **quantization: Any) -> Tensor:
    checkpoint = open_checkpoint(layouts.write_model(folder, tensors, {"quantization_config": quantization}))
    assert checkpoint.names() == ["x.weight"]
    return checkpoint.tensor("x.weight")


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_awq_is_read(tmp_path: Path, group: int) -> None:
    size = K if group == -1 else group
    codes, scales, zeros = numbers(4, size)
    tensor = opened(tmp_path, layouts.awq("x", codes, scales, zeros), quant_method="awq", bits=4, group_size=group)
    assert isinstance(tensor, AffineTensor)
    assert (tensor.bits, tensor.group, tensor.exact) == (4, size, True)
    check_values(tensor, expected(codes, scales, zeros, np.arange(K) // size))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [32, -1])
def test_gptq_is_read(tmp_path: Path, version: int, bits: int, act_order: bool, group: int) -> None:
    size = K if group == -1 else group
    codes, scales, zeros = numbers(bits, size)
    index = np.arange(K) // size
    if act_order:
        index = np.random.default_rng(1).permutation(index)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    stored = layouts.gptq("x", codes, scales, zeros, bits, index=index, version=version)
    tensor = opened(tmp_path, stored, **config)
    assert isinstance(tensor, AffineTensor)
    assert tensor.bits == (8 if bits == 8 else 4)
    assert (tensor.order is not None) == (act_order and group != -1)
    check_values(tensor, expected(codes, scales, zeros, index))


def test_gptq_with_one_zero_point_is_symmetric_and_needs_no_minima(tmp_path: Path) -> None:
    codes, scales, zeros = numbers(4, 64)
    zeros[:] = 8
    stored = layouts.gptq("x", codes, scales, zeros, 4, index=None)
    tensor = opened(tmp_path, stored, quant_method="gptq", bits=4, group_size=64, sym=True)
    assert isinstance(tensor, AffineTensor)
    assert (tensor.zero, tensor.has_minimum, tensor.scale_dtype) == (8, False, "f16")
    check_values(tensor, expected(codes, scales, 8, np.arange(K) // 64))


def test_modules_with_settings_of_their_own_are_told_by_their_shapes(tmp_path: Path) -> None:
    codes, scales, zeros = numbers(8, 64)
    stored = layouts.gptq("x", codes, scales, zeros, 8, index=None)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"x": {"bits": 8, "group_size": 64}}}
    check_values(opened(tmp_path, stored, **config), expected(codes, scales, zeros, np.arange(K) // 64))


def test_settings_beside_an_old_checkpoint_are_found(tmp_path: Path) -> None:
    codes, scales, zeros = numbers(4, 64)
    for name, stored, settings in [
        ("quantize_config.json", layouts.gptq("x", codes, scales, zeros, 4, index=None), '{"bits":4,"group_size":64}'),
        ("quant_config.json", layouts.awq("x", codes, scales, zeros), '{"w_bit":4,"q_group_size":64,"version":"GEMM"}'),
    ]:
        folder = layouts.write_model(tmp_path / name, stored, {})
        (folder / name).write_text(settings)
        check_values(open_checkpoint(folder).tensor("x.weight"), expected(codes, scales, zeros, np.arange(K) // 64))


@pytest.mark.parametrize("strategy", ["channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_compressed_tensors_are_read(tmp_path: Path, bits: int, symmetric: bool, strategy: str) -> None:
    size = 32 if strategy == "group" else K
    codes, scales, zeros = numbers(bits, size)
    stored = layouts.pack_quantized("x", codes, scales, None if symmetric else zeros, bits)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    tensor = opened(tmp_path, stored, quant_method="compressed-tensors", format="pack-quantized", config_groups=groups)
    check_values(tensor, expected(codes, scales, 1 << (bits - 1) if symmetric else zeros, np.arange(K) // size))


def test_packed_compressed_tensors_in_act_order_are_read(tmp_path: Path) -> None:
    codes, scales, _ = numbers(4, 32)
    index = np.random.default_rng(1).permutation(np.arange(K) // 32)
    stored = layouts.pack_quantized("x", codes, scales, None, 4, index)
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int", "actorder": "group", "group_size": 32}}}
    tensor = opened(tmp_path, stored, quant_method="compressed-tensors", format="pack-quantized", config_groups=groups)
    assert isinstance(tensor, AffineTensor)
    assert tensor.order is not None
    check_values(tensor, expected(codes, scales, 8, index))


@pytest.mark.parametrize("shape", [(1,), (N, 1), (N, 4)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_compressed_tensors_are_read(tmp_path: Path, shape: tuple[int, ...], symmetric: bool) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (N, K), dtype=np.int8)
    scales = rng.uniform(0.001, 0.02, shape).astype(np.float16)
    zeros = rng.integers(-100, 100, shape, dtype=np.int8)
    stored: dict[str, Any] = {"x.weight": codes, "x.weight_scale": scales}
    if not symmetric:
        stored["x.weight_zero_point"] = zeros
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"type": "int"}}}
    tensor = opened(tmp_path, stored, quant_method="compressed-tensors", format="int-quantized", config_groups=groups)
    wide = np.broadcast_to(scales.reshape(-1, shape[-1] if len(shape) == 2 else 1), (N, shape[-1]))
    wide = np.repeat(wide.astype(np.float64), K // wide.shape[1], axis=1)
    low = np.broadcast_to(zeros.reshape(-1, shape[-1] if len(shape) == 2 else 1), (N, shape[-1])).astype(np.float64)
    low = np.repeat(low, K // low.shape[1], axis=1) if not symmetric else 0
    check_values(tensor, wide * (codes.astype(np.float64) - low))


def test_eetq_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(-128, 128, (N, K), dtype=np.int8)
    scales = rng.uniform(0.001, 0.02, N).astype(np.float16)
    tensor = opened(tmp_path, layouts.eetq("x", weights, scales), quant_method="eetq", weights="int8")
    check_values(tensor, scales.astype(np.float64)[:, None] * weights)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("method", "scale", "shape", "block"),
    [
        ("fp8", "weight_scale", (), None),
        ("fp8", "weight_scale", (N, 1), None),
        ("fp8", "weight_scale_inv", (4, 2), [16, 96]),
        ("fp8", "weight_scale_inv", (1, 1), [128, 128]),
        ("compressed-tensors", "weight_scale", (1,), None),
        ("compressed-tensors", "weight_scale", (N, 1), None),
        ("compressed-tensors", "weight_scale", (N, 4), None),
        ("compressed-tensors", "weight_scale", (1, 1), [128, 128]),
    ],
)
def test_fp8_is_read(
    tmp_path: Path, dtype: torch.dtype, method: str, scale: str, shape: tuple[int, ...], block: list[int] | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(N, K, generator=generator) * 5).to(dtype)
    scales = torch.rand(shape, generator=generator) * 0.01 + 0.001
    stored = {"x.weight": weights, f"x.{scale}": scales, "x.input_scale": torch.ones(1)}
    config: dict[str, Any] = {"quant_method": method, "activation_scheme": "static", "weight_block_size": block}
    if method == "compressed-tensors":
        weight = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block}
        groups = {"group_0": {"weights": weight, "input_activations": {"type": "float", "dynamic": False}}}
        config = {"quant_method": method, "format": "float-quantized", "config_groups": groups}
    tensor = opened(tmp_path, stored, **config)
    assert isinstance(tensor, TableTensor)
    high, wide = (N, K) if block is None else block
    if block is None and len(shape) == 2:
        high, wide = 1, K // shape[1]
    values = scales.reshape(shape or (1, 1)).numpy().astype(np.float32)
    values = values.reshape(-1, shape[1] if len(shape) == 2 else 1)
    spread = values[np.arange(N) // high][:, np.arange(K) // wide]
    products = weights.float().numpy() * spread
    np.testing.assert_array_equal(tensor.read_f32(), products)
    np.testing.assert_array_equal(tensor.read_f32(7, 33), products[7:33])


def test_codes_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    weights = torch.ones(N, K).to(torch.float8_e4m3fn)
    weights.view(torch.uint8)[3, 5] = 0x7F
    stored = {"x.weight": weights, "x.weight_scale": torch.ones(1)}
    with pytest.raises(WeightsError, match=r"'x\.weight' holds e4m3 codes that are no numbers"):
        opened(tmp_path, stored, quant_method="fp8").read_f32()


def four_bits(kind: str, n: int, k: int, block: int, nested: bool) -> tuple[dict[str, Any], Array]:
    """bitsandbytes' tensors of a random weight, and its values."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, n * k, dtype=np.uint8)
    table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    blocks = -(-n * k // block)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    stored: dict[str, Any] = {"x.weight": (codes[0::2] << 4 | codes[1::2])[:, None], "x.weight.quant_map": table}
    scales = rng.uniform(0.1, 1, blocks).astype(np.float32)
    if nested:
        steps = np.linspace(-1, 1, 256).astype(np.float32)
        largest = rng.uniform(0.1, 1, -(-blocks // 256)).astype(np.float32)
        bytes_ = rng.integers(0, 256, blocks, dtype=np.uint8)
        scales = steps[bytes_] * largest[np.arange(blocks) // 256] + np.float32(1.25)
        stored |= {"x.weight.absmax": bytes_, "x.weight.nested_absmax": largest, "x.weight.nested_quant_map": steps}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1.25}
    else:
        stored["x.weight.absmax"] = scales
    stored[f"x.weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return stored, (table[codes] * np.repeat(scales, block)[: n * k]).reshape(n, k)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("kind", "k", "block"), [("nf4", 128, 64), ("fp4", 96, 64), ("nf4", 144, 64), ("nf4", 64, 128)]
)
def test_bitsandbytes_is_read(tmp_path: Path, kind: str, k: int, block: int, nested: bool) -> None:
    stored, values = four_bits(kind, 600, k, block, nested)
    tensor = opened(tmp_path, stored, quant_method="bitsandbytes", load_in_4bit=True)
    assert isinstance(tensor, TableTensor)
    assert tensor.group == math.gcd(k, block)
    np.testing.assert_array_equal(tensor.read_f32(), values)
    np.testing.assert_array_equal(tensor.read_f32(7, 33), values[7:33])


def test_llm_int8_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(-127, 128, (N, K), dtype=np.int8)
    largest = rng.uniform(0.1, 3, N).astype(np.float32)
    stored = {"x.weight": weights, "x.SCB": largest, "x.weight_format": np.zeros((), np.uint8)}
    tensor = opened(tmp_path, stored, quant_method="bitsandbytes", load_in_8bit=True)
    values = weights * largest.astype(np.float64)[:, None] / 127
    np.testing.assert_allclose(tensor.read_f32(), values, rtol=2e-7)
    for changed in ({"x.weight_format": np.array(2, np.uint8)}, {"x.SCB": largest[:-1]}):
        with pytest.raises(WeightsError, match=r"weight_format|SCB"):
            opened(tmp_path / "bad", {**stored, **changed}, quant_method="bitsandbytes")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "exl2"}, "'exl2' is not supported: EXL2 mixes bit widths"),
        ({"quant_method": "exl3"}, "'exl3' is not supported: EXL3 stores trellis codes"),
        ({"quant_method": "other"}, "octavo does not know it; supported are awq, bitsandbytes"),
        ({"quant_method": 5}, "it must be a name"),
        ({"quant_method": None}, "quant_method = 'None'"),
        ([], "quantization_config is a list"),
        ({"quant_method": "awq", "bits": 8}, "quantization_config.bits = 8 is not supported by awq: it must be 4"),
        ({"quant_method": "awq", "version": "GEMV"}, "version = 'GEMV' is not supported by awq"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point = False"),
        ({"quant_method": "awq", "group_size": 0}, "group_size = 0"),
        ({"quant_method": "gptq", "bits": 5}, "bits = 5"),
        ({"quant_method": "gptq", "bits": True}, "bits = True"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized'"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups = [1]"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse weights are not read",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "config_groups.g.weights.num_bits = 4",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size = [128] must be two sizes"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "fmt = 'e3m4'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, config: Any, message: str) -> None:
    folder = layouts.write_model(tmp_path, {"a": np.ones(1, np.float32)}, {"quantization_config": config})
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(folder)
    assert message in str(caught.value)


def test_exl2_says_what_works(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "exl2", "bits": 4.5}}
    with pytest.raises(WeightsError, match="take the unquantised checkpoint with quantization='w8' or 'w4'"):
        open_checkpoint(layouts.write_model(tmp_path, {"a": np.ones(1, np.float32)}, config))


def _broken(name: str, change: Any) -> dict[str, Array]:
    codes, scales, zeros = numbers(4, 32)
    stored = layouts.gptq("x", codes, scales, zeros, 4, index=np.arange(K) // 32)
    if change is None:
        del stored[name]
    else:
        stored[name] = change(stored[name])
    return stored


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x.qzeros", None, "'x.qzeros' is missing"),
        ("x.scales", None, "'x.scales' is missing"),
        ("x.qweight", lambda a: a[:-1], "'x.scales' has 4 groups, 120 inputs"),
        ("x.qweight", lambda a: a.astype(np.int64), "'x.qweight' has dtype I64, expected I32"),
        ("x.qweight", lambda a: a.reshape(-1), "'x.qweight' has shape [1024], expected ['any', 'any']"),
        ("x.qzeros", lambda a: a[:, :-1], "'x.qzeros' has 7 words for 64 columns of 4 bits"),
        ("x.qzeros", lambda a: a[:-1], "'x.qzeros' has shape [3, 8], expected [4, 'any']"),
        ("x.scales", lambda a: a[:, :-1], "'x.scales' has shape [4, 63], expected ['any', 64]"),
        ("x.scales", lambda a: a * np.float16(np.nan), "'x.scales' holds a number that is not finite"),
        ("x.scales", lambda a: a.astype(np.int16), "'x.scales' has dtype I16"),
        ("x.g_idx", lambda a: a * 0, "'x.g_idx' does not spread 128 inputs evenly over groups of 32"),
        ("x.g_idx", lambda a: a - 1, "'x.g_idx' does not spread"),
        ("x.g_idx", lambda a: a[:-1], "'x.g_idx' has shape [127], expected [128]"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(tmp_path: Path, name: str, change: Any, message: str) -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    with pytest.raises(WeightsError) as caught:
        read_all(layouts.write_model(tmp_path, _broken(name, change), config))
    assert message.removeprefix("'x.scales' holds") in str(caught.value)


def read_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.names():
        checkpoint.tensor(name).read_f32()


def test_a_weight_stored_whole_and_quantised_is_refused(tmp_path: Path) -> None:
    stored = {**_broken("x.g_idx", lambda a: a), "x.weight": np.ones((N, K), np.float32)}
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    with pytest.raises(WeightsError, match=r"'x\.weight' is stored whole and quantised"):
        read_all(layouts.write_model(tmp_path, stored, config))


def test_modules_left_alone_are_read_as_they_are(tmp_path: Path) -> None:
    codes, scales, zeros = numbers(4, 32)
    whole = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    stored = {**layouts.awq("x", codes, scales, zeros), "y.weight": whole}
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    checkpoint = open_checkpoint(layouts.write_model(tmp_path, stored, config))
    assert sorted(checkpoint.names()) == ["x.weight", "y.weight"]
    np.testing.assert_array_equal(checkpoint.tensor("y.weight").read_f32(), whole)


def test_mxfp4_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = rng.integers(0, 16, (4, 16, 4, 32))
    exponents = rng.integers(110, 130, (4, 16, 4))
    stored = {
        "x_blocks": (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8),
        "x_scales": exponents.astype(np.uint8),
    }
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    tensor = open_checkpoint(layouts.write_model(tmp_path, stored, config)).tensor("x")
    assert isinstance(tensor, TableTensor)
    check_values(tensor, (values[codes] * 2.0 ** (exponents[..., None] - 127.0)).reshape(64, 128))
