"""Prints where the time went: phases of a step and native operations, and how near these come to the peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.cli.console import remark, table

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

__all__ = ["machine_peaks", "peak_share", "phases_table", "print_profile", "profile_of", "profile_text"]

# What the native library calls its figures, and what a record calls them.
_PEAKS = {
    "dram_GBps": "dram_gbps",
    "l3_GBps": "l3_gbps",
    "l2_GBps": "l2_gbps",
    "fp32_GFLOPS": "f32_gflops",
    "bf16_GFLOPS": "bf16_gflops",
    "int8_GOPS": "int8_gops",
}
_RATES = {"int8": "int8_GOPS", "bf16": "bf16_GFLOPS", "f32": "fp32_GFLOPS"}


def machine_peaks(threads: int) -> dict[str, float]:
    """Bandwidths and arithmetic rates of this machine, measured with octavo's own kernels; takes about a second."""
    from octavo._native import measure_machine
    from octavo.backends.cpu.backend import instruction_set

    measured = measure_machine(instruction_set(), threads)
    return {name: float(measured[native]) for name, native in _PEAKS.items()}


def peak_share(row: Mapping[str, Any], peaks: Mapping[str, float]) -> tuple[float, str] | None:
    """The share of the machine's peak that an operation reached, and of which: what it was nearest to.

    An operation that multiplies is held against its arithmetic and against memory, from which weights and KV blocks
    come; one that goes row by row against the L3 cache, in which the rows of a step lie.
    """
    rate = _RATES.get(row.get("arithmetic") or "")
    limits = [(row["GBps"], "l3_GBps")] if rate is None else [(row["GOPS"], rate), (row["GBps"], "dram_GBps")]
    shares = [(value / peaks[name], name.partition("_")[0]) for value, name in limits if value and peaks.get(name)]
    return max(shares, default=None)


def _operations_table(rows: Sequence[Mapping[str, Any]], peaks: Mapping[str, float]) -> str:
    shown = []
    for row in sorted(rows, key=lambda row: -row["time_ms"]):
        share = peak_share(row, peaks)
        shown.append(
            [
                str(row["op"]),
                f"{row['calls']:,}",
                f"{row['time_ms']:.2f}",
                f"{row['share']:.1%}",
                f"{row['GBps']:.1f}",
                f"{row['GOPS']:.1f}",
                "" if share is None else f"{share[0]:.0%} {share[1]}",
            ]
        )
    return table(("operation", "calls", "ms", "share", "GB/s", "GOP/s", "of peak"), shown)


def phases_table(step: Mapping[str, Any]) -> str:
    """The phases of one kind of step, in the order in which they come, as text."""
    phases: Mapping[str, float] = step["phases_ms"]
    whole = sum(phases.values()) or 1.0
    rows = [
        [name, f"{spent:.2f}", f"{spent / max(1, step['steps']):.4f}", f"{spent / whole:.1%}"]
        for name, spent in phases.items()
        if spent
    ]
    return table(("phase", "ms", "ms a step", "share"), rows)


def profile_of(llm: LLM) -> dict[str, Any]:
    """What ``llm`` has measured, for a record: the machine's peaks, and each kind of step with its phases and
    operations, those with the share of the peak that they reached."""
    from octavo.planning.hardware import probe

    steps = llm.profile_steps()
    peaks = machine_peaks(llm.options.threads or probe().default_threads)
    for step in steps:
        for row in step["operations"]:
            share = peak_share(row, peaks)
            row["peak_share"], row["peak"] = (None, None) if share is None else share
    return {"peaks": peaks, "steps": steps}


def profile_text(profile: Mapping[str, Any]) -> str:
    """A profile as text: for each kind of step its phases, then its operations; at the end the machine's peaks."""
    parts = []
    for step in profile["steps"]:
        count, mean = step["steps"], sum(step["phases_ms"].values()) / max(1, step["steps"])
        each = f"{step['tokens'] / max(1, count):,.1f} tokens, {step['sequences'] / max(1, count):,.1f} sequences"
        parts.append(f"{step['step']}: {count:,} steps of {mean:.3f} ms, {each} each")
        parts.append(phases_table(step))
        parts.append(_operations_table(step["operations"], profile["peaks"]))
    parts.append("the machine's peaks: " + ", ".join(f"{name} {value:.0f}" for name, value in profile["peaks"].items()))
    return "\n\n".join(parts)


def print_profile(llm: LLM) -> dict[str, Any]:
    """Print the profile of everything ``llm`` has computed, to stderr, and return it."""
    profile = profile_of(llm)
    remark(profile_text(profile))
    return profile
