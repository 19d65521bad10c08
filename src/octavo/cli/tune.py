"""``octavo tune``: measures the tile shapes that a model's products run fastest with on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import options as opt
from octavo.cli.console import download_progress, remark, table

if TYPE_CHECKING:
    from octavo.backends.cpu.tiles import Bucket
    from octavo.frontend.tuning import TuningResult

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("tune", short_help="Measure what runs fastest on this machine.")(tune)


def tune(
    model: Annotated[str, typer.Argument(help=opt.engine_help("model"))] = opt.DEFAULT_MODEL,
    quantization: opt.QuantizationOption = None,
    threads: opt.Threads = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write to this file (see --tuning of octavo serve); default: where engines on this machine look.",
            dir_okay=False,
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="About how long to measure, after loading.")
    ] = 60.0,
) -> None:
    """Measure which tile shapes a model's products are fastest with, and keep them for the engines on this machine.

    Answers do not change, only how fast they are computed. Run it on a machine that does nothing else.
    """
    from octavo.frontend.tuning import tune_model
    from octavo.weights.hub import resolve_model

    with download_progress() as progress:
        path = resolve_model(model, progress=progress)
    result = tune_model(
        str(path),
        quantization=quantization.value if quantization else None,
        threads=threads,
        output=output,
        seconds=seconds,
        progress=lambda bucket, share: remark(f"measuring {_rows(bucket)} rows, {share:.0f} s"),
    )
    typer.echo(_report(result))


def _report(result: TuningResult) -> str:
    rows = [
        (
            f"{', '.join(choice.names)}: {choice.shape}",
            _rows(choice.bucket),
            str(choice.candidates),
            str(choice.built_in),
            "as built in" if choice.tile is None else str(choice.tile),
            f"{choice.ratio:.2f}",
        )
        for choice in result.choices
    ]
    header = ("product", "rows", "tried", "built in", "chosen", "faster by")
    better = sum(choice.tile is not None for choice in result.choices)
    parts = [table(header, rows)]
    if result.steps:
        steps = [
            (f"step of {step.rows} rows", f"{step.built_in * 1e3:.2f}", f"{step.chosen * 1e3:.2f}", f"{step.ratio:.2f}")
            for step in result.steps
        ]
        parts.append(table(("whole model", "built in, ms", "chosen, ms", "faster by"), steps))
    if better:
        others = len(result.choices) - better
        rest = f"; for the other {others} the built-in ones are as good" if others else ""
        parts.append(f"{better} of {len(result.choices)} choices are faster than the built-in tiles{rest}.")
    else:
        parts.append("The built-in tiles are as good everywhere: nothing will run faster.")
    parts.append(f"Tiles are rows x columns / regions, on {result.machine}.\nWritten to {result.path}")
    return "\n\n".join(parts)


def _rows(bucket: Bucket) -> str:
    first, last = bucket
    return str(first) if first == last else f"{first}-{last}" if last < 1 << 20 else f"{first}+"
