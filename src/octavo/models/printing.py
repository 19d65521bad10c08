"""Graphs as text: one line per operation, runs of identical layers folded into one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby

from octavo.models.graph import (
    Activate,
    Add,
    Attention,
    Embedding,
    GatherSampled,
    GeluMul,
    Graph,
    LayerNorm,
    Linear,
    Node,
    PositionEmbedding,
    RmsNorm,
    Scale,
    SiluMul,
    SoftCap,
    Value,
)
from octavo.models.mixture import LatentAttention, MoeExperts, MoeRoute, SigmoidGate

_LAYER = re.compile(r"\.\d+\.")


def format_graph(graph: Graph) -> str:
    """The graph, compactly: a header, then each run of nodes, identical neighbouring layers once.

    Inside a layer values are numbered from %1 and values from before it are called %in, so that like layers read alike.
    """
    widths = graph.widths()
    heads = {node.q_heads for node in graph.attentions}
    header = (
        f"{graph.architecture}: {graph.num_layers} layers, hidden {graph.hidden_size}, vocabulary {graph.vocab_size}, "
        f"{'/'.join(map(str, sorted(heads)))} query and {graph.kv_heads} kv heads of {graph.head_dim}, "
        f"at most {graph.max_position} positions"
    )
    lines = [header]
    runs = [(layer, list(nodes)) for layer, nodes in groupby(graph.nodes, key=lambda node: node.layer)]
    texts = [(layer, _format_run(layer, nodes, widths)) for layer, nodes in runs]
    position = 0
    while position < len(texts):
        layer, text = texts[position]
        end = position + 1
        while layer is not None and end < len(texts) and texts[end][1] == text:
            end += 1
        if layer is not None:
            last = texts[end - 1][0]
            lines.append(f"layer {layer}" if last == layer else f"layers {layer} to {last}, each")
        lines.extend(f"  {line}" for line in text)
        position = end
    views = dict.fromkeys(
        f"  {_any_layer(name)} = {view} of {_any_layer(view.source)} {list(view.shape)}"
        for name, view in graph.derived.items()
        if not view.part  # the entries of a stack are all viewed alike
    )
    return "\n".join([*lines, *(["derived weights", *views] if views else [])])


def _any_layer(name: str) -> str:
    return _LAYER.sub(".*.", name, count=1)


def _format_run(layer: int | None, nodes: list[Node], widths: dict[Value, int]) -> list[str]:
    names: dict[Value, str] = {node.output: f"%{number}" for number, node in enumerate(nodes, 1)}
    outside = dict.fromkeys(value for node in nodes for value in node.inputs() if value not in names)
    for number, value in enumerate(outside):
        names[value] = "%in" if len(outside) == 1 else f"%in{number}"
    return [f"{names[node.output]}[{widths[node.output]}] = {_format_node(node, names, layer)}" for node in nodes]


def _format_node(node: Node, names: dict[Value, str], layer: int | None) -> str:
    def weights(items: Iterable[str]) -> str:
        return " | ".join(item if layer is None else item.replace(f".{layer}.", ".*.", 1) for item in items)

    def values(*items: Value) -> str:
        return ", ".join(names[item] for item in items)

    match node:
        case Embedding():
            return f"embedding({weights([node.weight])}" + (f", scale {node.scale:g})" if node.scale != 1.0 else ")")
        case PositionEmbedding():
            plus = f" + {node.offset}" if node.offset else ""
            added = "" if node.plus is None else f", + row 0 of {weights([node.plus])}"
            return f"position_embedding({weights([node.weight])}, position{plus}{added})"
        case RmsNorm():
            plus = ", 1 + weight" if node.plus_one else ""
            return f"rms_norm({values(node.x)}, {weights([node.weight])}, eps {node.eps:g}{plus})"
        case LayerNorm():
            named = [name for name in (node.weight, node.bias) if name is not None]
            return f"layer_norm({', '.join(filter(None, [values(node.x), weights(named)]))}, eps {node.eps:g})"
        case Linear():
            text = f"linear({values(node.x)}, {weights(node.weights)}"
            if any(node.biases):
                text += f", bias {weights(bias or 'none' for bias in node.biases)}"
            if node.activation is not None:
                text += f", {node.activation}"
            if node.precise:
                text += ", in f32"
            return text + (f", + {values(node.residual)})" if node.residual is not None else ")")
        case LatentAttention():
            return _format_latent(node, values(*node.qkv), weights)
        case Attention():
            return _format_attention(node, values(*node.qkv), weights)
        case Add():
            return f"add({values(node.a, node.b)})"
        case SiluMul():
            return f"silu_mul({values(node.gate, node.up)})"
        case GeluMul():
            return f"{'gelu_tanh_mul' if node.tanh else 'gelu_mul'}({values(node.gate, node.up)})"
        case Activate():
            return f"{node.activation}({values(node.x)})"
        case Scale():
            return f"scale({values(node.x)}, {node.factor:g})"
        case SoftCap():
            return f"softcap({values(node.x)}, {node.cap:g})"
        case GatherSampled():
            return f"gather_sampled({values(node.x)})"
        case MoeRoute():
            return _format_route(node, values(node.x), weights)
        case MoeExperts():
            return _format_experts(node, values(node.x, node.route), values, weights)
        case SigmoidGate():
            return f"sigmoid_gate({values(node.x, node.gate)})"
        case _:
            raise TypeError(f"no text form for {type(node).__name__}")


def _format_attention(node: Attention, values: str, weights: Callable[[Iterable[str]], str]) -> str:
    parts = [f"{values}, {node.q_heads}/{node.kv_heads} heads of {node.head_dim}"]
    if node.clip is not None:
        parts.append(f"clipped to {node.clip:g}")
    norms = [norm if isinstance(norm, str) else f"{norm[0]} ..." for norm in (node.q_norm, node.k_norm) if norm]
    if node.unit_norms:
        parts.append(f"unit norms eps {node.norm_eps:g}")
    if norms:
        kind = "wide norms" if node.wide_norms else "head layer norms" if node.norm_layer else "head norms"
        parts.append(f"{kind} {weights(norms)} eps {node.norm_eps:g}{', 1 + weight' if node.norm_plus_one else ''}")
    parts.append("no rope" if node.rope is None else f"rope {node.rope}")
    if node.rope is not None and node.rope.dim != node.head_dim:
        parts[-1] += f" over {node.rope.dim}"
    if node.norm_after_rope:
        parts[-1] += " first"
    if node.query_scaling is not None:
        parts.append(f"queries grow by {node.query_scaling.weight:g} over {node.query_scaling.length}")
    if node.scale != node.head_dim**-0.5:
        parts.append(f"scale {node.scale:g}")
    if node.sliding_window is not None:
        parts.append(f"{'chunks of' if node.chunked else 'window'} {node.sliding_window}")
    if node.alibi is not None:
        parts.append(f"alibi {node.alibi[0]:g} to {node.alibi[-1]:g}")
    if node.softcap is not None:
        parts.append(f"softcap {node.softcap:g}")
    if node.sinks is not None:
        parts.append(f"sinks {weights([node.sinks])}")
    return f"attention({', '.join(parts)})"


def _format_latent(node: LatentAttention, values: str, weights: Callable[[Iterable[str]], str]) -> str:
    heads = f"{node.q_heads} heads of {node.nope_dim} + {node.rope_dim}, values of {node.value_dim}"
    latent = f"latent of {node.rank} + {node.rope_dim}, norm {weights([node.latent_norm])} eps {node.latent_eps:g}"
    rope = f"rope {node.rope}{', neighbours paired' if node.neighbours else ''}"
    expansion = f"expansion {weights([node.expansion])}"
    return f"latent_attention({values}, {heads}, {latent}, {expansion}, {rope}, scale {node.scale:g})"


def _format_route(node: MoeRoute, values: str, weights: Callable[[Iterable[str]], str]) -> str:
    parts = [values, f"top {node.top_k}", node.scoring]
    if node.groups > 1:
        worth = "two best experts" if node.group_pairs else "best expert"
        parts.append(f"of {node.top_groups} of {node.groups} groups by their {worth}")
    if node.correction is not None:
        parts.append(f"chosen with {weights([node.correction])}")
    if node.renormalize:
        parts.append("weights sum to 1")
    if node.scale != 1.0:
        parts.append(f"times {node.scale:g}")
    return f"moe_route({', '.join(parts)})"


def _format_experts(
    node: MoeExperts, inputs: str, values: Callable[..., str], weights: Callable[[Iterable[str]], str]
) -> str:
    parts = [inputs, f"{len(node.gates)} experts like {weights([node.gates[0], node.ups[0], node.downs[0]])}"]
    if node.gate_biases:
        parts.append(f"bias {weights([node.gate_biases[0], node.up_biases[0], node.down_biases[0]])}")
    clamp = node.activation == "clamped_silu_mul"
    parts.append(f"{node.activation}{f' alpha {node.alpha:g} limit {node.limit:g}' if clamp else ''}")
    if node.scale_inputs:
        parts.append("of weighted inputs")
    if node.residual is not None:
        parts.append(f"+ {values(node.residual)}")
    return f"moe_experts({', '.join(parts)})"
