"""The part of the graph vocabulary that few families need: mixtures of experts, and attention over a cached latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from octavo.errors import ModelError
from octavo.models.graph import Attention, Node, Shape, Value

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
SCORINGS: tuple[str, ...] = get_args(Scoring)
ExpertActivation = Literal["silu_mul", "gelu_mul", "gelu_tanh_mul", "clamped_silu_mul"]
EXPERT_ACTIVATIONS: tuple[str, ...] = get_args(ExpertActivation)


@dataclass(frozen=True, kw_only=True)
class MoeRoute(Node):
    """The experts of each row, from router logits `x` [tokens, experts]: `top_k` weights, then as many expert numbers.

    Scores are a softmax or a sigmoid of the logits ("softmax_of_chosen": the logits, with a softmax over those chosen).
    Experts are chosen by score plus `correction` [experts] (DeepSeek-V3's e_score_correction_bias), the lower number
    first where scores are equal. With `groups`, only experts of the best `top_groups` groups are chosen; a group counts
    as much as its best expert, or with `group_pairs` as its best two together. The weights of those chosen are their
    scores, divided by their sum with `renormalize`, times `scale`.
    """

    x: Value
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    correction: str | None = None
    groups: int = 1
    top_groups: int = 1
    group_pairs: bool = False

    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def width(self, widths: tuple[int, ...]) -> int:
        experts = widths[0]
        if self.scoring not in SCORINGS:
            raise ModelError(f"moe_route of layer {self.layer}: scoring {self.scoring!r} is not one of {SCORINGS}")
        if self.groups < 1 or experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ModelError(
                f"moe_route of layer {self.layer}: {self.top_groups} of {self.groups} groups of {experts} experts"
            )
        size = experts // self.groups
        if not 1 <= self.top_k <= size * self.top_groups or (self.group_pairs and size < 2):
            raise ModelError(
                f"moe_route of layer {self.layer}: {self.top_k} experts of {self.top_groups} groups of {size}"
            )
        return 2 * self.top_k

    def weight_shapes(self, widths: tuple[int, ...]) -> dict[str, Shape]:
        return {} if self.correction is None else {self.correction: (widths[0],)}


@dataclass(frozen=True, kw_only=True)
class MoeExperts(Node):
    """The weighted sum of the experts that MoeRoute `route` chose for each row of `x`, plus `residual`.

    Expert e is down_e · (act(gate_e · x) · (up_e · x)), with weights [intermediate, in] and [in, intermediate] and
    biases where there are any. Experts are added up in the order of their numbers. `clamped_silu_mul` (gpt-oss) is
    (up + 1) · gate · sigmoid(alpha · gate), gate first held below `limit` and up between -limit and limit. With
    `scale_inputs` (Llama 4) weights multiply what goes into experts instead of what comes out.
    """

    x: Value
    route: Value
    top_k: int
    intermediate: int
    gates: tuple[str, ...]
    ups: tuple[str, ...]
    downs: tuple[str, ...]
    gate_biases: tuple[str, ...] = ()
    up_biases: tuple[str, ...] = ()
    down_biases: tuple[str, ...] = ()
    activation: ExpertActivation = "silu_mul"
    alpha: float = 1.0
    limit: float = 0.0
    scale_inputs: bool = False
    residual: Value | None = None

    def inputs(self) -> tuple[Value, ...]:
        return (self.x, self.route) if self.residual is None else (self.x, self.route, self.residual)

    def width(self, widths: tuple[int, ...]) -> int:
        counts = {len(names) for names in (self.gates, self.ups, self.downs)}
        biases = {len(names) for names in (self.gate_biases, self.up_biases, self.down_biases)}
        if len(counts) != 1 or biases not in ({0}, counts):
            raise ModelError(f"moe_experts of layer {self.layer}: gates, ups and downs must be as many, biases or none")
        if self.activation not in EXPERT_ACTIVATIONS:
            raise ModelError(
                f"moe_experts of layer {self.layer}: activation {self.activation!r} is not one of {EXPERT_ACTIVATIONS}"
            )
        if widths[1] != 2 * self.top_k or any(width != widths[0] for width in widths[2:]):
            raise ModelError(f"moe_experts of layer {self.layer}: x, route and residual of widths {widths}")
        return widths[0]

    def weight_shapes(self, widths: tuple[int, ...]) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for names in (self.gates, self.ups):
            shapes.update(dict.fromkeys(names, (self.intermediate, widths[0])))
        shapes.update(dict.fromkeys(self.downs, (widths[0], self.intermediate)))
        shapes.update(dict.fromkeys((*self.gate_biases, *self.up_biases), (self.intermediate,)))
        shapes.update(dict.fromkeys(self.down_biases, (widths[0],)))
        return shapes


@dataclass(frozen=True, kw_only=True)
class SigmoidGate(Node):
    """sigmoid(gate) · x, one gate [tokens, 1] for a whole row (the shared expert of Qwen2-MoE)."""

    x: Value
    gate: Value

    def inputs(self) -> tuple[Value, ...]:
        return (self.x, self.gate)

    def width(self, widths: tuple[int, ...]) -> int:
        if widths[1] != 1:
            raise ModelError(f"sigmoid_gate of layer {self.layer}: a gate of width {widths[1]}, must be 1")
        return widths[0]


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in its absorbed form.

    `qkv` is the values (q, latent), or one value of both: q [q_heads · (nope_dim + rope dim)], of each head first what
    is not rotated; latent [rank + rope dim], the part to rotate last. The cache holds one head of `head_dim` = rank +
    rope dim: the rotated part, and the latent after its RMS norm `latent_norm` [rank]. `expansion`
    [q_heads · (nope_dim + value_dim), rank] has for each head the rows that make keys of a latent and those that make
    values of it: queries go through the first, transposed, and what attention gives through the second, so that neither
    keys nor values of heads are ever made. `neighbours`: rotated pairs are (0, 1), (2, 3), ... as stored.
    """

    nope_dim: int
    value_dim: int
    rank: int
    expansion: str
    latent_norm: str
    latent_eps: float
    neighbours: bool = False

    @property
    def rope_dim(self) -> int:
        """Rotated elements of a head."""
        return self.head_dim - self.rank

    @property
    def piece(self) -> int:
        return self.value_dim

    def widths_needed(self) -> tuple[int, int]:
        """Widths of q and of the latent."""
        return self.q_heads * (self.nope_dim + self.rope_dim), self.head_dim

    def width(self, widths: tuple[int, ...]) -> int:
        expected = self.widths_needed()
        if widths not in (expected, (sum(expected),)):
            raise ModelError(
                f"latent attention of layer {self.layer}: q and latent of widths {expected} needed, not {widths}"
            )
        if self.rope is None or self.rope.dim != self.rope_dim or self.kv_heads != 1:
            raise ModelError(f"latent attention of layer {self.layer}: one kv head, rope of {self.rope_dim} elements")
        return self.q_heads * self.value_dim

    def weight_shapes(self, widths: tuple[int, ...]) -> dict[str, Shape]:
        rows = self.q_heads * (self.nope_dim + self.value_dim)
        return {self.expansion: (rows, self.rank), self.latent_norm: (self.rank,)}
