"""Byte counts as people read and write them."""

from __future__ import annotations

__all__ = ["format_bytes"]

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def format_bytes(count: int) -> str:
    """``98362432`` as ``"98.4 MB"``: decimal units, three significant digits or so."""
    value = float(count)
    for unit in _UNITS:
        if abs(value) < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1000
    if unit == "B":
        return f"{count} B"
    return f"{value:.2f} {unit}" if abs(value) < 9.995 else f"{value:.1f} {unit}"
