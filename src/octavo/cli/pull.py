"""``octavo pull``: fetch a model into the local cache, so that later commands start at once."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli import options as opt
from octavo.cli.console import download_progress

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("pull", short_help="Fetch a model and print where it is kept.")(pull)


def pull(
    model: Annotated[
        str, typer.Argument(help="A known name such as smollm2-135m, or ORG/NAME of the Hugging Face hub.")
    ] = opt.DEFAULT_MODEL,
) -> None:
    """Fetch a model and print where it is kept; a model that is there already is not fetched again."""
    from octavo.weights.hub import pull as fetch

    with download_progress() as progress:
        path = fetch(model, progress=progress)
    typer.echo(path)
