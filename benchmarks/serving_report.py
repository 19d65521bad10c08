"""What the comparison of servers over HTTP says: medians with their spread, and ratios of runs of the same round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["COLUMNS", "Column", "Servers", "figure", "middle", "ratios", "table", "table_of_ratios"]

# Runs of one server by round, by its name.
Servers = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a run: where it is, the factor of its unit, whether more is better, and the ratio to be reached."""

    title: str
    path: tuple[str, ...]
    scale: float = 1.0
    higher: bool = False
    target: float | None = None
    digits: int = 0

    def met(self, ratio: float) -> bool | None:
        """Whether a ratio to another server reaches the target, None without a target."""
        if self.target is None:
            return None
        return ratio >= self.target if self.higher else ratio <= self.target


COLUMNS = (
    Column("req/s", ("req_per_s",), higher=True, target=2.0, digits=2),
    Column("tok/s", ("output_tok_per_s",), higher=True),
    Column("TTFT p50", ("ttft_ms", "p50")),
    Column("TTFT p99", ("ttft_ms", "p99"), target=0.5),
    Column("TPOT p50", ("tpot_ms", "p50"), digits=1),
    Column("TPOT p99", ("tpot_ms", "p99"), target=0.5, digits=1),
    Column("ITL p50", ("itl_ms", "p50"), digits=1),
    Column("ITL p99", ("itl_ms", "p99"), target=0.2),
    Column("RSS MB", ("peak_rss_bytes",), scale=1e-6, target=0.6),
    Column("front end %", ("front_end_share",), scale=100.0, digits=1),
)


def figure(run: Mapping[str, Any], column: Column) -> float | None:
    """A run's figure in the unit of its column, None where it was not measured."""
    value: Any = run
    for name in column.path:
        value = None if value is None else value.get(name)
    return None if value is None else float(value) * column.scale


def middle(runs: Sequence[Mapping[str, Any]], column: Column) -> tuple[float, float] | None:
    """The median over the rounds, and the distance of the least from the greatest as a share of it."""
    values = [value for run in runs if (value := figure(run, column)) is not None]
    if not values:
        return None
    median = statistics.median(values)
    return median, (max(values) - min(values)) / median if median else 0.0


def ratios(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], column: Column
) -> tuple[float, float, float] | None:
    """Median, least and greatest of the ratios of two servers, each of runs of the same round."""
    found = []
    for our, their in zip(ours, theirs, strict=True):
        one, other = figure(our, column), figure(their, column)
        if one is not None and other:
            found.append(one / other)
    return (statistics.median(found), min(found), max(found)) if found else None


def table(servers: Servers) -> str:
    """One line a server: the median of every figure; the spread of its rounds in percent below."""
    lines = [f"{'':22}" + "".join(f"{column.title:>12}" for column in COLUMNS) + f"{'failed':>8}"]
    for name, runs in servers.items():
        found = [middle(runs, column) for column in COLUMNS]
        cells = [
            f"{'-' if value is None else format(value[0], f'.{column.digits}f'):>12}"
            for column, value in zip(COLUMNS, found, strict=True)
        ]
        lines.append(f"{name:22}" + "".join(cells) + f"{sum(run['failed'] for run in runs):>8}")
        if len(runs) > 1:
            spreads = [f"{'' if value is None else f'{value[1]:.0%}':>12}" for value in found]
            lines.append(f"{'  spread':22}" + "".join(spreads))
    return "\n".join(lines)


def table_of_ratios(servers: Servers, ours: str = "octavo") -> str:
    """One line for each of our forms and each other server; + and - say whether a target is met."""
    columns = [column for column in COLUMNS if column.target is not None]
    lines = [f"{'ratio to':36}" + "".join(f"{column.title:>24}" for column in columns)]
    goals = [f"{'>=' if column.higher else '<='} {column.target:g}" for column in columns]
    lines.append(f"{'to be reached':36}" + "".join(f"{goal:>24}" for goal in goals))
    for name, runs in servers.items():
        if not name.startswith(ours):
            continue
        for other, their_runs in servers.items():
            if other.startswith(ours):
                continue
            cells = [_ratio_cell(ratios(runs, their_runs, column), column) for column in columns]
            lines.append(f"{name + ' / ' + other:36}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def _ratio_cell(found: tuple[float, float, float] | None, column: Column) -> str:
    if found is None:
        return "-"
    median, least, greatest = found
    return f"{'+' if column.met(median) else '-'} {median:.2f} ({least:.2f} to {greatest:.2f})"
