"""Prints the profile of the native operations: how often, how long, and how near to what the machine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.cli.console import remark, table

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

__all__ = ["machine_peaks", "print_profile", "profile_table"]

# What the native library calls its figures, and what a record calls them.
_PEAKS = {
    "dram_GBps": "dram_gbps",
    "l3_GBps": "l3_gbps",
    "l2_GBps": "l2_gbps",
    "fp32_GFLOPS": "f32_gflops",
    "bf16_GFLOPS": "bf16_gflops",
    "int8_GOPS": "int8_gops",
}


def machine_peaks(threads: int) -> dict[str, float]:
    """Bandwidths and arithmetic rates of this machine, measured with octavo's own kernels; takes about a second."""
    from octavo._native import measure_machine
    from octavo.backends.cpu.backend import instruction_set

    measured = measure_machine(instruction_set(), threads)
    return {name: float(measured[native]) for name, native in _PEAKS.items()}


def profile_table(rows: Sequence[Mapping[str, Any]], peaks: Mapping[str, float]) -> str:
    """The profile's rows, the longest first, and below them the machine's peaks, as text."""
    shown = [
        [
            str(row["op"]),
            f"{row['calls']:,}",
            f"{row['time_ms']:.2f}",
            f"{row['share']:.1%}",
            f"{row['GBps']:.1f}",
            f"{row['GOPS']:.1f}",
        ]
        for row in sorted(rows, key=lambda row: -row["time_ms"])
    ]
    limits = ", ".join(f"{name} {value:.0f}" for name, value in peaks.items())
    return f"{table(('operation', 'calls', 'ms', 'share', 'GB/s', 'GOP/s'), shown)}\nthe machine's peaks: {limits}"


def print_profile(llm: LLM) -> None:
    """Print the profile of everything ``llm`` has computed, to stderr."""
    from octavo.planning.hardware import probe

    rows = llm.profile()
    remark(profile_table(rows, machine_peaks(llm.options.threads or probe().default_threads)))
