"""The pre-norm decoder with gated feed-forward that Llama introduced and many families vary."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.models.config import LARGEST_SIZE, MOST_LAYERS, ConfigReader, read_rope
from octavo.models.graph import Graph, GraphBuilder
from octavo.models.rope import Rope

# Fields that change the arithmetic in other families: given another value here, the model is not what its name says.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "no_rope_layers": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "alibi": (False,),
    "clip_qkv": (),
    "rope_interleaved": (False,),
    "use_qk_norm": (False,),
}


def layer_windows(config: ConfigReader, num_layers: int) -> list[int | None]:
    """The window of each layer where `use_sliding_window` turns windows on from `max_window_layers` upwards (Qwen)."""
    window = config.integer("sliding_window") if config.boolean("use_sliding_window", False) else None
    kinds = config.values.get("layer_types")
    if kinds is None:
        if window is None:
            return [None] * num_layers
        first = config.integer("max_window_layers", least=0)
        return [window if index >= first else None for index in range(num_layers)]
    allowed = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in allowed for kind in kinds):
        raise config.refusal("layer_types", f"{num_layers} of {' or '.join(allowed)}")
    return [window if kind == "sliding_attention" else None for kind in kinds]


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
    """The graph of the decoder; `windows` is one sliding window for all layers, or one per layer."""
    for name, allowed in _NEUTRAL.items():
        config.require(name, allowed)
    config.require("mlp_bias", (mlp_bias,))
    hidden = config.integer("hidden_size")
    vocab = config.integer("vocab_size")
    layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    intermediate = config.integer("intermediate_size")
    q_heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise config.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {q_heads}")
    if head_dim is None and not config.has("head_dim") and hidden % q_heads:
        raise config.refusal("num_attention_heads", f"a divisor of hidden_size = {hidden}, or head_dim given")
    head_dim = config.integer("head_dim", head_dim or hidden // q_heads)
    if head_dim % 2:
        raise config.refusal("head_dim", f"even, not {head_dim}, to be rotated in pairs")
    eps = config.number("rms_norm_eps", 1e-6)
    max_position = config.integer("max_position_embeddings")
    rope = read_rope(config, head_dim, max_position)
    per_layer = [windows] * layers if windows is None or isinstance(windows, int) else list(windows)

    graph = GraphBuilder(config.family, vocab, hidden)

    def project(x: int, name: str, width: int, bias: bool) -> int:
        return graph.linear(x, f"{name}.weight", width, f"{name}.bias" if bias else None)

    x = graph.embedding("model.embed_tokens.weight")
    for index in range(layers):
        with graph.layer(index):
            layer = f"model.layers.{index}"
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            h = graph.rms_norm(x, f"{layer}.input_layernorm.weight", eps)
            attended = graph.attention(
                project(h, f"{attention}.q_proj", q_heads * head_dim, qkv_bias),
                project(h, f"{attention}.k_proj", kv_heads * head_dim, qkv_bias),
                project(h, f"{attention}.v_proj", kv_heads * head_dim, qkv_bias),
                q_heads=q_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                rope=rope,
                q_norm=f"{attention}.q_norm.weight" if head_norms else None,
                k_norm=f"{attention}.k_norm.weight" if head_norms else None,
                norm_eps=eps if head_norms else 0.0,
                sliding_window=per_layer[index],
            )
            x = graph.add(x, project(attended, f"{attention}.o_proj", hidden, output_bias))
            h = graph.rms_norm(x, f"{layer}.post_attention_layernorm.weight", eps)
            gated = graph.silu_mul(
                project(h, f"{mlp}.gate_proj", intermediate, mlp_bias),
                project(h, f"{mlp}.up_proj", intermediate, mlp_bias),
            )
            x = graph.add(x, project(gated, f"{mlp}.down_proj", hidden, mlp_bias))
    x = graph.rms_norm(x, "model.norm.weight", eps)
    tied = config.boolean("tie_word_embeddings", False)
    logits = graph.linear(x, "model.embed_tokens.weight" if tied else "lm_head.weight", vocab)
    return graph.build(
        logits,
        num_layers=layers,
        max_position=_usable_positions(config, rope, max_position),
        duplicates={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
    )


def _usable_positions(config: ConfigReader, rope: Rope, max_position: int) -> int:
    """YaRN configurations give the context before scaling, after it, or both; the larger is what was meant."""
    if rope.kind != "yarn":
        return max_position
    scaled = int(rope.original_max_position * rope.factor)
    if scaled > LARGEST_SIZE:
        raise config.refusal("max_position_embeddings", f"at most {LARGEST_SIZE} once scaled, not {scaled}")
    return max(max_position, scaled)
