"""What a server's own counters say of speculative decoding: the difference over a run, as vLLM's bench reports it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["counters", "speculation"]

_SAMPLE = re.compile(r"^vllm:spec_decode_(num_\w+?)_total(?:\{([^}]*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')


def counters(metrics: str) -> dict[str, float]:
    """The counters of speculative decoding in a ``/metrics`` text, summed over engines, those by position apart."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        position = _POSITION.search(labels or "")
        key = f"{name}/{position.group(1)}" if position else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


def speculation(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any] | None:
    """Acceptance over a run; None when nothing was drafted."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts, drafted = grown.get("num_drafts", 0.0), grown.get("num_draft_tokens", 0.0)
    if drafts <= 0 or drafted <= 0:
        return None
    accepted = grown.get("num_accepted_tokens", 0.0)
    by_position = {
        int(name.partition("/")[2]): value
        for name, value in grown.items()
        if name.startswith("num_accepted_tokens_per_pos/")
    }
    return {
        "num_drafts": int(drafts),
        "draft_tokens": int(drafted),
        "accepted_tokens": int(accepted),
        "acceptance_rate": 100 * accepted / drafted,
        "acceptance_length": 1 + accepted / drafts,
        "per_position_acceptance_rates": [by_position[place] / drafts for place in sorted(by_position)],
    }
