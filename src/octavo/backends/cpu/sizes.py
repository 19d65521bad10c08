"""How much memory a model takes on this back end under given settings, found without reading its weights."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.cpu.lowering import BLOCK_SIZE, StepShape, WeightSource, lower
from octavo.backends.cpu.packing import region_bytes
from octavo.kv_cache import kv_cache_type
from octavo.models.graph import Graph

__all__ = ["CpuSizes", "block_bytes", "cpu_sizes", "step_shape"]


@dataclass(frozen=True)
class CpuSizes:
    """Bytes: packed weights, one KV block over all layers, and the arena of the largest step."""

    weights_bytes: int
    block_bytes: int
    arena_bytes: int


def step_shape(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> StepShape:
    """The largest step. No sequence has less than a token, so there are no more of them than tokens."""
    blocks = -(-max_model_len // BLOCK_SIZE)
    return StepShape(max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens), blocks)


def block_bytes(graph: Graph, kv_cache_dtype: str) -> int:
    """One KV block over all layers."""
    kv = kv_cache_type(kv_cache_dtype)
    return sum(kv.block_bytes(node.kv_heads, node.head_dim) for node in graph.attentions)


def cpu_sizes(
    graph: Graph,
    source: WeightSource,
    *,
    quantization: str | None,
    kv_cache_dtype: str,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> CpuSizes:
    """The sizes of a rewritten graph. The arena does not depend on the length of sequences."""
    shape = step_shape(max_num_batched_tokens, max_num_seqs, BLOCK_SIZE)
    lowered = lower(graph, source, quantization=quantization, kv=kv_cache_type(kv_cache_dtype), shape=shape)
    return CpuSizes(region_bytes(lowered.packings), block_bytes(graph, kv_cache_dtype), lowered.arena_bytes)
