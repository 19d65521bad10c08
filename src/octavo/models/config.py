"""Typed reading of a model's configuration: every error names the field, its value and what would be accepted."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.models.nodes import Activation
from octavo.models.rope import Rope, yarn_attention_factor

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
    """A configuration in Hugging Face's naming; null counts as absent, as it does there.

    `read` are the fields somebody asked for: those a family honours, or refuses itself.
    """

    def __init__(
        self, values: Mapping[str, Any], family: str, prefix: str = "", given: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self.family = family
        self.read: set[str] = set()
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
        reader = ConfigReader(values, self.family, self._prefix, given)
        reader.read = self.read
        return reader

    def _name(self, name: str) -> str:
        return self._prefix + self._given.get(name, name)

    def _value(self, name: str) -> Any:
        self.read.add(name)
        return self.values.get(name)

    def refusal(self, name: str, limit: str) -> ModelError:
        """The error for a value that cannot be honoured."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        return ModelError(f"config: {self._name(name)} = {shown} is not supported by {self.family}: it must be {limit}")

    def has(self, name: str) -> bool:
        """Whether the field is given (and not null); alone that does not count as reading it."""
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_SIZE) -> int:
        """A whole number in [least, most]; needed unless there is a default."""
        value = self._value(name)
        if value is None:
            if default is None:
                raise ModelError(f"config: {self._name(name)} is missing, {self.family} needs it")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refusal(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number; needed unless there is a default."""
        value = self._value(name)
        if value is None:
            if default is None:
                raise ModelError(f"config: {self._name(name)} is missing, {self.family} needs it")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.refusal(name, "a positive number")
        return float(value)

    def optional(self, name: str, default: float | None = None) -> float | None:
        """A positive finite number, or None: where null is a value of its own and means "not at all".

        The default is for a configuration that does not have the field.
        """
        if self._value(name) is None:
            return None if name in self.values else default
        return self.number(name)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def activation(self, name: str, default: str | None = None) -> Activation:
        """An activation function by transformers' name for it; needed unless there is a default."""
        value = self._value(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config: {self._name(name)} is missing, {self.family} needs it")
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.refusal(name, f"one of {', '.join(sorted(_ACTIVATIONS))}")
        return _ACTIVATIONS[value]

    def choices(self, name: str, count: int, allowed: Collection[str]) -> list[str] | None:
        """A list of `count` words, each one of `allowed`; None when absent."""
        value = self._value(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or not all(item in allowed for item in value):
            raise self.refusal(name, f"{count} of {' or '.join(allowed)}")
        return list(value)

    def mapping(self, name: str) -> ConfigReader:
        """A nested object, empty when absent."""
        value = self._value(name)
        if value is None:
            return ConfigReader({}, self.family, f"{self._prefix}{name}.")
        if not isinstance(value, Mapping):
            raise self.refusal(name, "an object")
        self.read.add(name)
        return ConfigReader(value, self.family, f"{self._prefix}{name}.")

    def require(self, name: str, allowed: Collection[Any]) -> None:
        """Refuse a field whose value, when given, is none of `allowed`."""
        value = self._value(name)
        # 1 == True in Python, so types are compared too (numbers among themselves apart).
        matches = (value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed)
        if value is not None and not any(matches):
            raise self.refusal(name, " or ".join(sorted(repr(item) for item in allowed)) or "absent")

    def neutral(self, fields: Mapping[str, Collection[Any]]) -> None:
        """Refuse fields that nobody read unless they have one of the values given, which change nothing."""
        for name, allowed in fields.items():
            if name not in self.read:
                self.require(name, allowed)

    def only(self, names: Collection[str]) -> None:
        """Refuse fields outside `names`: what is not understood would be silently ignored."""
        for name in self.values:
            if name not in names and self.has(name):
                raise self.refusal(name, f"absent (fields understood here: {', '.join(sorted(names))})")


_FACTORS = frozenset({"short_factor", "long_factor"})
_ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
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
    "longrope": _FACTORS | {"factor", "original_max_position_embeddings", "attention_factor"},
    "su": _FACTORS | {"factor", "original_max_position_embeddings", "attention_factor"},
    "factors": frozenset({"factors"}),
}


def read_rope(
    config: ConfigReader,
    head_dim: int,
    max_position: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    also: Collection[str] = (),
) -> Rope:
    """The rotary embedding, from `rope_parameters` or from the older `rope_scaling` beside `rope_theta`.

    `theta` and `partial` are the family's defaults; with `partial` None its heads are always rotated whole. `also` are
    fields of the object that the family reads itself.
    """
    theta = config.number("rope_theta", theta)
    scaling = config.mapping("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    return read_rope_object(config, scaling, head_dim, max_position, theta, partial, also)


def read_layer_ropes(
    config: ConfigReader, head_dim: int, max_position: int, *, theta: float, local_theta: float
) -> tuple[Rope, Rope]:
    """The ropes of full and of sliding layers, where a family has one for each (Gemma 3, OLMo 3).

    `rope_parameters` has an object for each kind; older configurations have `rope_theta` and `rope_scaling` for full
    layers, and `rope_local_base_freq` for the others.
    """
    given = config.mapping("rope_parameters")
    if given.has("full_attention") or given.has("sliding_attention"):
        given.only({"full_attention", "sliding_attention"})
        config.require("rope_scaling", ())
        full, local = given.mapping("full_attention"), given.mapping("sliding_attention")
    else:
        given.only({"full_attention", "sliding_attention"})
        full, local = config.mapping("rope_scaling"), ConfigReader({}, config.family)
    theta = config.number("rope_theta", theta)
    local_theta = config.number("rope_local_base_freq", local_theta)
    return (
        read_rope_object(config, full, head_dim, max_position, theta),
        read_rope_object(config, local, head_dim, max_position, local_theta),
    )


def read_rope_object(
    config: ConfigReader,
    scaling: ConfigReader,
    head_dim: int,
    max_position: int,
    theta: float,
    partial: float | None = None,
    also: Collection[str] = (),
) -> Rope:
    """The rotary embedding of one object with its kind and parameters."""
    theta = scaling.number("rope_theta", theta)
    dim = _rotated(config, scaling, head_dim, partial)
    kind_field = "rope_type" if scaling.has("rope_type") else "type"
    scaling.require(kind_field, _ROPE_FIELDS)
    kind: str = scaling.values.get(kind_field) or "default"
    scaling.only({"rope_type", "type", "rope_theta", "partial_rotary_factor", *also} | _ROPE_FIELDS[kind])
    return _read_kind(config, scaling, kind, theta, dim, max_position)


def _rotated(config: ConfigReader, scaling: ConfigReader, head_dim: int, partial: float | None) -> int:
    """How many elements of a head are rotated."""
    if partial is None:
        config.require("partial_rotary_factor", {1.0})
        scaling.require("partial_rotary_factor", {1.0})
        return head_dim
    fraction = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", partial))
    dim = int(head_dim * fraction)
    if dim % 2 or not 0 < dim <= head_dim:
        where = scaling if scaling.has("partial_rotary_factor") else config
        raise where.refusal("partial_rotary_factor", f"such that an even part of a head of {head_dim} is rotated")
    return dim


def _read_kind(
    config: ConfigReader, scaling: ConfigReader, kind: str, theta: float, dim: int, max_position: int
) -> Rope:
    if kind == "default":
        return Rope("default", theta, dim)
    if kind == "linear":
        return Rope("linear", theta, dim, factor=scaling.number("factor"))
    if kind == "dynamic":
        # Its frequencies change with the length of a sequence beyond max_position_embeddings, and are plain up to it.
        # What a request gives must not depend on its length, so that is the model's length and they stay plain.
        if scaling.has("alpha"):
            # HunYuan's: the base is stretched once for all lengths. Its configurations carry yarn's fields in vain.
            scaling.require("factor", {1.0})
            return Rope("default", theta * scaling.number("alpha") ** (dim / (dim - 2)), dim)
        scaling.only({"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"})
        scaling.number("factor")
        return Rope("default", theta, dim)
    if kind == "factors":
        return Rope("factors", theta, dim, factors=_read_factors(scaling, "factors", dim // 2))
    # Phi-3's place for the field, outside the object, takes precedence in transformers.
    original = config.integer(
        "original_max_position_embeddings", scaling.integer("original_max_position_embeddings", max_position)
    )
    if kind in ("longrope", "su"):
        return _read_longrope(scaling, theta, dim, original, max_position)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if not low <= high:
            raise scaling.refusal("high_freq_factor", f"no less than low_freq_factor = {low}")
        return Rope(
            "llama3",
            theta,
            dim,
            factor=scaling.number("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return _read_yarn(scaling, theta, dim, original, max_position)


def _read_factors(scaling: ConfigReader, name: str, pairs: int) -> tuple[float, ...]:
    factors = scaling.values.get(name)
    if (
        not isinstance(factors, Collection)
        or len(factors) != pairs
        or not all(isinstance(item, int | float) and 0 < item < 1e30 for item in factors)
    ):
        raise scaling.refusal(name, f"a list of {pairs} positive numbers")
    return tuple(float(item) for item in factors)


def _read_longrope(scaling: ConfigReader, theta: float, dim: int, original: int, max_position: int) -> Rope:
    """LongRoPE (arXiv 2402.13753): frequencies divided one by one, by long factors or by short ones.

    transformers takes the long ones for a sequence longer than the original context, which changes what its first
    tokens give. Here they are the model's: long when it is for more positions than it was made with at first.
    """
    short = _read_factors(scaling, "short_factor", dim // 2)
    long = _read_factors(scaling, "long_factor", dim // 2)
    factor = scaling.number("factor", max_position / original)
    if original < 2:
        raise scaling.refusal("original_max_position_embeddings", "at least 2")
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        "factors",
        theta,
        dim,
        attention_factor=scaling.number("attention_factor", attention),
        factors=long if max_position > original else short,
    )


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
