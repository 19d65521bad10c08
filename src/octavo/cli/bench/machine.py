"""``octavo bench machine``: the peaks of this machine that the native operations are compared with."""

from __future__ import annotations

import typer

from octavo.cli import options as opt
from octavo.cli.bench import common

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("machine")(machine)


def machine(threads: opt.Threads = None, json: common.AsJson = False) -> None:
    """Memory bandwidth, cache bandwidth and arithmetic peaks, measured by octavo's own kernels."""
    from octavo.benchmarking.record import make_record
    from octavo.cli.bench.record import emit
    from octavo.cli.profile import machine_peaks
    from octavo.planning.hardware import probe

    count = threads or probe().default_threads
    emit(make_record("machine", machine_peaks(count), threads=count), as_json=json)
