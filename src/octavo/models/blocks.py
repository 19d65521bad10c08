"""The parts decoders are put together from: the names of their tensors, norms, attention and feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.models.config import ConfigReader
from octavo.models.derived import Rows, rotated_pairs
from octavo.models.graph import GraphBuilder, Value
from octavo.models.rope import QueryScaling, Rope

__all__ = ["Block", "GatedMlp", "Names", "Norm", "SelfAttention", "as_stored", "read_attention", "read_mlp"]

# What a block adds to a graph, of a value and the prefix of its layer's names.
Block = Callable[[GraphBuilder, Value, str], Value]


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a checkpoint calls what is not inside a block, without `.weight`; None where a family has no such norm.

    The norms of a layer, and all names inside blocks, follow `layers` and the layer's number.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class Norm:
    """A kind of norm: RMS times weight, RMS times (1 + weight), or layer norm without weight and bias."""

    eps: float
    kind: Literal["rms", "rms_plus_one", "plain_layer"] = "rms"

    def __call__(self, graph: GraphBuilder, x: Value, name: str, stretched: float = 1.0) -> Value:
        """The norm of x, held `stretched` times as large as the model means it, which only the epsilon can tell."""
        eps = self.eps * stretched**2
        if self.kind == "plain_layer":
            return graph.layer_norm(x, None, None, eps)
        return graph.rms_norm(x, f"{name}.weight", eps, plus_one=self.kind == "rms_plus_one")


@dataclass(frozen=True, kw_only=True)
class SelfAttention:
    """A layer's attention with its projections; what is not said here is as `octavo.models.graph.Attention` has it.

    `norms` are those of queries and keys: of each head, of all heads as one, or of each head without weights. `qkv` is
    the name of q, k and v where they are one tensor: one after the other, or `grouped` by kv head, its query heads, its
    key and its value together. `neighbours`: what rope rotates are pairs (0, 1), (2, 3), ... of a head.
    """

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = None
    sliding_window: int | None = None
    chunked: bool = False
    scale: float | None = None
    softcap: float | None = None
    clip: float | None = None
    alibi: tuple[float, ...] | None = None
    query_scaling: QueryScaling | None = None
    norms: Literal["head", "wide", "unit"] | None = None
    norm_eps: float = 0.0
    norm_plus_one: bool = False
    norm_after_rope: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    neighbours: bool = False
    grouped: bool = False
    qkv: str | None = None
    sinks: str | None = None
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"

    def __call__(self, graph: GraphBuilder, x: Value, layer: str) -> Value:
        q_width, kv_width = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        weighted = self.norms in ("head", "wide")
        attended = graph.attention(
            *self._qkv(graph, x, layer, q_width, kv_width),
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            scale=self.scale,
            q_norm=f"{layer}.{self.q_norm}.weight" if weighted else None,
            k_norm=f"{layer}.{self.k_norm}.weight" if weighted else None,
            norm_eps=self.norm_eps if self.norms else 0.0,
            norm_plus_one=self.norm_plus_one and weighted,
            wide_norms=self.norms == "wide",
            unit_norms=self.norms == "unit",
            norm_after_rope=self.norm_after_rope,
            query_scaling=self.query_scaling,
            sliding_window=self.sliding_window,
            chunked=self.chunked,
            softcap=self.softcap,
            clip=self.clip,
            alibi=self.alibi,
            sinks=None if self.sinks is None else f"{layer}.{self.sinks}",
        )
        return project(graph, attended, f"{layer}.{self.output}", self.hidden, self.output_bias)

    def _qkv(self, graph: GraphBuilder, x: Value, layer: str, q_width: int, kv_width: int) -> tuple[Value, ...]:
        pairs = rotated_pairs(self.head_dim, self.rope.dim) if self.neighbours and self.rope is not None else None
        parts: tuple[tuple[str, int, Rows | None], ...]
        if self.qkv is None:
            parts = ((self.q, q_width, pairs), (self.k, kv_width, pairs), (self.v, kv_width, None))
        else:
            parts = ((self.qkv, q_width + 2 * kv_width, self._fused_rows(pairs) if self.grouped or pairs else None),)
        values = []
        for name, width, rows in parts:
            view = None if rows is None else _View(rows, (width, self.hidden))
            values.append(project(graph, x, f"{layer}.{name}", width, self.qkv_bias, view))
        return tuple(values)

    def _fused_rows(self, pairs: Rows | None) -> Rows:
        """The rows of q, then of k, then of v in the one tensor that holds them."""
        group = self.q_heads // self.kv_heads
        heads = [*range(self.q_heads + 2 * self.kv_heads)]
        if self.grouped:
            starts = [kv * (group + 2) for kv in range(self.kv_heads)]
            queries = [start + head for start in starts for head in range(group)]
            heads = [*queries, *(start + group for start in starts), *(start + group + 1 for start in starts)]
        inside = range(self.head_dim) if pairs is None else pairs.offsets
        rotated = self.q_heads + self.kv_heads
        places = [(head, inside if place < rotated else range(self.head_dim)) for place, head in enumerate(heads)]
        return Rows(tuple(head * self.head_dim + offset for head, offsets in places for offset in offsets))


@dataclass(frozen=True, kw_only=True)
class GatedMlp:
    """down(act(gate(x)) · up(x))."""

    hidden: int
    intermediate: int
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    bias: bool = False
    gate_up: str | None = None
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"

    def __call__(self, graph: GraphBuilder, x: Value, layer: str) -> Value:
        gate, up = self._halves(graph, x, layer)
        if self.activation == "silu":
            gated = graph.silu_mul(gate, up)
        else:
            gated = graph.gelu_mul(gate, up, tanh=self.activation == "gelu_tanh")
        return project(graph, gated, f"{layer}.{self.down}", self.hidden, self.bias)

    def _halves(self, graph: GraphBuilder, x: Value, layer: str) -> tuple[Value, Value]:
        if self.gate_up is None:
            names = (f"{layer}.{self.gate}", f"{layer}.{self.up}")
            gate, up = (project(graph, x, name, self.intermediate, self.bias) for name in names)
            return gate, up
        values = []
        for label, begin in (("gate", 0), ("up", self.intermediate)):
            rows = Rows(range(begin, begin + self.intermediate))
            view = _View(rows, (2 * self.intermediate, self.hidden), label)
            values.append(project(graph, x, f"{layer}.{self.gate_up}", self.intermediate, self.bias, view))
        return values[0], values[1]


@dataclass(frozen=True)
class _View:
    """Some rows of a module, or all in another order: the shape it is stored in, and what they are called."""

    rows: Rows
    stored: tuple[int, int]
    label: str = "ordered"


def project(graph: GraphBuilder, x: Value, name: str, width: int, bias: bool, view: _View | None = None) -> Value:
    """A Linear by the name of its module, of all its rows as they are stored or of those of a view."""
    weight, biased = f"{name}.weight", f"{name}.bias" if bias else None
    if view is not None:
        weight = graph.derive(weight, view.label, view.stored, rows=view.rows)
        biased = None if biased is None else graph.derive(biased, view.label, view.stored[:1], rows=view.rows)
    return graph.linear(x, weight, width, biased)


def as_stored(config: ConfigReader, value: float) -> float:
    """A number in the precision of the model's weights, as a family has it that multiplies by it in that precision."""
    name = "dtype" if config.has("dtype") else "torch_dtype"
    config.require(name, ("float32", "bfloat16", "float16"))
    dtype = config.values.get(name)
    if dtype == "bfloat16":
        bits = int(np.float32(value).view(np.uint32))
        return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))
    return float(np.float16(value) if dtype == "float16" else np.float32(value))


def read_attention(config: ConfigReader, head_dim: int | None = None) -> SelfAttention:
    """Attention of the sizes a configuration gives, as yet without rope; `head_dim` is for one that does not say it."""
    hidden = config.integer("hidden_size")
    q_heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise config.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {q_heads}")
    if head_dim is None and not config.has("head_dim") and hidden % q_heads:
        raise config.refusal("num_attention_heads", f"a divisor of hidden_size = {hidden}, or head_dim given")
    head_dim = config.integer("head_dim", head_dim or hidden // q_heads)
    if head_dim % 2:
        raise config.refusal("head_dim", f"even, not {head_dim}, to be rotated in pairs")
    return SelfAttention(hidden=hidden, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)


def read_mlp(config: ConfigReader) -> GatedMlp:
    """The feed-forward of the sizes a configuration gives, with SiLU."""
    return GatedMlp(hidden=config.integer("hidden_size"), intermediate=config.integer("intermediate_size"))
