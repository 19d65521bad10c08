"""What a model is and how much memory it needs under given settings, found without reading its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo.errors import ParameterError
from octavo.frontend.options import EngineOptions
from octavo.models.graph import GatherSampled, Graph
from octavo.models.registry import build_graph, check_weights
from octavo.models.rewrites import optimize
from octavo.planning.memory import Alternative, MemoryNeeds
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.tensors import AffineTensor, Tensor

__all__ = ["ModelDescription", "describe_model", "memory_needs"]

_PANEL = 16  # output columns packed together; a matrix is padded to a multiple of them
_GROUP = 32  # weights that share a scale when quantised while loading
_KV_BYTES = {"auto": 2, "bf16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """An opened checkpoint and the checked graph it is run as; closes the checkpoint."""

    checkpoint: Checkpoint
    graph: Graph

    @property
    def summary(self) -> str:
        """One line: architecture, sizes and the format of the weights."""
        graph = self.graph
        parameters = sum(math.prod(shape) for shape in graph.weights().values())
        forms: dict[str, None] = {}
        for name in graph.weights():
            tensor = self.checkpoint.tensor(name)
            if len(tensor.shape) > 1:
                forms[tensor.source if isinstance(tensor, AffineTensor) else tensor.dtype] = None
        return (
            f"{graph.architecture}, {parameters / 1e6:.0f}M parameters, {graph.num_layers} layers, hidden "
            f"{graph.hidden_size}, vocabulary {graph.vocab_size:,}, context {graph.max_position:,}, "
            f"{self.checkpoint.format} ({', '.join(forms)})"
        )

    def close(self) -> None:
        """Close the files."""
        self.checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def describe_model(path: str | Path) -> ModelDescription:
    """Open a model directory or file and check that octavo can run it."""
    checkpoint = open_checkpoint(path)
    try:
        graph = optimize(build_graph(checkpoint.config))
        check_weights(graph, checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    return ModelDescription(checkpoint, graph)


def memory_needs(description: ModelDescription, options: EngineOptions) -> MemoryNeeds:
    """What the memory plan has to know; the other weight and KV forms are offered where the chosen ones do not fit."""
    graph = description.graph
    if options.max_model_len is not None and options.max_model_len > graph.max_position:
        raise ParameterError("max_model_len", options.max_model_len, f"at most the model's {graph.max_position}")
    arena = _arena_bytes(graph, options)
    chosen = options.quantization
    weights = _weights_bytes(description, chosen)
    block = _block_bytes(graph, options.kv_cache_dtype)
    alternatives = []
    for form in ("w8", "w4"):
        size = _weights_bytes(description, form)
        if form != chosen and size < weights:
            alternatives.append(Alternative(f"quantization={form}", size, block, arena))
    if options.kv_cache_dtype == "f32":
        alternatives.append(Alternative("kv_cache_dtype=bf16", weights, _block_bytes(graph, "bf16"), arena))
    return MemoryNeeds(
        weights_bytes=weights,
        block_bytes=block,
        arena_bytes=arena,
        model_max_len=graph.max_position,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        memory_utilization=options.memory_utilization,
        kv_cache_bytes=options.kv_cache_bytes,
        num_blocks=options.num_gpu_blocks_override,
        weights_form="as in the file" if chosen is None else {"none": "bf16"}.get(chosen, chosen),
        kv_dtype="bf16" if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        alternatives=tuple(alternatives),
    )


def _weights_bytes(description: ModelDescription, quantization: str | None) -> int:
    tensors = (description.checkpoint.tensor(name) for name in description.graph.weights())
    return sum(_packed_bytes(tensor, quantization) for tensor in tensors)


def _packed_bytes(tensor: Tensor, quantization: str | None) -> int:
    """Size of a weight in the packed form it is run in."""
    if len(tensor.shape) < 2:
        return 4 * math.prod(tensor.shape)
    rows, k = tensor.shape
    rows = -(-rows // _PANEL) * _PANEL
    if isinstance(tensor, AffineTensor) and quantization is None:
        scales = k // tensor.group * (2 if tensor.scale_dtype == "f16" else 4)
        return rows * (k * tensor.bits // 8 + scales * (2 if tensor.has_minimum else 1))
    if quantization == "w8":
        return rows * (k + -(-k // _GROUP) * 2)
    if quantization == "w4":
        return rows * (k // 2 + -(-k // _GROUP) * 4)
    return rows * k * 2


def _block_bytes(graph: Graph, kv_cache_dtype: str) -> int:
    """One KV block over all layers."""
    values = sum(2 * node.kv_heads * node.head_dim for node in graph.attentions)
    return values * 16 * _KV_BYTES[kv_cache_dtype]


def _arena_bytes(graph: Graph, options: EngineOptions) -> int:
    """The largest sum of values alive at once in the largest step, each reusing the place of dead ones."""
    widths = graph.widths()
    last_use = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs()}
    last_use[graph.output] = len(graph.nodes)
    rows = {True: options.max_num_batched_tokens, False: min(options.max_num_seqs, options.max_num_batched_tokens)}
    alive: dict[int, int] = {}
    most = 0
    before_gather = True
    for index, node in enumerate(graph.nodes):
        before_gather = before_gather and not isinstance(node, GatherSampled)
        alive[node.output] = widths[node.output] * rows[before_gather] * 4
        most = max(most, sum(alive.values()))
        alive = {value: size for value, size in alive.items() if last_use.get(value, index) > index}
    return most
