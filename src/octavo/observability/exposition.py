"""Families of metrics and their Prometheus text form (version 0.0.4).

prometheus_client's own writer would add ``_total`` to every counter, which TGI's names do not have, and takes several
times as long, during which the event loop would stand still.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from prometheus_client.utils import floatToGoString

from octavo.observability.instruments import Histogram, project

if TYPE_CHECKING:
    from octavo.observability.numbers import Snapshot

__all__ = ["CONTENT_TYPE", "Family", "Labels", "histogram", "label_text", "labelled", "render", "scalar"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]

_number: Callable[[float], str] = floatToGoString  # untyped where it comes from


@dataclass(frozen=True)
class Family:
    """One metric name with all its series: ``write`` adds their lines to a list."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    write: Callable[[list[str], Snapshot], None]
    header: str = field(init=False)

    def __post_init__(self) -> None:
        text = self.help.replace("\\", r"\\").replace("\n", r"\n")
        object.__setattr__(self, "header", f"# HELP {self.name} {text}\n# TYPE {self.name} {self.kind}\n")


def scalar(
    name: str,
    kind: Literal["counter", "gauge"],
    text: str,
    *series: tuple[Labels, Callable[[Snapshot], float]],
) -> Family:
    """A counter or gauge with fixed series, each a set of labels and where its value comes from."""
    prepared = [(f"{name}{label_text(labels)} ", read) for labels, read in series]

    def write(out: list[str], snapshot: Snapshot) -> None:
        for prefix, read in prepared:
            out.append(f"{prefix}{_number(read(snapshot))}\n")

    return Family(name, kind, text, write)


def labelled(
    name: str,
    kind: Literal["counter", "gauge"],
    text: str,
    names: Sequence[str],
    read: Callable[[Snapshot], Mapping[tuple[str, ...], float]],
) -> Family:
    """A counter or gauge whose series come and go: one for each key, which holds the values of the labels."""

    def write(out: list[str], snapshot: Snapshot) -> None:
        for values, number in list(read(snapshot).items()):
            labels = label_text(dict(zip(names, values, strict=True)))
            out.append(f"{name}{labels} {_number(number)}\n")

    return Family(name, kind, text, write)


def histogram(name: str, text: str, bounds: Sequence[float], *series: tuple[Labels, Sequence[Histogram]]) -> Family:
    """A histogram with fixed series, each a set of labels and the histograms it is the sum of."""
    edges = [_number(bound) for bound in bounds] + ["+Inf"]
    prepared = [
        (
            [f"{name}_bucket{label_text({**labels, 'le': edge})} " for edge in edges],
            f"{name}_sum{label_text(labels)} ",
            f"{name}_count{label_text(labels)} ",
            shown,
        )
        for labels, shown in series
    ]

    def write(out: list[str], snapshot: Snapshot) -> None:
        for buckets, sum_prefix, count_prefix, shown in prepared:
            counts, total = project(shown, bounds)
            out.extend([f"{prefix}{count}.0\n" for prefix, count in zip(buckets, counts, strict=True)])
            out.append(f"{sum_prefix}{_number(total)}\n{count_prefix}{counts[-1]}.0\n")

    return Family(name, "histogram", text, write)


def render(families: Sequence[Family], snapshot: Snapshot) -> str:
    """The text of these families."""
    out: list[str] = []
    for family in families:
        out.append(family.header)
        family.write(out, snapshot)
    return "".join(out)


def label_text(labels: Labels) -> str:
    """Labels as they are written behind a name."""
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{_escaped(value)}"' for name, value in labels.items()]) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
