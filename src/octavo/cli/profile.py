"""Prints the profile of the native operations: how often, how long, and how near to what the machine can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.cli.console import remark, table

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

__all__ = ["print_profile", "profile_table"]


def profile_table(rows: list[dict[str, object]]) -> str:
    """The profile's rows, the longest first, as text."""
    shown = [
        [
            str(row["op"]),
            f"{row['calls']:,}",
            f"{row['time_ms']:.2f}",
            f"{row['share']:.1%}",
            f"{row['GBps']:.1f}",
            f"{row['GOPS']:.1f}",
        ]
        for row in sorted(rows, key=lambda row: -float(str(row["time_ms"])))
    ]
    return table(("operation", "calls", "ms", "share", "GB/s", "GOP/s"), shown)


def print_profile(llm: LLM) -> None:
    """Print the profile of everything ``llm`` has computed, to stderr."""
    remark(profile_table(llm.profile()))
