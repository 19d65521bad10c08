"""``octavo bench``: measures this machine and a model on it, and records the figures with all that they depend on."""

from __future__ import annotations

import typer

from octavo.cli.bench import latency, machine, prefill, serve, throughput

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command and its kinds to ``app``."""
    bench = typer.Typer(
        help="Measure speed: throughput, latency, prefill, a server over HTTP, or the machine itself.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    throughput.register(bench)
    latency.register(bench)
    prefill.register(bench)
    serve.register(bench)
    machine.register(bench)
    app.add_typer(bench, name="bench", short_help="Measure speed: offline, of the machine, of a server.")
