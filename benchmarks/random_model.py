"""Writes small Llama models with random weights, for what real ones are too large or too short for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

__all__ = ["write_random_model"]


def write_random_model(
    folder: Path,
    *,
    layers: int,
    hidden: int = 576,
    heads: int = 9,
    kv_heads: int = 3,
    intermediate: int = 1536,
    vocab: int = 1024,
    context: int = 32_896,
) -> Path:
    """A Hugging Face directory in bf16, by default with layers of SmolLM2-135M's shape; it has no tokenizer."""
    dim = hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (heads * dim, hidden),
                "self_attn.k_proj": (kv_heads * dim, hidden),
                "self_attn.v_proj": (kv_heads * dim, hidden),
                "self_attn.o_proj": (hidden, heads * dim),
                "mlp.gate_proj": (intermediate, hidden),
                "mlp.up_proj": (intermediate, hidden),
                "mlp.down_proj": (hidden, intermediate),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    chance = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            # Norms of one, matrices of deviation 0.02: the upper halves of float32, which is bf16 cut off.
            values = np.ones(shape) if len(shape) == 1 else chance.standard_normal(shape, np.float32) * np.float32(0.02)
            file.write((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return folder
