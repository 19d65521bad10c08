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
    from octavo import _native
    from octavo.cli.bench.record import emit, make_record
    from octavo.planning.hardware import probe

    count = threads or probe().default_threads
    peaks = {name: float(value) for name, value in _native.machine_peaks(count).items()}
    emit(make_record("machine", peaks, threads=count), as_json=json)
