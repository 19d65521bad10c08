"""CodeGen: GPT-J with q, v and k fused in four shards, as it was trained on four devices."""

from octavo.models.classic import ClassicBuilder
from octavo.models.config import ConfigReader
from octavo.models.derived import Rows, rotated_pairs
from octavo.models.families.gptj import SIZES, build_gptj
from octavo.models.graph import Graph, Value

ARCHITECTURES = ("CodeGenForCausalLM",)
_SHARDS = 4


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config = config.aliased(**SIZES)
    heads = config.integer("num_attention_heads")
    if heads % _SHARDS:
        raise config.refusal("num_attention_heads", f"a multiple of {_SHARDS}")

    def qkv(graph: ClassicBuilder, h: Value, attention: str, rotary: int) -> tuple[Value, ...]:
        hidden = graph.hidden_size
        local, head_dim = hidden // _SHARDS, hidden // heads

        def project(label: str, first: int) -> Value:
            pairs = rotated_pairs(head_dim, rotary if label != "v" else 0).offsets
            offsets = tuple(first + head + offset for head in range(0, local, head_dim) for offset in pairs)
            rows = Rows(offsets, 3 * local)
            return graph.project_rows(h, f"{attention}.qkv_proj", rows, label, 3 * hidden, hidden)

        return project("q", 0), project("k", 2 * local), project("v", local)

    return build_gptj(config, qkv, r"\.attn\.causal_mask$")
