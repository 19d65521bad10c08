"""Compares what peers.py measured: whom each form of octavo stands against, ratios, targets, the machine's limit."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from peers_cases import GROUPS, Row
from peers_engines import Form

__all__ = ["CLASS_KL", "Comparison", "Measured", "compare", "html", "markdown", "spread"]

# Mean KL up to which a form counts as of its class; at 4 bits the peer's own KL is the limit.
CLASS_KL = {16: 1.5e-3, 8: 4e-3}


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one form on one row, round by round, and its quality where that is known."""

    form: Form
    values: Sequence[float]
    kl: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def bits(self) -> int:
        """The class: that of the weights' bits, unless the quality measured is not up to it."""
        bits = self.form.bits
        while self.kl is not None and bits > 4 and self.kl > CLASS_KL[bits]:
            bits //= 2
        return bits


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles; of fewer than three values the least and the greatest."""
    if len(values) < 3:
        return min(values), max(values)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


@dataclass(frozen=True, slots=True)
class Comparison:
    """One form of octavo on one row beside the peers."""

    row: Row
    ours: Measured
    of_class: Measured | None  # the best peer of its class
    fair: Measured | None  # the best peer of its class or a lower one
    of_all: Measured | None  # the best peer whatever its class
    limit: float | None  # the best figure the machine allows

    def ratio(self, peer: Measured | None) -> float | None:
        """Medians: above 1 octavo has more. Where less is better, below 1 is better."""
        return None if peer is None else self.ours.median / peer.median

    def ratio_spread(self, peer: Measured) -> tuple[float, float]:
        """The ratio with each side's worse quartile and the other's better one."""
        (our_low, our_high), (their_low, their_high) = spread(self.ours.values), spread(peer.values)
        return our_low / their_high, our_high / their_low

    @property
    def peer(self) -> Measured | None:
        """The peer that the target is about."""
        return self.of_all if self.row.smallest else self.of_class

    @property
    def target(self) -> float | None:
        """The ratio to reach; 0.6 of the smallest peer for memory."""
        return 0.6 if self.row.smallest else self.row.targets.get(self.ours.bits)

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is none, or no peer to compare with."""
        if self.row.absolute is not None:
            return self.ours.median <= self.row.absolute
        ratio = self.ratio(self.peer)
        if ratio is None or self.target is None:
            return None
        return ratio <= self.target if self.row.lower else ratio >= self.target

    @property
    def largest_ratio(self) -> float | None:
        """The ratio to the peer of the target if octavo did what the machine allows."""
        return None if self.limit is None or self.peer is None else self.limit / self.peer.median

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "row": self.row.key,
            "title": self.row.title,
            "unit": self.row.unit,
            "form": self.ours.form.title,
            "class_bits": self.ours.bits,
            "median": self.ours.median,
            "quartiles": spread(self.ours.values),
            "mean_kl": self.ours.kl,
            "target": self.row.absolute if self.row.absolute is not None else self.target,
            "met": self.met,
            "limit": self.limit,
            "largest_ratio": self.largest_ratio,
        }
        for name, peer in (("of_class", self.of_class), ("fair", self.fair), ("of_all", self.of_all)):
            found[name] = None if peer is None else {
                "form": peer.form.title,
                "class_bits": peer.bits,
                "median": peer.median,
                "quartiles": spread(peer.values),
                "mean_kl": peer.kl,
                "ratio": self.ratio(peer),
                "ratio_spread": self.ratio_spread(peer),
            }  # fmt: skip
        return found


def compare(
    measured: Mapping[str, Sequence[Measured]], limits: Mapping[tuple[str, str], float | None]
) -> list[Comparison]:
    """Every form of octavo on every row it was measured on. ``limits`` are by row and form."""
    found: list[Comparison] = []
    for row in (row for group in GROUPS for row in group.rows):
        everyone = measured.get(row.key, ())
        peers = [each for each in everyone if not each.form.ours]
        for ours in (each for each in everyone if each.form.ours):
            same = [peer for peer in peers if ours.bits in _classes(peer) and _no_better(peer, ours)]
            lower = [peer for peer in peers if peer.form.bits < ours.bits]
            limit = limits.get((row.key, ours.form.title))
            best = (_best(row, same), _best(row, same + lower), _best(row, peers))
            found.append(Comparison(row, ours, *best, limit))
    return found


def _classes(peer: Measured) -> set[int]:
    """A peer is a rival at the bits of its weights, however bad it is there; one of 16 bits may also count as 8."""
    return {peer.form.bits, max(peer.bits, 8)} if peer.form.bits > 4 else {4}


def _no_better(peer: Measured, ours: Measured) -> bool:
    """At 4 bits a peer must not be of better quality than the form it is compared with."""
    return ours.bits > 4 or peer.kl is None or ours.kl is None or ours.kl <= peer.kl


def _best(row: Row, peers: Sequence[Measured]) -> Measured | None:
    if not peers:
        return None
    return (min if row.lower else max)(peers, key=lambda peer: peer.median)


# --- tables -----------------------------------------------------------------------------------------------------------

_HEAD = ("work", "octavo", "figure", "best peer of its class", "ratio", "target", "machine's limit",
         "largest ratio", "best peer of all")  # fmt: skip


def _cells(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, ...]]:
    shown = ""
    for each in comparisons:
        title = f"{each.row.title}, {each.row.unit}"
        yield (
            "" if title == shown else title,
            _named(each.ours, each.ours.form.name),
            _figure(each.ours),
            "" if each.peer is None else f"{_named(each.peer, each.peer.form.title)}: {_figure(each.peer)}",
            "" if each.peer is None else _ratio(each, each.peer),
            _target(each),
            "" if each.limit is None else f"{_number(each.limit)} ({_share(each)})",
            "" if each.largest_ratio is None else f"{each.largest_ratio:.2f}",
            "" if each.of_all is None else f"{each.of_all.form.title}: {_number(each.of_all.median)}, "
            f"{each.ours.median / each.of_all.median:.2f}",
        )  # fmt: skip
        shown = title


def _named(measured: Measured, name: str) -> str:
    return name if measured.kl is None else f"{name} (KL {measured.kl:.1e})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _figure(measured: Measured) -> str:
    low, high = spread(measured.values)
    return f"{_number(measured.median)} ({_number(low)}–{_number(high)})"


def _ratio(each: Comparison, peer: Measured) -> str:
    low, high = each.ratio_spread(peer)
    return f"{each.ours.median / peer.median:.2f} ({low:.2f}–{high:.2f})"


def _target(each: Comparison) -> str:
    sign = "≤" if each.row.lower else "≥"
    value = each.row.absolute if each.row.absolute is not None else each.target
    if value is None:
        return ""
    word = {True: "met", False: "not met", None: "no peer"}[each.met]
    return f"{sign} {value:g}: {word}"


def _share(each: Comparison) -> str:
    """How near octavo is to the limit."""
    assert each.limit is not None
    return f"{(each.limit / each.ours.median if each.row.lower else each.ours.median / each.limit):.0%}"


def markdown(comparisons: Sequence[Comparison]) -> str:
    """A table of Markdown."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    lines += ["| " + " | ".join(cells) + " |" for cells in _cells(comparisons)]
    return "\n".join(lines) + "\n"


def html(comparisons: Sequence[Comparison], heading: str, remarks: Sequence[str]) -> str:
    """A page of its own."""
    head = "".join(f"<th>{escape(word)}</th>" for word in _HEAD)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in _cells(comparisons)
    )
    notes = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    style = "body{font:14px sans-serif;margin:2em}td,th{padding:.3em .6em;border-bottom:1px solid #ccc;text-align:left}"
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(heading)}</title><style>{style}</style>"
        f"<h1>{escape(heading)}</h1><table><tr>{head}</tr>\n{body}</table><ul>{notes}</ul></html>\n"
    )
