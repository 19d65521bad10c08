"""The report of a quantised checkpoint, JSON and HTML: sizes, quality before and after, the error of every matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from typing import Any

from octavo.benchmarking.plots import Series, chart
from octavo.planning.units import format_bytes
from octavo.ptq.settings import QuantizeSettings

__all__ = ["make_report", "report_page", "worst_matrices"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; } svg { max-width: 100%; height: auto; }
"""
_WORST = 12


def make_report(
    settings: QuantizeSettings, model: str, done: Mapping[str, Any], evaluations: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """What is kept as report.json: ``done`` of the run, ``evaluations`` of the model before and after."""
    return {
        "benchmark": "quantize",
        "model": model,
        "settings": asdict(settings),
        **done,
        "error_of": "outputs over the calibration inputs" if done["sequences"] else "weights",
        "worst": [{"name": name, "error": error} for name, error in worst_matrices(done)],
        "evaluations": dict(evaluations),
    }


def worst_matrices(done: Mapping[str, Any], count: int = _WORST) -> list[tuple[str, float]]:
    """The matrices that lost most, by name, with their relative squared error."""
    errors = {name: error for layer in done["layers"] for name, error in layer["errors"].items()}
    return sorted(errors.items(), key=lambda item: -item[1])[:count]


def report_page(report: Mapping[str, Any]) -> str:
    """One HTML page that needs nothing else."""
    settings = report["settings"]
    title = f"{report['model']}: {settings['method']}, {settings['bits']} bits"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f"<p>{format_bytes(report['source_bytes'])} became {format_bytes(report['bytes'])} "
        f"({report['bytes'] / max(1, report['source_bytes']):.1%}) in {report['seconds']:.0f} s, with "
        f"{report['tokens']:,} tokens of calibration and {format_bytes(report['peak_memory_bytes'])} of memory.</p>",
    ]
    if report["evaluations"]:
        parts += ["<h2>Quality</h2>", _quality(report["evaluations"])]
    parts += [f"<h2>Error of each matrix ({escape(report['error_of'])})</h2>", _plot(report)]
    parts += ["<h2>Worst matrices</h2>", _rows(("matrix", "relative squared error"), _worst(report))]
    parts += ["<h2>Settings</h2>", _rows(("setting", "value"), [(k, str(v)) for k, v in settings.items()])]
    return "\n".join([*parts, "</body></html>", ""])


def _worst(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(one["name"], f"{one['error']:.3e}") for one in report["worst"]]


def _quality(evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for title, found in evaluations.items():
        ppl, kl = found["perplexity"], found["divergence"]
        rows.append(
            (
                title,
                f"{ppl['perplexity']:.3f} ± {ppl['perplexity_error']:.3f}",
                f"{kl['mean_kl']:.2e} ± {kl['mean_kl_error']:.0e}",
                f"{kl['p99_kl']:.2e}",
                f"{kl['top1']:.2%}",
            )
        )
    header = ("", "perplexity", "mean KL to float32 of the source", "99 % below", "same likeliest token")
    return _rows(header, rows)


def _rows(header: tuple[str, ...], rows: list[Any]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _plot(report: Mapping[str, Any]) -> str:
    """A line for each kind of matrix over the layers."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for layer in report["layers"]:
        for name, error in layer["errors"].items():
            lines.setdefault(name.removesuffix(".weight").rsplit(".", 1)[-1], []).append((layer["layer"], error))
    series = [Series(name, points) for name, points in lines.items()]
    return chart(
        series, title="Error by layer", x_label="layer", y_label="relative squared error", y_log=True, width=900
    )
