"""From a model's name to an engine that is ready: files, graph, memory plan, back end, tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.backends.cpu import CpuBackend
from octavo.backends.cpu.backend import instruction_set
from octavo.backends.cpu.tiles import TuningUse
from octavo.backends.cpu.tuning_cache import choices_for
from octavo.engine.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.phases import PhaseProfile
from octavo.errors import ModelError
from octavo.frontend.description import describe_model, fit_memory, memory_needs
from octavo.frontend.options import EngineOptions
from octavo.frontend.tokenizer import Tokenizer, give_back_memory, load_tokenizer
from octavo.kv_cache import kv_cache_type
from octavo.planning.hardware import probe
from octavo.planning.memory import MemoryPlan
from octavo.weights.built import TUNING, BuiltCheckpoint
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.hub import resolve_model
from octavo.weights.kv_scales import static_kv_scales

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["LoadedModel", "ModelFacts", "RemoteModel", "describe_model", "load_engine", "memory_needs"]

_log = logging.getLogger(__name__)


class ModelFacts(Protocol):
    """What the front end has to know of a model, wherever its engine runs."""

    @property
    def options(self) -> EngineOptions: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    @property
    def memory_report(self) -> str: ...


@dataclass(slots=True, kw_only=True)
class RemoteModel:
    """A model whose engine runs in another process."""

    options: EngineOptions
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    memory_report: str


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """An engine with everything the front end needs to know of its model."""

    options: EngineOptions
    engine: Engine
    loaded_tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    plan: MemoryPlan | None = None
    backend: Any = None
    threads: int = 0
    isa: str = ""
    tuning: TuningUse = field(default_factory=TuningUse)
    resources: ExitStack = field(default_factory=ExitStack)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; it must have been loaded."""
        if self.loaded_tokenizer is None:
            raise RuntimeError("this model was loaded without its tokenizer")
        return self.loaded_tokenizer

    @property
    def memory_report(self) -> str:
        """Where the memory goes, as a table, and below it how much of the model runs with measured tiles."""
        return "" if self.plan is None else f"{self.plan.render()}\ntuning: {self.tuning}"

    def prompt_logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The logits after every position of a prompt."""
        logits: NDArray[np.float32] = self.backend.prompt_logits(token_ids)
        return logits

    def profile(self) -> list[dict[str, Any]]:
        """What the back end measured of its operations."""
        return list(self.backend.profile())

    def profile_steps(self) -> list[dict[str, Any]]:
        """What was measured of each kind of step: its phases, and the operations of its native phase."""
        assert self.engine.phases is not None
        steps = self.engine.phases.report()
        for step in steps:
            operations = step["operations"] = list(self.backend.profile(step["step"]))
            # Sampling is an operation of the native call.
            sampling = sum(row["time_ms"] for row in operations if row["op"] == "sample")
            step["phases_ms"]["native"] -= sampling
            step["phases_ms"]["sampling"] += sampling
        return steps

    def reset_profile(self) -> None:
        """Forget what was measured so far."""
        assert self.engine.phases is not None
        self.engine.phases.clear()
        self.backend.set_profiling(True)

    def close(self) -> None:
        """Free the back end's memory and close the files."""
        self.resources.close()


def load_engine(
    options: EngineOptions, *, progress: Callable[..., Any] | None = None, with_tokenizer: bool = True
) -> LoadedModel:
    """Find, check and load a model (fetching it when it is not here), plan the memory and start an engine on it.

    An engine knows token ids only: in a process of its own it is loaded without the tokenizer.
    """
    loaded = _load(options, resolve_model(options.model, progress=progress), with_tokenizer)
    give_back_memory()  # what the files' headers and the tokenizer's parts took
    return loaded


def _load(options: EngineOptions, path: Path, with_tokenizer: bool) -> LoadedModel:
    with describe_model(path) as description, ExitStack() as stack:
        checkpoint, graph = description.checkpoint, description.graph
        if graph.encoder:
            raise ModelError(
                f"{path}: {graph.architecture} is an encoder, which makes embeddings and generates no text; use "
                "octavo.Encoder, or octavo serve and /v1/embeddings"
            )
        hardware = probe()
        plan = fit_memory(description, options, hardware)
        _log.info("%s", plan.render())
        for note in checkpoint.notes:
            _log.info("weights: %s", note)
        threads = options.threads or hardware.default_threads
        tokenizer = None

        def load_tokenizer_meanwhile() -> None:
            # The interpreter makes it, while the weights are packed outside of it.
            nonlocal tokenizer
            if with_tokenizer:
                tokenizer = load_tokenizer(checkpoint if options.tokenizer is None else options.tokenizer)

        backend = CpuBackend.load(
            graph,
            checkpoint,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            kv_scales=_kv_scales(checkpoint, options, graph.num_layers),
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_model_len=plan.max_model_len,
            num_blocks=plan.num_blocks,
            threads=threads,
            meanwhile=load_tokenizer_meanwhile,
        )
        stack.callback(backend.close)
        own = checkpoint.path / TUNING if isinstance(checkpoint, BuiltCheckpoint) else None
        tuning = backend.tune(*choices_for(options.tuning, hardware.cpu_model, instruction_set(), threads, own))
        _log.info("tuning: %s", tuning)
        backend.set_profiling(options.profile)
        backend.prefault(options.kv_prefault_bytes)
        config = EngineConfig(
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
            block_size=options.block_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            enable_prefix_caching=options.enable_prefix_caching,
            policy=options.scheduling_policy,
            capacity=options.capacity,
            max_step_seconds=options.max_step_seconds,
            debug=options.debug,
        )
        return LoadedModel(
            options=options,
            engine=Engine(config, backend, phases=PhaseProfile() if options.profile else None),
            loaded_tokenizer=tokenizer,
            vocab_size=graph.vocab_size,
            max_model_len=plan.max_model_len,
            config=checkpoint.config,
            generation_config=checkpoint.generation_config,
            plan=plan,
            backend=backend,
            threads=threads,
            isa=instruction_set(),
            tuning=tuning,
            resources=stack.pop_all(),
        )


def _kv_scales(checkpoint: Checkpoint, options: EngineOptions, layers: int) -> list[tuple[float, float]]:
    """The scales that come with the checkpoint, if the KV cache is of a type that takes them."""
    if not kv_cache_type(options.kv_cache_dtype).static:
        return []
    scales = static_kv_scales(checkpoint, layers)
    _log.info("KV cache: %s, %s", options.kv_cache_dtype, "scales of the checkpoint" if scales else "scales of 1")
    return scales
