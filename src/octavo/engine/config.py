"""The settings of the engine, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError

__all__ = ["CAPACITY_POLICIES", "SCHEDULING_POLICIES", "EngineConfig"]

SCHEDULING_POLICIES = ("fcfs", "priority", "shortest", "fair")
CAPACITY_POLICIES = ("max_utilization", "no_evict")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How the engine shares the KV cache and the steps between sequences.

    ``policy`` orders admission: ``fcfs`` by arrival; ``priority`` by priority (lower first), then arrival; ``shortest``
    by the prompt tokens that no cached prefix covers, then arrival; ``fair`` lets tenants take turns, the one that was
    given the fewest tokens first, and orders the requests of each by arrival.
    ``capacity``: ``max_utilization`` admits what fits now and preempts the youngest when memory runs out; ``no_evict``
    admits only what fits to its last token.
    ``max_step_seconds``: about how long a step with decodes in it may take; prompts are computed in chunks that fit,
    which also bounds how long a stream stands still. None: ``max_num_batched_tokens`` alone bounds a step.
    ``starvation_bound`` is how many admissions may overtake a sequence that is long (``shortest``) or does not fit yet.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    capacity: str = "max_utilization"
    starvation_bound: int = 64
    max_step_seconds: float | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs", "starvation_bound"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.max_step_seconds is not None and not self.max_step_seconds > 0:
            raise ConfigError(f"max_step_seconds must be above 0 or None, got {self.max_step_seconds}")
        if self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len must be at least 2 (a prompt token and an answer token), got {self.max_model_len}"
            )
        for name, choices in (("policy", SCHEDULING_POLICIES), ("capacity", CAPACITY_POLICIES)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
