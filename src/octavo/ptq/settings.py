"""What a checkpoint is quantised with: checked when made, and the same for every layer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from octavo.errors import ConfigError

__all__ = ["BITS", "DEFAULT_FORMATS", "FORMATS", "METHODS", "QuantizeSettings"]

Method = Literal["rtn", "awq", "gptq", "smoothquant"]
Format = Literal["awq", "gptq", "compressed-tensors"]
StaticScales = Literal["max", "percentile", "mse"]
METHODS: tuple[str, ...] = get_args(Method)
FORMATS: tuple[str, ...] = get_args(Format)
STATIC_SCALES: tuple[str, ...] = get_args(StaticScales)

DEFAULT_FORMATS: dict[str, Format] = {
    "rtn": "gptq",
    "awq": "awq",
    "gptq": "gptq",
    "smoothquant": "compressed-tensors",
}
# What each layout can hold.
BITS: dict[str, tuple[int, ...]] = {"awq": (4,), "gptq": (2, 3, 4, 8), "compressed-tensors": (4, 8)}


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """Method, grid, layout and calibration.

    ``group_size`` is the weights along k with one scale, -1 for whole rows. ``static_scales`` None keeps activations
    dynamic; it and ``smoothing`` are smoothquant's. ``clip`` searches the range of every group.
    """

    method: Method
    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    format: Format = "gptq"
    clip: bool = True
    act_order: bool = True
    damping: float = 0.01
    samples: int = 64
    seq_len: int = 512
    smoothing: float = 0.5
    static_scales: StaticScales | None = None
    percentile: float = 99.99

    def __post_init__(self) -> None:
        _one_of("--method", self.method, METHODS)
        _one_of("--format", self.format, FORMATS)
        if self.static_scales is not None:
            _one_of("--static-scales", self.static_scales, STATIC_SCALES)
        smooth = self.method == "smoothquant"
        bits = (8,) if smooth else BITS[self.format]
        if self.bits not in bits:
            what = "smoothquant" if smooth else f"the {self.format} layout"
            raise ConfigError(f"--bits must be {' or '.join(map(str, bits))} for {what}, got {self.bits}")
        if smooth and self.format != "compressed-tensors":
            raise ConfigError("--method smoothquant writes the compressed-tensors layout only: leave --format out")
        if smooth and self.group_size != -1:
            raise ConfigError("--method smoothquant has one scale a row of weights: leave --group-size out, or give -1")
        if self.static_scales is not None and not smooth:
            raise ConfigError("--static-scales is of --method smoothquant: the others do not round activations")
        if self.format == "awq" and self.symmetric:
            raise ConfigError("--symmetric: the awq layout always has zero points")
        if self.group_size != -1 and (self.group_size < 16 or self.group_size % 8):
            raise ConfigError(
                f"--group-size must be -1 (a whole row) or a multiple of 8 from 16, got {self.group_size}"
            )
        _within("--damping", self.damping, 0, 1)
        _within("--smoothing", self.smoothing, 0, 1)
        _within("--percentile", self.percentile, 50, 100)
        if self.samples < 1 or self.seq_len < 2:
            raise ConfigError("--samples must be at least 1 and --seq-len at least 2")

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at activations."""
        return self.method != "rtn"

    @property
    def least_zero(self) -> int:
        """The lowest zero point: the gptq layout stores it less one, in as many bits as a weight."""
        return 1 if self.format == "gptq" else 0

    def fingerprint(self, *parts: str) -> str:
        """A hash of all settings and of ``parts``: what must be the same for work to be taken up again."""
        text = json.dumps([asdict(self), *parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be from {low} to {high}, got {value}")
