"""A comparison as one HTML page that needs nothing else: plots as SVG, tables, and what the figures depend on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from octavo.benchmarking.comparison import COMPARED, Comparison, ratios
from octavo.benchmarking.plots import COLOURS, Series, chart, distribution

__all__ = ["comparison_record", "comparison_report"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1280px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } .about { opacity: .75; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child, .left { text-align: left; } tr:hover { background: var(--soft); }
.good { color: #00805a; } .bad { color: #c04a00; } .spread { opacity: .7; font-size: .9em; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } svg { max-width: 100%; height: auto; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
pre { white-space: pre-wrap; background: var(--soft); padding: .8rem; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { .good { color: #3ecf9b; } .bad { color: #ff9a5c; } }
"""


def comparison_record(comparison: Comparison, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of a comparison but the pooled distributions, to be kept as JSON."""
    return {
        "benchmark": "serve comparison",
        "servers": comparison.servers,
        "levels": comparison.levels,
        "rounds": comparison.rounds,
        "ratios": [
            {
                "level": one.level,
                "metric": one.key,
                "of": comparison.servers[0],
                "to": one.other,
                "median": one.median,
                "least": one.low,
                "greatest": one.high,
                "more_is_better": one.more_is_better,
            }
            for one in ratios(comparison)
        ],
        "runs": [
            {"server_name": one.server, "level": one.level, "round": one.round, **one.result}
            for one in comparison.samples
        ],
        **about,
    }


def comparison_report(comparison: Comparison, about: Mapping[str, Any], *, title: str = "Servers compared") -> str:
    """The page. ``about`` is what the record carries: machine, versions, command, date."""
    machine = about.get("machine", {})
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="about">{escape(_headline(comparison, machine, about))}</p>',
        f"<p>{_legend(comparison)}</p>",
        "<h2>Ratios</h2>",
        _ratio_rows(comparison),
        "<h2>Throughput against latency</h2>",
        f'<div class="plots">{"".join(_against(comparison))}</div>',
        "<h2>Distributions</h2>",
        f'<div class="plots">{"".join(_distributions(comparison))}</div>',
        "<h2>Medians</h2>",
        *(_medians(comparison, level) for level in comparison.levels),
        "<h2>What the figures depend on</h2>",
        f"<pre>{escape(json.dumps({**_measured(comparison), **about}, indent=1, default=str))}</pre>",
        "</body></html>",
    ]
    return "\n".join(parts)


_SETTINGS = ("backend", "dataset_name", "num_prompts", "request_rate", "burstiness", "tokenizer_id", "definitions")


def _measured(comparison: Comparison) -> dict[str, Any]:
    """What was measured: the settings all runs share, and of each server its model and what it says of itself."""
    first = comparison.samples[0].result
    servers = {}
    for one in comparison.samples:
        about = {"model": one.result.get("model_id"), "model_sha256": one.result.get("model_sha256")}
        servers[one.server] = {**about, **one.result.get("server", {})}
    return {**{name: first.get(name) for name in _SETTINGS}, "servers": servers}


def _headline(comparison: Comparison, machine: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    sample = comparison.samples[0].result
    return (
        f"{sample['num_prompts']} requests of data set {sample.get('dataset_name', '')} a run, "
        f"{comparison.rounds} rounds in turns. {machine.get('cpu', '')}, {machine.get('physical_cores', '?')} cores. "
        f"{about.get('date', '')}"
    )


def _legend(comparison: Comparison) -> str:
    return " &emsp; ".join(
        f'<span class="key" style="background:{COLOURS[number % len(COLOURS)]}"></span>{escape(name)}'
        for number, name in enumerate(comparison.servers)
    )


def _ratio_rows(comparison: Comparison) -> str:
    first = escape(comparison.servers[0])
    head = (
        f'<tr><th>load</th><th class="left">figure</th><th>{first}</th><th class="left">other</th><th></th>'
        "<th>ratio</th><th>spread</th></tr>"
    )
    rows = []
    for one in ratios(comparison):
        better = (one.median > 1) == one.more_is_better
        rows.append(
            f'<tr><td>{escape(one.level)}</td><td class="left">{escape(one.title)}</td><td>{one.first_median:,.2f}</td>'
            f'<td class="left">{escape(one.other)}</td><td>{one.other_median:,.2f}</td>'
            f'<td class="{"good" if better else "bad"}">{one.median:.2f}&times;</td>'
            f'<td class="spread">{one.low:.2f} &ndash; {one.high:.2f}</td></tr>'
        )
    note = (
        f'<p class="about">{first} over the other, round by round: the median, the least and the greatest. '
        "Of rates more is better, of milliseconds less.</p>"
    )
    return f"<table>{head}{''.join(rows)}</table>{note}"


def _against(comparison: Comparison) -> list[str]:
    """Output tokens a second against latencies: one point a run, medians joined over the levels."""
    charts = []
    for key, label in (("median_ttft_ms", "median TTFT"), ("median_tpot_ms", "median TPOT"), ("p99_itl_ms", "ITL p99")):
        series = []
        for number, server in enumerate(comparison.servers):
            middles, dots = [], []
            for level in comparison.levels:
                runs = [(one.result["output_throughput"], one.result[key]) for one in comparison.of(server, level)]
                dots += runs
                middles.append((statistics.median(x for x, _ in runs), statistics.median(y for _, y in runs)))
            series.append(Series(server, middles, dots=True, colour=number))
            if comparison.rounds > 1:
                series.append(Series(server, dots, line=False, faint=True, colour=number))
        charts.append(
            chart(
                series,
                title=f"Output throughput and {label}",
                x_label="output tokens a second",
                y_label=f"{label}, ms",
                y_log=True,
            )
        )
    return charts


def _distributions(comparison: Comparison) -> list[str]:
    charts = []
    for level in comparison.levels:
        for metric, label in (("ttft", "TTFT"), ("itl", "ITL"), ("e2el", "E2EL")):
            series = []
            for number, server in enumerate(comparison.servers):
                pooled = [value for one in comparison.of(server, level) for value in one.values[metric]]
                if pooled:
                    series.append(distribution(server, pooled, colour=number))
            charts.append(
                chart(series, title=f"{label}, {level}", x_label="milliseconds", y_label="up to this, %", x_log=True)
            )
    return charts


def _medians(comparison: Comparison, level: str) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for _, title, _ in COMPARED)
    rows = []
    for server in comparison.servers:
        runs = comparison.of(server, level)
        cells = [_middle([one.result.get(key) for one in runs]) for key, _, _ in COMPARED]
        failed = sum(one.result["failed"] for one in runs)
        rows.append(f"<tr><td>{escape(server)}</td>{''.join(cells)}<td>{failed}</td></tr>")
    return f"<h3>{escape(level)}</h3><table><tr><th></th>{head}<th>failed</th></tr>{''.join(rows)}</table>"


def _middle(values: Sequence[Any]) -> str:
    numbers = [float(value) for value in values if value is not None]
    return f"<td>{statistics.median(numbers):,.2f}</td>" if numbers else "<td>&ndash;</td>"
