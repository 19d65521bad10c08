"""What every recorded measurement says about itself: command, machine, date, versions, model, form and quality."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.benchmarking import quality
from octavo.benchmarking.quality import AS_STORED, no_quality
from octavo.benchmarking.record import machine_description, model_sha256
from octavo.weights.hub import resolve_model

__all__ = [
    "RESULTS",
    "about_model",
    "command",
    "dashed",
    "machine",
    "model_sha256",
    "no_quality",
    "peer_quality",
    "provenance",
    "recorded_quality",
    "versions",
    "write",
]

REPOSITORY = Path(__file__).resolve().parent.parent
# Of this tree, also where the octavo that runs is an installed one.
RESULTS = REPOSITORY / "benchmarks" / "results"


def recorded_quality(digest: str, form: str | None) -> dict[str, Any]:
    """The recorded quality of a weight form (None: as stored) of the model with this hash."""
    return quality.recorded_quality(digest, form, folder=RESULTS)


def peer_quality(engine: str, form: str) -> dict[str, Any]:
    """The recorded quality of a form of another engine."""
    return quality.peer_quality(engine, form, folder=RESULTS)


def provenance(packages: Iterable[str]) -> dict[str, Any]:
    """Command, machine, date, source revision and the versions of octavo and ``packages``."""
    return {
        "command": command(["python", *sys.orig_argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(packages),
    }


def about_model(name: str | Path, form: str | None = None) -> dict[str, Any]:
    """Name, hash, weight form (None: as stored) and recorded quality of the model that was run."""
    model = resolve_model(str(name))
    digest = model_sha256(model)
    return {
        "model": model.name,
        "model_sha256": digest,
        "form": form or AS_STORED,
        "quality": recorded_quality(digest, form),
    }


def machine() -> dict[str, Any]:
    """The processor, the cores this process may use, the system, and how busy it was just before."""
    return {
        **machine_description(None),
        "system": platform.system(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python, octavo with its source revision, and ``packages``."""
    found = {"python": platform.python_version(), "octavo": _version("octavo"), "octavo_revision": _revision()}
    return found | {name: _version(name) for name in packages}


def command(words: Iterable[str]) -> str:
    """A command line in which every file that is there goes by its name alone: its folder is nobody's business."""
    return shlex.join(_without_folder(word) for word in words)


def dashed(text: str) -> str:
    """``text`` as a part of a file name."""
    return "-".join("".join(c if c.isalnum() or c in "._" else " " for c in text).split())


def write(record: dict[str, Any], path: Path) -> None:
    """Write ``record`` as JSON, making the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_folder(word: str) -> str:
    option, equals, value = word.partition("=")
    if equals and (option.startswith("-") or Path(value).exists()):
        return f"{option}={_without_folder(value)}"
    path = Path(word)
    if not path.exists() and not path.is_absolute():
        return word
    if path.resolve().is_relative_to(REPOSITORY) and path.resolve() != REPOSITORY:
        return str(path.resolve().relative_to(REPOSITORY))
    return path.name or word


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _revision() -> str:
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
