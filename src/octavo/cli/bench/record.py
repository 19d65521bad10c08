"""Prints the record of a measurement: as JSON, or the figures as lines for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["emit"]


def emit(record: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the record: as JSON, or the figures as lines for people."""
    if as_json:
        print(json.dumps(record, indent=1))
        return
    for name, value in record.items():
        if isinstance(value, float):
            print(f"{name:<16}{value:>14,.3f}{_spread(record, name)}")
        elif isinstance(value, (int, str)) and name not in ("command", "date"):
            print(f"{name:<16}{value!s:>14}")
    machine = record["machine"]
    print(f"{'machine':<16}{machine['cpu']}, {machine['threads']} threads, {machine['isa']}")


def _spread(record: Mapping[str, Any], name: str) -> str:
    values = [each[name] for each in record.get("rounds", ()) if name in each]
    if len(values) < 2:
        return ""
    return f"  (median of {len(values)}: {min(values):,.3f} to {max(values):,.3f})"
