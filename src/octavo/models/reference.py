"""A graph run by numpy over one whole sequence: the oracle back ends are tested against, slow and plain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from octavo.models.mixture_reference import latent_attention, mixture, route, softmax
from octavo.models.rope import Rope

Array = NDArray[Any]  # float32 throughout; numpy's own annotations widen it at every step


def reference_logits(
    graph: Graph,
    weight: Callable[[str], Array],
    token_ids: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    round_inputs: bool = False,
) -> Array:
    """Logits float32 [rows, vocab_size] of the positions `rows` (all when None).

    `weight` gives a weight by name as float32. `round_inputs` rounds both inputs of every Linear to bf16, as a bf16
    back end does, accumulating in float32. `rows` needs a graph with GatherSampled.
    """
    return _Run(graph, weight, np.asarray(token_ids, dtype=np.int64), rows, round_inputs).logits()


def run_nodes(
    graph: Graph,
    nodes: Sequence[Node],
    weight: Callable[[str], Array],
    token_ids: Sequence[int],
    values: dict[Value, Array],
    before: Callable[[Node], None],
) -> None:
    """Evaluate some of a graph's nodes on one sequence; `values` has what they read and gets what they give.

    `before` is called before each.
    """
    run = _Run(graph, weight, np.asarray(token_ids, dtype=np.int64), None, False)
    run.values = values
    for node in nodes:
        before(node)
        values[node.output] = run._evaluate(node)


def round_to_bf16(x: Array) -> Array:
    """The nearest bf16 of each finite number (ties to even), as float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def apply_rope(x: Array, rope: Rope) -> Array:
    """Rotate x [tokens, heads, head_dim] at positions 0 to tokens - 1."""
    cos, sin = (table[:, None, :] for table in rope.tables(x.shape[0]))
    half = rope.dim // 2
    first, second = x[..., :half], x[..., half : rope.dim]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., rope.dim :]], axis=-1)


_nearest_bf16 = round_to_bf16


class _Run:
    """The values of one run."""

    def __init__(
        self,
        graph: Graph,
        weight: Callable[[str], Array],
        token_ids: NDArray[np.int64],
        rows: Sequence[int] | None,
        round_inputs: bool,
    ) -> None:
        self.graph = graph
        self.weight = weight
        self.token_ids = token_ids
        self.rows = slice(None) if rows is None else np.asarray(rows)
        self.round: Callable[[Array], Array] = round_to_bf16 if round_inputs else np.asarray
        # What is bf16 also where other products have another form.
        self.round_always: Callable[[Array], Array] = _nearest_bf16 if round_inputs else np.asarray
        self.values: dict[Value, Array] = {}

    def logits(self) -> Array:
        for node in self.graph.nodes:
            self.values[node.output] = self._evaluate(node)
        return self.values[self.graph.output]

    def _evaluate(self, node: Node) -> Array:
        inputs = [self.values[value] for value in node.inputs()]
        match node:
            case Embedding():
                embedded: Array = self.weight(node.weight)[self.token_ids] * np.float32(node.scale)
                return embedded
            case PositionEmbedding():
                rows: Array = self.weight(node.weight)[node.offset : node.offset + len(self.token_ids)]
                if node.plus is not None:
                    rows = rows + self.weight(node.plus)[0]
                return rows
            case RmsNorm():
                return _rms_norm(inputs[0], self.weight(node.weight), node.eps, node.plus_one)
            case LayerNorm():
                ones = np.ones(1, np.float32)
                scaled = _layer_norm(inputs[0], ones if node.weight is None else self.weight(node.weight), node.eps)
                return scaled if node.bias is None else scaled + self.weight(node.bias)
            case Linear():
                return self._linear(node, inputs)
            case LatentAttention():
                return self._latent_attention(node, np.concatenate(inputs, axis=-1))
            case Attention():
                return self._attention(node, np.concatenate(inputs, axis=-1))
            case Add():
                return inputs[0] + inputs[1]
            case SiluMul():
                return _silu(inputs[0]) * inputs[1]
            case GeluMul():
                return _ACTIVATIONS["gelu_tanh" if node.tanh else "gelu"](inputs[0]) * inputs[1]
            case Activate():
                return _ACTIVATIONS[node.activation](inputs[0])
            case Scale():
                return inputs[0] * np.float32(node.factor)
            case SoftCap():
                return np.tanh(inputs[0] / np.float32(node.cap)) * np.float32(node.cap)
            case GatherSampled():
                return inputs[0][self.rows]
            case MoeRoute():
                return route(node, inputs[0], None if node.correction is None else self.weight(node.correction))
            case MoeExperts():
                return mixture(node, inputs, self.weight, self.round, _ACTIVATIONS)
            case SigmoidGate():
                return inputs[0] / (np.float32(1) + np.exp(-inputs[1]))
            case _:
                raise TypeError(f"no reference for {type(node).__name__}")

    def _linear(self, node: Linear, inputs: list[Array]) -> Array:
        rounded: Callable[[Array], Array] = np.asarray if node.precise else self.round
        x = rounded(inputs[0])
        parts = []
        for name, bias in zip(node.weights, node.biases, strict=True):
            part = x @ rounded(self.weight(name)).T
            parts.append(part if bias is None else part + self.weight(bias))
        result: Array = np.concatenate(parts, axis=-1)
        if node.gated:
            result = _ACTIVATIONS[str(node.activation).removesuffix("_mul")](parts[0]) * parts[1]
        elif node.activation is not None:
            result = _ACTIVATIONS[node.activation](result)
        return result if node.residual is None else result + inputs[1]

    def _attention(self, node: Attention, qkv: Array) -> Array:
        tokens = qkv.shape[0]
        if node.clip is not None:
            qkv = np.clip(qkv, -np.float32(node.clip), np.float32(node.clip))
        q, k, v = np.split(qkv, np.cumsum(node.qkv_widths())[:2], axis=-1)
        q = q.reshape(tokens, node.q_heads, node.head_dim)
        k = k.reshape(tokens, node.kv_heads, node.head_dim)
        v = v.reshape(tokens, node.kv_heads, node.head_dim)
        if not node.norm_after_rope:
            q, k = self._head_norm(node, q, node.q_norm), self._head_norm(node, k, node.k_norm)
        if node.rope is not None:
            q, k = apply_rope(q, node.rope), apply_rope(k, node.rope)
        if node.norm_after_rope:
            q, k = self._head_norm(node, q, node.q_norm), self._head_norm(node, k, node.k_norm)
        if node.query_scaling is not None:
            q = q * node.query_scaling.factors(tokens)[:, None, None]
        group = node.q_heads // node.kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = (q.transpose(1, 0, 2) @ k.transpose(1, 2, 0)) * np.float32(node.scale)  # [heads, queries, keys]
        if node.softcap is not None:
            scores = np.tanh(scores / np.float32(node.softcap)) * np.float32(node.softcap)
        distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
        if node.alibi is not None:
            scores = scores - np.asarray(node.alibi, np.float32)[:, None, None] * distance.astype(np.float32)
        visible = np.full_like(distance, True, dtype=bool) if self.graph.encoder else distance >= 0
        if node.sliding_window is not None:
            near = distance < node.sliding_window
            if node.chunked:
                chunk = np.arange(tokens) // node.sliding_window
                near = chunk[:, None] == chunk[None, :]
            visible &= near
        sinks = None if node.sinks is None else self.weight(node.sinks)
        weights = softmax(scores, visible, sinks)
        attended: Array = (weights @ v.transpose(1, 0, 2)).transpose(1, 0, 2).reshape(tokens, -1)
        return attended

    def _latent_attention(self, node: LatentAttention, q_latent: Array) -> Array:
        rope, weight = node.rope, self.weight(node.latent_norm)
        assert rope is not None
        return latent_attention(
            node,
            q_latent,
            self.weight,
            self.round_always,
            lambda x: apply_rope(x, rope),
            lambda x: _rms_norm(x, weight, node.latent_eps, False),
        )

    def _head_norm(self, node: Attention, x: Array, names: str | tuple[str, ...] | None) -> Array:
        """The norm of queries or keys x [tokens, heads, head_dim], by one weight for all heads or by each one's own."""
        if node.unit_norms:
            return _rms_norm(x, np.ones(1, np.float32), node.norm_eps, False)
        if names is None:
            return x
        weight = self.weight(names) if isinstance(names, str) else np.stack([self.weight(name) for name in names])
        if node.norm_layer:
            return _layer_norm(x, weight, node.norm_eps)
        rows = x.reshape(x.shape[0], -1) if node.wide_norms else x
        return _rms_norm(rows, weight, node.norm_eps, node.norm_plus_one).reshape(x.shape)


def _layer_norm(x: Array, weight: Array, eps: float) -> Array:
    centred: Array = x - x.mean(axis=-1, keepdims=True)
    normal: Array = centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + np.float32(eps))
    return normal * weight


def _rms_norm(x: Array, weight: Array, eps: float, plus_one: bool) -> Array:
    normal: Array = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(eps))
    factor: Array = weight + np.float32(1) if plus_one else weight
    return normal * factor


def _silu(x: Array) -> Array:
    result: Array = x / (np.float32(1) + np.exp(np.minimum(-x, np.float32(88))))
    return result


def _gelu_tanh(x: Array) -> Array:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    result: Array = x * np.float32(0.5) * (np.float32(1) + np.tanh(inner))
    return result


def _gelu(x: Array) -> Array:
    error_function = np.vectorize(math.erf, otypes=[np.float32])
    result: Array = x * np.float32(0.5) * (np.float32(1) + error_function(x / np.float32(math.sqrt(2))))
    return result


def _relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0))


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "relu": _relu,
    "relu2": lambda x: np.square(_relu(x)),
}
