"""What positions do to queries and keys: rotary embeddings as cosine and sine tables, and factors of queries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]

Float32Array = NDArray[np.float32]


@dataclass(frozen=True)
class Rope:
    """A rotary embedding of the first `dim` elements of a head, pairing element i with element i + dim/2.

    `original_max_position` and the fields after it only matter to the kinds that scale by wavelength (llama3, yarn).
    `factors` divides each frequency by a number of its own (the form GGUF files store llama3 scaling in).
    """

    kind: RopeKind
    theta: float
    dim: int
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()

    def inverse_frequencies(self) -> Float32Array:
        """Radians per position of each pair, float32 [dim/2]; in float32 throughout, as the models were trained."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        wavelengths: Float32Array = np.power(np.float32(self.theta), exponents)
        plain: Float32Array = np.asarray(np.reciprocal(wavelengths), dtype=np.float32)
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return plain / np.float32(self.factor)
        if self.kind == "factors":
            divisors: Float32Array = np.asarray(self.factors, dtype=np.float32)
            return np.divide(plain, divisors, dtype=np.float32)
        if self.kind == "llama3":
            return self._llama3(plain)
        return self._yarn(plain, np.float32(1.0) / (np.float32(self.factor) * wavelengths))

    def _llama3(self, plain: Float32Array) -> Float32Array:
        """Long wavelengths divided by the factor, short ones kept, those between interpolated."""
        wavelengths = np.float32(2 * math.pi) / plain
        longest = np.float32(self.original_max_position / self.low_freq_factor)
        shortest = np.float32(self.original_max_position / self.high_freq_factor)
        scaled = plain / np.float32(self.factor)
        if self.high_freq_factor == self.low_freq_factor:  # Llama 4: nothing lies between
            return np.where(wavelengths > longest, scaled, plain).astype(np.float32)
        smooth = (np.float32(self.original_max_position) / wavelengths - np.float32(self.low_freq_factor)) / np.float32(
            self.high_freq_factor - self.low_freq_factor
        )
        between = (np.float32(1.0) - smooth) * scaled + smooth * plain
        result = np.where(wavelengths > longest, scaled, np.where(wavelengths < shortest, plain, between))
        return result.astype(np.float32)

    def _yarn(self, extrapolated: Float32Array, interpolated: Float32Array) -> Float32Array:
        """A ramp over the pairs from unscaled (many rotations in the original context) to fully scaled (few)."""

        def pair_with(rotations: float) -> float:
            ratio = self.original_max_position / (rotations * 2 * math.pi)
            return self.dim * math.log(ratio) / (2 * math.log(self.theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001  # the ramp would divide by zero
        pairs = np.arange(self.dim // 2, dtype=np.float32)
        ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
        blended: Float32Array = interpolated * ramp + extrapolated * (np.float32(1.0) - ramp)
        return blended

    def tables(self, max_position: int) -> tuple[Float32Array, Float32Array]:
        """Cosines and sines, float32 [max_position, dim/2], with the attention factor folded in."""
        positions = np.arange(max_position, dtype=np.float32)
        angles = positions[:, None] * self.inverse_frequencies()[None, :]
        scale = np.float32(self.attention_factor)
        return np.cos(angles) * scale, np.sin(angles) * scale

    def __str__(self) -> str:
        text = f"{self.kind} theta {self.theta:g}"
        if self.dim and self.kind in ("linear", "llama3", "yarn"):
            text += f" factor {self.factor:g}"
        if self.attention_factor != 1.0:
            text += f" attention factor {self.attention_factor:.6g}"
        return text


@dataclass(frozen=True)
class QueryScaling:
    """Queries at position p times 1 + weight · ln(1 + floor((p + offset) / length)): attention stays as sharp over long
    contexts without a position of its own (Llama 4, whose layers without rope have it; Ministral 3).
    """

    weight: float
    length: int
    offset: int = 0

    def factors(self, max_position: int) -> Float32Array:
        """The factor of every position, float32 [max_position]."""
        steps = np.floor(
            (np.arange(max_position, dtype=np.float32) + np.float32(self.offset)) / np.float32(self.length)
        )
        factors: Float32Array = np.float32(1) + np.float32(self.weight) * np.log1p(steps)
        return factors


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The attention temperature YaRN prescribes when the configuration does not give one."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)
