"""``octavo bench machine``: the peaks of this machine that the native operations are compared with."""

from __future__ import annotations

import typer

from octavo.cli import options as opt
from octavo.cli.bench import common

__all__ = ["register", "thread_counts"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("machine")(machine)


def machine(threads: opt.Threads = None, json: common.AsJson = False) -> None:
    """Memory bandwidth, cache bandwidth and arithmetic peaks, measured by octavo's own kernels, per thread count."""
    from octavo.benchmarking.record import make_record
    from octavo.cli.bench.record import emit
    from octavo.cli.console import table
    from octavo.cli.profile import machine_peaks
    from octavo.planning.hardware import probe

    most = threads or probe().default_threads
    counts = thread_counts(most)
    peaks = {count: machine_peaks(count) for count in counts}
    by_threads = [{"threads": count, **peaks[count]} for count in counts]
    emit(make_record("machine", peaks[most], threads=most, by_threads=by_threads), as_json=json)
    if not json and len(counts) > 1:
        rows = [[str(count), *(f"{value:,.1f}" for value in peaks[count].values())] for count in counts]
        print(f"\n{table(('threads', *peaks[most]), rows)}")


def thread_counts(most: int) -> list[int]:
    """1, 2, 4 and so on, and ``most`` itself."""
    counts = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*counts, most]
