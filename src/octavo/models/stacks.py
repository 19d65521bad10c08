"""Graphs for checkpoints that hold the experts of a layer as stacks, where their family names each by itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from octavo.models.derived import Derived, Rows
from octavo.models.graph import Graph
from octavo.models.mixture import MoeExperts

__all__ = ["with_stacked_experts"]


def with_stacked_experts(graph: Graph, names: Collection[str]) -> Graph:
    """The graph, its experts views of stacks where the checkpoint, whose tensors have these names, has stacks.

    Known are stacks of gate and up together, `gate_up_proj` [experts, 2 · intermediate, in] beside `down_proj`
    [experts, in, intermediate] (transformers 5, when it saves its own layout), and one stack for each of the three,
    named like a tensor of one expert without its number (how GGUF files have them).
    """
    derived, widths = dict(graph.derived), graph.widths()
    for node in graph.nodes:
        if not isinstance(node, MoeExperts) or node.gates[0] in names or node.gates[0] in derived:
            continue
        count, width = len(node.gates), widths[node.x]
        prefix = node.gates[0].rpartition(".0.")[0]
        both, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
        if both in names:
            stack, size = (count, 2 * node.intermediate, width), node.intermediate
            for expert in range(count):
                derived[node.gates[expert]] = Derived(both, stack, expert, rows=Rows(range(size)))
                derived[node.ups[expert]] = Derived(both, stack, expert, rows=Rows(range(size, 2 * size)))
                derived[node.downs[expert]] = Derived(down, (count, width, size), expert)
            continue
        for weights in (node.gates, node.ups, node.downs):
            before, _, after = weights[0].rpartition(".0.")
            name = f"{before}.{after}"
            shape = (width, node.intermediate) if weights is node.downs else (node.intermediate, width)
            if name in names:
                for expert, weight in enumerate(weights):
                    derived[weight] = Derived(name, (count, *shape), expert)
    return replace(graph, derived=derived)
