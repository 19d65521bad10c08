"""The names of KV cache types are those of the command line and of vLLM, and each type takes the bytes it says."""

from __future__ import annotations

import pytest

from octavo.cli.options import KvCacheDtype
from octavo.kv_cache import KV_CACHE_DTYPES, KV_CACHE_TYPES, kv_cache_type


def test_the_command_line_has_all_names() -> None:
    assert sorted(each.value for each in KvCacheDtype) == sorted(KV_CACHE_DTYPES)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("auto", "bf16"),
        ("bfloat16", "bf16"),
        ("float16", "f16"),
        ("float32", "f32"),
        ("fp8", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("fp8_per_token_head", "fp8_per_token_head"),
        ("int8_per_token_head", "int8"),
        ("int4_per_token_head", "int4"),
    ],
)
def test_names_of_other_engines_mean_the_same_type(name: str, kind: str) -> None:
    assert kv_cache_type(name) is KV_CACHE_TYPES[kind]


def test_a_block_takes_its_numbers_and_scales() -> None:
    found = {name: kind.block_bytes(3, 64) for name, kind in KV_CACHE_TYPES.items()}
    numbers = 3 * 2 * 64 * 16
    assert found == {
        "bf16": 2 * numbers,
        "f16": 2 * numbers,
        "f32": 4 * numbers,
        "fp8_e4m3": numbers,
        "fp8_e5m2": numbers,
        "fp8_per_token_head": numbers + 3 * 64,
        "int8": numbers + 3 * 64,
        "int4": numbers // 2 + 3 * 64,
    }
