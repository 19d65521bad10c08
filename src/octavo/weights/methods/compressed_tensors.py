"""compressed-tensors checkpoints (llm-compressor): packed, int8 and FP8 weights, scaled by tensor, row, group or block.

"pack-quantized": `weight_packed` int32 [n, words], each word of 32 // bits codes along k, `weight_shape` [n, k].
"int-quantized": `weight` int8 [n, k]. "float-quantized": `weight` FP8 [n, k]. Beside them `weight_scale` of one number,
[n, 1], [n, groups] or [n / rows, k / columns], and `weight_zero_point` where codes are not symmetric: int8 like the
scale, or of packed weights int32 [n / codes a word, groups]. Codes and zero points are stored plus half their range.

How a weight is stored follows from the tensors it has. Scales of activations (`input_scale`) are not needed: int8
activations get theirs for each token and 32 inputs as they arise, and FP8 weights are multiplied with bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.weights.float8 import FLOAT8_DTYPES, float8_tensor
from octavo.weights.methods.fp8 import block_size
from octavo.weights.methods.gptq import group_order
from octavo.weights.quantized import AffineParts, QuantizedWeight, Settings, affine_rows
from octavo.weights.stored import StoredArray, StoredTensors
from octavo.weights.tensors import AffineRows, AffineTensor, Tensor, Uint8Array
from octavo.weights.unpacking import unpack_words

NAMES = ("compressed-tensors", "compressed_tensors")

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", "mixed-precision")
_FLOATS = ("F32", "F16", "BF16")
_IGNORED_PARTS = ("input_scale", "input_zero_point")


def read(settings: Settings, stored: StoredTensors) -> dict[str, QuantizedWeight]:
    """Every weight with a scale."""
    settings.require("format", _FORMATS)
    settings.require("quantization_status", ("compressed", "frozen", "calibration", "initialized"))
    sparsity = settings.values.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise settings.refusal("sparsity_config", "absent: sparse weights are not read")
    if settings.values.get("transform_config"):
        raise settings.refusal("transform_config", "absent: transforms at run time are not made")
    groups = settings.values.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise settings.refusal("config_groups", "an object of objects")
    bits: set[int] = set()
    blocks: set[tuple[int, int]] = set()
    for name, group in groups.items():
        _read_group(settings, str(name), group, bits, blocks)
    if len(blocks) > 1:
        raise settings.refusal("config_groups", "of one block_structure")
    block = next(iter(blocks), None)
    found = {}
    for base in stored.ending(".weight_scale"):
        used = tuple(f"{base}.{part}" for part in _IGNORED_PARTS if f"{base}.{part}" in stored)
        if f"{base}.weight_packed" in stored:
            weight = _packed(base, stored, bits)
        elif f"{base}.weight" in stored and stored[f"{base}.weight"].dtype == "I8":
            weight = _int8(base, stored)
        else:
            weight = _float8(base, stored, block)
        found[f"{base}.weight"] = QuantizedWeight((*weight.parts, *used), weight.make)
    return found


def _read_group(
    settings: Settings, name: str, group: Mapping[str, Any], bits: set[int], blocks: set[tuple[int, int]]
) -> None:
    """Note what a group of modules is stored as, and refuse what cannot be read."""

    def part(key: str) -> Settings:
        value = group.get(key)
        return Settings(
            value if isinstance(value, Mapping) else {},
            settings.method,
            f"{settings.prefix}.config_groups.{name}.{key}",
        )

    weights, inputs = part("weights"), part("input_activations")
    weights.require("type", ("int", "float"))
    weights.require("strategy", ("tensor", "channel", "group", "block"))
    weights.require("actorder", ("weight", "group", "static", "dynamic", False))
    width = weights.integer("num_bits", 8, 1, 32)
    if width is not None and (not 2 <= width <= 8 or (weights.values.get("type") == "float" and width != 8)):
        raise weights.refusal(
            "num_bits", "2 to 8 of integers, or 8 of floats (NVFP4 and MXFP4 are not read in this format)"
        )
    if width is not None:
        bits.add(width)
    block = block_size(weights, "block_structure", weights.values.get("block_structure"))
    if block is not None:
        blocks.add(block)
    if part("output_activations").values:
        settings.note("rounding of outputs of linears (output_activations) is left out: they stay float32")
    if inputs.values:
        inputs.require("type", ("int", "float"))
        if inputs.values.get("type") == "float":
            settings.note("FP8 activations are not rounded to FP8: products are of bf16 activations")
        else:
            scheme = "dynamic" if inputs.values.get("dynamic") else "static"
            settings.note(f"{scheme} int8 activations get a scale for each token and 32 inputs as they arise")


def _scale_groups(stored: StoredTensors, scale: StoredArray, n: int, k: int) -> int:
    """Groups along k of a scale of one number, [n], [n, 1] or [n, groups]."""
    if scale.shape in ((), (1,), (1, 1), (n,), (n, 1)):
        return 1
    if len(scale.shape) == 2 and scale.shape[0] == n and scale.shape[1] > 0 and k % scale.shape[1] == 0:
        return scale.shape[1]
    raise stored.error(scale.name, f"has shape {list(scale.shape)}, which fits no scale of {n} x {k}")


def _rows_of(part: StoredArray, groups: int, start: int, stop: int) -> Any:
    """Where in a scale or zero point the rows [start, stop) are, one for all of them or one each."""
    return np.s_[...] if part.shape in ((), (1,), (1, 1)) else np.s_[start:stop]


def _scales(part: StoredArray, groups: int, start: int, stop: int) -> Any:
    values = part.finite_f32(_rows_of(part, groups, start, stop)).reshape(-1, groups)
    return np.ascontiguousarray(np.broadcast_to(values, (stop - start, groups)))


def _packed(base: str, stored: StoredTensors, bits: set[int]) -> QuantizedWeight:
    names = {part: f"{base}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape")}
    optional = {part: f"{base}.{part}" for part in ("weight_zero_point", "weight_g_idx")}
    present = {part: name for part, name in optional.items() if name in stored}

    def make() -> Tensor:
        shape = stored.need(names["weight_shape"], ("I64", "I32"), (2,))
        n, k = (int(size) for size in shape.array)
        packed = stored.need(names["weight_packed"], ("I32",), (n, None))
        words = packed.shape[1]
        if not 0 < n < 1 << 31 or not 0 < k < 1 << 31:
            raise stored.error(shape.name, f"says {n} x {k}")
        widths = [width for width in sorted(bits) if -(-k // (32 // width)) == words]
        if len(widths) != 1:
            raise stored.error(
                packed.name, f"has {words} words for {k} codes of {' or '.join(map(str, sorted(bits)))} bits"
            )
        width = widths[0]
        scale = stored.need(names["weight_scale"], _FLOATS)
        groups = _scale_groups(stored, scale, n, k)
        index = present.get("weight_g_idx")
        order = None
        if index is not None:
            # -1 everywhere is how a module without an order is written.
            found = stored.need(index, ("I32", "I64"), (k,))
            order = None if (found.array == -1).all() else group_order(stored, found, k // groups)
        zeros = None
        if "weight_zero_point" in present:
            zeros = stored.need(present["weight_zero_point"], ("I32",), (-(-n // (32 // width)), groups))

        def rows(start: int, stop: int) -> AffineRows:
            codes = unpack_words(packed.array[start:stop], width, k)
            if order is not None:
                codes = codes[:, order]
            own: Uint8Array | None = None
            if zeros is not None:
                own = unpack_words(np.ascontiguousarray(zeros.array.T), width, n)[:, start:stop].T
            return affine_rows(codes, _scales(scale, groups, start, stop), own)

        kind = "act-order" if order is not None else "per channel" if groups == 1 else f"group {k // groups}"
        return AffineTensor(
            f"{base}.weight",
            (n, k),
            4 if width <= 4 else 8,
            k // groups,
            0 if zeros is not None else 1 << (width - 1),
            zeros is not None,
            "f16" if zeros is None and scale.dtype == "F16" else "f32",
            f"W{width} {kind}",
            True,
            AffineParts((packed, scale, *(() if zeros is None else (zeros,))), rows),
            order,
        )

    return QuantizedWeight((*names.values(), *present.values()), make)


def _int8(base: str, stored: StoredTensors) -> QuantizedWeight:
    names = (f"{base}.weight", f"{base}.weight_scale")
    zero_name = f"{base}.weight_zero_point"
    parts = (*names, *((zero_name,) if zero_name in stored else ()))

    def make() -> Tensor:
        weight = stored.need(names[0], ("I8",), (None, None))
        n, k = weight.shape
        scale = stored.need(names[1], _FLOATS)
        groups = _scale_groups(stored, scale, n, k)
        zeros = stored.need(zero_name, ("I8",), scale.shape) if zero_name in stored else None
        if zeros is not None and not zeros.array.any():
            zeros = None

        def rows(start: int, stop: int) -> AffineRows:
            codes = weight.array[start:stop].view(np.uint8) ^ np.uint8(0x80)
            own: Uint8Array | None = None
            if zeros is not None:
                stored_zeros = zeros.array[_rows_of(zeros, groups, start, stop)].view(np.uint8) ^ np.uint8(0x80)
                own = np.broadcast_to(stored_zeros.reshape(-1, groups), (stop - start, groups))
            return affine_rows(codes, _scales(scale, groups, start, stop), own)

        kind = "per channel" if groups == 1 else f"group {k // groups}"
        return AffineTensor(
            names[0],
            (n, k),
            8,
            k // groups,
            0 if zeros is not None else 128,
            zeros is not None,
            "f16" if zeros is None and scale.dtype == "F16" else "f32",
            f"W8 {kind}",
            True,
            AffineParts((weight, scale), rows),
        )

    return QuantizedWeight(parts, make)


def _float8(base: str, stored: StoredTensors, block: tuple[int, int] | None) -> QuantizedWeight:
    names = (f"{base}.weight", f"{base}.weight_scale")
    zero_name = f"{base}.weight_zero_point"
    parts = (*names, *((zero_name,) if zero_name in stored else ()))

    def make() -> Tensor:
        weight = stored.need(names[0], tuple(FLOAT8_DTYPES), (None, None))
        if zero_name in stored and stored.need(zero_name, ("I8", *_FLOATS, *FLOAT8_DTYPES)).array.any():
            raise stored.error(zero_name, "is not zero, which FP8 weights have no use for")
        return float8_tensor(stored, names[0], weight, stored[names[1]], block)

    return QuantizedWeight(parts, make)
