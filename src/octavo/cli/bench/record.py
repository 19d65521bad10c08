"""The record of a measurement: the figures together with machine, versions, model, form, command and date."""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from octavo.planning.hardware import probe

__all__ = ["emit", "make_record", "median_of_rounds"]


def _machine_description(threads: int | None) -> dict[str, Any]:
    """What the figures depend on in the machine."""
    from octavo.backends.cpu.backend import instruction_set

    hardware = probe()
    return {
        "cpu": hardware.cpu_model,
        "architecture": hardware.architecture,
        "isa": instruction_set(),
        "physical_cores": hardware.physical_cores,
        "logical_cpus": hardware.logical_cpus,
        "cpu_quota": hardware.cpu_quota,
        "threads": threads or hardware.default_threads,
        "memory_bytes": hardware.memory_total,
        "huge_pages": hardware.huge_pages,
    }


def make_record(benchmark: str, figures: Mapping[str, Any], *, threads: int | None, **about: Any) -> dict[str, Any]:
    """A record of ``figures``; ``about`` is what was measured: model, form, lengths."""
    import octavo

    return {
        "benchmark": benchmark,
        **figures,
        **about,
        "machine": _machine_description(threads),
        "versions": {
            "octavo": octavo.__version__,
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "system": platform.platform(),
        },
        "command": shlex.join(["octavo", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def median_of_rounds(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The median of each figure over the rounds, and the rounds themselves."""
    figures: dict[str, Any] = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    figures["rounds"] = [dict(each) for each in rounds]
    return figures


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
