"""Writes tests/golden/quantized: small weights quantised by the formats' own libraries, and what these make of them.

Run it in an environment that has bitsandbytes, compressed-tensors, hqq and autoawq besides octavo's: each writes the
files it can. A file holds the tensors of one module `x` as a checkpoint would, `expected` as the library dequantises
it, and as metadata the quantization_config and the library's version.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import distribution, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel  # noqa: F401 - first, or what the libraries import of it fails

FOLDER = Path(__file__).parent / "quantized"
N, K = 32, 128


def weights(n: int = N, k: int = K) -> torch.Tensor:
    """A matrix with an outlier here and there."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(n, k, generator=generator) * 0.05
    values[::5, ::31] *= 8
    return values


def save(
    name: str, library: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], expected: torch.Tensor
) -> None:
    """One file."""
    FOLDER.mkdir(exist_ok=True)
    whole = {f"x.{part}": tensor.detach().contiguous().clone() for part, tensor in tensors.items()}
    metadata = {"quantization_config": json.dumps(config), "library": f"{library} {version(library)}"}
    save_file({**whole, "expected": expected.detach().contiguous().clone()}, FOLDER / f"{name}.safetensors", metadata)


def bitsandbytes() -> None:
    """LLM.int8, NF4 and FP4, the latter two also with quantised scales, and with rows that are no whole blocks."""
    import bitsandbytes.functional as bnb
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    codes, largest, _ = bnb.int8_vectorwise_quant(weights().half())
    expected = bnb.int8_vectorwise_dequant(codes, largest)
    config: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    save("bnb_int8", "bitsandbytes", config, {"weight": codes, "SCB": largest}, expected)
    for kind, nested, k in [("nf4", False, K), ("nf4", True, K), ("fp4", False, K), ("fp4", True, 96)]:
        matrix = weights(64, k).bfloat16()
        packed, state = bnb.quantize_4bit(matrix, quant_type=kind, blocksize=64, compress_statistics=nested)
        parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        # On its general path: the CPU kernel of 0.50.2 takes a wrong scale where a block runs on into the next row.
        scales = state.absmax
        if nested:
            scales = bnb.dequantize_blockwise(state.absmax, state.state2).float() + state.offset
        expected = _dequantize_4bit_compute(packed.reshape(-1), scales, state.code, 64, matrix.shape, matrix.dtype)
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        name = f"bnb_{kind}{'_double' if nested else ''}"
        save(name, "bitsandbytes", config, {"weight": packed, **parts}, expected)


def compressed_tensors() -> None:
    """Packed 4 and 8 bits, int8 and FP8, by the library's own compressors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "ct_w4_group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        "ct_w4_asymmetric": (
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
        ),
        "ct_w8_channel": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        "ct_int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        "ct_fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        "ct_fp8_block": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 64]},
        ),
    }
    for name, (layout, settings) in cases.items():
        args = QuantizationArgs(**settings)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        matrix = weights().bfloat16()
        low, high = _extremes(matrix, settings)
        scale, zero = calculate_qparams(low, high, args)
        compressor = BaseCompressor.get_value_from_registry(layout)
        state = {"weight": matrix, "weight_scale": scale, "weight_zero_point": zero}
        if args.symmetric:
            del state["weight_zero_point"]
        compressed = dict(compressor.compress(state, scheme))
        expected = compressor.decompress(dict(compressed), scheme)["weight"]
        groups = {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}}
        config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
        save(name, "compressed-tensors", config, compressed, expected)


def _extremes(matrix: torch.Tensor, settings: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    n, k = matrix.shape
    if settings["strategy"] == "group":
        blocks = matrix.reshape(n, -1, settings["group_size"])
        return blocks.amin(dim=2), blocks.amax(dim=2)
    if settings["strategy"] == "block":
        high, wide = settings["block_structure"]
        blocks = matrix.reshape(n // high, high, k // wide, wide)
        return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    return matrix.amin(dim=1, keepdim=True), matrix.amax(dim=1, keepdim=True)


def hqq() -> None:
    """HQQ in 8, 4, 3 and 2 bits, groups along the rows."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for bits in (8, 4, 3, 2):
        linear = torch.nn.Linear(K, N, bias=False)
        linear.weight.data = weights()
        settings = BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
        layer = HQQLinear(linear, settings, compute_dtype=torch.float16, device="cpu", del_orig=False)
        state = {name: value for name, value in layer.state_dict().items() if isinstance(value, torch.Tensor)}
        config = {"quant_method": "hqq", "quant_config": json.loads(json.dumps(settings, default=str))}
        save(f"hqq_{bits}", "hqq", config, state, layer.dequantize())


def awq() -> None:
    """AWQ's gemm layout, packed by AutoAWQ's linear and dequantised by its own function.

    The package is made of its folder alone: importing it whole asks for a transformers of its own time.
    """
    package = ModuleType("awq")
    package.__path__ = [str(Path(str(distribution("autoawq").locate_file("awq"))))]
    sys.modules["awq"] = package
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = torch.nn.Linear(K, N, bias=False)
    grouped = weights().half().reshape(N, -1, 64)
    low, high = grouped.amin(dim=2), grouped.amax(dim=2)
    scales = ((high - low) / 15).clamp(min=1e-5)
    zeros = (-torch.round(low / scales)).clamp(0, 15)
    rounded = (torch.round(grouped / scales[..., None]) + zeros[..., None]).clamp(0, 15) - zeros[..., None]
    linear.weight.data = (rounded * scales[..., None]).reshape(N, K)
    layer = WQLinear_GEMM.from_linear(linear, 4, 64, scales=scales.t(), zeros=zeros.t())
    parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
    expected = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, 64).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
    save("awq", "autoawq", config, parts, expected)


MAKERS: dict[str, Callable[[], None]] = {
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "hqq": hqq,
    "awq": awq,
}


if __name__ == "__main__":
    for method in sys.argv[1:] or MAKERS:
        MAKERS[method]()
