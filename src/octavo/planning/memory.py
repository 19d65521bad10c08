"""The memory plan: what fits the budget, how large the KV pool becomes, and what to change when a model does not fit.

Budget = min over every memory limit of (limit x utilisation - what is in use). From it come the packed weights, the
arena of the largest step and a reserve for the interpreter; the rest is the KV pool, but never more blocks than
``max_num_seqs`` sequences of ``max_model_len`` tokens can fill. The pool is virtual memory until a block is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.errors import CapacityError, ConfigError
from octavo.planning.hardware import Hardware
from octavo.planning.units import format_bytes

__all__ = ["RESERVE_BYTES", "Alternative", "MemoryNeeds", "MemoryPlan", "memory_budget", "plan_memory", "reserve_bytes"]

# The interpreter with its libraries and buffers of requests, and what the tokenizer takes for each token it knows.
RESERVE_BYTES = 55_000_000
RESERVE_BYTES_A_TOKEN = 350

# A model whose length was left open is shortened to fit, but not below this: too short to be of use to anybody.
_SHORTEST_AUTO_LEN = 256

# Above this a machine swaps or kills for reasons that have nothing to do with the model.
_HIGHEST_SENSIBLE_UTILIZATION = 0.98


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another choice of one setting and the sizes it would lead to; offered when the present ones do not fit."""

    setting: str
    weights_bytes: int
    block_bytes: int
    arena_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What a model asks for under the chosen settings.

    ``block_bytes`` is one KV block over all layers. ``max_model_len`` is None when the user left it open: then it is
    the model's own length, or what fits. ``kv_cache_bytes`` or ``num_blocks`` fix the pool instead of filling the
    budget; ``num_blocks`` is what the user knows as num_gpu_blocks_override. The settings have been checked before
    (EngineOptions).
    """

    weights_bytes: int
    block_bytes: int
    arena_bytes: int
    model_max_len: int
    max_model_len: int | None = None
    max_num_seqs: int = 64
    block_size: int = 16
    reserve_bytes: int = RESERVE_BYTES
    memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    weights_form: str = ""
    kv_dtype: str = ""
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes. ``notes`` are one-line remarks on what was adjusted to fit."""

    num_blocks: int
    max_model_len: int
    weights_bytes: int
    block_bytes: int
    arena_bytes: int
    reserve_bytes: int
    budget_bytes: int
    block_size: int
    max_num_seqs: int
    memory_utilization: float
    limit_bytes: int
    in_use_bytes: int
    weights_form: str = ""
    kv_dtype: str = ""
    notes: tuple[str, ...] = ()

    @property
    def kv_bytes(self) -> int:
        """Size of the whole KV pool."""
        return self.num_blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV pool holds."""
        return self.num_blocks * self.block_size

    @property
    def full_sequences(self) -> float:
        """How many sequences of ``max_model_len`` the pool holds at once."""
        return self.num_blocks / _blocks(self.max_model_len, self.block_size)

    @property
    def total_bytes(self) -> int:
        """Everything planned, with the pool full."""
        return self.weights_bytes + self.kv_bytes + self.arena_bytes + self.reserve_bytes

    def rows(self) -> list[tuple[str, int, str]]:
        """The table: name, bytes, remark."""
        shown = f"{self.full_sequences:.1f}".removesuffix(".0")
        pool = (
            f"{self.num_blocks:,} blocks, {self.kv_tokens:,} tokens, {shown} sequence{'' if shown == '1' else 's'}"
            f" of {self.max_model_len:,}; {self.kv_dtype + '; ' if self.kv_dtype else ''}taken as it is used"
        )
        return [
            ("weights", self.weights_bytes, self.weights_form),
            ("KV pool", self.kv_bytes, pool),
            ("arena", self.arena_bytes, "intermediate values of the largest step"),
            ("reserve", self.reserve_bytes, "interpreter, tokenizer, requests"),
            ("left over", self.budget_bytes - self.total_bytes, ""),
        ]

    def render(self) -> str:
        """The table as plain text, printed when an engine starts."""
        lines = [
            f"memory budget {format_bytes(self.budget_bytes)}: {self.memory_utilization:g} of "
            f"{format_bytes(self.limit_bytes)}, less {format_bytes(self.in_use_bytes)} in use"
        ]
        for name, size, remark in self.rows():
            lines.append(f"  {name:<10}{format_bytes(size):>10}  {remark}".rstrip())
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)


def reserve_bytes(vocab_size: int) -> int:
    """What a process takes besides weights, KV pool and arena, with a tokenizer of so many tokens."""
    return RESERVE_BYTES + RESERVE_BYTES_A_TOKEN * vocab_size


def memory_budget(hardware: Hardware, utilization: float) -> tuple[int, int, int]:
    """(budget, limit, in use) in bytes under the memory limit that leaves the least room."""
    budget, limit, in_use = min(
        (int(each.limit * utilization) - each.in_use, each.limit, each.in_use) for each in hardware.memory
    )
    return max(0, budget), limit, in_use


def plan_memory(needs: MemoryNeeds, hardware: Hardware) -> MemoryPlan:
    """Fit ``needs`` into the budget, or raise CapacityError saying how much is missing and what would make it fit."""
    if needs.kv_cache_bytes is not None and needs.kv_cache_bytes < needs.block_bytes:
        raise ConfigError(f"kv_cache_bytes must hold a block of {needs.block_bytes} bytes, got {needs.kv_cache_bytes}")
    budget, limit, in_use = memory_budget(hardware, needs.memory_utilization)
    room = budget - needs.weights_bytes - needs.arena_bytes - needs.reserve_bytes
    if needs.num_blocks is not None or needs.kv_cache_bytes is not None:
        num_blocks = needs.num_blocks or (needs.kv_cache_bytes or 0) // needs.block_bytes
        if num_blocks * needs.block_bytes > room:
            raise _does_not_fit(needs, hardware, num_blocks)
    else:
        longest = needs.max_model_len or needs.model_max_len
        shortest = needs.max_model_len or min(needs.model_max_len, _SHORTEST_AUTO_LEN)
        wanted = needs.max_num_seqs * _blocks(longest, needs.block_size)
        num_blocks = min(wanted, max(0, room) // needs.block_bytes)
        least = _blocks(shortest, needs.block_size)
        if room < 0 or num_blocks < least:
            raise _does_not_fit(needs, hardware, least)
    notes = []
    max_model_len = needs.max_model_len
    if max_model_len is None:
        max_model_len = min(needs.model_max_len, num_blocks * needs.block_size)
        if max_model_len < needs.model_max_len:
            notes.append(
                f"max_model_len is {max_model_len:,} of the model's {needs.model_max_len:,}: the KV pool holds no more"
            )
    return MemoryPlan(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        weights_bytes=needs.weights_bytes,
        block_bytes=needs.block_bytes,
        arena_bytes=needs.arena_bytes,
        reserve_bytes=needs.reserve_bytes,
        budget_bytes=budget,
        block_size=needs.block_size,
        max_num_seqs=needs.max_num_seqs,
        memory_utilization=needs.memory_utilization,
        limit_bytes=limit,
        in_use_bytes=in_use,
        weights_form=needs.weights_form,
        kv_dtype=needs.kv_dtype,
        notes=tuple(notes),
    )


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _does_not_fit(needs: MemoryNeeds, hardware: Hardware, blocks: int) -> CapacityError:
    budget, limit, in_use = memory_budget(hardware, needs.memory_utilization)
    pool = blocks * needs.block_bytes
    total = needs.weights_bytes + needs.arena_bytes + needs.reserve_bytes + pool
    missing = total - budget
    remedies = list(_remedies(needs, hardware, blocks, budget))
    advice = "it would fit with " + ", or ".join(remedies) if remedies else "no single setting makes it fit"
    parts = (
        f"weights {format_bytes(needs.weights_bytes)}, KV for {blocks * needs.block_size:,} tokens "
        f"{format_bytes(pool)}, arena {format_bytes(needs.arena_bytes)}, reserve {format_bytes(needs.reserve_bytes)}"
    )
    return CapacityError(
        f"the model does not fit: {missing:,} bytes ({format_bytes(missing)}) are missing. It needs "
        f"{format_bytes(total)} ({parts}) and may use {format_bytes(budget)} ({needs.memory_utilization:g} of "
        f"{format_bytes(limit)}, less {format_bytes(in_use)} in use); {advice}",
        needed=total,
        available=budget,
        unit="bytes",
    )


def _remedies(needs: MemoryNeeds, hardware: Hardware, blocks: int, budget: int) -> Iterator[str]:
    """Each single change that would make the model fit, the least costly to quality first."""
    fixed = needs.weights_bytes + needs.arena_bytes + needs.reserve_bytes
    possible = max(0, budget - fixed) // needs.block_bytes
    if needs.num_blocks is not None and possible:
        yield f"num_gpu_blocks_override={possible}"
    elif needs.kv_cache_bytes is not None and possible:
        yield f"kv_cache_bytes={possible * needs.block_bytes}"
    elif needs.max_model_len is not None and possible:
        yield f"max_model_len={possible * needs.block_size}"
    needed = fixed + blocks * needs.block_bytes
    utilization = max((needed + ceiling.in_use) / ceiling.limit for ceiling in hardware.memory)
    utilization = math.ceil(utilization * 100) / 100
    if needs.memory_utilization < utilization <= _HIGHEST_SENSIBLE_UTILIZATION:
        yield f"memory_utilization={utilization:g}"
    for other in needs.alternatives:
        rest = other.weights_bytes + other.arena_bytes + needs.reserve_bytes
        if rest + blocks * other.block_bytes <= budget:
            yield other.setting
