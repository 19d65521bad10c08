"""Lowering of mixtures of experts and of latent attention: their forms, packed weights, buffers and operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo._native import Act, Epilogue, Form, PackedWeight, Plan, Scoring
from octavo.backends.cpu.forms import WeightForm
from octavo.backends.cpu.packing import Packing, interleaved_columns, stacked_columns
from octavo.errors import ModelError
from octavo.models.derived import TensorSource
from octavo.models.mixture import LatentAttention, MoeExperts, MoeRoute
from octavo.weights.built import BuiltCheckpoint
from octavo.weights.row_views import picked_view, transposed_view
from octavo.weights.tensors import Tensor
from octavo.weights.views import dequantized_view

if TYPE_CHECKING:
    from octavo.backends.cpu.lowering import _Lowering

__all__ = ["ExpertForms", "choose_expert_forms", "lower_experts", "lower_latent_attention", "lower_route"]

Float32Array = NDArray[np.float32]

_MOST_EXPERTS = 1024  # kMaxExperts in native/experts.h
_MAX_HEAD_DIM = 576  # kMaxHeadDim in native/common.h
_COLUMNS = 64  # packed columns are padded to this
_F32 = (Act.F32, 0, 0)
_SCORINGS = {
    "softmax": Scoring.Softmax,
    "sigmoid": Scoring.Sigmoid,
    "softmax_of_chosen": Scoring.SoftmaxOfChosen,
}
_ACTIVATIONS = {
    "silu_mul": Epilogue.SiluMul,
    "gelu_mul": Epilogue.GeluMul,
    "gelu_tanh_mul": Epilogue.GeluTanhMul,
    "clamped_silu_mul": Epilogue.ClampedSiluMul,
}


@dataclass(frozen=True)
class ExpertForms:
    """What the weights of a mixture are packed as, one form for all experts, and the tensors they are packed from."""

    gate_up: WeightForm
    down: WeightForm
    gates: list[Tensor]
    ups: list[Tensor]
    downs: list[Tensor]


def choose_expert_forms(lowering: _Lowering, node: MoeExperts) -> ExpertForms:
    """One form for gate and up of all experts, and one for down: rows of several experts are quantised alike."""
    if len(node.gates) > _MOST_EXPERTS:
        raise ModelError(f"the CPU back end runs up to {_MOST_EXPERTS} experts; this model has {len(node.gates)}")
    gate_up, tensors = lowering._choose((*node.gates, *node.ups))
    down, downs = lowering._choose(node.downs)
    if gate_up.order is not None or down.order is not None:
        raise ModelError(f"tensor {node.gates[0]}: experts quantised in act-order cannot be run; use static groups")
    return ExpertForms(gate_up, down, tensors[: len(node.gates)], tensors[len(node.gates) :], downs)


def lower_route(lowering: _Lowering, node: MoeRoute) -> None:
    """The experts of each row and their weights, as one float32 value."""
    logits = lowering._get(node.x, _F32, "route")
    out = lowering.held[node.output][_F32] = lowering._buffer(_F32, 2 * node.top_k)
    experts = lowering.widths[node.x]
    correction = None if node.correction is None else lowering._vector(node.correction)

    def add(plan: Plan, _: Sequence[PackedWeight]) -> None:
        plan.add_route(
            "route",
            logits.activation(),
            experts,
            node.top_k,
            _SCORINGS[node.scoring],
            node.renormalize,
            node.scale,
            correction,
            node.groups,
            node.top_groups,
            node.group_pairs,
            out.activation(),
        )

    lowering._emit((logits, out), add)


def lower_experts(lowering: _Lowering, node: MoeExperts) -> None:
    """Gate and up of each expert with its rows, and down of what they give, added up in the order of experts."""
    forms = lowering.experts[node.output]
    x = lowering._get(node.x, forms.gate_up.activation, "experts input")
    route = lowering._get(node.route, _F32, "experts")
    width = lowering.widths[node.output]
    pairs, count = interleaved_columns(node.intermediate)
    gate_up = [
        lowering._add_packing(Packing((gate, up), forms.gate_up, tuple(pairs), count))
        for gate, up in zip(forms.gates, forms.ups, strict=True)
    ]
    columns, down_count = stacked_columns([width])
    down = [lowering._add_packing(Packing((one,), forms.down, tuple(columns), down_count)) for one in forms.downs]
    gate_up_bias = _biases(lowering, (node.gate_biases, node.up_biases), pairs, count)
    down_bias = _biases(lowering, (node.down_biases,), columns, down_count)
    hidden = lowering._buffer(forms.down.activation, node.intermediate, lowering._rows() * node.top_k)
    out = lowering._buffer(_F32, width) if node.residual is None else lowering._residual(node.residual)
    lowering.held[node.output][_F32] = out
    lowering.result.arithmetic["experts"] = lowering.arithmetic_of(forms.gate_up)
    lowering.result.arithmetic["experts.down"] = lowering.arithmetic_of(forms.down)

    def add(plan: Plan, weights: Sequence[PackedWeight]) -> None:
        plan.add_experts(
            "experts",
            route.activation(),
            node.top_k,
            x.activation(),
            [weights[index] for index in gate_up],
            gate_up_bias,
            _ACTIVATIONS[node.activation],
            node.alpha,
            node.limit,
            hidden.activation(),
            [weights[index] for index in down],
            down_bias,
            node.residual is not None,
            out.activation(),
            width,
            node.scale_inputs,
        )

    lowering._emit((x, route, hidden, out), add)


def _biases(
    lowering: _Lowering, names: Sequence[Sequence[str]], columns: Sequence[NDArray[np.int32]], count: int
) -> Float32Array | None:
    """Biases of all experts one after another, each in the order of its packed columns."""
    if not names[0]:
        return None
    bias = np.zeros((len(names[0]), -(-count // _COLUMNS) * _COLUMNS), np.float32)
    for each, places in zip(names, columns, strict=True):
        for expert, name in enumerate(each):
            bias[expert, places] = lowering._vector(name)
    return bias.reshape(-1)


def lower_latent_attention(lowering: _Lowering, node: LatentAttention) -> None:
    """Queries through the keys' part of the expansion, attention over the latents, and the values' part of it.

    The two products of each head run in bf16 (float32 where all do): a transposed quantised matrix would have its
    groups across its rows, and they are a twentieth of a layer's weights.
    """
    _check_latent(node)
    if lowering.result.kv.bits == 4:
        raise ModelError(f"a KV cache of {lowering.result.kv.name} cannot hold latents: use int8")
    nope, rope, dim, heads = node.nope_dim, node.rope_dim, node.head_dim, node.q_heads
    q_width = node.widths_needed()[0]
    q_source = lowering._get(node.qkv[0], _F32, "attention input")
    latent = lowering._get(node.qkv[-1], _F32, "attention input")
    latent_first = q_width if len(node.qkv) == 1 else 0
    exact = lowering.quantization == "f32"
    form = WeightForm(Form.F32 if exact else Form.BF16)
    keys, values = _expansion(lowering, node, form)
    q_in = q_source
    if not exact:
        q_in = lowering._buffer(form.activation, q_width)
        lowering._emit(
            (q_source, q_in),
            lambda plan, _: plan.add_norm(
                "queries", q_source.activation(), q_width, None, None, 0.0, False, q_in.activation(), False
            ),
        )
    q = lowering._buffer((lowering.query_form, 32, 0), heads * dim)
    lowering._emit(
        (q_in, q),
        lambda plan, weights: plan.add_head_linear(
            "key expansion", [weights[i] for i in keys], q_in.activation(), 0, nope + rope, q.activation(), rope, dim
        ),
    )
    assert node.rope is not None
    tables, norm = lowering._tables(node.rope), lowering._vector(node.latent_norm)
    lowering._emit(
        (q_source, latent, q),
        lambda plan, _: plan.add_latent(
            "latent append",
            node.layer,
            q_source.activation(),
            nope,
            nope + rope,
            latent.activation(),
            latent_first,
            heads,
            node.rank,
            rope,
            node.neighbours,
            tables,
            norm,
            node.latent_eps,
            q.activation(),
        ),
    )
    attended = lowering._buffer(form.activation, heads * dim)
    lowering._emit(
        (q, attended),
        lambda plan, _: plan.add_attention(
            "attention", q.activation(), node.layer, heads, 1, dim, node.scale, 0.0, 0, attended.activation()
        ),
    )
    needed = lowering.needs[node.output]
    requirement = next(iter(needed)) if len(needed) == 1 else _F32
    out = lowering.held[node.output][requirement] = lowering._buffer(requirement, heads * node.value_dim)
    lowering._emit(
        (attended, out),
        lambda plan, weights: plan.add_head_linear(
            "value expansion",
            [weights[i] for i in values],
            attended.activation(),
            rope,
            dim,
            out.activation(),
            0,
            node.value_dim,
        ),
    )
    for name in ("key expansion", "value expansion"):
        lowering.result.arithmetic[name] = lowering.arithmetic_of(form)
    lowering.result.arithmetic["attention"] = lowering.arithmetic_name(lowering.query_form)


def _check_latent(node: LatentAttention) -> None:
    """What the native operations ask of the sizes; every model known has them."""
    wrong = [
        f"{what} = {size}, must be a multiple of {multiple}"
        for what, size, multiple in (
            ("qk_nope_head_dim", node.nope_dim, 32),
            ("qk_rope_head_dim", node.rope_dim, 32),
            ("kv_lora_rank", node.rank, _COLUMNS),
            ("v_head_dim", node.value_dim, _COLUMNS),
        )
        if size % multiple
    ]
    if node.head_dim > _MAX_HEAD_DIM:
        wrong.append(f"kv_lora_rank + qk_rope_head_dim = {node.head_dim}, must be at most {_MAX_HEAD_DIM}")
    if wrong:
        raise ModelError(f"the CPU back end cannot run this latent attention: {'; '.join(wrong)}")


def _expansion(lowering: _Lowering, node: LatentAttention, form: WeightForm) -> tuple[list[int], list[int]]:
    """Packed weights of each head: from a query to its latent [rank, nope_dim], and from a latent to values."""
    keys: list[int] = []
    values: list[int] = []
    for head in range(node.q_heads):
        for packed, part in zip((keys, values), _expansion_parts(lowering.source, node, head), strict=True):
            columns, count = stacked_columns([part.shape[0]])
            packed.append(lowering._add_packing(Packing((part,), form, tuple(columns), count)))
    return keys, values


def _expansion_parts(source: TensorSource, node: LatentAttention, head: int) -> tuple[Tensor, Tensor]:
    """A head's part of the expansion, under names of their own, by which a built model knows them."""
    names = (f"{node.expansion}:{head} keys", f"{node.expansion}:{head} values")
    if isinstance(source, BuiltCheckpoint):
        return source.tensor(names[0]), source.tensor(names[1])
    tensor, rows = dequantized_view(source.tensor(node.expansion)), node.nope_dim + node.value_dim
    own = np.arange(head * rows, (head + 1) * rows, dtype=np.int64)
    keys, values = picked_view(tensor, own[: node.nope_dim]), picked_view(tensor, own[node.nope_dim :])
    return replace(transposed_view(keys), name=names[0]), replace(values, name=names[1])
