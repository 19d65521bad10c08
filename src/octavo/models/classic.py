"""What decoders with layer norms and a feed-forward of two linears have in common: GPT-2 and its many variations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from octavo.models.config import MOST_LAYERS, ConfigReader
from octavo.models.derived import Rows
from octavo.models.graph import Activation, Graph, GraphBuilder, Value

__all__ = ["ClassicBuilder", "HeadShape", "alibi_slopes", "head_shape"]

# Fields that would change the arithmetic, in any of these families.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
}


@dataclass(frozen=True)
class HeadShape:
    """Query heads, key/value heads, and the width of each."""

    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def head_shape(config: ConfigReader, hidden: int, kv_heads: int | None = None) -> HeadShape:
    """The heads, each hidden / heads wide; as many of keys and values as `kv_heads` or num_key_value_heads says."""
    q_heads = config.integer("num_attention_heads")
    if hidden % q_heads:
        raise config.refusal("num_attention_heads", f"a divisor of the hidden size {hidden}")
    kv = config.integer("num_key_value_heads", q_heads) if kv_heads is None else kv_heads
    if q_heads % kv:
        raise config.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {q_heads}")
    config.require("head_dim", (hidden // q_heads,))
    return HeadShape(q_heads, kv, hidden // q_heads)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi (arXiv 2108.12409): 2^(-8i/n) for a power of two n, the others from between those of 2n."""
    whole = 1 << (heads.bit_length() - 1)

    def powers(count: int) -> list[float]:
        return [math.pow(2.0, -8.0 * (i + 1) / count) for i in range(count)]

    return tuple(powers(whole) + powers(2 * whole)[::2][: heads - whole])


@dataclass
class ClassicBuilder(GraphBuilder):
    """A builder with the pieces of these families; `bias` and `norm_bias` are what linears and layer norms have."""

    eps: float = 1e-5
    bias: bool = True
    norm_bias: bool = True
    layers: int = 0
    config: ConfigReader = field(default_factory=lambda: ConfigReader({}, ""))

    @classmethod
    def of(
        cls, config: ConfigReader, *, eps: str = "layer_norm_eps", bias: bool = True, norm_bias: bool = True
    ) -> ClassicBuilder:
        """A builder of the sizes a configuration gives; `eps` names the field of the norms' epsilon."""
        for name, allowed in _NEUTRAL.items():
            config.require(name, allowed)
        return cls(
            config.family,
            config.integer("vocab_size"),
            config.integer("hidden_size"),
            eps=config.number(eps, 1e-5),
            bias=bias,
            norm_bias=norm_bias,
            layers=config.integer("num_hidden_layers", most=MOST_LAYERS),
            config=config,
        )

    def norm(self, x: Value, name: str) -> Value:
        """The layer norm `name`."""
        return self.layer_norm(x, f"{name}.weight", f"{name}.bias" if self.norm_bias else None, self.eps)

    def project(self, x: Value, name: str, width: int, bias: bool | None = None) -> Value:
        """The linear `name`."""
        biased = self.bias if bias is None else bias
        return self.linear(x, f"{name}.weight", width, f"{name}.bias" if biased else None)

    def project_rows(
        self, x: Value, name: str, rows: Rows, label: str, of: int, width: int, bias: bool | None = None
    ) -> Value:
        """`width` rows of the linear `name`, which has `of` of them."""
        weight = self.derive(f"{name}.weight", label, (of, self.hidden_size), rows=rows)
        biased = self.bias if bias is None else bias
        return self.linear(x, weight, width, self.derive(f"{name}.bias", label, (of,), rows=rows) if biased else None)

    def fused_heads(
        self, x: Value, name: str, heads: HeadShape, bias: bool | None = None
    ) -> tuple[Value, Value, Value]:
        """q, k and v of a linear whose rows are, for each kv head, its query heads, the key head and the value head."""
        dim, queries = heads.head_dim, heads.q_heads // heads.kv_heads * heads.head_dim
        total, period = heads.q_width + 2 * heads.kv_width, queries + 2 * dim
        parts = (
            ("q", range(queries), heads.q_width),
            ("k", range(queries, queries + dim), heads.kv_width),
            ("v", range(queries + dim, period), heads.kv_width),
        )
        q, k, v = (
            self.project_rows(x, name, Rows(rows, period), label, total, width, bias) for label, rows, width in parts
        )
        return q, k, v

    def mlp(self, x: Value, up: str, down: str, inner: int, activation: Activation, bias: bool | None = None) -> Value:
        """Two linears with an activation between them."""
        return self.project(self.activate(self.project(x, up, inner, bias), activation), down, self.hidden_size, bias)

    def finish(
        self,
        x: Value,
        *,
        embedding: str,
        head: str = "lm_head",
        max_position: int,
        tied: bool | None = None,
        head_bias: bool = False,
        logit_scale: float = 1.0,
        renames: tuple[tuple[str, str], ...] = (),
        buffers: str | None = None,
    ) -> Graph:
        """The head, tied to the embedding or not (`tied`: the default of tie_word_embeddings), and the graph."""
        is_tied = self.config.boolean("tie_word_embeddings", bool(tied))
        weight, bias = f"{embedding}.weight" if is_tied else f"{head}.weight", f"{head}.bias" if head_bias else None
        logits = self.linear(x, weight, self.vocab_size, bias)
        if logit_scale != 1.0:
            logits = self.scale(logits, logit_scale)
        return self.build(
            logits,
            num_layers=self.layers,
            max_position=max_position,
            duplicates={f"{head}.weight": f"{embedding}.weight"} if is_tied else {},
            renames=renames,
            buffers=buffers,
        )
