"""Blocks of mixtures of experts and of latent attention: what they read of a configuration and add to a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.models.blocks import Block, GatedMlp, project
from octavo.models.config import ConfigReader
from octavo.models.derived import Rows
from octavo.models.graph import GraphBuilder, Value
from octavo.models.mixture import ExpertActivation, LatentAttention, MoeExperts, MoeRoute, Scoring, SigmoidGate
from octavo.models.rope import Rope

__all__ = [
    "ExpertNames",
    "LatentSelfAttention",
    "MoeMlp",
    "Routing",
    "read_expert_count",
    "read_sparse_layers",
    "separate_experts",
    "stacked_experts",
]

_MOST_EXPERTS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The weights of all experts by name, in the order of experts; biases of all or of none."""

    gates: tuple[str, ...]
    ups: tuple[str, ...]
    downs: tuple[str, ...]
    gate_biases: tuple[str, ...] = ()
    up_biases: tuple[str, ...] = ()
    down_biases: tuple[str, ...] = ()


# Where the experts of a layer are, by the prefix of its names; weights that are views are derived on the way.
NameExperts = Callable[[GraphBuilder, str], ExpertNames]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen and weighted, as `MoeRoute` has it; `correction` is a name inside the layer."""

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    correction: str | None = None
    groups: int = 1
    top_groups: int = 1
    group_pairs: bool = False

    def __call__(self, graph: GraphBuilder, logits: Value, layer: str) -> Value:
        correction = None if self.correction is None else f"{layer}.{self.correction}"
        return graph.node(MoeRoute, x=logits, **{**self.__dict__, "correction": correction})


@dataclass(frozen=True, kw_only=True)
class MoeMlp:
    """The experts that a router chooses for each token, and one that all tokens go through where there is one.

    `shared_gate` is the name of a projection to one number, whose sigmoid the shared expert is multiplied with.
    """

    hidden: int
    intermediate: int
    experts: int
    routing: Routing
    names: NameExperts
    router: str = "mlp.gate"
    router_bias: bool = False
    activation: ExpertActivation = "silu_mul"
    limits: dict[str, float] = field(default_factory=dict)
    scale_inputs: bool = False
    shared: GatedMlp | None = None
    shared_gate: str | None = None

    def __call__(self, graph: GraphBuilder, x: Value, layer: str) -> Value:
        bias = f"{layer}.{self.router}.bias" if self.router_bias else None
        logits = graph.linear(x, f"{layer}.{self.router}.weight", self.experts, bias, precise=True)
        route = self.routing(graph, logits, layer)
        shared = None if self.shared is None else self.shared(graph, x, layer)
        if shared is not None and self.shared_gate is not None:
            gate = graph.linear(x, f"{layer}.{self.shared_gate}.weight", 1, precise=True)
            shared = graph.node(SigmoidGate, x=shared, gate=gate)
        routed = graph.node(
            MoeExperts,
            x=x,
            route=route,
            top_k=self.routing.top_k,
            intermediate=self.intermediate,
            activation=self.activation,
            scale_inputs=self.scale_inputs,
            **self.limits,
            **self.names(graph, layer).__dict__,
        )
        return routed if shared is None else graph.add(shared, routed)


def separate_experts(
    count: int, prefix: str = "mlp.experts", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> NameExperts:
    """Experts with tensors of their own: {prefix}.{expert}.{gate}.weight and so on."""

    def names(_: GraphBuilder, layer: str) -> ExpertNames:
        def all_of(name: str) -> tuple[str, ...]:
            return tuple(f"{layer}.{prefix}.{expert}.{name}.weight" for expert in range(count))

        return ExpertNames(gates=all_of(gate), ups=all_of(up), downs=all_of(down))

    return names


def stacked_experts(
    count: int,
    hidden: int,
    intermediate: int,
    *,
    gate_up: str,
    down: str,
    transposed: bool = False,
    alternating: bool = False,
    biases: bool = False,
) -> NameExperts:
    """Experts in one stack of gate and up [experts, 2 · intermediate, hidden] and one of down [experts, hidden, ...].

    `transposed`: matrices are stored [in, out]. `alternating`: rows of gate and up take turns, else gate comes first.
    `biases`: there are stacks of those named like the weights, with _bias.
    """
    rows = 2 * intermediate
    of_gate, of_up = (
        (range(0, rows, 2), range(1, rows, 2)) if alternating else (range(rows // 2), range(rows // 2, rows))
    )

    def names(graph: GraphBuilder, layer: str) -> ExpertNames:
        def views(name: str, label: str, shape: Sequence[int], turned: bool, picked: range | None) -> tuple[str, ...]:
            stack = (count, *(reversed(shape) if turned else shape))
            return tuple(
                graph.derive(
                    f"{layer}.{name}",
                    f"{expert} {label}",
                    stack,
                    part=expert,
                    transposed=turned,
                    rows=None if picked is None else Rows(picked),
                )
                for expert in range(count)
            )

        both = (rows, hidden)
        return ExpertNames(
            gates=views(gate_up, "gate", both, transposed, of_gate),
            ups=views(gate_up, "up", both, transposed, of_up),
            downs=views(down, "down", (hidden, intermediate), transposed, None),
            gate_biases=views(f"{gate_up}_bias", "gate", (rows,), False, of_gate) if biases else (),
            up_biases=views(f"{gate_up}_bias", "up", (rows,), False, of_up) if biases else (),
            down_biases=views(f"{down}_bias", "down", (hidden,), False, None) if biases else (),
        )

    return names


def read_expert_count(config: ConfigReader, *names: str) -> int:
    """The number of experts, under the first of the names that is given."""
    name = next((name for name in names if config.has(name)), names[0])
    count = config.integer(name, most=_MOST_EXPERTS)
    for other in names:
        config.require(other, (count,))
    return count


def read_sparse_layers(config: ConfigReader, layers: int, moe: Block, dense: Block) -> list[Block]:
    """The mixture in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name (Qwen)."""
    step = config.integer("decoder_sparse_step", 1)
    only = config.values.get("mlp_only_layers") or []
    config.read.add("mlp_only_layers")
    if not isinstance(only, list) or not all(isinstance(index, int) for index in only):
        raise config.refusal("mlp_only_layers", "a list of layer numbers")
    return [moe if index not in only and (index + 1) % step == 0 else dense for index in range(layers)]


@dataclass(frozen=True, kw_only=True)
class LatentSelfAttention:
    """Multi-head latent attention with its projections, in DeepSeek's names; queries may be made of a latent too."""

    hidden: int
    heads: int
    nope_dim: int
    value_dim: int
    rank: int
    q_rank: int | None
    rope: Rope
    scale: float
    neighbours: bool
    bias: bool = False
    # DeepSeek's norms of latents take no epsilon from the configuration.
    latent_eps: float = 1e-6

    def __call__(self, graph: GraphBuilder, x: Value, layer: str) -> Value:
        prefix, q_width = f"{layer}.self_attn", self.heads * (self.nope_dim + self.rope.dim)
        if self.q_rank is None:
            q = project(graph, x, f"{prefix}.q_proj", q_width, False)
        else:
            q = project(graph, x, f"{prefix}.q_a_proj", self.q_rank, self.bias)
            q = graph.rms_norm(q, f"{prefix}.q_a_layernorm.weight", self.latent_eps)
            q = project(graph, q, f"{prefix}.q_b_proj", q_width, False)
        latent = project(graph, x, f"{prefix}.kv_a_proj_with_mqa", self.rank + self.rope.dim, self.bias)
        attended = graph.node(
            LatentAttention,
            qkv=(q, latent),
            q_heads=self.heads,
            kv_heads=1,
            head_dim=self.rank + self.rope.dim,
            scale=self.scale,
            rope=self.rope,
            nope_dim=self.nope_dim,
            value_dim=self.value_dim,
            rank=self.rank,
            expansion=f"{prefix}.kv_b_proj.weight",
            latent_norm=f"{prefix}.kv_a_layernorm.weight",
            latent_eps=self.latent_eps,
            neighbours=self.neighbours,
        )
        return project(graph, attended, f"{prefix}.o_proj", self.hidden, self.bias)
