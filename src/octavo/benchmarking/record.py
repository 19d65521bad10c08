"""The record of a measurement: the figures together with machine, versions, what was measured, command and date."""

from __future__ import annotations

import hashlib
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from octavo.benchmarking.quality import no_quality
from octavo.planning.hardware import probe
from octavo.weights.built import MANIFEST, is_built

__all__ = ["machine_description", "make_record", "median_of_rounds", "model_sha256", "provenance", "safe_command"]

_SECRETS = ("--api-key", "--header")


def machine_description(threads: int | None) -> dict[str, Any]:
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


def provenance(threads: int | None = None) -> dict[str, Any]:
    """Machine, versions, command and date, as every record ends with."""
    import octavo

    return {
        "machine": machine_description(threads),
        "versions": {
            "octavo": octavo.__version__,
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "system": platform.platform(),
        },
        "command": safe_command(sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def model_sha256(model: Path) -> str:
    """SHA-256 of a .gguf file, or of a directory's weight files one after another in the order of their names.

    Of a built model it is that of its manifest, which has the checksums of all its weights.
    """
    digest = hashlib.sha256()
    files = [model / MANIFEST] if is_built(model) else sorted(model.glob("*.safetensors"))
    for file in [model] if model.is_file() else files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def safe_command(arguments: Sequence[str]) -> str:
    """The command line of octavo with ``arguments``; the values of options that carry keys are left out."""
    words = ["octavo"]
    hide = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if hide:
            words.append("...")
        else:
            words.append(f"{name}=..." if name in _SECRETS and equals else word)
        hide = not hide and word in _SECRETS
    return shlex.join(words)


def make_record(benchmark: str, figures: Mapping[str, Any], *, threads: int | None, **about: Any) -> dict[str, Any]:
    """A record of ``figures``; ``about`` is what was measured: model, form, its quality, lengths."""
    known = {"quality": no_quality("no model was run")} | about
    return {"benchmark": benchmark, **figures, **known, **provenance(threads)}


def median_of_rounds(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The median of each figure over the rounds, and the rounds themselves."""
    figures: dict[str, Any] = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    figures["rounds"] = [dict(each) for each in rounds]
    return figures
