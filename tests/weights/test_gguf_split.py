"""A model over several GGUF files reads as one would; what is missing, doubled or misnamed is refused by name."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import WeightsError
from octavo.weights import open_checkpoint
from octavo.weights.gguf import GgufCheckpoint
from tests.weights.gguf_files import GgufFileSpec, TensorSpec, Typed, tiny_model


def split_model(folder: Path, count: int = 3, **changes: dict[str, Any]) -> Path:
    """A tiny model in so many files, as gguf-split writes them; ``changes`` to the keys of part 0, 1, ... by name."""
    whole = tiny_model(kind="Q8_0")
    size = -(-len(whole.tensors) // count)
    for number in range(count):
        tensors = list(whole.tensors)[size * number : size * (number + 1)]
        keys: dict[str, Any] = dict(whole.metadata) if number == 0 else {}
        keys["split.no"] = Typed(2, number)
        keys["split.count"] = Typed(2, count)
        keys["split.tensors.count"] = Typed(5, len(whole.tensors))
        keys |= changes.get(f"part{number}", {})
        GgufFileSpec(keys, tensors).write(folder / f"tiny-{number + 1:05d}-of-{count:05d}.gguf")
    return folder / f"tiny-00001-of-{count:05d}.gguf"


def test_a_split_model_reads_as_the_whole_one_by_any_part_or_its_folder(tmp_path: Path) -> None:
    parts, whole = tmp_path / "parts", tmp_path / "whole.gguf"
    parts.mkdir()
    first = split_model(parts)
    expected = GgufCheckpoint(tiny_model(kind="Q8_0").write(whole))
    for path in (first, parts / "tiny-00003-of-00003.gguf", parts):
        checkpoint = open_checkpoint(path)
        assert checkpoint.names() == expected.names()
        assert checkpoint.config == expected.config
        assert checkpoint.gguf_metadata is not None
        assert "tokenizer.ggml.tokens" in checkpoint.gguf_metadata
        for name in expected.names():
            np.testing.assert_array_equal(checkpoint.tensor(name).read_f32(), expected.tensor(name).read_f32())


def refused(path: Path, *reasons: str) -> None:
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(path)
    for reason in reasons:
        assert reason in str(caught.value)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    first = split_model(tmp_path)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    refused(first, "one of 3 parts", "1 of them are missing: tiny-00002-of-00003.gguf")
    refused(tmp_path, "tiny-00002-of-00003.gguf")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"part1": {"split.no": Typed(2, 2)}}, "tiny-00002-of-00003.gguf: split.no is 2, its name says 1"),
        ({"part2": {"split.count": Typed(2, 4)}}, "tiny-00003-of-00003.gguf: split.count is 4, its name says 3"),
        ({"part1": {"split.count": "three"}}, "split.count is 'three', its name says 3"),
        ({"part0": {"split.tensors.count": Typed(5, 99)}}, "split.tensors.count is 99, the 3 parts have 12"),
        ({"part0": {"split.tensors.count": "all"}}, "split.tensors.count is 'all'"),
    ],
)
def test_parts_that_say_other_than_their_names_are_refused(
    tmp_path: Path, changes: dict[str, dict[str, Any]], reason: str
) -> None:
    refused(split_model(tmp_path, **changes), reason)


def test_a_tensor_in_two_parts_is_refused_by_name(tmp_path: Path) -> None:
    first = split_model(tmp_path)
    last = tmp_path / "tiny-00003-of-00003.gguf"
    keys = {"split.no": Typed(2, 2), "split.count": Typed(2, 3), "split.tensors.count": Typed(5, 12)}
    tensor = TensorSpec("output_norm.weight", (64,), "F32", struct.pack("<64f", *range(64)))
    GgufFileSpec(keys, [tensor, replace(tensor, name="token_embd.weight")]).write(last)
    refused(first, "tiny-00003-of-00003.gguf: tensor 'token_embd.weight' is in tiny-00001-of-00003.gguf too")


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    part = split_model(tmp_path).rename(tmp_path / "model.gguf")
    refused(part, "one of 3 parts of a split GGUF", "not named as one")


@pytest.mark.parametrize("name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-99999.gguf"])
def test_names_of_impossible_parts_are_refused(tmp_path: Path, name: str) -> None:
    refused(tiny_model().write(tmp_path / name), "its name speaks of part")


def test_a_model_of_a_single_part_is_a_model(tmp_path: Path) -> None:
    assert open_checkpoint(split_model(tmp_path, count=1)).config["model_type"] == "llama"


def test_a_folder_of_several_models_names_none(tmp_path: Path) -> None:
    split_model(tmp_path)
    tiny_model().write(tmp_path / "other.gguf")
    refused(tmp_path, "4 .gguf files, name one of them")
