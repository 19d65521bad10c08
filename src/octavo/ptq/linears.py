"""Which linears of a graph share an input, and where a scale of that input can be taken out of what makes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.models.graph import Graph
from octavo.models.mixture import MoeExperts
from octavo.models.nodes import Attention, GeluMul, LayerNorm, Linear, Node, RmsNorm, SiluMul, Value

__all__ = ["Absorber", "LayerPlan", "LinearGroup", "layer_plans"]


@dataclass(frozen=True)
class Absorber:
    """Vectors and rows of matrices that take the inverse of an input's factors.

    ``vectors`` are a norm's weight and bias; ``plus_one`` that the weight stands for 1 + weight. ``matrix`` is a tensor
    whose rows (those of ``rows``, or all, and the bias) are divided; ``heads`` (query heads, kv heads, head_dim) that
    they are values of attention, whose outputs repeat each kv head for several query heads.
    """

    vectors: tuple[str, ...] = ()
    plus_one: bool = False
    matrix: str | None = None
    rows: NDArray[np.intp] | None = field(default=None, compare=False)
    bias: str | None = None
    heads: tuple[int, int, int] | None = None

    @property
    def is_norm(self) -> bool:
        return self.matrix is None


@dataclass(frozen=True)
class LinearGroup:
    """The tensors of a checkpoint that are multiplied with one value, maybe several projections in one of them.

    ``clip`` says which may have their ranges clipped. ``absorber`` None: the value's factors can be taken out nowhere.
    """

    value: Value
    weights: tuple[str, ...]
    k: int
    clip: tuple[bool, ...]
    absorber: Absorber | None


@dataclass(frozen=True)
class LayerPlan:
    """A decoder layer: its nodes, and its linears in the order in which they run."""

    layer: int
    nodes: tuple[Node, ...]
    groups: tuple[LinearGroup, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        """All matrices to quantise."""
        return tuple(name for group in self.groups for name in group.weights)


def layer_plans(graph: Graph) -> list[LayerPlan]:
    """The decoder layers of a graph as built (not rewritten), in order."""
    if any(isinstance(node, MoeExperts) for node in graph.nodes):
        raise ModelError(
            f"architecture {graph.architecture}: experts cannot be quantised ahead yet; run it in w8 or w4"
        )
    places: dict[int, list[int]] = defaultdict(list)
    for place, node in enumerate(graph.nodes):
        if node.layer is not None:
            places[node.layer].append(place)
    analysis = _Analysis(graph)
    plans, end = [], min((found[0] for found in places.values()), default=0)
    for layer, found in sorted(places.items()):
        if found != list(range(end, end + len(found))):
            raise ModelError(f"architecture {graph.architecture}: layer {layer} is not computed in one piece")
        nodes = graph.nodes[end : end + len(found)]
        plans.append(LayerPlan(layer, nodes, analysis.groups(nodes)))
        end += len(found)
    if not any(plan.groups for plan in plans):
        raise ModelError(f"architecture {graph.architecture}: has no linears in its layers that could be quantised")
    return plans


class _Analysis:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = {node.output: node for node in graph.nodes}
        self.readers: dict[Value, list[Node]] = defaultdict(list)
        self.inputs: dict[str, set[Value]] = defaultdict(set)  # what each tensor is multiplied with
        for node in graph.nodes:
            for value in node.inputs():
                self.readers[value].append(node)
            if isinstance(node, Linear):
                for name in node.weights:
                    self.inputs[self.source(name)].add(node.x)
        self.widths = graph.widths()

    def source(self, name: str) -> str:
        """The checkpoint's tensor that a weight is, or is some rows of."""
        view = self.graph.derived.get(name)
        return name if view is None else view.source

    def groups(self, nodes: Sequence[Node]) -> tuple[LinearGroup, ...]:
        """The linears among some nodes, by what they read."""
        found: dict[Value, list[Linear]] = {}
        for node in nodes:
            if isinstance(node, Linear):
                for name in node.weights:
                    self._check(name)
                found.setdefault(node.x, []).append(node)
        return tuple(self._group(value, linears) for value, linears in found.items())

    def _check(self, name: str) -> None:
        source, view = self.source(name), self.graph.derived.get(name)
        if len(self.inputs[source]) > 1:
            raise ModelError(f"tensor {source}: is multiplied with several values, which cannot be quantised yet")
        if view is not None and (view.transposed or view.part is not None or view.scale != 1.0):
            raise ModelError(
                f"tensor {source}: is stored otherwise than [outputs, inputs] ({view}), which cannot be quantised yet"
            )

    def _group(self, value: Value, linears: list[Linear]) -> LinearGroup:
        clip: dict[str, bool] = {}
        for linear in linears:
            for name in linear.weights:
                clip[self.source(name)] = clip.get(self.source(name), True) and self._may_clip(linear)
        return LinearGroup(value, tuple(clip), self.widths[value], tuple(clip.values()), self._absorber(value, linears))

    def _may_clip(self, linear: Linear) -> bool:
        """Queries and keys are multiplied with each other, and suffer from clipping (AWQ leaves them out)."""
        return not any(
            isinstance(node, Attention) and linear.output in node.qkv[: max(1, len(node.qkv) - 1)]
            for node in self.readers[linear.output]
        )

    def _absorber(self, value: Value, linears: list[Linear]) -> Absorber | None:
        made_by: Any = self.producers[value]
        if len(self.readers[value]) != len(linears) or made_by.layer != linears[0].layer:
            return None
        match made_by:
            case RmsNorm() | LayerNorm():
                given: tuple[str | None, ...] = (made_by.weight, getattr(made_by, "bias", None))
                vectors = tuple(name for name in given if name is not None)
                if made_by.weight is None or any(name in self.graph.derived for name in vectors):
                    return None
                return Absorber(vectors, bool(getattr(made_by, "plus_one", False)))
            case SiluMul() | GeluMul():
                return self._rows_of(made_by.up, None)
            case Attention() if len(made_by.qkv) == 3 and made_by.clip is None:
                return self._rows_of(made_by.qkv[2], (made_by.q_heads, made_by.kv_heads, made_by.head_dim))
            case _:
                return None

    def _rows_of(self, value: Value, heads: tuple[int, int, int] | None) -> Absorber | None:
        linear = self.producers[value]
        if not isinstance(linear, Linear) or len(self.readers[value]) != 1 or len(linear.weights) != 1:
            return None
        (name,), (bias,) = linear.weights, linear.biases
        if linear.activation is not None or linear.residual is not None or bias in self.graph.derived:
            return None
        view = self.graph.derived.get(name)
        rows = None if view is None or view.rows is None else view.rows.order(view.whole[0])
        return Absorber(matrix=self.source(name), rows=rows, bias=bias, heads=heads)
