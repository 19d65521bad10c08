"""Several servers on the same work, in turns, and how many times one is faster than another, with the spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.benchmarking.datasets import make_work
from octavo.benchmarking.figures import request_values
from octavo.benchmarking.options import BenchOptions
from octavo.benchmarking.session import Run, Server, measure
from octavo.benchmarking.workload import WordSource

__all__ = ["COMPARED", "Comparison", "Level", "Ratio", "Sample", "compare", "ratio_table", "ratios"]

# What is compared: key of a result, title, and whether more is better.
COMPARED = (
    ("request_throughput", "requests/s", True),
    ("request_goodput", "good requests/s", True),
    ("output_throughput", "output tok/s", True),
    ("total_token_throughput", "total tok/s", True),
    ("median_ttft_ms", "TTFT p50 ms", False),
    ("p99_ttft_ms", "TTFT p99 ms", False),
    ("median_tpot_ms", "TPOT p50 ms", False),
    ("p99_tpot_ms", "TPOT p99 ms", False),
    ("median_itl_ms", "ITL p50 ms", False),
    ("p99_itl_ms", "ITL p99 ms", False),
    ("median_e2el_ms", "E2EL p50 ms", False),
)
_MOST_VALUES = 20_000  # kept of each distribution and run; more would only make the report large


@dataclass(frozen=True, slots=True)
class Level:
    """A load within a comparison: the options that differ from the common ones."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One run within a comparison; ``values`` are milliseconds by metric."""

    server: str
    level: str
    round: int
    result: dict[str, Any]
    values: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs; the first server is the one the others are held against."""

    servers: list[str]
    levels: list[str]
    rounds: int
    samples: list[Sample]

    def of(self, server: str, level: str) -> list[Sample]:
        """The runs of a server at a level, by round."""
        found = [one for one in self.samples if one.server == server and one.level == level]
        return sorted(found, key=lambda one: one.round)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The first server's figure over another's: the median over the rounds, the least and the greatest."""

    level: str
    key: str
    title: str
    more_is_better: bool
    other: str
    first_median: float
    other_median: float
    median: float
    low: float
    high: float


async def compare(
    servers: Sequence[Server],
    options: BenchOptions,
    words: WordSource,
    *,
    tokenizer_id: str,
    rounds: int,
    levels: Sequence[Level],
    progress: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Run every level on every server once a round.

    Within a round all get the same work, and each round has work of its own, so that no prompt is in a cache. Who
    comes first changes from round to round: a slow spell of the machine hits all.
    """
    wanted = ",".join(dict.fromkeys((*options.metrics, "ttft", "tpot", "itl", "e2el")))
    percents = ",".join(f"{share:g}" for share in dict.fromkeys((*options.percentiles, 99.0)))
    options = replace(options.with_lengths(), percentile_metrics=wanted, metric_percentiles=percents)
    samples = []
    for number in range(rounds):
        shift = number % len(servers)
        for place, level in enumerate(levels):
            seed = options.seed + number * len(levels) + place
            mine = replace(options, seed=seed, **level.changes)
            work = make_work(mine, words, seed=seed)
            for server in [*servers[shift:], *servers[:shift]]:
                run = await measure(server, mine, words, tokenizer_id=tokenizer_id, work=work, progress=progress)
                samples.append(_sample(server, level, number, run, mine))
                tell(f"round {number + 1}, {level.name}: {server.name}: {_short(run.result)}")
    return Comparison([one.name for one in servers], [one.name for one in levels], rounds, samples)


def _sample(server: Server, level: Level, number: int, run: Run, options: BenchOptions) -> Sample:
    good = [answer for answer in run.answers if answer.ok]
    values = request_values(good, per_token=options.definitions == "octavo")
    kept = {
        name: [1000 * value for value in seconds[:: 1 + len(seconds) // _MOST_VALUES]]
        for name, seconds in values.items()
    }
    return Sample(server.name, level.name, number, run.result, kept)


def _short(result: Mapping[str, Any]) -> str:
    failed = f", {result['failed']} failed" if result["failed"] else ""
    return (
        f"{result['request_throughput']:.2f} req/s, {result['output_throughput']:.1f} tok/s, "
        f"TTFT p50 {result['median_ttft_ms']:.0f} ms, TPOT p50 {result['median_tpot_ms']:.1f} ms{failed}"
    )


def ratios(comparison: Comparison) -> list[Ratio]:
    """The first server's figures over each other's: the ratio is taken round by round, from neighbours in time."""
    first = comparison.servers[0]
    found = []
    for level in comparison.levels:
        for key, title, more in COMPARED:
            for other in comparison.servers[1:]:
                pairs = [
                    (float(a.result[key]), float(b.result[key]))
                    for a, b in zip(comparison.of(first, level), comparison.of(other, level), strict=True)
                    if a.result.get(key) and b.result.get(key)
                ]
                if not pairs:
                    continue
                each = [a / b for a, b in pairs]
                found.append(
                    Ratio(
                        level,
                        key,
                        title,
                        more,
                        other,
                        statistics.median(a for a, _ in pairs),
                        statistics.median(b for _, b in pairs),
                        statistics.median(each),
                        min(each),
                        max(each),
                    )
                )
    return found


def ratio_table(comparison: Comparison) -> str:
    """The ratios as lines of text."""
    first = comparison.servers[0]
    lines = [
        f"{first} over the others; medians of {comparison.rounds} rounds, in brackets the rounds' least and greatest"
    ]
    width = max(len(name) for name in comparison.servers)
    for level in comparison.levels:
        lines.append(f"\n{level}")
        head = f"{'':<18}{first:>12}  {'other':<{width}}{'':>12}{'ratio':>9}"
        lines.append(head.rstrip())
        for one in ratios(comparison):
            if one.level == level:
                spread = f"({one.low:.2f} to {one.high:.2f})"
                better = "more is better" if one.more_is_better else "less is better"
                lines.append(
                    f"{one.title:<18}{one.first_median:>12.2f}  {one.other:<{width}}{one.other_median:>12.2f}"
                    f"{one.median:>8.2f}x  {spread:<18} {better}"
                )
    return "\n".join(lines)
