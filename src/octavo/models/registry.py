"""From a configuration to its graph, and from a graph to the assurance that a checkpoint holds exactly its weights."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.models import families
from octavo.models.config import ConfigReader
from octavo.models.derived import Derived
from octavo.models.graph import Graph, Shape
from octavo.weights.kv_scales import is_kv_scale
from octavo.weights.quantized import find_method

# Derived from the configuration, stored by old checkpoints all the same.
_IGNORABLE = re.compile(r"\.(rotary_emb|self_attn\.rotary_emb)\.(inv_freq|original_inv_freq)$")
_NAMES_SHOWN = 4


class TensorLike(Protocol):
    """What checking needs of a tensor."""

    @property
    def shape(self) -> Shape: ...

    def read_f32(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]: ...


class CheckpointLike(Protocol):
    """What checking needs of a checkpoint."""

    def names(self) -> Iterable[str]: ...

    def tensor(self, name: str) -> TensorLike: ...


@dataclass(frozen=True)
class Family:
    """A module of `octavo.models.families`; its name is the `model_type`, `summary` its docstring's first line."""

    model_type: str
    architectures: tuple[str, ...]
    build: Callable[[ConfigReader], Graph]
    summary: str
    encoder: bool = False


@cache
def supported_families() -> tuple[Family, ...]:
    """Every family there is a module for."""
    found = []
    for item in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{item.name}")
        summary = (module.__doc__ or item.name).strip().splitlines()[0].removesuffix(".")
        model_type = getattr(module, "MODEL_TYPE", item.name)  # one with a hyphen is no module's name
        found.append(Family(model_type, tuple(module.ARCHITECTURES), module.build, summary, _is_encoder(module)))
    return tuple(found)


def _is_encoder(module: ModuleType) -> bool:
    """Whether a family's models make vectors instead of text: its module says ENCODER = True."""
    return getattr(module, "ENCODER", False) is True


def find_family(config: Mapping[str, Any]) -> Family:
    """The family by `architectures`, or by `model_type` where no architecture is given."""
    model_type, names = config.get("model_type"), config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    for family in supported_families():
        if name in family.architectures:
            if model_type not in (None, family.model_type):
                raise ModelError(f"config: model_type = {model_type!r} does not go with architecture {name}")
            return family
        if name is None and model_type == family.model_type:
            return family
    given = f"architecture {name!r}" if name is not None else f"model_type {model_type!r}"
    known = ", ".join(sorted(name for family in supported_families() for name in family.architectures))
    raise ModelError(f"config: {given} is not supported; supported architectures: {known}")


def build_graph(config: Mapping[str, Any]) -> Graph:
    """The checked graph of the model a configuration (Hugging Face naming) describes."""
    if config.get("quantization_config") is not None:
        find_method(config["quantization_config"])
    family = find_family(config)
    return family.build(ConfigReader(config, family.model_type))


def fit_names(graph: Graph, names: Collection[str]) -> Graph:
    """The graph reading the tensors of a checkpoint by the names it has for them, of those `graph.renames` allows.

    A checkpoint may also hold what is a view elsewhere as a tensor of its own, under the name of the view.
    """
    present = set(names)
    derived = {name: view for name, view in graph.derived.items() if name not in present}
    duplicates = dict(graph.duplicates)
    for name, shape in graph.weights().items():
        view = derived.get(name, Derived(name, shape))
        stored = _stored_name(view.source, graph.renames, present)
        if stored != view.source:
            derived[name] = replace(view, source=stored)
    for name, original in graph.duplicates.items():
        del duplicates[name]
        found = _stored_name(original, graph.renames, present)
        duplicates[_stored_name(name, graph.renames, present)] = found
    return replace(graph, derived=derived, duplicates=duplicates)


def _stored_name(name: str, renames: Iterable[tuple[str, str]], present: Collection[str]) -> str:
    if name in present:
        return name
    stored = (other + name.removeprefix(begin) for begin, other in renames if name.startswith(begin))
    return next((found for found in stored if found in present), name)


def check_weights(graph: Graph, checkpoint: CheckpointLike) -> None:
    """Refuse a checkpoint that lacks a weight, holds one nothing reads, or gives one another shape; all by name."""
    needed = graph.sources()
    present = list(checkpoint.names())
    problems: list[str] = []
    missing = sorted(set(needed) - set(present))
    if missing:
        problems.append(f"missing {_listed(missing)}")
    unknown = [name for name in present if name not in needed and name not in graph.duplicates]
    buffers = [_IGNORABLE] + ([] if graph.buffers is None else [re.compile(graph.buffers)])
    unknown = [name for name in unknown if not any(pattern.search(name) for pattern in buffers)]
    unknown = [name for name in unknown if not name.startswith(graph.unused)]
    unknown = [name for name in unknown if not _adds_nothing(checkpoint, name) and not is_kv_scale(name)]
    if unknown:
        problems.append(f"unknown {_listed(unknown)}")
    wrong = [
        f"{name} ({tuple(checkpoint.tensor(name).shape)}, must be {needed[name]})"
        for name in present
        if name in needed and not _fits(tuple(checkpoint.tensor(name).shape), needed[name])
    ]
    if wrong:
        problems.append(f"wrong shape {_listed(wrong)}")
    if problems:
        raise ModelError(f"weights do not fit architecture {graph.architecture}: " + "; ".join(problems))
    for name in present:
        if name in graph.duplicates and name not in needed:
            _check_duplicate(checkpoint, name, graph.duplicates[name])


def _fits(shape: Shape, needed: Shape) -> bool:
    """Whether a tensor has the shape needed; a stack of matrices may be one of all their rows, as quantised are."""
    return shape == needed or (len(shape) == 2 < len(needed) and shape == (math.prod(needed[:-1]), needed[-1]))


def _adds_nothing(checkpoint: CheckpointLike, name: str) -> bool:
    """Whether it is a bias of zeros, as AutoGPTQ stores one beside every weight."""
    tensor = checkpoint.tensor(name) if name.endswith(".bias") else None
    return tensor is not None and len(tensor.shape) == 1 and not tensor.read_f32().any()


def _check_duplicate(checkpoint: CheckpointLike, name: str, original: str) -> None:
    """A second copy of a tied weight must hold the same numbers, else one of the two would be ignored."""
    copy, kept = checkpoint.tensor(name), checkpoint.tensor(original)
    same = tuple(copy.shape) == tuple(kept.shape)
    step = 4096
    for start in range(0, kept.shape[0] if same else 0, step):
        stop = min(start + step, kept.shape[0])
        same = same and np.array_equal(copy.read_f32(start, stop), kept.read_f32(start, stop))
    if not same:
        raise ModelError(
            f"weights: {name} differs from {original}, though the configuration ties them (tie_word_embeddings)"
        )


def _listed(names: list[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return f"{len(names)}: " + ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
