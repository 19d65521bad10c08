"""Typed reading of the metadata keys of one GGUF architecture: every error names the key, its value and the limit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import WeightsError
from octavo.weights.gguf_file import GgufFile

__all__ = ["ArchitectureKeys"]

# Keys of an architecture that describe the file and change nothing in the arithmetic.
DESCRIPTIVE_KEYS = frozenset(
    {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.orig_ctx_len"}
)
# Keys that change nothing when they have this value; with any other they are refused, unless the family reads them.
NEUTRAL_VALUES: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "pooling_type": 0,
    "residual_scale": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}


class ArchitectureKeys:
    """The metadata keys of one architecture, each read with its type and range checked, the unread ones known."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.path: Path = file.path
        self.prefix = architecture + "."
        self.values = {
            key.removeprefix(self.prefix): v for key, v in file.metadata.items() if key.startswith(self.prefix)
        }
        self.read: set[str] = set()

    def refuse(self, key: str, why: str) -> WeightsError:
        """The error for a value that cannot be honoured."""
        return WeightsError(f"{self.path}: metadata key {self.prefix}{key} {why}")

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return key in self.values

    def integer(self, key: str, default: int | None = None, limit: int = 1 << 31, least: int = 1) -> int:
        """An integer from ``least`` to ``limit``; of an array (one item per layer) all items must be equal."""
        self.read.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise self.refuse(key, "is missing")
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or not least <= value <= limit:
            raise self.refuse(key, f"is {value!r:.80}, a single integer from {least} to {limit} is supported")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A positive finite number, rounded to the shortest decimal that is the same float32 (1e-05, not 9.99e-06)."""
        self.read.add(key)
        value = self.values.get(key, default)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value < 3e38:
            raise self.refuse(key, f"is {value!r:.80}, a positive finite number is expected")
        return float(str(np.float32(value)))

    def optional(self, key: str) -> float | None:
        """A number of which 0 stands for none."""
        self.read.add(key)
        return None if self.values.get(key) in (None, 0, 0.0) else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        self.read.add(key)
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.refuse(key, f"is {value!r:.80}, true or false is expected")
        return value

    def pattern(self, key: str, layers: int, period: int | None = None) -> list[bool] | None:
        """Which layers something is true of: an array of them, or of every period all but the last.

        ``period`` is the family's when the file has no such key; None: nothing is known.
        """
        self.read.add(key)
        value = self.values.get(key, period)
        if value is None:
            return None
        if type(value) is int and 1 <= value <= 1 << 16:
            return [(layer + 1) % value != 0 for layer in range(layers)]
        if not isinstance(value, list) or len(value) != layers or not all(item in (True, False) for item in value):
            raise self.refuse(key, f"is {value!r:.80}, a period or {layers} of true and false are expected")
        return [bool(item) for item in value]

    def check_rest(self) -> None:
        """Refuse every key that was neither read nor is known to change nothing."""
        for key in sorted(self.values.keys() - self.read - DESCRIPTIVE_KEYS):
            value = self.values[key]
            if key not in NEUTRAL_VALUES:
                raise self.refuse(key, f"(value {value!r:.80}) is not supported")
            if value != NEUTRAL_VALUES[key]:
                raise self.refuse(key, f"is {value!r:.80}, only {NEUTRAL_VALUES[key]!r} is supported")
