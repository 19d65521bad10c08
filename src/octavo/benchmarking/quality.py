"""What is known of the quality of a model's weight form: the newest record of benchmarks/quality.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["AS_STORED", "RESULTS", "no_quality", "peer_quality", "recorded_quality"]

AS_STORED = "as stored"
# Beside the sources; an installed octavo has no such folder, and then no quality to tell.
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
_FIGURES = ("mean_kl", "p99_kl", "top1", "positions")


def recorded_quality(model_sha256: str, form: str | None, *, folder: Path | None = None) -> dict[str, Any]:
    """The divergence of ``form`` (None: as stored) of that model; ``mean_kl`` None with the reason if there is none.

    Records of a KV cache that is not bf16 are of something else.
    """
    name = form or AS_STORED
    found = [
        (record["date"], file, record)
        for file, record in _records(folder)
        if record.get("model_sha256") == model_sha256
        and record.get("form") == name
        and record.get("kv_cache_dtype", "auto") in ("auto", "bf16")
    ]
    if not found:
        return no_quality(_why_not(folder, f"this model in the form {name!r}"))
    _, file, record = max(found, key=lambda each: str(each[0]))
    return _summary(record, file, record)


def peer_quality(engine: str, form: str, *, folder: Path | None = None) -> dict[str, Any]:
    """The same for another engine, whose records (benchmarks/quality_peers.py) hold several forms."""
    found = [
        (record["date"], file, record)
        for file, record in _records(folder)
        if record.get("engine") == engine and form in record.get("forms", {})
    ]
    if not found:
        return no_quality(_why_not(folder, f"{engine} {form}"))
    _, file, record = max(found, key=lambda each: str(each[0]))
    return _summary(record["forms"][form], file, record)


def no_quality(reason: str) -> dict[str, Any]:
    """No quality, and why."""
    return {"mean_kl": None, "reason": reason}


def _summary(figures: dict[str, Any], file: Path, record: dict[str, Any]) -> dict[str, Any]:
    return {name: figures[name] for name in _FIGURES} | {"record": file.name, "date": record["date"]}


def _records(folder: Path | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted((folder or RESULTS).glob("quality-*.json")):
        yield file, json.loads(file.read_text(encoding="utf-8"))


def _why_not(folder: Path | None, what: str) -> str:
    if not (folder or RESULTS).is_dir():
        return "this installation has no folder benchmarks/results with records of quality"
    return f"benchmarks/results has no record of {what} (benchmarks/quality.py makes one)"
