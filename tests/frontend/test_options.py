"""Engine options: checked when made, nothing unknown accepted."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from octavo.errors import ConfigError, ParameterError
from octavo.frontend.options import EngineOptions, option_documentation
from octavo.kv_cache import KV_CACHE_DTYPES


def test_defaults_are_valid_and_documented() -> None:
    options = EngineOptions()
    assert options.model == "smollm2-135m"
    documentation = option_documentation()
    assert set(documentation) == {item.name for item in dataclasses.fields(options)}
    assert all(len(text) > 10 for text in documentation.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", None),
        ("tokenizer", 3),
        ("quantization", "int8"),
        ("kv_cache_dtype", "nvfp4"),
        ("kv_cache_dtype", "fp8_ds_mla"),
        ("max_model_len", 1),
        ("max_model_len", 2.0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", -1),
        ("block_size", 32),
        ("block_size", 16.0),
        ("enable_prefix_caching", 1),
        ("memory_utilization", 0),
        ("memory_utilization", 1.1),
        ("memory_utilization", math.nan),
        ("memory_utilization", True),
        ("kv_cache_bytes", 0),
        ("num_gpu_blocks_override", 0),
        ("scheduling_policy", "lifo"),
        ("capacity", "guess"),
        ("threads", 0),
        ("tuning", ""),
        ("tuning", 1),
        ("max_logprobs", -1),
        ("seed", 1.5),
        ("seed", 1 << 64),
        ("profile", "yes"),
        ("debug", None),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_limit(field: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        EngineOptions(**{field: value})
    assert caught.value.field == field
    assert caught.value.value is value
    assert caught.value.limit
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_num_sequences", "did you mean max_num_seqs"),
        ("gpu_memory_utilization", "memory_utilization"),
        ("trust_remote_code", "never runs code"),
        ("frobnicate", "the options are"),
    ],
)
def test_an_unknown_option_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ParameterError, match=hint) as caught:
        EngineOptions.from_kwargs(**{name: 1})
    assert caught.value.field == name


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_every_name_of_a_kv_cache_type_is_understood(name: str) -> None:
    assert EngineOptions(kv_cache_dtype=name).kv_cache_dtype == name


def test_two_sizes_of_the_kv_cache_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="kv_cache_bytes and num_gpu_blocks_override"):
        EngineOptions(kv_cache_bytes=1 << 20, num_gpu_blocks_override=4)
