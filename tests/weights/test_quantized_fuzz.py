"""Quantised checkpoints with damaged parts and settings are read, or refused with a WeightsError in one line."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import WeightsError
from octavo.weights import open_checkpoint
from tests.weights import layouts
from tests.weights.layouts import Array
from tests.weights.test_quantized import four_bits, numbers

DTYPES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1}
Stored = dict[str, tuple[str, list[int], bytes]]


def entry(value: Array, dtype: str | None = None) -> tuple[str, list[int], bytes]:
    names = {"float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8"}
    return dtype or names[str(value.dtype)], list(value.shape), np.ascontiguousarray(value).tobytes()


def seeds() -> list[tuple[dict[str, Any], Stored]]:
    """One small weight of each method."""
    codes, scales, zeros = numbers(4, 32)
    index = np.random.default_rng(0).permutation(np.arange(128) // 32)
    group = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
    float_group = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}}
    small = scales.astype(np.float32)
    found = [
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, layouts.awq("x", codes, scales, zeros)),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2", "dynamic": None},
            layouts.gptq("x", codes, scales, zeros, 4, index=index, version=2),
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}},
            layouts.pack_quantized("x", codes, scales, zeros, 4, index),
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
            {"x.weight": codes.view(np.int8), "x.weight_scale": small, "x.weight_zero_point": zeros.view(np.int8)},
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, four_bits("nf4", 64, 64, 64, True)[0]),
        ({"quant_method": "bitsandbytes"}, {"x.weight": codes.view(np.int8), "x.SCB": small[:, 0]}),
        (
            {"quant_method": "mxfp4"},
            {"x_blocks": codes.reshape(2, 32, 8, 16), "x_scales": zeros.reshape(2, 32, 4).repeat(2, axis=2)},
        ),
        ({"quant_method": "eetq"}, layouts.eetq("x", codes.view(np.int8), scales[:, 0])),
    ]
    made = [(config, {name: entry(value) for name, value in stored.items()}) for config, stored in found]
    blocks = {"x.weight": entry(codes, "F8_E4M3"), "x.weight_scale_inv": entry(small[:1, :2])}
    made.append(({"quant_method": "fp8", "weight_block_size": [64, 64], "fmt": "e4m3"}, blocks))
    scaled = {"x.weight": entry(codes, "F8_E5M2"), "x.weight_scale": entry(small[:1, :2])}
    made.append(({"quant_method": "compressed-tensors", "config_groups": {"g": float_group}}, scaled))
    return made


SEEDS = seeds()


def write(folder: Path, config: Any, stored: Stored, cut: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    header, data = {}, b""
    for name, (dtype, shape, content) in stored.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + data
    (folder / "model.safetensors").write_bytes(whole[: len(whole) - cut])
    return folder


def read_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.names():
        checkpoint.tensor(name).read_f32()


@pytest.mark.parametrize("seed", range(len(SEEDS)), ids=lambda seed: SEEDS[seed][0]["quant_method"])
def test_the_unchanged_weights_are_read(tmp_path: Path, seed: int) -> None:
    folder = write(tmp_path, *SEEDS[seed])
    assert len(open_checkpoint(folder).names()) == 1
    read_all(folder)


@pytest.mark.parametrize("seed", range(len(SEEDS)), ids=lambda seed: SEEDS[seed][0]["quant_method"])
def test_truncated_files_and_missing_parts_are_refused_by_name(tmp_path: Path, seed: int) -> None:
    config, stored = SEEDS[seed]
    for cut in (1, 100):
        with pytest.raises(WeightsError, match=r"tensor '.*' ?.*: its bytes"):
            read_all(write(tmp_path, config, stored, cut))
    for name in stored:
        rest = {other: value for other, value in stored.items() if other != name}
        try:
            read_all(write(tmp_path, config, rest))
        except WeightsError as error:
            assert "tensor 'x" in str(error)  # noqa: PT017 - a part that may be left out is no error


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.text(max_size=6) | st.sampled_from([-1, 0, 64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Any, Stored]:
    """A seed with one or two changes: to a setting, or to the dtype, shape, bytes or presence of a tensor."""
    config, stored = copy.deepcopy(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(stored)))
        dtype, shape, content = stored[name]
        match draw(st.sampled_from(["setting", "group", "bytes", "dtype", "shape", "json", "rename"])):
            case "setting":
                config[draw(st.sampled_from([*config, "group_size", "bits", "sparsity_config"]))] = draw(json_values)
            case "group" if isinstance(config.get("config_groups"), dict) and "g" in config["config_groups"]:
                part = draw(st.sampled_from(["num_bits", "type", "strategy", "block_structure", "actorder"]))
                if isinstance(config["config_groups"]["g"], dict):
                    config["config_groups"]["g"]["weights"] = {part: draw(json_values)}
            case "bytes":
                noise = np.random.default_rng(draw(st.integers(0, 99))).bytes(len(content))
                stored[name] = dtype, shape, noise
            case "dtype":
                other = draw(st.sampled_from(sorted(DTYPES)))
                size = len(content) // DTYPES[other]
                stored[name] = other, [size], content[: size * DTYPES[other]]
            case "shape":
                width = DTYPES[dtype]
                sizes = draw(st.lists(st.integers(0, 40), max_size=4))
                count = int(np.prod(sizes))
                content = (content * (count * width // max(len(content), 1) + 1))[: count * width]
                stored[name] = dtype, sizes, content
            case "json" if "quant_state" in name:
                state = {**json.loads(content), draw(st.sampled_from(["shape", "blocksize", "nested_blocksize"])): 0}
                state[draw(st.sampled_from(["shape", "blocksize", "nested_offset"]))] = draw(json_values)
                content = json.dumps(state).encode()
                stored[name] = dtype, [len(content)], content
            case "rename":
                del stored[name]
                renamed = draw(st.sampled_from(["x.weight", "x.bias", "y.scales", "x.weight_scale"]))
                stored[renamed] = dtype, shape, content
            case _:
                pass
    return config, stored


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=damaged())
def test_damaged_weights_are_read_or_refused(tmp_path: Path, case: tuple[Any, Stored]) -> None:
    try:
        read_all(write(tmp_path, *case))
    except WeightsError as error:
        assert "\n" not in str(error)  # noqa: PT017 - that it is read is right too
