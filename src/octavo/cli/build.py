"""``octavo build``: packs a model once, so that every later start maps it and begins at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import options as opt
from octavo.cli.console import download_progress, remark

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("build", short_help="Pack a model once, for starts that only map it.")(build)


def build(
    model: Annotated[str, typer.Argument(help=opt.engine_help("model"))],
    output: Annotated[Path, typer.Argument(help="The folder to make.", file_okay=False)],
    quantization: opt.QuantizationOption = None,
    threads: opt.Threads = None,
    tune: Annotated[
        float,
        typer.Option(
            "--tune",
            min=0.0,
            help="Afterwards measure tile shapes for about so many seconds (see octavo tune) and keep them in the "
            "folder; 0: do not.",
        ),
    ] = 0.0,
    force: Annotated[bool, typer.Option("--force", help="Replace a built model that is there.")] = False,
) -> None:
    """Pack a model into a folder that octavo serve, run and the others take in place of the model.

    The folder holds the weights as the kernels read them, the tokenizer and the chat template. It is mapped instead of
    being packed at every start, and processes that run it share its memory. Answers are the same to the last bit.
    """
    from octavo.frontend.building import build_model
    from octavo.planning.units import format_bytes
    from octavo.weights.hub import resolve_model

    with download_progress() as progress:
        path = resolve_model(model, progress=progress)
    told = -1

    def report(what: str, done: int, total: int) -> None:
        nonlocal told
        if total == 0:
            remark(what)
        elif (quarter := 4 * done // total) > told:
            told = quarter
            remark(f"packing {what}: {format_bytes(done)} of {format_bytes(total)}")

    result = build_model(
        path,
        output,
        name=model,
        quantization=quantization.value if quantization else None,
        threads=threads,
        tune_seconds=tune,
        force=force,
        progress=report,
    )
    forms = ", ".join(f"{count} x {form}" for form, count in result.forms.items())
    typer.echo(f"{result.path}: {format_bytes(result.total_bytes)}, weights {forms}")
