"""What there is to say of an architecture of GGUF files: which weights its tensors hold, and where their rows are.

The entries themselves are in `gguf_families`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.weights.gguf_keys import ArchitectureKeys

__all__ = [
    "Architecture",
    "Config",
    "Heads",
    "Part",
    "Piece",
    "PlacedPiece",
    "RowOrder",
    "grouped_heads",
    "key_pairs",
    "key_rows",
    "pieces_of",
    "query_pairs",
    "query_rows",
    "value_rows",
]

Config = dict[str, Any]
RowOrder = npt.NDArray[np.int64]


class Heads(NamedTuple):
    """The heads of queries and of keys and values, and the size of each."""

    queries: int
    keys: int
    size: int


# Of so many heads and stored rows, the stored row of each row wanted; None for rows that do not suit the heads.
RowRule = Callable[[Heads, int], RowOrder | None]


@dataclass(frozen=True)
class Piece:
    """A weight of the model that a GGUF tensor holds, all of it or some of its rows.

    ``name`` is its module in the layer; ".weight" or ".bias" follows where it has no ``{kind}`` of its own and is not
    ``bare``. With ``{expert}`` the tensor is a stack of as many weights. ``row`` says that a vector is a matrix of one,
    ``half`` that the weight expands latent vectors to these of each head, and another tensor holds the other half.
    """

    name: str
    rows: RowRule | None = None
    bare: bool = False
    row: bool = False
    half: Literal["keys", "values"] | None = None

    def hf_name(self, layer: str, kind: str, expert: int = 0) -> str:
        """The whole name of the weight."""
        name = self.name.format(kind=kind, expert=expert)
        return f"{layer}{name}" if self.bare or "{kind}" in self.name else f"{layer}{name}.{kind}"


Part = str | Piece | tuple[Piece, ...]


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF files.

    ``parts`` are the tensors of a layer by their GGUF names (with ".weight" or ".bias" where the two differ in more
    than that), ``top`` those outside of layers (whole names). What its configuration has besides what all have is in
    ``constants``, in ``numbers`` (fields by their keys, absent where the key is absent or 0), and put there by
    ``adapt``, which may also change what is there. ``variant`` gives another entry in place of this one, of a file's
    metadata and the names of its tensors.
    """

    model_type: str
    model_class: str
    parts: Mapping[str, Part]
    top: Mapping[str, str]
    layer: str = "model.layers.{}."
    norm: Literal["rms", "layer"] = "rms"
    epsilon: str | None = None  # the field for what norms add to the variance, None for the usual one
    norm_shift: float = 0.0  # added to the weights of norms
    partial_rotary: str | None = None  # the field for the part of a head that is rotated; None: all of it is
    latent: bool = False  # keys and values are made of a latent vector; the size of a head is that of its rotated part
    constants: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[ArchitectureKeys, Config, Collection[str]], None] | None = None
    variant: Callable[[Mapping[str, Any], Collection[str]], Architecture | None] | None = None


def interleaved_halves(heads: int, rows: int) -> RowOrder | None:
    """Stored: the two halves of each head interleaved, as llama.cpp rotates neighbours. Wanted: one after the other."""
    if rows % (2 * heads):
        return None
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def query_pairs(heads: Heads, rows: int) -> RowOrder | None:
    """The rows of q as llama.cpp's converter leaves those of Llama, put back."""
    return interleaved_halves(heads.queries, rows)


def key_pairs(heads: Heads, rows: int) -> RowOrder | None:
    """The same for k."""
    return interleaved_halves(heads.keys, rows)


def heads_of(picked: range | list[int], heads: Heads, rows: int) -> RowOrder | None:
    """The rows of some heads of a stack of q, k and v."""
    if rows != (heads.queries + 2 * heads.keys) * heads.size:
        return None
    return (np.asarray(picked, np.int64)[:, None] * heads.size + np.arange(heads.size)).reshape(-1)


def query_rows(heads: Heads, rows: int) -> RowOrder | None:
    """Of a stack of q, k and v the rows of q."""
    return heads_of(range(heads.queries), heads, rows)


def key_rows(heads: Heads, rows: int) -> RowOrder | None:
    """Of a stack of q, k and v the rows of k."""
    return heads_of(range(heads.queries, heads.queries + heads.keys), heads, rows)


def value_rows(heads: Heads, rows: int) -> RowOrder | None:
    """Of a stack of q, k and v the rows of v."""
    return heads_of(range(heads.queries + heads.keys, heads.queries + 2 * heads.keys), heads, rows)


def grouped_heads(heads: Heads, rows: int) -> RowOrder | None:
    """Stored: q, k, v. Wanted: for each key head the query heads that share it, then itself and its value head."""
    if heads.queries % heads.keys:
        return None
    share = heads.queries // heads.keys
    wanted: list[int] = []
    for key in range(heads.keys):
        wanted += [*range(key * share, (key + 1) * share), heads.queries + key, heads.queries + heads.keys + key]
    return heads_of(wanted, heads, rows)


LAYER_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z0-9_]+)\.(weight|bias)")


class PlacedPiece(NamedTuple):
    """A weight by its whole name, the piece it is, and which of a stack (None: not a stack)."""

    name: str
    piece: Piece
    expert: int | None


def pieces_of(architecture: Architecture, name: str, entries: int) -> Iterator[PlacedPiece]:
    """The weights in a GGUF tensor with so many ``entries`` along its first dimension; none for an unknown name."""
    if name in architecture.top:
        yield PlacedPiece(architecture.top[name], Piece(architecture.top[name]), None)
        return
    match = LAYER_PATTERN.fullmatch(name)
    if match is None:
        return
    layer, kind = architecture.layer.format(match[1]), match[3]
    found = architecture.parts.get(f"{match[2]}.{kind}", architecture.parts.get(match[2], ()))
    for part in found if isinstance(found, tuple) else (found,):
        piece = Piece(part) if isinstance(part, str) else part
        if "{expert}" in piece.name:
            for expert in range(entries):
                yield PlacedPiece(piece.hf_name(layer, kind, expert), piece, expert)
        else:
            yield PlacedPiece(piece.hf_name(layer, kind), piece, None)
