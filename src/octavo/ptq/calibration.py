"""The calibration sequences on their way through a model, one decoder layer at a time, computed by numpy in float32.

Kept between layers is what later layers read, for a decoder the residual stream: samples x tokens x width floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from octavo.errors import ConfigError
from octavo.models.graph import Graph
from octavo.models.nodes import Linear, Node, Value
from octavo.models.reference import run_nodes
from octavo.ptq.grid import Float32Array

__all__ = ["CalibrationRun", "Tap", "calibration_sequences"]

Tap: TypeAlias = Callable[[Value, Float32Array], None]
"""Given the value linears read and its numbers [tokens, width], once for each sequence."""


def calibration_sequences(
    ids: Sequence[int], samples: int, seq_len: int, prefix: Sequence[int] = ()
) -> list[list[int]]:
    """Up to ``samples`` sequences of ``seq_len`` tokens, spread evenly over a text, each beginning with ``prefix``."""
    room = seq_len - len(prefix)
    pieces = len(ids) // room if room > 0 else 0
    if pieces < 1:
        raise ConfigError(
            f"the calibration text has {len(ids)} tokens, one sequence of --seq-len {seq_len} needs {max(room, 2)}"
        )
    count = min(samples, pieces)
    places = [index * pieces // count for index in range(count)]
    return [[*prefix, *ids[place * room : (place + 1) * room]] for place in places]


class CalibrationRun:
    """All sequences, as far as they have been computed."""

    def __init__(self, graph: Graph, sequences: Sequence[Sequence[int]]) -> None:
        self.graph = graph
        self.sequences = sequences
        self.values: list[dict[Value, Float32Array]] = [{} for _ in sequences]
        self._last_read = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs()}
        self._place = {id(node): index for index, node in enumerate(graph.nodes)}

    def begin(self, nodes: Sequence[Node], weight: Callable[[str], Float32Array]) -> None:
        """Run what comes before the first layer."""
        self.advance(nodes, weight)

    def observe(self, nodes: Sequence[Node], weight: Callable[[str], Float32Array], tap: Tap) -> None:
        """Run nodes without keeping what they give; ``tap`` sees what linears read."""
        for number in range(len(self.sequences)):
            self._run(nodes, weight, number, tap)

    def advance(self, nodes: Sequence[Node], weight: Callable[[str], Float32Array], tap: Tap | None = None) -> None:
        """Run nodes, and keep of all values those that later nodes read."""
        end = max((self._place[id(node)] for node in nodes), default=-1)
        for number in range(len(self.sequences)):
            values = self._run(nodes, weight, number, tap)
            self.values[number] = {value: x for value, x in values.items() if self._last_read.get(value, -1) > end}

    def _run(
        self, nodes: Sequence[Node], weight: Callable[[str], Float32Array], number: int, tap: Tap | None
    ) -> dict[Value, Float32Array]:
        values = dict(self.values[number])
        seen: set[Value] = set()

        def before(node: Node) -> None:
            if tap is not None and isinstance(node, Linear) and node.x not in seen:
                seen.add(node.x)
                tap(node.x, values[node.x])

        with np.errstate(over="ignore"):
            run_nodes(self.graph, nodes, weight, self.sequences[number], values, before)
        return values

    def arrays(self) -> dict[str, Float32Array]:
        """What is kept, for a file: an array for each value of each sequence."""
        return {f"{number}.{value}": x for number, values in enumerate(self.values) for value, x in values.items()}

    def restore(self, arrays: Mapping[str, Float32Array]) -> None:
        """Take up what ``arrays`` gave."""
        self.values = [{} for _ in self.sequences]
        for name, x in arrays.items():
            number, _, value = name.partition(".")
            self.values[int(number)][int(value)] = x
