"""The text of ``/metrics``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest

from octavo.observability.exposition import CONTENT_TYPE, Family, render, scalar
from octavo.observability.octavo_names import octavo_families
from octavo.observability.tgi_names import tgi_families
from octavo.observability.vllm_names import vllm_families

if TYPE_CHECKING:
    from octavo.observability.metrics import Metrics

__all__ = ["CONTENT_TYPE", "metrics_text"]


def metrics_text(metrics: Metrics) -> bytes:
    """Everything that is counted, in Prometheus' text format; send it as ``CONTENT_TYPE``.

    A group of names that cannot be read is left out and the fault logged; the others are served.
    """
    snapshot = metrics.snapshot()
    engine = snapshot.engine
    engine_pid = engine.pid if engine is not None and snapshot.up and engine.pid != os.getpid() else None
    groups: list[Callable[[], str]] = [
        lambda: render(_families(metrics), snapshot),
        lambda: render(metrics.http.families(), snapshot),
        lambda: render([_gauge(name, *gauge) for name, gauge in metrics.gauges.copy().items()], snapshot),
        lambda: _process(None),
        lambda: "" if engine_pid is None else _process(engine_pid),
    ]
    parts = []
    for group in groups:
        try:
            parts.append(group())
        except Exception:
            metrics.fault("metrics_text")
    return "".join(parts).encode()


def _families(metrics: Metrics) -> list[Family]:
    """Made once for each engine: its limits decide on buckets and its settings are shown as labels."""
    if metrics.families is None:
        numbers, engine = metrics.numbers, metrics.engine
        metrics.families = [
            *vllm_families(numbers, metrics.model_name, engine, metrics.options),
            *tgi_families(numbers, engine),
            *octavo_families(numbers, metrics.model_name, metrics.version),
        ]
    return metrics.families


def _gauge(name: str, text: str, read: Callable[[], float]) -> Family:
    return scalar(name, "gauge", text, ({}, lambda snapshot: read()))


def _process(engine_pid: int | None) -> str:
    """The standard names of this process, or those of the engine's process with a prefix."""
    registry = CollectorRegistry()
    if engine_pid is None:
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
    else:
        ProcessCollector(namespace="octavo_engine", pid=lambda: engine_pid, registry=registry)
    return generate_latest(registry).decode()
