"""Decoders put together from blocks: the residual stream with its norms, and the plain one that Llama introduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octavo.models.blocks import Block, GatedMlp, Names, Norm, SelfAttention, read_attention, read_mlp
from octavo.models.config import LARGEST_SIZE, MOST_LAYERS, ConfigReader, read_rope
from octavo.models.graph import Graph, GraphBuilder
from octavo.models.rope import Rope

__all__ = [
    "Parts",
    "Scales",
    "assemble",
    "build_decoder",
    "layer_windows",
    "patterned_windows",
    "read_layers",
    "read_parts",
    "usable_positions",
]

# Fields that change the arithmetic of some families: where a family does not read one, its value must be one of these.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": (),
    "mlp_bias": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "query_pre_attn_scalar": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "no_rope_layers": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "alibi": (False,),
    "clip_qkv": (),
    "rope_interleaved": (False,),
    "use_qk_norm": (False,),
}


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Numbers a family multiplies by: the embedding, what each block adds to the stream, the logits; and their cap."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a configuration says of Llama's parts, which a family changes before they are assembled."""

    layers: int
    attention: SelfAttention
    mlp: GatedMlp
    norm: Norm
    max_position: int


def read_layers(config: ConfigReader) -> int:
    """The number of layers."""
    return config.integer("num_hidden_layers", most=MOST_LAYERS)


def read_parts(
    config: ConfigReader,
    *,
    head_dim: int | None = None,
    eps: float = 1e-6,
    theta: float = 10000.0,
    partial: float | None = None,
    bias: bool = False,
    rope: bool = True,
) -> Parts:
    """The parts of a decoder like Llama; what is given are the family's defaults.

    `partial` is None where heads are always rotated whole; without `rope` a family reads its own ropes.
    """
    attention = read_attention(config, head_dim)
    bias = config.boolean("attention_bias", bias)
    max_position = config.integer("max_position_embeddings")
    usable = max_position
    if rope:
        rotation = read_rope(config, attention.head_dim, max_position, theta=theta, partial=partial)
        attention = replace(attention, rope=rotation)
        usable = usable_positions(config, rotation, max_position)
    eps = config.number("rms_norm_eps", eps)
    return Parts(
        layers=read_layers(config),
        attention=replace(attention, qkv_bias=bias, output_bias=bias, norm_eps=eps),
        mlp=read_mlp(config),
        norm=Norm(eps),
        max_position=usable,
    )


def layer_windows(config: ConfigReader, num_layers: int) -> list[int | None]:
    """The window of each layer where `use_sliding_window` turns windows on from `max_window_layers` upwards (Qwen)."""
    window = config.integer("sliding_window") if config.boolean("use_sliding_window", False) else None
    allowed = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    kinds = config.choices("layer_types", num_layers, allowed)
    if kinds is None:
        if window is None:
            return [None] * num_layers
        first = config.integer("max_window_layers", least=0)
        return [window if index >= first else None for index in range(num_layers)]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def patterned_windows(config: ConfigReader, num_layers: int, window: int, period: int) -> list[int | None]:
    """The window of each layer: of all but every `period`-th, unless `layer_types` says which.

    `window` is the family's default size; without layer_types, null means that no layer has one.
    """
    kinds = config.choices("layer_types", num_layers, ("full_attention", "sliding_attention"))
    if config.optional("sliding_window", window) is None:
        if kinds is not None and "sliding_attention" in kinds:
            raise config.refusal("sliding_window", "given, as layer_types has sliding_attention")
        return [None] * num_layers
    if kinds is None:
        kinds = ["full_attention" if index % period == 0 else "sliding_attention" for index in range(1, num_layers + 1)]
    size = config.integer("sliding_window", window)
    return [size if kind == "sliding_attention" else None for kind in kinds]


def assemble(
    config: ConfigReader,
    parts: Parts,
    *,
    attention: Block | Sequence[Block] | None = None,
    mlp: Block | Sequence[Block] | None = None,
    names: Names | None = None,
    scales: Scales | None = None,
    tied: bool = False,
    unit_head: bool = False,
) -> Graph:
    """The graph of a decoder whose layers add attention, then feed-forward, to a stream.

    `attention` and `mlp` stand in place of those of `parts`, one for all layers or one for each. `names` says where
    norms are, `tied` is the family's default of tie_word_embeddings; with `unit_head` each row of the head is divided
    by its length. Everything a family honours has been read from the configuration by now: the other fields that
    families have must change nothing.
    """
    names, scales, norm = names or Names(), scales or Scales(), parts.norm
    blocks = [_per_layer(attention or parts.attention, parts.layers), _per_layer(mlp or parts.mlp, parts.layers)]
    config.neutral(_NEUTRAL)
    hidden, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    graph = GraphBuilder(config.family, vocab, hidden)
    # A stream that blocks are added to times r is r times one they are added to as they are; norms undo the difference.
    stretched = 1.0 / scales.residual
    x = graph.embedding(f"{names.embedding}.weight", scales.embedding * stretched)
    for index, (attend, feed) in enumerate(zip(*blocks, strict=True)):
        layer = f"{names.layers}.{index}"
        steps = (
            (names.before_attention, attend, names.after_attention),
            (names.before_mlp, feed, names.after_mlp),
        )
        with graph.layer(index):
            for before, block, after in steps:
                h = x if before is None else norm(graph, x, f"{layer}.{before}", stretched)
                h = block(graph, h, layer)
                x = graph.add(x, h if after is None else norm(graph, h, f"{layer}.{after}"))
    x = norm(graph, x, names.final_norm, stretched)
    tied = config.boolean("tie_word_embeddings", tied)
    embedding, head = f"{names.embedding}.weight", f"{names.head}.weight"
    weight = embedding if tied else head
    if unit_head:
        weight = graph.derive(weight, "unit", (vocab, hidden), unit_rows=True)
    logits = graph.linear(x, weight, vocab)
    if scales.logits != 1.0:
        logits = graph.scale(logits, scales.logits)
    if scales.softcap is not None:
        logits = graph.softcap(logits, scales.softcap)
    return graph.build(
        logits,
        num_layers=parts.layers,
        max_position=parts.max_position,
        duplicates={head: embedding} if tied else {},
    )


def _per_layer(blocks: Block | Sequence[Block], layers: int) -> Sequence[Block]:
    return blocks if isinstance(blocks, Sequence) else [blocks] * layers


def build_decoder(
    config: ConfigReader,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    head_dim: int | None = None,
    windows: Sequence[int | None] | int | None = None,
) -> Graph:
    """The graph of Llama or one of its near relations.

    `windows` is one sliding window for all layers, or one for each; `head_dim` is for a configuration without it.
    """
    config.require("mlp_bias", (mlp_bias,))
    parts = read_parts(config, head_dim=head_dim)
    norms: Literal["head"] | None = "head" if head_norms else None
    attention = replace(parts.attention, qkv_bias=qkv_bias, output_bias=output_bias, norms=norms)
    per_layer = [windows] * parts.layers if windows is None or isinstance(windows, int) else windows
    return assemble(
        config,
        parts,
        attention=[replace(attention, sliding_window=window) for window in per_layer],
        mlp=replace(parts.mlp, bias=mlp_bias),
    )


def usable_positions(config: ConfigReader, rope: Rope, max_position: int) -> int:
    """YaRN configurations give the context before scaling, after it, or both; the larger is what was meant."""
    if rope.kind != "yarn":
        return max_position
    scaled = int(rope.original_max_position * rope.factor)
    if scaled > LARGEST_SIZE:
        raise config.refusal("max_position_embeddings", f"at most {LARGEST_SIZE} once scaled, not {scaled}")
    return max(max_position, scaled)
