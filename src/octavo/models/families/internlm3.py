"""InternLM 3: Llama by other names of its biases, heads of 128 and two kv heads."""

from octavo.models.config import ConfigReader
from octavo.models.decoder import build_decoder
from octavo.models.graph import Graph

ARCHITECTURES = ("InternLM3ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    bias = config.boolean("bias", config.boolean("mlp_bias", False))
    qkv_bias = config.boolean("qkv_bias", config.boolean("attention_bias", False))
    return build_decoder(config, qkv_bias=qkv_bias, output_bias=bias, mlp_bias=bias, head_dim=128)
