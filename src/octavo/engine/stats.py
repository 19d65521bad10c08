"""Counters of the engine and a snapshot of its state, for metrics, benchmarks and tests."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Counters", "EngineStats"]


@dataclass(slots=True)
class Counters:
    """Totals since the start of the engine; they only grow."""

    steps: int = 0
    computed_tokens: int = 0
    prefill_tokens: int = 0  # of those computed; the others were computed one a sequence and step
    generated_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache at a first admission
    prefix_hits: int = 0  # of those, tokens found
    admissions: int = 0
    preemptions: int = 0
    pauses: int = 0
    deferrals: int = 0  # times an admission waited for a prefix another sequence was computing
    block_copies: int = 0
    blocks_shared_late: int = 0  # blocks computed although an equal one was finished meanwhile, and given back
    refused: int = 0
    busy_seconds: float = 0.0  # spent in steps, of wall time
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})


@dataclass(slots=True)
class EngineStats:
    """The state of the engine between two steps. ``running``, ``waiting`` and ``paused`` count sequences.

    Waste as in the paged attention paper: ``allocated_slots`` are the token slots of referenced blocks, each block
    counted once however many share it; ``used_slots`` are those that hold a token.
    """

    running: int
    waiting: int
    paused: int
    num_blocks: int
    block_size: int
    referenced_blocks: int
    cached_blocks: int
    free_blocks: int
    reserved_blocks: int
    evictions: int
    allocated_slots: int
    used_slots: int
    step_tokens: int  # computed in the last step: prefill and decode
    step_prefill_tokens: int
    step_decode_tokens: int
    schedule_seconds: float  # of the last step: until the back end was called
    execute_seconds: float  # in the back end
    process_seconds: float  # afterwards
    counters: Counters

    @property
    def waste(self) -> float:
        """Unused share of the allocated slots."""
        return 1.0 - self.used_slots / self.allocated_slots if self.allocated_slots else 0.0

    @property
    def usage(self) -> float:
        """Referenced share of the pool."""
        return self.referenced_blocks / self.num_blocks
