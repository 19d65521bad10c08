"""Tile shapes of a plan's linears: what they are chosen for, which rows share a choice, and handing them to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from octavo._native import Act, Epilogue, Form, Plan

__all__ = ["BUCKETS", "Bucket", "LinearShape", "Tile", "TuningUse", "apply_tiles", "shapes_of"]

Bucket = tuple[int, int]
# Rows of a step, first and last, that share a choice. One row streams the weights; up to 8 mostly do; up to 96 are one
# tile high; beyond, weights are read once for every tile.
BUCKETS: tuple[Bucket, ...] = ((1, 1), (2, 8), (9, 32), (33, 96), (97, 256), (257, 1 << 24))

_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]

_FORMS: Mapping[Form, Any] = {
    Form.F32: "f32",
    Form.BF16: "bf16",
    Form.W8: "w8",
    Form.W4: "w4",
    Form.Lut4: "lut4",
    Form.Lut4F: "lut4f",
    Form.E4M3: "e4m3",
    Form.E5M2: "e5m2",
}
_OUTPUTS: Mapping[Act, Any] = {Act.F32: "f32", Act.BF16: "bf16", Act.I8: "int8"}
_EPILOGUES = {
    Epilogue.Store: "store",
    Epilogue.Add: "add",
    Epilogue.SiluMul: "silu_mul",
    Epilogue.GeluMul: "gelu_mul",
    Epilogue.GeluTanhMul: "gelu_tanh_mul",
    Epilogue.Gelu: "gelu",
    Epilogue.GeluTanh: "gelu_tanh",
    Epilogue.Silu: "silu",
}


class LinearShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a choice is made for: linears that are alike in this take the same time. Columns and k are padded ones."""

    form: Literal["f32", "bf16", "w8", "w4", "lut4", "lut4f", "e4m3", "e5m2"]
    columns: _Size
    k: _Size
    group: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
    minimum: bool
    epilogue: Annotated[str, msgspec.Meta(max_length=32)]
    output: Literal["f32", "bf16", "int8"]

    def __str__(self) -> str:
        group = f" g{self.group}" if self.group else ""
        return f"{self.form}{group} {self.columns}x{self.k} {self.epilogue}"


class Tile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of a tile at the most, its packed columns, and the regions of the output whose tiles are claimed in turn.

    The limits here keep numbers small; what a plan can take is checked by the native library.
    """

    rows: _Size
    columns: _Size
    regions: _Size

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}/{self.regions}"


@dataclass(frozen=True, slots=True)
class TuningUse:
    """How many choices (of a shape and rows that steps can have) were found in `source`, and how many were not."""

    source: str = ""
    hits: int = 0
    misses: int = 0

    def __str__(self) -> str:
        found = f"{self.hits} of {self.hits + self.misses} tile choices measured"
        return f"{found}, in {self.source}" if self.source else found


def shapes_of(plan: Plan) -> list[tuple[LinearShape, str, int]]:
    """Shape, name and most rows of every linear of a plan, in the order that their numbers follow."""
    return [
        (
            LinearShape(
                _FORMS[linear["form"]],
                linear["columns"],
                linear["k"],
                linear["group"],
                linear["minimum"],
                _EPILOGUES[linear["epilogue"]],
                _OUTPUTS[linear["output"]],
            ),
            linear["name"],
            linear["max_rows"],
        )
        for linear in plan.linears()
    ]


def apply_tiles(plan: Plan, choices: Mapping[tuple[LinearShape, Bucket], Tile | None], source: str = "") -> TuningUse:
    """Give every linear its measured tiles; None and what is not there leave the built-in ones.

    A tile that the plan cannot take is a ValueError that leaves the plan as it was.
    """
    met: dict[tuple[LinearShape, Bucket], bool] = {}
    try:
        for index, (shape, _, max_rows) in enumerate(shapes_of(plan)):
            for bucket in buckets_within(max_rows):
                met[shape, bucket] = (shape, bucket) in choices
                tile = choices.get((shape, bucket))
                if tile is not None:
                    plan.set_tile(index, *bucket, tile.rows, tile.columns, tile.regions)
    except ValueError:
        plan.clear_tiles()
        raise
    hits = sum(met.values())
    return TuningUse(source, hits, len(met) - hits)


def buckets_within(max_rows: int) -> Sequence[Bucket]:
    """The buckets that a linear of at most so many rows can meet."""
    return [bucket for bucket in BUCKETS if bucket[0] <= max_rows]
