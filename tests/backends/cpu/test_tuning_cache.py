"""The tuning file: what is written is read, by the machine it was made for, and nothing else is believed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.cpu.tiles import BUCKETS, LinearShape, Tile
from octavo.backends.cpu.tuning_cache import (
    Entry,
    Machine,
    check_target,
    choices_for,
    default_path,
    read_choices,
    store_entries,
    this_machine,
)
from octavo.errors import ConfigError

MACHINE = Machine("1.0", "v4", "A CPU (of 3 GHz)", 2)
SHAPES = [
    LinearShape("w4", 960, 576, 32, True, "store", "f32"),
    LinearShape("w4", 3072, 576, 32, True, "silu_mul", "int8"),
    LinearShape("bf16", 576, 1536, 0, False, "add", "f32"),
]
ENTRIES = [
    Entry(shape, *bucket, Tile(96, 64, 2) if index % 2 else None, 1.0)
    for index, (shape, bucket) in enumerate((shape, bucket) for shape in SHAPES for bucket in BUCKETS)
]


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What the module warns of meanwhile (a fixture would be shared by the examples of hypothesis)."""
    found: list[str] = []
    logger = logging.getLogger("octavo.backends.cpu.tuning_cache")
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "tuning" / "file.json"
    store_entries(target, MACHINE, ENTRIES)
    return target


def test_what_is_written_is_read(path: Path) -> None:
    with warnings() as said:
        choices = read_choices(path, MACHINE)
    assert choices == {(entry.shape, (entry.first_rows, entry.last_rows)): entry.tile for entry in ENTRIES}
    assert said == []
    assert [file.name for file in path.parent.iterdir() if file.suffix != ".lock"] == ["file.json"]


def test_entries_of_other_models_stay_and_newer_ones_replace_older(path: Path) -> None:
    other = LinearShape("w8", 64, 64, 32, False, "store", "f32")
    store_entries(
        path, MACHINE, [Entry(other, 1, 1, Tile(96, 64, 1), 1.1), Entry(SHAPES[0], 1, 1, Tile(6, 32, 1), 1.2)]
    )
    choices = read_choices(path, MACHINE)
    assert len(choices) == len(ENTRIES) + 1
    assert choices[other, (1, 1)] == Tile(96, 64, 1)
    assert choices[SHAPES[0], (1, 1)] == Tile(6, 32, 1)


def test_entries_of_another_version_are_replaced(path: Path) -> None:
    newer = Machine("2.0", MACHINE.isa, MACHINE.cpu, MACHINE.threads)
    store_entries(path, newer, ENTRIES[:1])
    assert len(read_choices(path, newer)) == 1


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Machine("1.1", "v4", "A CPU (of 3 GHz)", 2), "octavo 1.1"),
        (Machine("1.0", "v3", "A CPU (of 3 GHz)", 2), "v3"),
        (Machine("1.0", "v4", "Another CPU", 2), "Another CPU"),
        (Machine("1.0", "v4", "A CPU (of 3 GHz)", 4), "4 threads"),
    ],
)
def test_a_file_of_another_machine_is_ignored_with_a_warning(path: Path, other: Machine, named: str) -> None:
    with warnings() as said:
        assert read_choices(path, other) == {}
    (message,) = said
    assert str(path) in message
    assert named in message
    assert "run octavo tune" in message


def changed(path: Path, **values: object) -> bytes:
    return json.dumps({**json.loads(path.read_bytes()), **values}).encode()


def test_damaged_files_are_ignored_with_a_warning(path: Path) -> None:
    content = json.loads(path.read_bytes())
    entry = content["entries"][0]
    machine = content["machine"]
    damaged = [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"[" * 100_000,
        b"null",
        path.read_bytes()[:-20],
        changed(path, format=2),
        changed(path, format="1"),
        changed(path, machine={**machine, "threads": 0}),
        changed(path, machine={**machine, "more": 1}),
        changed(path, machine={"isa": "v4"}),
        changed(path, entries=[entry, entry]),
        changed(path, entries=[{**entry, "first_rows": 2}]),
        changed(path, entries=[{**entry, "tile": {"rows": 0, "columns": 64, "regions": 1}}]),
        changed(path, entries=[{**entry, "tile": {"rows": 1 << 70, "columns": 64, "regions": 1}}]),
        changed(path, entries=[{**entry, "tile": {"rows": 6.5, "columns": 64, "regions": 1}}]),
        changed(path, entries=[{**entry, "tile": {"rows": 6, "columns": 64}}]),
        changed(path, entries=[{**entry, "shape": {**entry["shape"], "form": "w3"}}]),
        changed(path, entries=[{**entry, "extra": None}]),
        changed(path, extra=1),
        b" " * (5 << 20),
    ]
    for data in damaged:
        path.write_bytes(data)
        with warnings() as said:
            assert read_choices(path, MACHINE) == {}, data[:80]
        (message,) = said
        assert message.startswith(f"tuning: {path} is damaged and not used (")
        assert "delete it or run octavo tune again" in message
        assert "\n" not in message


CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_a_file_holds_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes replaced, inserted and cut out of a good file, and any value in place of any part of it."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.unlink(missing_ok=True)  # or what is left of the example before would stay in it
    store_entries(path, MACHINE, ENTRIES[:2])
    good = path.read_bytes()
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(good)))
        end = data.draw(st.integers(start, min(len(good), start + 30)))
        path.write_bytes(good[:start] + data.draw(st.binary(max_size=10)) + good[end:])
    else:
        content = json.loads(good)
        entry = content["entries"][1]
        part = data.draw(st.sampled_from([content, content["machine"], entry, entry["shape"], entry["tile"]]))
        part[data.draw(st.sampled_from(sorted(part)))] = data.draw(CONTENT)
        path.write_text(json.dumps(content))
    with warnings() as said:
        choices = read_choices(path, MACHINE)
    assert isinstance(choices, dict)
    assert choices or said or path.read_bytes().count(b'"shape"') == 0
    for tile in choices.values():
        assert tile is None or min(tile.rows, tile.columns, tile.regions) >= 1


def test_an_engine_uses_this_machines_file_another_one_or_none(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OCTAVO_TUNING", raising=False)
    here = ("A CPU (of 3 GHz)", "v4", 2)
    own = default_path(*here)
    machine = this_machine(*here)
    store_entries(path, machine, ENTRIES)
    assert own == tmp_path / "cache" / "tuning" / "a-cpu-of-3-ghz-v4-2-threads.json"
    assert choices_for(None, *here) == ({}, "")
    store_entries(own, machine, ENTRIES[:1])
    assert choices_for(None, *here) == (read_choices(own, machine), str(own))
    assert choices_for(str(path), *here) == (read_choices(path, machine), str(path))
    assert choices_for("off", *here) == ({}, "")
    monkeypatch.setenv("OCTAVO_TUNING", "off")
    assert choices_for(None, *here) == ({}, "")
    monkeypatch.setenv("OCTAVO_TUNING", str(path))
    assert choices_for(None, *here)[1] == str(path)
    assert choices_for("off", *here) == ({}, "")


def test_a_named_file_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"tuning is '.*none.json', which is no file"):
        choices_for(str(tmp_path / "none.json"), "A CPU", "v4", 2)
    monkeypatch.setenv("OCTAVO_TUNING", str(tmp_path))
    with pytest.raises(ConfigError, match="OCTAVO_TUNING is"):
        choices_for(None, "A CPU", "v4", 2)


def test_what_the_user_names_as_target_is_not_overwritten_unless_it_is_a_tuning_file(
    path: Path, tmp_path: Path
) -> None:
    check_target(path, named=True)
    check_target(tmp_path / "new" / "file.json", named=True)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is no tuning file"):
        check_target(model, named=True)
    check_target(model, named=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_target(tmp_path, named=True)
