"""Hugging Face directories: what the reference writer saves is read back, and hostile headers are refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from octavo.errors import WeightsError
from octavo.weights import DenseTensor, open_checkpoint
from octavo.weights.safetensors_files import SafetensorsCheckpoint, SafetensorsFile
from octavo.weights.tensors import bf16_to_f32, f32_to_bf16


def model_directory(path: Path, config: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    return path


def raw_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with this header, given as JSON text or as the object to write."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_all_dense_types_are_read_back(tmp_path: Path) -> None:
    values = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    tensors = {"f32": values, "f16": values.half(), "bf16": values.bfloat16(), "vector": values[0].clone()}
    save_torch_file(tensors, model_directory(tmp_path / "m") / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.format == "safetensors"
    assert checkpoint.gguf_metadata is None
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, value in tensors.items():
        tensor = checkpoint.tensor(name)
        assert isinstance(tensor, DenseTensor)
        assert tensor.dtype == ("f32" if name == "vector" else name)
        np.testing.assert_array_equal(tensor.read_f32(), value.float().numpy())
        np.testing.assert_array_equal(tensor.read_f32(2, 5), value[2:5].float().numpy())
    bits = checkpoint.tensor("bf16")
    assert isinstance(bits, DenseTensor)
    np.testing.assert_array_equal(bits.read_bf16(1, 4), tensors["bf16"][1:4].view(torch.int16).numpy().view(np.uint16))
    half = checkpoint.tensor("f16")
    assert isinstance(half, DenseTensor)
    np.testing.assert_array_equal(half.read_f16().view(np.float16), tensors["f16"].numpy())
    with pytest.raises(WeightsError, match="is stored as f16, bf16 bits were asked for"):
        half.read_bf16()


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    header = {
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "none": {"dtype": "F32", "shape": [0, 5], "data_offsets": [4, 4]},
    }
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw_file(header, struct.pack("<f", 2.5)))
    file = SafetensorsFile(path)
    assert file.tensor("scalar").read_f32().item() == 2.5
    assert file.tensor("none").read_f32().shape == (0, 5)


def test_data_at_an_odd_address_is_read(tmp_path: Path) -> None:
    values = np.arange(12, dtype="<f4").reshape(3, 4)
    for padding in range(4):
        header = b'{"a":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}' + b" " * padding
        path = tmp_path / f"{padding}.safetensors"
        path.write_bytes(raw_file(header, values.tobytes()))
        read = SafetensorsFile(path).tensor("a").read_f32()
        assert read.flags.aligned
        np.testing.assert_array_equal(read, values)


def test_shards_are_joined_by_their_index(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "m")
    one, two = {"a": np.ones((2, 2), np.float32)}, {"b": np.zeros(3, np.float32), "c": np.full(1, 7, np.float32)}
    save_file(one, folder / "model-00001-of-00002.safetensors")
    save_file(two, folder / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors"} | dict.fromkeys("bc", "model-00002-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map}))
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.names()) == ["a", "b", "c"]
    assert checkpoint.tensor("c").read_f32().item() == 7


def test_configuration_files_are_read(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "m", {"model_type": "qwen2", "hidden_size": 8})
    save_file({"a": np.ones(1, np.float32)}, folder / "weights.safetensors")
    assert open_checkpoint(folder).config == {"model_type": "qwen2", "hidden_size": 8}
    assert open_checkpoint(folder).generation_config == {}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(folder).generation_config == {"eos_token_id": [1, 2]}


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "../m/model.safetensors"}, "not the name of a .safetensors file"),
        ({"a": "/etc/model.safetensors"}, "not the name of a .safetensors file"),
        ({"a": "model.bin"}, "not the name of a .safetensors file"),
        ({"a": 5}, "not the name of a .safetensors file"),
        ({"a": "absent.safetensors"}, "absent.safetensors: cannot be opened"),
        ({"a": "model.safetensors", "b": "model.safetensors"}, "puts tensor 'b' in model.safetensors, which lacks it"),
        ({"a": "model.safetensors", "b": "more.safetensors"}, "tensor 'a' is both in"),
        ({}, "weight_map is missing"),
        ([], "weight_map is missing"),
        (None, "weight_map is missing"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, weight_map: Any, reason: str) -> None:
    folder = model_directory(tmp_path / "m")
    save_file({"a": np.ones(1, np.float32)}, folder / "model.safetensors")
    save_file(dict.fromkeys("ab", np.ones(1, np.float32)), folder / "more.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError) as caught:
        SafetensorsCheckpoint(folder)
    assert reason in str(caught.value)


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {**GOOD["a"], **changes}}


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "seven bytes": (bytes(7), "is 7 bytes long"),
    "header longer than the file": (raw_file(GOOD, bytes(8), 1 << 20), "claims a header of 1048576 bytes"),
    "header of the largest size": (raw_file(GOOD, bytes(8), (1 << 64) - 1), "claims a header of 18446744073709551615"),
    "not JSON": (raw_file(b"\x80\x02}q\x00."), "is not UTF-8"),
    "broken JSON": (raw_file(b'{"a": '), "not valid JSON"),
    "not an object": (raw_file([]), "holds a JSON list"),
    "deep": (raw_file(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "two of a name": (raw_file(b'{"a":1,"a":2}'), "the key 'a' appears twice"),
    "NaN": (raw_file(b'{"a":NaN}'), "NaN is not a JSON number"),
    "huge number": (raw_file(b'{"a":' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "entry of another kind": (raw_file({"a": 3}), "must have exactly dtype, shape and data_offsets"),
    "field missing": (raw_file({"a": {"dtype": "F32", "shape": [2]}}), "must have exactly"),
    "field too many": (raw_file(entry(extra=1), bytes(8)), "must have exactly"),
    "unknown dtype": (raw_file(entry(dtype="F31"), bytes(8)), "unknown dtype 'F31'"),
    "dtype not text": (raw_file(entry(dtype=["F32"]), bytes(8)), "unknown dtype"),
    "shape negative": (raw_file(entry(shape=[-2]), bytes(8)), "its shape is not a list"),
    "shape fractional": (raw_file(entry(shape=[2.0]), bytes(8)), "its shape is not a list"),
    "shape true": (raw_file(entry(shape=[True, 2]), bytes(8)), "its shape is not a list"),
    "shape of many dimensions": (raw_file(entry(shape=[1] * 9), bytes(8)), "at most 8 sizes"),
    "shape overflow": (raw_file(entry(shape=[1 << 62] * 8), bytes(8)), "its offsets say 8"),
    "size mismatch": (raw_file(entry(shape=[3]), bytes(8)), "F32 [3] takes 12 bytes, its offsets say 8"),
    "wrong dtype for the size": (raw_file(entry(dtype="F16"), bytes(8)), "F16 [2] takes 4 bytes"),
    "offsets turned": (raw_file(entry(data_offsets=[8, 0]), bytes(8)), "outside of the 8 bytes"),
    "offsets outside": (raw_file(entry(data_offsets=[8, 16]), bytes(8)), "outside of the 8 bytes"),
    "offsets negative": (raw_file(entry(data_offsets=[-8, 0]), bytes(8)), "not a pair of positions"),
    "offsets huge": (raw_file(entry(data_offsets=[0, 1 << 70]), bytes(8)), "not a pair of positions"),
    "three offsets": (raw_file(entry(data_offsets=[0, 4, 8]), bytes(8)), "not a pair of positions"),
    "overlap": (raw_file({**GOOD, "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)), "overlaps"),
    "same bytes twice": (raw_file({**GOOD, "b": GOOD["a"]}, bytes(8)), "overlaps the tensor before it"),
    "gap": (raw_file({**GOOD, "b": {"dtype": "U8", "shape": [1], "data_offsets": [9, 10]}}, bytes(10)), "leaves a gap"),
    "bytes after the end": (raw_file(GOOD, bytes(12)), "end at 8, the file has 12 bytes"),
    "cut": (raw_file(GOOD, bytes(7)), "outside of the 7 bytes"),
    "metadata of numbers": (raw_file({"__metadata__": {"a": 1}}), "__metadata__ is not an object of strings"),
    "metadata of another kind": (raw_file({"__metadata__": []}), "__metadata__ is not an object of strings"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_with_its_name_and_reason(tmp_path: Path, case: str) -> None:
    content, reason = HOSTILE[case]
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert reason in message
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 600 + len(str(path))


def test_a_dtype_that_is_not_supported_is_refused_where_it_is_used(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "m")
    save_file({"mask": np.ones((2, 2), np.uint8), "w": np.ones((2, 2), np.float32)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.names()) == ["mask", "w"]
    with pytest.raises(WeightsError, match="tensor 'mask' has dtype U8; supported are F32, F16, BF16"):
        checkpoint.tensor("mask")
    with pytest.raises(WeightsError, match="has no tensor 'x'"):
        checkpoint.tensor("x")


def test_checkpoints_quantised_in_another_way_are_refused_by_name(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "m", {"quantization_config": {"quant_method": "exl2"}})
    save_file({"a": np.ones(1, np.float32)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="quant_method = 'exl2' is not supported"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"a": Infinity}', b"\xff", b"[" * 100_000, b'{"a":1,"a":1}'])
def test_a_damaged_config_is_refused(tmp_path: Path, text: bytes) -> None:
    folder = model_directory(tmp_path / "m")
    (folder / "config.json").write_bytes(text)
    with pytest.raises(WeightsError, match=r"config\.json"):
        open_checkpoint(folder)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "m")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(WeightsError, match="pickled weights"):
        open_checkpoint(folder)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "m")
    for name in ("a", "b"):
        save_file({name: np.ones(1, np.float32)}, folder / f"{name}.safetensors")
    with pytest.raises(WeightsError, match=r"2 \.safetensors files but no"):
        open_checkpoint(folder)


def test_paths_that_are_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for path, reason in (
        (tmp_path / "absent", "no such file"),
        (tmp_path / "notes.txt", "neither a model directory nor"),
        (tmp_path, "has no config.json and no .gguf file"),
    ):
        with pytest.raises(WeightsError, match=reason.replace(".", r"\.")):
            open_checkpoint(path)


def test_bf16_rounding_is_to_nearest_even_and_keeps_nan(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    special = np.asarray([0.0, -0.0, np.inf, -np.inf, np.nan, 1.00390625, 1.01171875, 3.4e38, 1e-45], np.float32)
    values = np.concatenate(
        [special, rng.integers(0, 1 << 32, 4096, dtype=np.uint64).astype(np.uint32).view(np.float32)]
    )
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(bf16_to_f32(f32_to_bf16(values)), expected)
    signalling = np.asarray([0x7F800001, 0xFF800001], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_f32(f32_to_bf16(signalling))).all()
