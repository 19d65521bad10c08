"""What numpy computes for mixtures of experts and latent attention: the part of the oracle that few families need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.models.mixture import LatentAttention, MoeExperts, MoeRoute

__all__ = ["latent_attention", "mixture", "route", "softmax"]

Array = NDArray[Any]
Weight = Callable[[str], Array]
Round = Callable[[Array], Array]


def route(node: MoeRoute, logits: Array, correction: Array | None) -> Array:
    """Weights and numbers of the experts of each row."""
    rows, experts = logits.shape
    scores = logits
    if node.scoring == "sigmoid":
        scores = np.float32(1) / (np.float32(1) + np.exp(-logits))
    elif node.scoring == "softmax":
        scores = softmax(logits, np.ones((1, experts), np.bool_), None)
    choice = scores if correction is None else scores + correction
    if node.top_groups < node.groups:
        grouped = choice.reshape(rows, node.groups, -1)
        worth = np.sort(grouped, axis=-1)[..., -2 if node.group_pairs else -1 :].sum(axis=-1)
        best = np.argsort(-worth, axis=-1, kind="stable")[:, : node.top_groups]
        chosen = np.zeros(worth.shape, np.bool_)
        np.put_along_axis(chosen, best, True, axis=-1)
        choice = np.where(chosen[..., None], grouped, np.float32(-np.inf)).reshape(rows, experts)
    numbers = np.argsort(-choice, axis=-1, kind="stable")[:, : node.top_k]
    weights = np.take_along_axis(scores, numbers, axis=-1)
    if node.scoring == "softmax_of_chosen":
        weights = softmax(weights, np.ones((1, node.top_k), np.bool_), None)
    if node.renormalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    return np.concatenate([weights * np.float32(node.scale), numbers.astype(np.float32)], axis=-1)


def softmax(scores: Array, visible: Array, sinks: Array | None) -> Array:
    """The softmax of what is visible in the last dimension; sinks [heads] are one more score of each row."""
    scores = np.where(visible, scores, np.float32(-np.inf))
    largest = scores.max(axis=-1, keepdims=True)
    extra = np.float32(0)
    if sinks is not None:
        largest = np.maximum(largest, sinks[:, None, None])
        extra = np.exp(sinks[:, None, None] - largest)
    weights = np.exp(scores - largest)
    result: Array = weights / (weights.sum(axis=-1, keepdims=True) + extra)
    return result


def mixture(
    node: MoeExperts,
    inputs: list[Array],
    weight: Weight,
    rounded: Round,
    activations: dict[str, Callable[[Array], Array]],
) -> Array:
    """The weighted sum of experts."""
    x = rounded(inputs[0])
    weights, numbers = np.split(inputs[1], 2, axis=-1)
    total = np.zeros_like(inputs[0]) if node.residual is None else inputs[2].copy()
    for expert in range(len(node.gates)):
        rows, ranks = np.nonzero(numbers == expert)
        if not rows.size:
            continue

        def product(a: Array, names: tuple[str, ...], biases: tuple[str, ...], expert: int = expert) -> Array:
            result: Array = a @ rounded(weight(names[expert])).T
            return result + weight(biases[expert]) if biases else result

        factors = weights[rows, ranks][:, None]
        inside, outside = (factors, np.float32(1)) if node.scale_inputs else (None, factors)
        own = x[rows] if inside is None else rounded(x[rows] * inside)
        gate = product(own, node.gates, node.gate_biases)
        up = product(own, node.ups, node.up_biases)
        if node.activation == "clamped_silu_mul":
            limit = np.float32(node.limit)
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            hidden = (up + np.float32(1)) * gate / (np.float32(1) + np.exp(-np.float32(node.alpha) * gate))
        else:
            hidden = activations[node.activation.removesuffix("_mul")](gate) * up
        total[rows] += outside * product(rounded(hidden), node.downs, node.down_biases)
    return total


def latent_attention(
    node: LatentAttention,
    q_latent: Array,
    weight: Weight,
    rounded: Round,
    rotate: Callable[[Array], Array],
    normed: Callable[[Array], Array],
) -> Array:
    """Attention of q_latent [tokens, q | latent | rotated]; `rotate` and `normed` are the reference's own."""
    tokens, rank = q_latent.shape[0], node.rank
    q, latent = np.split(q_latent, [node.widths_needed()[0]], axis=-1)
    q = q.reshape(tokens, node.q_heads, -1)
    q_rotated, k_rotated = q[..., node.nope_dim :], latent[:, None, rank:]
    if node.neighbours:
        order = [*range(0, node.rope_dim, 2), *range(1, node.rope_dim, 2)]
        q_rotated, k_rotated = q_rotated[..., order], k_rotated[..., order]
    q_rotated, k_rotated = rotate(q_rotated), rotate(k_rotated)[:, 0]
    latent = normed(latent[:, :rank])
    expansion = rounded(weight(node.expansion)).reshape(node.q_heads, -1, rank)
    keys, values = expansion[:, : node.nope_dim], expansion[:, node.nope_dim :]
    absorbed = np.einsum("qhd,hdr->qhr", rounded(q[..., : node.nope_dim]), keys)
    scores = np.einsum("qhr,kr->hqk", absorbed, latent) + np.einsum("qhd,kd->hqk", q_rotated, k_rotated)
    visible = np.tri(tokens, dtype=np.bool_)
    attended = np.einsum("hqk,kr->qhr", softmax(scores * np.float32(node.scale), visible, None), latent)
    result: Array = np.einsum("qhr,hdr->qhd", rounded(attended), values)
    return result.reshape(tokens, -1)
