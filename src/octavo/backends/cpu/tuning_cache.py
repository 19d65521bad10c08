"""The file that measured tile shapes are kept in: where it lies, read with distrust, written whole.

What a file says can change how fast a model runs and nothing else: results do not depend on tiles, and the native
library checks each one before it is used.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from octavo.backends.cpu.tiles import BUCKETS, Bucket, LinearShape, Tile
from octavo.errors import ConfigError
from octavo.weights.model_cache import cache_root, exclusive

__all__ = [
    "Choices",
    "Entry",
    "Machine",
    "check_target",
    "choices_for",
    "default_path",
    "read_choices",
    "store_entries",
    "this_machine",
    "warn_damaged",
]

_log = logging.getLogger(__name__)

FORMAT = 1
_MOST_BYTES = 4 << 20
_MOST_ENTRIES = 10_000

_Text = Annotated[str, msgspec.Meta(max_length=200)]
_Rows = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What measured times hold for: this version of the kernels on this processor with so many threads."""

    octavo: _Text
    isa: _Text
    cpu: _Text
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)]

    def __str__(self) -> str:
        return f"octavo {self.octavo}, {self.isa}, {self.cpu}, {self.threads} threads"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A choice: the tile for a shape and rows, or None where the built-in one is as good.

    `ratio` is the time with the built-in tiles over that with the chosen ones, for people who read the file.
    """

    shape: LinearShape
    first_rows: _Rows
    last_rows: _Rows
    tile: Tile | None
    ratio: float


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    machine: Machine
    entries: Annotated[list[Entry], msgspec.Meta(max_length=_MOST_ENTRIES)]


class _Header(msgspec.Struct):
    """What every format begins with."""

    format: int


class _DamagedError(Exception):
    """The file is not what `store_entries` writes."""


Choices = Mapping[tuple[LinearShape, Bucket], Tile | None]


def this_machine(cpu: str, isa: str, threads: int) -> Machine:
    """What is measured here holds for. Looking up the version takes longer than most of a start: see `choices_for`."""
    import octavo

    return Machine(octavo.__version__, isa, cpu, threads)


def default_path(cpu: str, isa: str, threads: int) -> Path:
    """This machine's file in the cache folder. Versions share it, so that an upgrade leaves no old ones behind."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{cpu}-{isa}-{threads}-threads".lower()).strip("-")
    return cache_root() / "tuning" / f"{name}.json"


def choices_for(setting: str | None, cpu: str, isa: str, threads: int, own: Path | None = None) -> tuple[Choices, str]:
    """The choices an engine is to use on this machine, and where they are from ("" where there are none).

    ``setting``: a file, "off", or None for $OCTAVO_TUNING and without it this machine's own file. A file that was
    named has to be there; one that cannot be used is left alone with a warning that says why. ``own``: a file that
    came with a built model, used where nothing is set, if it was measured on a machine like this one.
    """
    name, value = ("tuning", setting) if setting else ("OCTAVO_TUNING", os.environ.get("OCTAVO_TUNING", ""))
    if value == "off":
        return {}, ""
    if not value and own is not None and own.is_file() and (choices := _choices_of_built(own, cpu, isa, threads)):
        return choices, str(own)
    path = Path(value).expanduser() if value else default_path(cpu, isa, threads)
    if not path.is_file():
        if value:
            raise ConfigError(f"{name} is {value!r}, which is no file; give a file that octavo tune wrote, or off")
        return {}, ""
    choices = read_choices(path, this_machine(cpu, isa, threads))
    return choices, str(path) if choices else ""


def _choices_of_built(path: Path, cpu: str, isa: str, threads: int) -> Choices:
    """The choices that came with a built model; none, without a word, when it was tuned for another machine."""
    try:
        file = _read(path)
        return _by_shape(file.entries) if file.machine == this_machine(cpu, isa, threads) else {}
    except (OSError, _DamagedError) as error:
        warn_damaged(path, error)
        return {}


def read_choices(path: Path, machine: Machine) -> Choices:
    """The choices of a file; none, with a warning, when it was made for another machine or is damaged."""
    try:
        file = _read(path)
        if file.machine != machine:
            _log.warning(
                "tuning: %s was measured with %s, and this is %s: it is not used; run octavo tune to measure again",
                path,
                file.machine,
                machine,
            )
            return {}
        return _by_shape(file.entries)
    except (OSError, _DamagedError) as error:
        warn_damaged(path, error)
        return {}


def warn_damaged(path: Path | str, error: Exception) -> None:
    """Say that a file is not used since it is no good."""
    reason = " ".join(str(error).split())[:200]
    _log.warning("tuning: %s is damaged and not used (%s); delete it or run octavo tune again", path, reason)


def check_target(path: Path, *, named: bool) -> None:
    """Find out before anything is measured that `store_entries` will not be able to write.

    A file that the user has ``named`` is not replaced when it is something else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"the tuning file {path} cannot be written there; choose another with --output")
    try:
        if named and path.exists():
            _read(path)
    except _DamagedError as error:
        raise ConfigError(f"{path} exists and is no tuning file of this version ({error}): it is left alone") from None


def store_entries(path: Path, machine: Machine, entries: Iterable[Entry]) -> None:
    """Write entries to ``path``, in place of older ones for the same; those of other models on this machine stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(path):
        kept: dict[tuple[LinearShape, int, int], Entry] = {}
        try:
            old = _read(path)
        except (FileNotFoundError, _DamagedError):
            old = None
        for entry in (*(old.entries if old is not None and old.machine == machine else ()), *entries):
            kept[entry.shape, entry.first_rows, entry.last_rows] = entry
        text = msgspec.json.format(msgspec.json.encode(_File(FORMAT, machine, list(kept.values()))), indent=1)
        handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        try:
            with open(handle, "wb") as target:
                target.write(text + b"\n")
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def _read(path: Path) -> _File:
    with open(path, "rb") as source:
        data = source.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise _DamagedError(f"it is larger than {_MOST_BYTES} bytes")
    try:
        found = msgspec.json.decode(data, type=_Header).format
        if found != FORMAT:
            raise _DamagedError(f"it has format {found}, this version reads {FORMAT}")
        return msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _DamagedError(str(error)) from None


def _by_shape(entries: Iterable[Entry]) -> Choices:
    choices: dict[tuple[LinearShape, Bucket], Tile | None] = {}
    for entry in entries:
        bucket = (entry.first_rows, entry.last_rows)
        if bucket not in BUCKETS:
            raise _DamagedError(f"no choice is made for {bucket[0]} to {bucket[1]} rows")
        if (entry.shape, bucket) in choices:
            raise _DamagedError(f"two choices for {entry.shape}, {bucket[0]} to {bucket[1]} rows")
        choices[entry.shape, bucket] = entry.tile
    return choices
