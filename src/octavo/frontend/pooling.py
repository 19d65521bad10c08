"""How the token vectors of an encoder become one vector of a text: what the model's files say, and doing it.

The files are those of sentence-transformers: `modules.json` names the modules in order, `1_Pooling/config.json` says
what is pooled, `sentence_bert_config.json` how long a text may be. Without them the first token's vector is taken, as
BERT was trained, and normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.models.registry import find_family
from octavo.weights.json_files import parse_json_object, read_json_object

__all__ = ["POOLINGS", "Pooling", "PoolingKind", "is_encoder", "read_pooling"]

PoolingKind = Literal["cls", "mean", "max", "last", "mean_sqrt_len"]
POOLINGS: tuple[str, ...] = get_args(PoolingKind)

_MODES: Mapping[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
}
_MOST_MODULES = 16


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is made of a text's token vectors. ``max_tokens``: the longest text the model was trained for, if told."""

    kind: PoolingKind = "cls"
    normalize: bool = True
    max_tokens: int | None = None

    @property
    def rows(self) -> Literal["first", "last", "all"]:
        """Which token vectors are needed."""
        return {"cls": "first", "last": "last"}.get(self.kind, "all")  # type: ignore[return-value]

    def pool(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """One vector [width] of a text's needed vectors [tokens, width], in float32, tokens added in order."""
        if self.kind == "max":
            pooled = vectors.max(axis=0)
        elif self.kind in ("mean", "mean_sqrt_len"):
            # Added one by one: numpy's own sum takes an order that depends on the number of tokens in memory at once.
            pooled = np.add.accumulate(vectors, axis=0)[-1]
            count = np.float32(vectors.shape[0])
            pooled = pooled / (count if self.kind == "mean" else np.sqrt(count))
        else:
            pooled = vectors[0]
        if self.normalize:
            length = np.float32(np.sqrt(np.dot(pooled.astype(np.float64), pooled.astype(np.float64))))
            pooled = pooled / np.maximum(length, np.float32(1e-12))
        result: NDArray[np.float32] = pooled.astype(np.float32)
        return result

    def __str__(self) -> str:
        return f"{self.kind} of the tokens" + (", normalised" if self.normalize else "")


def is_encoder(path: Path) -> bool:
    """Whether the model in a folder makes vectors instead of text; found from its configuration alone."""
    file = path / "config.json"
    if not file.is_file():
        return False
    try:
        return find_family(read_json_object(file)).encoder
    except ModelError:  # whoever loads it says what is wrong with it
        return False


def read_pooling(folder: Path) -> Pooling:
    """What the files in a model's folder say; a ModelError names what cannot be honoured."""
    listed = folder / "modules.json"
    if not listed.is_file():
        return Pooling()
    text = listed.read_bytes()[: 1 << 20]
    modules = parse_json_object(b'{"modules":' + text + b"}", str(listed))["modules"]
    if not isinstance(modules, list) or not 1 <= len(modules) <= _MOST_MODULES:
        raise ModelError(f"{listed}: must be a list of 1 to {_MOST_MODULES} modules")
    kind: PoolingKind | None = None
    normalize = False
    for module in modules:
        name, path = _module(module, listed)
        if name == "Transformer":
            continue
        if name == "Pooling":
            kind = _pooling_kind(folder / path / "config.json")
        elif name == "Normalize":
            normalize = True
        else:
            raise ModelError(f"{listed}: module {name!r} is not supported; Transformer, Pooling and Normalize are")
    if kind is None:
        raise ModelError(f"{listed}: has no Pooling module, so that there is no one vector of a text")
    return Pooling(kind, normalize, _max_tokens(folder / "sentence_bert_config.json"))


def _module(module: Any, listed: Path) -> tuple[str, str]:
    name = module.get("type") if isinstance(module, dict) else None
    path = module.get("path") if isinstance(module, dict) else None
    if not isinstance(name, str) or not isinstance(path, str):
        raise ModelError(f"{listed}: every module must have a type and a path")
    if path and (Path(path).is_absolute() or ".." in Path(path).parts):
        raise ModelError(f"{listed}: the path {path[:120]!r} leaves the folder of the model")
    return name.rsplit(".", 1)[-1], path


def _pooling_kind(file: Path) -> PoolingKind:
    config = read_json_object(file)
    modes = [kind for field, kind in _MODES.items() if config.get(field) is True]
    other = [field for field in config if field.startswith("pooling_mode_") and field not in _MODES and config[field]]
    if other or len(modes) != 1:
        named = ", ".join([*modes, *other]) or "none"
        raise ModelError(f"{file}: pools {named}; exactly one of {', '.join(_MODES.values())} is supported")
    return modes[0]


def _max_tokens(file: Path) -> int | None:
    if not file.is_file():
        return None
    value = read_json_object(file).get("max_seq_length")
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise ModelError(f"{file}: max_seq_length = {value!r:.60} must be a whole number from 1 to {1 << 20}")
    return value
