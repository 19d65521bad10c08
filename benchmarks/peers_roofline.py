"""What the machine allows at most: the figures of work if nothing but its operations or its bytes took time.

The operations are multiplications and additions of the linear layers, at the peak of int8 (4 and 8 bit forms) or bf16,
and of attention, at the peak of bf16. The bytes are the weights once a step and the keys and values in use, those of a
shared prefix once for all. The longer of the two is the least time; peaks and bandwidth are those octavo's own kernels
reached on the same machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine", "Shape", "limit"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Peaks in operations and bytes a second."""

    bytes_s: float
    int8_s: float
    bf16_s: float

    @classmethod
    def from_records(cls, *records: Mapping[str, float]) -> Machine:
        """The best that each of several measurements found."""
        return cls(
            bytes_s=max(record["dram_GBps"] for record in records) * 1e9,
            int8_s=max(record["int8_GOPS"] for record in records) * 1e9,
            bf16_s=max(max(record["bf16_GFLOPS"], record["fp32_GFLOPS"]) for record in records) * 1e9,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama shape: parameters a token goes through, and those of attention."""

    linear: int
    head: int
    attention: int  # operations of one query with one key, over all layers

    @classmethod
    def read(cls, directory: Path) -> Shape:
        """From config.json."""
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
        width = config.get("head_dim") or hidden // heads
        queries, keys = heads * width, config["num_key_value_heads"] * width
        layer = hidden * (2 * queries + 2 * keys + 3 * config["intermediate_size"])
        return cls(layers * layer, hidden * config["vocab_size"], layers * 4 * queries)


@dataclass(slots=True)
class _Work:
    """Counts operations and bytes."""

    shape: Shape
    weights_bytes: float
    kv_token_bytes: float
    linear: float = 0.0
    attention: float = 0.0
    bytes: float = 0.0

    def prompts(self, count: int, length: int, shared: int = 0) -> _Work:
        """``count`` prompts of ``length`` tokens after ``shared`` that are in the cache; logits of the last token."""
        self.linear += 2 * count * (length * self.shape.linear + self.shape.head)
        self.attention += count * self.shape.attention * (length * shared + length * (length + 1) / 2)
        self.bytes += self.weights_bytes + (shared + count * length) * self.kv_token_bytes
        return self

    def tokens(self, count: int, steps: int, context: int, shared: int = 0) -> _Work:
        """``steps`` steps of ``count`` sequences, after ``shared`` common tokens and ``context`` of their own each."""
        own = sum(context + step for step in range(1, steps + 1))
        self.linear += 2 * count * steps * (self.shape.linear + self.shape.head)
        self.attention += count * self.shape.attention * (own + steps * shared)
        self.bytes += steps * self.weights_bytes + (steps * shared + count * own) * self.kv_token_bytes
        return self

    def seconds(self, machine: Machine, bits: int) -> float:
        rate = machine.bf16_s if bits == 16 else max(machine.int8_s, machine.bf16_s)
        return max(self.linear / rate + self.attention / machine.bf16_s, self.bytes / machine.bytes_s)


def limit(
    row: str, shape: Shape, machine: Machine, *, bits: int, weights_bytes: float, kv_token_bytes: float, requests: int
) -> float | None:
    """The best figure of ``row`` that the machine allows; None where this says nothing (start)."""

    def work() -> _Work:
        return _Work(shape, weights_bytes, kv_token_bytes)

    def seconds(*parts: _Work) -> float:
        return sum(part.seconds(machine, bits) for part in parts)

    kind = row.rpartition(" ")[2]
    if kind == "decode":
        return 128 / seconds(work().tokens(1, 128, 128))
    if kind == "prefill":
        return 1024 / seconds(work().prompts(1, 1024))
    if kind == "batch":
        return requests * 320 / seconds(work().prompts(requests, 256), work().tokens(requests, 63, 256))
    if kind in ("cold", "primed"):
        parts = [work().prompts(requests, 32, 512), work().tokens(requests, 63, 32, 512)]
        if kind == "cold":
            parts.append(work().prompts(1, 512))
        return requests * 64 / seconds(*parts)
    if kind == "memory":
        return (weights_bytes + requests * 320 * kv_token_bytes) / 2**20
    return None
