"""What a model is and how much memory it needs under given settings, found without reading its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo.backends.cpu import CpuSizes, cpu_sizes
from octavo.backends.cpu.encoder import blocks_of
from octavo.errors import CapacityError, ParameterError
from octavo.frontend.options import EngineOptions
from octavo.kv_cache import kv_cache_type
from octavo.models.derived import derived_source
from octavo.models.graph import Graph
from octavo.models.registry import build_graph, check_weights, fit_names
from octavo.models.rewrites import optimize
from octavo.models.stacks import with_stacked_experts
from octavo.planning.hardware import Hardware
from octavo.planning.memory import Alternative, MemoryNeeds, MemoryPlan, plan_memory, reserve_bytes
from octavo.weights.built import BuiltCheckpoint, BuiltRows
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.tensors import DenseTensor

__all__ = ["ModelDescription", "describe_model", "encoder_bytes", "fit_memory", "memory_needs"]


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
        source = derived_source(self.checkpoint, graph.derived)
        for name in graph.weights():
            tensor = source.tensor(name)
            if isinstance(tensor.reader, BuiltRows):
                forms[str(tensor.reader.weight.form["form"]).lower()] = None
            elif len(tensor.shape) > 1:
                forms[tensor.dtype if isinstance(tensor, DenseTensor) else tensor.source] = None
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
        names = set(checkpoint.names())
        graph = with_stacked_experts(fit_names(optimize(build_graph(checkpoint.config)), names), names)
        if not isinstance(checkpoint, BuiltCheckpoint):  # whose weights were checked when it was built
            check_weights(graph, checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    return ModelDescription(checkpoint, graph)


def memory_needs(description: ModelDescription, options: EngineOptions, *, alternatives: bool = True) -> MemoryNeeds:
    """What the memory plan has to know; with ``alternatives`` also what other weight and KV forms would take."""
    graph = description.graph
    if options.max_model_len is not None and options.max_model_len > graph.max_position:
        raise ParameterError("max_model_len", options.max_model_len, f"at most the model's {graph.max_position}")
    chosen, kv_dtype = options.quantization, options.kv_cache_dtype
    if isinstance(description.checkpoint, BuiltCheckpoint):
        description.checkpoint.check_quantization(chosen)
        chosen, alternatives = description.checkpoint.manifest.quantization, False
    sizes = _sizes(description, options, chosen, kv_dtype)
    others = []
    for form in ("w8", "w4") if alternatives else ():
        other = _sizes(description, options, form, kv_dtype)
        if form != chosen and other.weights_bytes < sizes.weights_bytes:
            others.append(_alternative(f"quantization={form}", other))
    bits = kv_cache_type(kv_dtype).bits
    for name in ("bf16", "int8") if alternatives else ():
        if kv_cache_type(name).bits < bits:
            others.append(_alternative(f"kv_cache_dtype={name}", _sizes(description, options, chosen, name)))
    return MemoryNeeds(
        weights_bytes=sizes.weights_bytes,
        block_bytes=sizes.block_bytes,
        arena_bytes=sizes.arena_bytes,
        model_max_len=graph.max_position,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        reserve_bytes=reserve_bytes(graph.vocab_size),
        memory_utilization=options.memory_utilization,
        kv_cache_bytes=options.kv_cache_bytes,
        num_blocks=options.num_gpu_blocks_override,
        weights_form={None: "as in the file", "none": "bf16"}.get(chosen, chosen or ""),
        kv_dtype=kv_cache_type(kv_dtype).name,
        alternatives=tuple(others),
    )


def encoder_bytes(description: ModelDescription, options: EngineOptions, max_tokens: int) -> int:
    """What an encoder takes for steps of so many tokens; keys and values are there for one step only."""
    sizes = _sizes(description, replace(options, max_num_batched_tokens=max_tokens), options.quantization, "auto")
    blocks = blocks_of(max_tokens, options.max_num_seqs)
    reserve = reserve_bytes(description.graph.vocab_size)
    return sizes.weights_bytes + sizes.arena_bytes + blocks * sizes.block_bytes + reserve


def fit_memory(description: ModelDescription, options: EngineOptions, hardware: Hardware) -> MemoryPlan:
    """The memory plan, or a CapacityError that says which other setting would make the model fit."""
    try:
        return plan_memory(memory_needs(description, options, alternatives=False), hardware)
    except CapacityError:
        # Sizing the other forms takes time that a start should not pay for.
        return plan_memory(memory_needs(description, options), hardware)


def _sizes(
    description: ModelDescription, options: EngineOptions, quantization: str | None, kv_cache_dtype: str
) -> CpuSizes:
    return cpu_sizes(
        description.graph,
        description.checkpoint,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
    )


def _alternative(setting: str, sizes: CpuSizes) -> Alternative:
    return Alternative(setting, sizes.weights_bytes, sizes.block_bytes, sizes.arena_bytes)
