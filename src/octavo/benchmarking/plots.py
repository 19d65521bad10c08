"""Charts as SVG text, drawn here: lines, dots and shares over linear or logarithmic axes. They need nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["COLOURS", "Series", "chart", "distribution"]

# Told apart by most who cannot tell red from green (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 18, 38, 52
_MOST_POINTS = 240  # of a distribution's curve: more cannot be seen


@dataclass(frozen=True, slots=True)
class Series:
    """A named row of points. ``line`` joins them, ``dots`` marks them, ``dashed`` makes the line so.

    ``faint`` ones are drawn lightly and not listed below the chart: the runs behind a median.
    """

    name: str
    points: Sequence[tuple[float, float]]
    line: bool = True
    dots: bool = True
    dashed: bool = False
    faint: bool = False
    colour: int | None = None


class _Axis:
    """Turns values into places: linear from 0 or logarithmic, with round numbers as its marks."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool) -> None:
        usable = [value for value in values if math.isfinite(value) and (not log or value > 0)]
        low, high = min(usable, default=1.0), max(usable, default=1.0)
        self.log = log
        if log:
            low, high = low / 1.15, high * 1.15
        else:
            low = min(0.0, low)
            high = high * 1.05 if high > low else low + 1.0
        self._low, self._high = self._scaled(low), self._scaled(high)
        self._start, self._end = start, end
        self.marks = _log_marks(low, high) if log else _linear_marks(low, high)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def place(self, value: float) -> float | None:
        """Where a value is; None where it has no place."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return None
        share = (self._scaled(value) - self._low) / ((self._high - self._low) or 1.0)
        return self._start + share * (self._end - self._start)


def _linear_marks(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_marks(low: float, high: float) -> list[float]:
    if high < 4 * low:
        return [mark for mark in _linear_marks(low, high) if mark > 0]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        marks = [mark for mark in marks if low <= mark <= high]
        if len(marks) <= 9:
            break
    return marks or [low, high]


def _number(value: float) -> str:
    """A number as short as an axis wants it."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    width: int = 600,
    height: int = 360,
) -> str:
    """One chart as an ``<svg>`` element that can stand in a page or in a file of its own."""
    columns = _legend_columns([one.name for one in series if not one.faint])
    rows = max(1, math.ceil(sum(not one.faint for one in series) / columns))
    bottom = height - _BOTTOM - 18 * rows
    x = _Axis([p[0] for one in series for p in one.points], _LEFT, width - _RIGHT, log=x_log)
    y = _Axis([p[1] for one in series for p in one.points], bottom, _TOP, log=y_log)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12" '
        'fill="currentColor">',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="600">{escape(title)}</text>',
    ]
    parts += _frame(x, y, bottom, width)
    middle = (_LEFT + width - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{bottom + 36}" text-anchor="middle">{escape(x_label)}</text>')
    up = (_TOP + bottom) / 2
    parts.append(
        f'<text x="16" y="{up:.0f}" text-anchor="middle" transform="rotate(-90 16 {up:.0f})">{escape(y_label)}</text>'
    )
    listed = 0
    for number, one in enumerate(series):
        colour = COLOURS[(number if one.colour is None else one.colour) % len(COLOURS)]
        parts += _draw(one, x, y, colour)
        if one.faint:
            continue
        column, row = listed % columns, listed // columns
        listed += 1
        left, line = _LEFT + column * (width - _LEFT - _RIGHT) / columns, bottom + 56 + 18 * row
        parts.append(f'<rect x="{left:.0f}" y="{line - 9}" width="12" height="8" fill="{colour}"/>')
        parts.append(f'<text x="{left + 17:.0f}" y="{line}">{escape(one.name)}</text>')
    return "\n".join([*parts, "</svg>"])


def _legend_columns(names: Sequence[str]) -> int:
    longest = max((len(name) for name in names), default=0)
    return 3 if longest <= 18 else 2 if longest <= 32 else 1


def _frame(x: _Axis, y: _Axis, bottom: int, width: int) -> list[str]:
    parts = []
    for mark in x.marks:
        place = x.place(mark)
        parts.append(
            f'<line x1="{place:.1f}" y1="{_TOP}" x2="{place:.1f}" y2="{bottom}" stroke="currentColor" '
            f'stroke-opacity="0.13"/><text x="{place:.1f}" y="{bottom + 17}" text-anchor="middle">'
            f"{_number(mark)}</text>"
        )
    for mark in y.marks:
        place = y.place(mark)
        parts.append(
            f'<line x1="{_LEFT}" y1="{place:.1f}" x2="{width - _RIGHT}" y2="{place:.1f}" stroke="currentColor" '
            f'stroke-opacity="0.13"/><text x="{_LEFT - 6}" y="{place:.1f}" dy="4" text-anchor="end">'
            f"{_number(mark)}</text>"
        )
    outline = f"M{_LEFT} {_TOP}V{bottom}H{width - _RIGHT}"
    return [*parts, f'<path d="{outline}" fill="none" stroke="currentColor"/>']


def _draw(one: Series, x: _Axis, y: _Axis, colour: str) -> list[str]:
    found = [(x.place(px), y.place(py), px, py) for px, py in one.points]
    seen = [(left, down, px, py) for left, down, px, py in found if left is not None and down is not None]
    parts = []
    if one.line and len(seen) > 1:
        path = "L".join(f"{left:.1f} {down:.1f}" for left, down, _, _ in seen)
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
    if one.dots:
        opacity, radius = (0.35, 2.8) if one.faint else (0.9, 3.8)
        parts += [
            f'<circle cx="{left:.1f}" cy="{down:.1f}" r="{radius}" fill="{colour}" fill-opacity="{opacity}">'
            f"<title>{escape(one.name)}: {_number(px)}, {_number(py)}</title></circle>"
            for left, down, px, py in seen
        ]
    return parts


def distribution(name: str, values: Sequence[float], *, colour: int | None = None) -> Series:
    """The share of ``values`` up to each value, in percent."""
    ordered = sorted(values)
    count = len(ordered)
    picked = (
        range(count)
        if count <= _MOST_POINTS
        else [round(place * (count - 1) / (_MOST_POINTS - 1)) for place in range(_MOST_POINTS)]
    )
    return Series(name, [(ordered[index], 100 * (index + 1) / count) for index in picked], dots=False, colour=colour)
