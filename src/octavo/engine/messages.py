"""What the front end and an engine say to each other, as msgspec structs that cross a process border as msgpack.

Commands go to the engine, frames come back: one after each step (or after commands that changed something). Both hold
token ids only. Where engine and front end share a process, the same objects are handed over as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from octavo.engine.request import EngineRequest, FinishReason, ProducedSequence, SequenceOutput
from octavo.errors import CapacityError, OctavoError, ParameterError
from octavo.sampling.params import SamplingParams

__all__ = [
    "Abort",
    "Add",
    "Command",
    "EngineInfo",
    "Failed",
    "Finish",
    "Frame",
    "FromEngine",
    "Heartbeat",
    "Pause",
    "Query",
    "Refusal",
    "Reply",
    "Resume",
    "Start",
    "Started",
    "StepStats",
    "ToEngine",
    "wire_request",
]


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


# -- to the engine


class WireRequest(msgspec.Struct, array_like=True):
    """An EngineRequest in types msgpack knows; ``params`` holds the fields that differ from their defaults."""

    request_id: str
    prompt_ids: bytes
    params: dict[str, Any]
    bad_words_ids: list[list[int]] | None
    eos_ids: list[int]
    arrival: float
    priority: int
    cache_salt: str | None
    adapter: str | None
    seed: int | None
    tenant: str | None
    produced: list[ProducedSequence]

    def restore(self) -> EngineRequest:
        """The request this stands for."""
        params = SamplingParams.from_mapping(self.params, self.bad_words_ids)
        return EngineRequest(
            request_id=self.request_id,
            prompt_ids=np.frombuffer(self.prompt_ids, np.int32),
            params=params,
            eos_ids=tuple(self.eos_ids),
            arrival=self.arrival,
            priority=self.priority,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            seed=self.seed,
            tenant=self.tenant,
            produced=self.produced,
        )


def wire_request(request: EngineRequest) -> WireRequest:
    """A request in the form that crosses the socket."""
    words = request.params.bad_words_ids
    return WireRequest(
        request.request_id,
        np.ascontiguousarray(request.prompt_ids, np.int32).tobytes(),
        request.params.to_mapping(),
        None if words is None else [list(word) for word in words],
        list(request.eos_ids),
        request.arrival,
        request.priority,
        request.cache_salt,
        request.adapter,
        request.seed,
        request.tenant,
        list(request.produced),
    )


class Start(_Message):
    """The first message: the engine's options by name."""

    options: dict[str, Any]
    heartbeat_seconds: float


class Add(_Message):
    """Queue a request."""

    request: WireRequest


class Abort(_Message):
    """End a request that nobody waits for any more."""

    request_id: str


class Finish(_Message):
    """End one sequence, such as at a stop string."""

    request_id: str
    index: int
    reason: FinishReason


class Pause(_Message):
    """Take a request out of the batch until it is resumed."""

    request_id: str


class Resume(_Message):
    """Let a paused request run again."""

    request_id: str


class Query(_Message):
    """Ask for something between two steps: ``stats``, ``reset_prefix_cache`` or ``check``."""

    number: int
    name: str


Command = Add | Abort | Finish | Pause | Resume | Query
ToEngine = Start | Add | Abort | Finish | Pause | Resume | Query


# -- from the engine


class EngineInfo(_Message):
    """What the front end has to know of an engine that is ready."""

    pid: int
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    memory_report: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    isa: str = ""
    threads: int = 0
    tuning_hits: int = 0  # tile choices that were measured
    tuning_misses: int = 0  # and those that were not, where built-in tiles run


class Failed(_Message):
    """Why the engine could not start or had to stop: the name of an error of ``octavo.errors`` and its message."""

    error: str
    message: str


class Heartbeat(_Message):
    """A sign of life once a second, also during a long step; ``step_seconds`` is how long the present step has run."""

    steps: int
    step_seconds: float


class Refusal(msgspec.Struct, array_like=True):
    """A request the engine would not take, with the error to raise."""

    request_id: str
    error: str
    message: str
    field: str | None = None
    value: str | None = None
    limit: str | None = None
    needed: int | None = None
    available: int | None = None
    unit: str = "blocks"

    @classmethod
    def of(cls, request_id: str, error: OctavoError) -> Refusal:
        """A refusal that can cross the socket."""
        refusal = cls(request_id, type(error).__name__, str(error))
        if isinstance(error, ParameterError):
            refusal.field, refusal.value, refusal.limit = error.field, str(error.value)[:200], error.limit
        elif isinstance(error, CapacityError):
            refusal.needed, refusal.available, refusal.unit = error.needed, error.available, error.unit
        return refusal

    def restore(self) -> OctavoError:
        """The error this stands for."""
        if self.error == "ParameterError":
            return ParameterError(self.field or "request", self.value, self.limit or "different", self.message)
        if self.error == "CapacityError":
            return CapacityError(self.message, needed=self.needed, available=self.available, unit=self.unit)
        return OctavoError(self.message)


class Reply(msgspec.Struct, array_like=True):
    """The answer to a Query."""

    number: int
    value: Any


class StepStats(msgspec.Struct, array_like=True):
    """The state of the engine after a step. Totals start at 0 with the engine's process; seconds are of wall time."""

    running: int = 0
    waiting: int = 0
    paused: int = 0
    num_blocks: int = 0
    block_size: int = 16
    referenced_blocks: int = 0
    cached_blocks: int = 0
    allocated_slots: int = 0
    used_slots: int = 0
    prefill_tokens: int = 0  # of this step
    decode_tokens: int = 0  # of this step
    steps: int = 0
    computed_tokens: int = 0
    prompt_tokens_computed: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0  # in tokens
    prefix_hits: int = 0  # in tokens
    preemptions: int = 0
    evictions: int = 0
    schedule_seconds: float = 0.0  # of this step
    execute_seconds: float = 0.0  # of this step
    process_seconds: float = 0.0  # of this step
    busy_seconds: float = 0.0
    uptime_seconds: float = 0.0
    finished: dict[str, int] = {}

    @property
    def usage(self) -> float:
        """Referenced share of the KV cache, 0 to 1."""
        return self.referenced_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def waste(self) -> float:
        """Unused share of the token slots in referenced blocks, 0 to 1."""
        return 1.0 - self.used_slots / self.allocated_slots if self.allocated_slots else 0.0


class Frame(_Message):
    """What happened since the last frame: at most one step, and the commands before it."""

    time: float  # when the step began, in seconds of the machine's monotonic clock
    stepped: bool
    outputs: list[SequenceOutput]
    started: list[str]  # requests scheduled for the first time
    refused: list[Refusal]
    replies: list[Reply]
    stats: StepStats


class Started(_Message):
    """Requests that the step that begins now computes for the first time. Sent before the step, which may kill."""

    request_ids: list[str]


FromEngine = EngineInfo | Failed | Heartbeat | Started | Frame
