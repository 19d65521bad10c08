"""The types a KV cache can have: octavo's names, those of other engines, and the bytes they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["KV_CACHE_DTYPES", "KV_CACHE_TYPES", "KvCacheType", "kv_cache_type"]

_BLOCK_SIZE = 16
_SCALE_BYTES = 2  # a bf16


@dataclass(frozen=True, slots=True)
class KvCacheType:
    """How keys and values are stored.

    ``bits``: of a number. ``scaled``: the key and the value of every token and kv head have a scale each. ``static``:
    the scales of a checkpoint, one for the keys and one for the values of a layer, are used where it has them.
    ``float32``: attention is computed in float32, not in bf16 with float32 sums.
    """

    name: str
    bits: int
    scaled: bool = False
    static: bool = False
    float32: bool = False

    def block_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of a block of 16 tokens in one layer."""
        scales = 2 * _SCALE_BYTES * _BLOCK_SIZE if self.scaled else 0
        return kv_heads * (2 * head_dim * _BLOCK_SIZE * self.bits // 8 + scales)


KV_CACHE_TYPES: Mapping[str, KvCacheType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            KvCacheType("bf16", 16),
            KvCacheType("f16", 16, float32=True),
            KvCacheType("f32", 32, float32=True),
            KvCacheType("fp8_e4m3", 8, static=True),
            KvCacheType("fp8_e5m2", 8, static=True),
            KvCacheType("fp8_per_token_head", 8, scaled=True),
            KvCacheType("int8", 8, scaled=True),
            KvCacheType("int4", 4, scaled=True),
        )
    }
)
# What vLLM calls them.
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "auto": "bf16",
        "bfloat16": "bf16",
        "float16": "f16",
        "float32": "f32",
        "fp8": "fp8_e4m3",
        "int8_per_token_head": "int8",
        "int4_per_token_head": "int4",
    }
)
# Every name that is understood.
KV_CACHE_DTYPES: tuple[str, ...] = ("auto", *KV_CACHE_TYPES, *(name for name in _ALIASES if name != "auto"))


def kv_cache_type(name: str) -> KvCacheType:
    """The type by any of its names (`KV_CACHE_DTYPES`)."""
    return KV_CACHE_TYPES[_ALIASES.get(name, name)]
