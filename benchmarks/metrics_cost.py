"""Measures what watching costs: counting a step and ending a request in microseconds, a scrape in milliseconds."""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from octavo.engine.messages import EngineInfo, StepStats
from octavo.frontend.output_processor import Processed
from octavo.frontend.outputs import RequestMetrics
from octavo.observability.access import AccessRecord
from octavo.observability.endpoint import metrics_text
from octavo.observability.logs import configure, log_access
from octavo.observability.metrics import Metrics
from octavo.sampling.params import SamplingParams


def median_microseconds(work: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def request() -> Any:
    """What the metrics read of a request that has ended."""
    now = time.monotonic()
    sequence = SimpleNamespace(finish_reason="stop", token_ids=[1] * 100)
    return SimpleNamespace(
        sequences=[sequence],
        params=SamplingParams(max_tokens=200),
        prompt_ids=[1] * 50,
        num_cached_tokens=32,
        running=1,
        error=None,
        metrics=RequestMetrics(now - 4, now - 3.9, now - 3, now - 1, now - 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32, help="running sequences")
    parser.add_argument("--repetitions", type=int, default=5000)
    arguments = parser.parse_args()
    metrics = Metrics("model")
    metrics.engine_started(EngineInfo(0, 49152, 8192, 1000, 16, "", {}, {}))
    stats = StepStats(num_blocks=1000, running=arguments.sequences, decode_tokens=arguments.sequences)
    processed = Processed(
        intervals=[0.012 + 0.0001 * number for number in range(arguments.sequences)], num_tokens=arguments.sequences
    )

    def step() -> None:
        nonlocal stats
        stats = StepStats(**{**known, "steps": stats.steps + 1})
        begin = time.perf_counter()
        metrics.stepped(stats, processed)
        spent.append((time.perf_counter() - begin) * 1e6)

    def whole() -> None:
        state = request()
        metrics.accepted(state)
        metrics.finished(state)

    known = {name: getattr(stats, name) for name in StepStats.__struct_fields__}
    spent: list[float] = []
    for _ in range(arguments.repetitions):
        step()
    print(f"counting a step of {arguments.sequences} sequences: {statistics.median(spent):.1f} us")
    print(f"counting a request: {median_microseconds(whole, arguments.repetitions):.1f} us")
    scrape = median_microseconds(lambda: metrics_text(metrics), 200)
    print(f"a scrape: {scrape / 1000:.2f} ms, {len(metrics_text(metrics))} bytes")
    now = time.monotonic()
    record = AccessRecord(
        request_id="0" * 32,
        method="POST",
        path="/v1/completions",
        route="/v1/completions",
        status=200,
        arrival=now - 4,
        end=now,
        generations=1,
        times=request().metrics,
    )
    for form in ("text", "json"):
        configure(form, stream=io.StringIO())
        print(f"a line of the log as {form}: {median_microseconds(lambda: log_access(record), 2000):.1f} us")


if __name__ == "__main__":
    main()
