"""Writes small GGUF files for the tests, well-formed or not: every count, type and offset can be set by hand."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TYPE_NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "Q8_K": 15, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20,
    "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "F64": 28, "IQ1_M": 29, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39,
    "NVFP4": 40,
}  # fmt: skip
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "F64": (1, 8),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "Q8_K": (256, 292), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17), "NVFP4": (64, 36),
    "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110),
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "TQ1_0": (256, 54), "TQ2_0": (256, 66),
}  # fmt: skip
# The byte of each block (counted from its end where negative) and the bit in it that, when clear, keep its f16 factors
# finite: the top bit of their exponents.
FACTORS = {
    "Q4_0": (1,), "Q4_1": (1, 3), "Q5_0": (1,), "Q5_1": (1, 3), "Q8_0": (1,), "Q2_K": (-3, -1), "Q3_K": (-1,),
    "Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (-1,), "IQ4_NL": (1,), "IQ4_XS": (1,), "MXFP4": (), "NVFP4": (),
    "IQ2_XXS": (1,), "IQ2_XS": (1,), "IQ2_S": (1,), "IQ3_XXS": (1,), "IQ3_S": (1,), "IQ1_S": (1,), "IQ1_M": (-1,),
    "TQ1_0": (-1,), "TQ2_0": (-1,),
}  # fmt: skip
SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Typed:
    """A metadata value with its GGUF value type; for arrays (type 9) the item type too."""

    kind: int
    value: Any
    item_kind: int = 0


def typed(value: Any) -> Typed:
    """The value type a converter would give this value."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool):
        return Typed(7, value)
    if isinstance(value, int):
        return Typed(4, value)
    if isinstance(value, float):
        return Typed(6, value)
    if isinstance(value, str):
        return Typed(8, value)
    return Typed(9, value, typed(value[0]).kind if value else 4)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def encode(kind: int, value: Any, item_kind: int = 0) -> bytes:
    if kind == 8:
        return string(value)
    if kind == 9:
        items = b"".join(
            encode(item_kind, item.value, item.item_kind) if isinstance(item, Typed) else encode(item_kind, item)
            for item in value
        )
        return struct.pack("<IQ", item_kind, len(value)) + items
    return struct.pack("<" + SCALAR_CODES[kind], value)


@dataclass
class TensorSpec:
    """A tensor to write; ``shape`` has the fastest dimension last. What is None is worked out."""

    name: str
    shape: Sequence[int]
    kind: str
    data: bytes
    offset: int | None = None
    kind_number: int | None = None
    dimensions: int | None = None


@dataclass
class GgufFileSpec:
    """A whole file to write."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[TensorSpec] = ()
    version: int = 3
    magic: bytes = b"GGUF"
    tensor_count: int | None = None
    key_count: int | None = None
    alignment: int = 32

    def to_bytes(self) -> bytes:
        tensor_count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        key_count = len(self.metadata) if self.key_count is None else self.key_count
        head = self.magic + struct.pack("<IQQ", self.version, tensor_count, key_count)
        for key, value in self.metadata.items():
            item = typed(value)
            head += string(key) + struct.pack("<I", item.kind) + encode(item.kind, item.value, item.item_kind)
        body = b""
        for tensor in self.tensors:
            body += bytes(-len(body) % self.alignment)
            offset = len(body) if tensor.offset is None else tensor.offset
            number = TYPE_NUMBERS[tensor.kind] if tensor.kind_number is None else tensor.kind_number
            count = len(tensor.shape) if tensor.dimensions is None else tensor.dimensions
            head += string(tensor.name) + struct.pack("<I", count)
            head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
            head += struct.pack("<IQ", number, offset)
            body += tensor.data
        return head + bytes(-len(head) % self.alignment) + body

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def random_blocks(rng: np.random.Generator, kind: str, shape: Sequence[int], *, finite: bool = False) -> bytes:
    """Random contents for a tensor: finite numbers for the dense types, any bytes for the quantised ones.

    With ``finite`` no block of theirs has an infinite factor either.
    """
    count = int(np.prod(shape))
    if kind in ("F32", "F16", "F64"):
        return rng.standard_normal(count).astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[kind]).tobytes()
    if kind == "BF16":
        return (rng.standard_normal(count).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    values, size = BLOCKS[kind]
    blocks = rng.integers(0, 256, (count // values, size), dtype=np.uint8)
    for place in FACTORS[kind] if finite else ():
        blocks[:, place] &= 0xBF
    return blocks.tobytes()


def tiny_model(
    architecture: str = "llama",
    kind: str = "Q8_0",
    *,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 64,
    intermediate: int = 96,
    vocab: int = 48,
    layers: int = 1,
    tied: bool = False,
    biases: bool = False,
    metadata: Mapping[str, Any] | None = None,
    seed: int = 0,
    finite: bool = False,
) -> GgufFileSpec:
    """A whole model of the architecture, its matrices in ``kind``, everything random."""
    rng = np.random.default_rng(seed)
    head_dim = hidden // heads
    prefix = architecture + "."
    keys: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": "tiny",
        prefix + "block_count": layers,
        prefix + "context_length": 256,
        prefix + "embedding_length": hidden,
        prefix + "feed_forward_length": intermediate,
        prefix + "attention.head_count": heads,
        prefix + "attention.head_count_kv": kv_heads,
        prefix + "attention.layer_norm_rms_epsilon": 1e-5,
        prefix + "rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(vocab)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    for key, value in (metadata or {}).items():
        if value is None:
            keys.pop(key, None)
        else:
            keys[key] = value
    tensors: list[TensorSpec] = []

    def add(name: str, *shape: int, dense: bool = False) -> None:
        stored = "F32" if dense else kind
        tensors.append(TensorSpec(name, shape, stored, random_blocks(rng, stored, shape, finite=finite)))

    add("token_embd.weight", vocab, hidden)
    for layer in range(layers):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", hidden, dense=True)
        for part, rows, k in (
            ("attn_q", hidden, hidden),
            ("attn_k", kv_heads * head_dim, hidden),
            ("attn_v", kv_heads * head_dim, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", intermediate, hidden),
            ("ffn_up", intermediate, hidden),
            ("ffn_down", hidden, intermediate),
        ):
            add(f"{block}{part}.weight", rows, k)
            if biases and part in ("attn_q", "attn_k", "attn_v"):
                add(f"{block}{part}.bias", rows, dense=True)
        add(block + "ffn_norm.weight", hidden, dense=True)
    add("output_norm.weight", hidden, dense=True)
    if not tied:
        add("output.weight", vocab, hidden)
    return GgufFileSpec(keys, tensors)
