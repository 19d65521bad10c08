"""A model split over several GGUF files, NAME-00001-of-0000N.gguf: found by any of them, checked to be whole.

The layout is that of llama.cpp's gguf-split: each file has the keys split.no (from 0), split.count and
split.tensors.count (of all files together), the first also all other metadata.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import WeightsError
from octavo.weights.gguf_file import GgufFile, TensorInfo

__all__ = ["GgufParts", "PlacedTensor", "first_part", "open_parts", "part_paths"]

MAX_PARTS = 4096
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


class PlacedTensor(NamedTuple):
    """A tensor and the file it is in."""

    file: GgufFile
    info: TensorInfo


class GgufParts(NamedTuple):
    """The files of one model, the first of them leading, and all of their tensors by GGUF name."""

    files: tuple[GgufFile, ...]
    tensors: dict[str, PlacedTensor]


def first_part(files: Sequence[Path]) -> Path | None:
    """The first of the given files when they are parts of one model (there may be some missing), else None."""
    matches = [PART_NAME.fullmatch(file.name) for file in files]
    found = {(match["stem"], match["count"]) for match in matches if match is not None}
    if None in matches or len(found) != 1:
        return None
    return min(files)


def part_paths(path: Path) -> list[Path]:
    """All the files that the name of one of them tells of; the file itself when its name is no part's."""
    match = PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        raise WeightsError(
            f"{path}: its name speaks of part {int(match['number'])} of {count}, "
            f"parts from 1 to at most {MAX_PARTS} are possible"
        )
    return [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def open_parts(path: Path) -> GgufParts:
    """Open a GGUF file, with the others of its model when it is one of several."""
    paths = part_paths(path)
    missing = [part.name for part in paths if not part.is_file()]
    if missing and len(paths) > 1:
        raise WeightsError(
            f"{path}: is one of {len(paths)} parts of a model, and {len(missing)} of them are missing: "
            + ", ".join(missing[:4])
            + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        )
    files = tuple(GgufFile(part) for part in paths)
    tensors: dict[str, PlacedTensor] = {}
    for number, file in enumerate(files):
        _check_place(file, number, len(files))
        for name, info in file.tensors.items():
            if name in tensors:
                raise WeightsError(f"{file.path}: tensor {name!r} is in {tensors[name].file.path.name} too")
            tensors[name] = PlacedTensor(file, info)
    expected = files[0].metadata.get("split.tensors.count")
    if len(files) > 1 and expected != len(tensors):
        raise WeightsError(
            f"{files[0].path}: split.tensors.count is {expected!r:.60}, the {len(files)} parts have {len(tensors)}"
        )
    return GgufParts(files, tensors)


def _check_place(file: GgufFile, number: int, count: int) -> None:
    """A file must say of itself what its name says."""
    claimed: Any = file.metadata.get("split.count", 0 if count == 1 else None)
    if count == 1 and claimed in (0, 1):
        return
    if count == 1:
        raise WeightsError(
            f"{file.path}: is one of {claimed!r:.60} parts of a split GGUF (split.count), but is not named as one "
            "(NAME-00001-of-0000N.gguf), so that the others cannot be found"
        )
    if claimed != count:
        raise WeightsError(f"{file.path}: split.count is {claimed!r:.60}, its name says {count}")
    if file.metadata.get("split.no") != number:
        raise WeightsError(f"{file.path}: split.no is {file.metadata.get('split.no')!r:.60}, its name says {number}")
