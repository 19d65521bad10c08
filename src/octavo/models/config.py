"""Typed reading of a model's configuration: every error names the field, its value and what would be accepted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.models.nodes import Activation
from octavo.models.rope import ROPE_KINDS, Rope, RopeKind, yarn_attention_factor

# Far above any model, low enough that a hostile file cannot ask for a graph that exhausts memory.
LARGEST_SIZE = 1 << 24
MOST_LAYERS = 4096
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}


class ConfigReader:
    """A configuration in Hugging Face's naming; null counts as absent, as it does there."""

    def __init__(
        self, values: Mapping[str, Any], family: str, prefix: str = "", given: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self.family = family
        self._prefix = prefix
        self._given = given or {}  # the names of the file for what is known by another here

    def aliased(self, **names: str | tuple[str, ...]) -> ConfigReader:
        """The same configuration, a field also by the name(s) its family gives it; two values for one are refused."""
        values, given = dict(self.values), dict(self._given)
        for name, others in names.items():
            for other in (others,) if isinstance(others, str) else others:
                value = self.values.get(other)
                if value is None:
                    continue
                if values.get(name) not in (None, value):
                    raise self.refusal(other, f"equal to {given.get(name, name)} = {values[name]!r}")
                if values.get(name) is None:
                    values[name], given[name] = value, other
        return ConfigReader(values, self.family, self._prefix, given)

    def _name(self, name: str) -> str:
        return self._prefix + self._given.get(name, name)

    def refusal(self, name: str, limit: str) -> ModelError:
        """The error for a value that cannot be honoured."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        return ModelError(f"config: {self._name(name)} = {shown} is not supported by {self.family}: it must be {limit}")

    def has(self, name: str) -> bool:
        """Whether the field is given (and not null)."""
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_SIZE) -> int:
        """A whole number in [least, most]; needed unless there is a default."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise ModelError(f"config: {self._name(name)} is missing, {self.family} needs it")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refusal(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number; needed unless there is a default."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise ModelError(f"config: {self._name(name)} is missing, {self.family} needs it")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.refusal(name, "a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def activation(self, name: str, default: str | None = None) -> Activation:
        """An activation function by transformers' name for it; needed unless there is a default."""
        value = self.values.get(name, default)
        if value is None:
            raise ModelError(f"config: {self._name(name)} is missing, {self.family} needs it")
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.refusal(name, f"one of {', '.join(sorted(_ACTIVATIONS))}")
        return _ACTIVATIONS[value]

    def mapping(self, name: str) -> ConfigReader:
        """A nested object, empty when absent."""
        value = self.values.get(name)
        if value is None:
            return ConfigReader({}, self.family, f"{self._prefix}{name}.")
        if not isinstance(value, Mapping):
            raise self.refusal(name, "an object")
        return ConfigReader(value, self.family, f"{self._prefix}{name}.")

    def require(self, name: str, allowed: Collection[Any]) -> None:
        """Refuse a field whose value, when given, is none of `allowed`."""
        value = self.values.get(name)
        # 1 == True in Python, so types are compared too (numbers among themselves apart).
        matches = (value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed)
        if value is not None and not any(matches):
            raise self.refusal(name, " or ".join(sorted(repr(item) for item in allowed)) or "absent")

    def only(self, names: Collection[str]) -> None:
        """Refuse fields outside `names`: what is not understood would be silently ignored."""
        for name in self.values:
            if name not in names and self.has(name):
                raise self.refusal(name, f"absent (fields understood here: {', '.join(sorted(names))})")


_ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "factors": frozenset({"factors"}),
}


def read_rope(config: ConfigReader, head_dim: int, max_position: int, *, partial: float | None = None) -> Rope:
    """The rotary embedding, from `rope_parameters` or from the older `rope_scaling` beside `rope_theta`.

    `partial` is the default of partial_rotary_factor, the part of a head that is rotated, in families that have it;
    others refuse any but 1.
    """
    scaling = config.mapping("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    kind_field = "rope_type" if scaling.has("rope_type") else "type"
    scaling.require(kind_field, ROPE_KINDS)
    kind: RopeKind = scaling.values.get(kind_field) or "default"
    scaling.only({"rope_type", "type", "rope_theta", "partial_rotary_factor"} | _ROPE_FIELDS[kind])
    dim = head_dim
    if partial is None:
        config.require("partial_rotary_factor", {1.0})
        scaling.require("partial_rotary_factor", {1.0})
    else:
        place = scaling if scaling.has("partial_rotary_factor") else config
        dim = int(head_dim * place.number("partial_rotary_factor", partial))
        if not 0 < dim <= head_dim or dim % 2:
            raise place.refusal("partial_rotary_factor", f"such that an even part of a head of {head_dim} is rotated")
    if kind == "default":
        return Rope(kind, theta, dim)
    if kind == "linear":
        return Rope(kind, theta, dim, factor=scaling.number("factor"))
    if kind == "factors":
        return Rope(kind, theta, dim, factors=_read_factors(scaling, dim // 2))
    # Phi-3's place for the field, outside the object, takes precedence in transformers.
    original = config.integer(
        "original_max_position_embeddings", scaling.integer("original_max_position_embeddings", max_position)
    )
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if not low < high:
            raise scaling.refusal("high_freq_factor", f"above low_freq_factor = {low}")
        return Rope(
            kind,
            theta,
            dim,
            factor=scaling.number("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return _read_yarn(scaling, theta, dim, original, max_position)


def _read_factors(scaling: ConfigReader, pairs: int) -> tuple[float, ...]:
    factors = scaling.values.get("factors")
    if (
        not isinstance(factors, Collection)
        or len(factors) != pairs
        or not all(isinstance(item, int | float) and 0 < item < 1e30 for item in factors)
    ):
        raise scaling.refusal("factors", f"a list of {pairs} positive numbers")
    return tuple(float(item) for item in factors)


def _read_yarn(scaling: ConfigReader, theta: float, dim: int, original: int, max_position: int) -> Rope:
    if theta <= 1:
        raise scaling.refusal("rope_theta", "above 1")
    factor = scaling.number("factor", max_position / original)
    mscale = scaling.number("mscale") if scaling.values.get("mscale") else None
    mscale_all_dim = scaling.number("mscale_all_dim") if scaling.values.get("mscale_all_dim") else None
    return Rope(
        "yarn",
        theta,
        dim,
        factor=factor,
        original_max_position=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.boolean("truncate", True),
        attention_factor=scaling.number("attention_factor", yarn_attention_factor(factor, mscale, mscale_all_dim)),
    )
