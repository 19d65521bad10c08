"""octavo's own names: what neither vLLM nor TGI has one for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from octavo.observability.buckets import STEP
from octavo.observability.exposition import Family, histogram, labelled, scalar
from octavo.observability.numbers import Numbers, Snapshot

__all__ = ["octavo_families"]

_Read = Callable[[Snapshot], float]


def octavo_families(numbers: Numbers, model_name: str, version: str) -> list[Family]:
    """The names that start with ``octavo:``."""
    base = {"model_name": model_name, "engine": "0"}

    def one(name: str, kind: Literal["counter", "gauge"], text: str, read: _Read) -> Family:
        return scalar(f"octavo:{name}", kind, text, (base, read))

    def several(name: str, kind: Literal["counter", "gauge"], text: str, label: str, reads: dict[str, _Read]) -> Family:
        return scalar(f"octavo:{name}", kind, text, *[({**base, label: value}, read) for value, read in reads.items()])

    prefill, decode = numbers.prefill_steps, numbers.decode_steps
    phases = {
        "schedule": [prefill.schedule, decode.schedule],
        "execute": [prefill.execute, decode.execute],
        "process": [prefill.process, decode.process],
    }
    return [
        scalar("octavo:build_info", "gauge", "The version that runs.", ({"version": version}, lambda s: 1)),
        one("engine_up", "gauge", "1 while an engine runs.", lambda s: s.up),
        one("engine_restarts_total", "counter", "Engines that died or hung.", lambda s: numbers.restarts),
        one("replays_total", "counter", "Requests given to a new engine after a crash.", lambda s: numbers.replayed),
        one("lost_requests_total", "counter", "Requests given up after crashes.", lambda s: numbers.lost),
        one("accepted_requests_total", "counter", "Requests given to the engine.", lambda s: numbers.accepted),
        one("requests_in_flight", "gauge", "Requests given to the engine that have not ended.", lambda s: s.live),
        one("paused_requests", "gauge", "Requests out of the batch as their readers are slow.", lambda s: s.paused),
        one("pauses_total", "counter", "Times a request was paused.", lambda s: numbers.pauses),
        labelled(
            "octavo:refused_requests_total",
            "counter",
            "Requests refused before the engine got them, by reason.",
            ("reason",),
            lambda s: {(reason,): count for reason, count in {**_REASONS, **numbers.refused}.items()},
        ),
        scalar(
            "octavo:request_timeouts_total",
            "counter",
            "Requests that ran out of time in the queue or in all.",
            ({"limit": "queue"}, lambda s: numbers.timeouts["queue"]),
            ({"limit": "total"}, lambda s: numbers.timeouts["total"]),
        ),
        labelled(
            "octavo:failed_requests_total",
            "counter",
            "Requests that failed for a reason that is not the client's, by kind.",
            ("kind",),
            lambda s: {(kind,): count for kind, count in {**_KINDS, **numbers.failures}.items()},
        ),
        scalar(
            "octavo:client_disconnects_total",
            "counter",
            "Clients that left before their answer was complete.",
            ({}, lambda s: numbers.clients_gone),
        ),
        several(
            "kv_blocks",
            "gauge",
            "Blocks of the KV cache: held by requests, kept as cached prefixes only, or free.",
            "state",
            {
                "referenced": lambda s: s.stats.referenced_blocks,
                "cached": lambda s: s.stats.cached_blocks,
                "free": lambda s: s.stats.num_blocks - s.stats.referenced_blocks - s.stats.cached_blocks,
            },
        ),
        several(
            "kv_slots",
            "gauge",
            "Token places in the blocks that requests hold, and those with a token in them.",
            "state",
            {"allocated": lambda s: s.stats.allocated_slots, "used": lambda s: s.stats.used_slots},
        ),
        one("kv_waste_ratio", "gauge", "Share of the held token places that is empty.", lambda s: s.stats.waste),
        one("prefix_evictions_total", "counter", "Cached blocks given up for new ones.", lambda s: s.totals.evictions),
        several(
            "tile_choices",
            "gauge",
            "Tile shapes of the engine's products, by shape and rows: found in the tuning file, or built in.",
            "tuning",
            {
                "hit": lambda s: s.engine.tuning_hits if s.engine else 0,
                "miss": lambda s: s.engine.tuning_misses if s.engine else 0,
            },
        ),
        one("steps_total", "counter", "Steps of the engine.", lambda s: s.totals.steps),
        several(
            "step_tokens_total",
            "counter",
            "Tokens computed in steps: of prompts (again after a preemption), and one for each running sequence.",
            "kind",
            {"prefill": lambda s: numbers.prefill_tokens, "decode": lambda s: numbers.decode_tokens},
        ),
        one("engine_busy_seconds_total", "counter", "Time engines spent in steps.", lambda s: s.totals.busy_seconds),
        one("engine_uptime_seconds_total", "counter", "Time engines were up.", lambda s: s.uptime),
        one("engine_idle_ratio", "gauge", "Share of that time without a step, since the start.", lambda s: s.idle),
        histogram(
            "octavo:step_phase_seconds",
            "Time of a step by phase: choosing what runs, running it, reading what came out.",
            STEP,
            *[({**base, "phase": phase}, shown) for phase, shown in phases.items()],
        ),
        histogram(
            "octavo:request_preparation_seconds",
            "From the arrival of a request until it is given to the engine: checks, template, tokens.",
            STEP,
            (base, [numbers.preparation]),
        ),
        scalar(
            "octavo:metric_faults_total",
            "counter",
            "Errors in counting; above 0 is a bug.",
            ({}, lambda s: numbers.faults),
        ),
    ]


# Shown from the start, so that rates have a first value to start from.
_REASONS = dict.fromkeys(("invalid", "template", "overloaded", "unavailable", "unauthorized", "too_large"), 0)
_KINDS = dict.fromkeys(("generation", "internal", "unavailable"), 0)
