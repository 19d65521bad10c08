"""The settings of an engine: names, defaults, documentation and checks shared by LLM, AsyncLLM and the command line."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

from octavo.errors import ConfigError, ParameterError
from octavo.kv_cache import KV_CACHE_DTYPES

__all__ = ["DEFAULT_MODEL", "EngineOptions", "option_documentation"]

DEFAULT_MODEL = "smollm2-135m"

# "f32" is a yardstick: weights and arithmetic in float32, at a fraction of the speed.
_QUANTIZATIONS = (None, "none", "w8", "w8-wide", "w8-channel", "w4", "w4-g32", "w4-g64", "w4-g128", "fp8", "f32")
_POLICIES = ("fcfs", "priority", "shortest", "fair")
_CAPACITIES = ("max_utilization", "no_evict")
_BLOCK_SIZES = (16,)
_MAX_TOKENS = 1 << 24

# Names other engines use for what octavo has under another name, or does not have; a refusal then says what to do.
_ELSEWHERE: Mapping[str, str] = {
    "gpu_memory_utilization": "octavo's name is memory_utilization",
    "dtype": "weights run as stored; quantization='none' runs a quantised file as bf16",
    "load_format": "the format is found from the files",
    "kv_cache_memory_bytes": "octavo's name is kv_cache_bytes",
    "num_blocks": "octavo's name is num_gpu_blocks_override",
    "trust_remote_code": "octavo never runs code that comes with a model",
    "tensor_parallel_size": "this back end runs in one process",
    "pipeline_parallel_size": "this back end runs in one process",
    "enforce_eager": "octavo always runs its compiled plan",
    "enable_chunked_prefill": "prefill is always chunked, by max_num_batched_tokens",
    "max_seq_len": "octavo's name is max_model_len",
    "num_threads": "octavo's name is threads",
    "policy": "octavo's name is scheduling_policy",
}


def _option(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Everything that can be set when an engine is started. Checked when made: a wrong value is a ParameterError."""

    model: str = _option(
        DEFAULT_MODEL, "a known name, a local directory, a .gguf file, or ORG/NAME of the Hugging Face hub"
    )
    tokenizer: str | None = _option(None, "directory or .gguf file to take the tokenizer from; default: the model")
    quantization: str | None = _option(
        None,
        "weights: none (bf16) or, quantised while loading, w8, w8-wide, w8-channel, w4, w4-g32, w4-g64, w4-g128 or "
        "fp8; default: as they are in the file",
    )
    kv_cache_dtype: str = _option(
        "auto",
        "type of the KV cache: auto (bf16), bf16, f16, f32, fp8_e4m3 (or fp8), fp8_e5m2, fp8_per_token_head, int8 or "
        "int4; those of 8 bits take half the memory of bf16, int4 a quarter",
    )
    max_model_len: int | None = _option(
        None, "longest prompt plus answer in tokens; default: what the model allows and memory holds"
    )
    max_num_batched_tokens: int = _option(2048, "most tokens computed in one step; longer prompts are cut in chunks")
    max_step_seconds: float | None = _option(
        None,
        "about how long a step may take while answers are streamed, in seconds: prompts are then cut in smaller "
        "chunks; default: no bound (the server's is 0.2)",
    )
    max_num_seqs: int = _option(64, "most sequences computed in one step")
    block_size: int = _option(16, "tokens in a KV cache block")
    enable_prefix_caching: bool = _option(True, "reuse the KV cache of equal prompt beginnings")
    memory_utilization: float = _option(0.9, "share of the memory limit (cgroup or machine) octavo may plan with")
    kv_cache_bytes: int | None = _option(None, "size of the KV cache in bytes; default: what memory_utilization gives")
    kv_prefault_bytes: int | None = _option(
        None,
        "bytes of the KV cache that are given memory in idle time after the start, so that no step has to wait for it; "
        "default: 512 MiB, but a quarter of the cache at the most",
    )
    num_gpu_blocks_override: int | None = _option(None, "number of KV cache blocks; default: computed")
    scheduling_policy: Literal["fcfs", "priority", "shortest", "fair"] = _option(
        "fcfs", "order of admission: fcfs, priority, shortest or fair (tenants take turns)"
    )
    capacity: Literal["max_utilization", "no_evict"] = _option(
        "max_utilization",
        "room a request needs to be admitted: max_utilization (at present; preempt when full) or no_evict (at worst)",
    )
    threads: int | None = _option(None, "worker threads; default: physical cores within the CPU quota")
    tuning: str | None = _option(
        None,
        "tile shapes that octavo tune measured: a file, or off for the built-in ones; default: $OCTAVO_TUNING, else "
        "the file for this machine in the cache folder",
    )
    max_logprobs: int = _option(20, "most log-probabilities a request may ask for at each position")
    seed: int | None = _option(
        0, "requests without a seed draw theirs from this and their number; None: from the system"
    )
    profile: bool = _option(False, "measure every native operation; slows small steps a little")
    debug: bool = _option(False, "check the KV cache for integrity whenever the engine is idle")

    def __post_init__(self) -> None:
        _text("model", self.model)
        if self.tokenizer is not None:
            _text("tokenizer", self.tokenizer)
        _one_of("quantization", self.quantization, _QUANTIZATIONS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.max_model_len is not None:
            _integer("max_model_len", self.max_model_len, 2, _MAX_TOKENS)
        _integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, _MAX_TOKENS)
        if self.max_step_seconds is not None and (
            isinstance(self.max_step_seconds, bool)
            or not isinstance(self.max_step_seconds, (int, float))
            or not 0 < self.max_step_seconds < math.inf
        ):
            raise ParameterError("max_step_seconds", self.max_step_seconds, "a number of seconds above 0 or None")
        _integer("max_num_seqs", self.max_num_seqs, 1, 65536)
        _one_of("block_size", self.block_size, _BLOCK_SIZES)
        _boolean("enable_prefix_caching", self.enable_prefix_caching)
        _fraction("memory_utilization", self.memory_utilization)
        if self.kv_cache_bytes is not None:
            _integer("kv_cache_bytes", self.kv_cache_bytes, 1, 1 << 62)
        if self.kv_prefault_bytes is not None:
            _integer("kv_prefault_bytes", self.kv_prefault_bytes, 0, 1 << 62)
        if self.num_gpu_blocks_override is not None:
            _integer("num_gpu_blocks_override", self.num_gpu_blocks_override, 1, 1 << 31)
        if self.kv_cache_bytes is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError("kv_cache_bytes and num_gpu_blocks_override both size the KV cache: give one of them")
        _one_of("scheduling_policy", self.scheduling_policy, _POLICIES)
        _one_of("capacity", self.capacity, _CAPACITIES)
        if self.threads is not None:
            _integer("threads", self.threads, 1, 1024)
        if self.tuning is not None:
            _text("tuning", self.tuning)
        _integer("max_logprobs", self.max_logprobs, 0, 1024)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        _boolean("profile", self.profile)
        _boolean("debug", self.debug)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineOptions:
        """Make options from keyword arguments; a name that is not an option is refused, never ignored."""
        known = {item.name for item in fields(cls)}
        for name, value in kwargs.items():
            if name not in known:
                raise ParameterError(name, value, "absent", _unknown(name, known))
        return cls(**kwargs)


def option_documentation() -> dict[str, str]:
    """The one-sentence documentation of every option by name, for help texts."""
    return {item.name: _documentation(item) for item in fields(EngineOptions)}


def _documentation(item: Field[Any]) -> str:
    return str(item.metadata["doc"])


def _unknown(name: str, known: Iterable[str]) -> str:
    hint = _ELSEWHERE.get(name)
    if hint is None:
        close = difflib.get_close_matches(name, list(known), n=1)
        hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(sorted(known))}"
    return f"{name} is not an option of the engine: {hint}"


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ParameterError(name, value, "a non-empty string")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # The type is compared too: True == 1, and 16.0 == 16.
    if not any(value == item and type(value) is type(item) for item in allowed):
        raise ParameterError(name, value, "one of " + ", ".join(str(item) for item in allowed))


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(name, value, f"an integer from {low} to {high}")


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ParameterError(name, value, "True or False")


def _fraction(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or not 0 < value <= 1:
        raise ParameterError(name, value, "a number above 0 and at most 1")
