"""One decoder layer quantised: scales taken out of inputs, ranges searched, weights rounded, the error measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from octavo.models.nodes import Value
from octavo.ptq.awq import scale_search
from octavo.ptq.gptq import gptq
from octavo.ptq.grid import (
    Float32Array,
    Grid,
    GridSpec,
    QuantizedMatrix,
    ScaleDtype,
    clip_search,
    fit_grid,
    round_to_grid,
)
from octavo.ptq.linears import Absorber, LayerPlan, LinearGroup
from octavo.ptq.settings import QuantizeSettings
from octavo.ptq.smoothquant import smoothing_factors
from octavo.ptq.statistics import InputStatistics

__all__ = ["LayerResult", "absorb", "quantize_layer"]

Statistics = Mapping[Value, InputStatistics]


@dataclass
class LayerResult:
    """The matrices of a layer on their grids, vectors that took factors, and for every matrix its relative error.

    The error is of outputs over the calibration inputs, |(W' - W) x|^2 / |W x|^2; without calibration of the weights.
    """

    matrices: dict[str, QuantizedMatrix] = field(default_factory=dict)
    vectors: dict[str, Float32Array] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    factors: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # least and largest, by first weight of a group


def quantize_layer(
    plan: LayerPlan,
    weights: dict[str, Float32Array],
    vectors: Mapping[str, Float32Array],
    statistics: Statistics,
    settings: QuantizeSettings,
    scale_dtype: ScaleDtype,
) -> LayerResult:
    """Quantise the matrices of ``plan``. ``weights`` are changed in place where factors go into them.

    ``vectors`` are the weights and biases that may take factors; ``statistics`` those of every group's input, none for
    a method without calibration.
    """
    result = LayerResult()
    changed = dict(vectors)
    moments = {value: found.moments for value, found in statistics.items() if settings.method != "smoothquant"}
    for group in plan.groups:
        factors = _factors(group, weights, statistics, moments, settings, scale_dtype)
        if factors is None or group.absorber is None:
            continue
        for name in group.weights:
            weights[name] = weights[name] * factors
        if group.value in moments:
            moments[group.value] = moments[group.value] / np.outer(factors, factors)
        absorb(group.absorber, factors, weights, changed, result)
        result.factors[group.weights[0]] = (float(factors.min()), float(factors.max()))
    for group in plan.groups:
        _round(group, weights, moments.get(group.value), settings, scale_dtype, result)
    return result


def _spec(settings: QuantizeSettings, k: int, scale_dtype: ScaleDtype) -> GridSpec:
    group = k if settings.group_size == -1 else settings.group_size
    symmetric = settings.symmetric or settings.method == "smoothquant"
    return GridSpec(settings.bits, group, symmetric, settings.least_zero, scale_dtype)


def _factors(
    group: LinearGroup,
    weights: Mapping[str, Float32Array],
    statistics: Statistics,
    moments: Mapping[Value, Float32Array],
    settings: QuantizeSettings,
    scale_dtype: ScaleDtype,
) -> Float32Array | None:
    """What to divide a group's input by; None for nothing."""
    absorber = group.absorber
    if absorber is None or settings.method not in ("awq", "smoothquant"):
        return None
    matrices = [weights[name] for name in group.weights]
    found = statistics[group.value]
    if settings.method == "smoothquant":
        # The paper smooths what comes out of norms only.
        return smoothing_factors(matrices, found.max_abs, settings.smoothing) if absorber.is_norm else None
    spec = _spec(settings, group.k, scale_dtype)
    return scale_search(matrices, moments[group.value], found.mean_abs, spec, heads=absorber.heads)


def absorb(
    absorber: Absorber,
    factors: Float32Array,
    weights: dict[str, Float32Array],
    vectors: dict[str, Float32Array],
    result: LayerResult,
) -> None:
    """Divide what makes an input by its factors."""
    for number, name in enumerate(absorber.vectors):
        one = np.float32(1 if absorber.plus_one and number == 0 else 0)
        vectors[name] = (vectors[name] + one) / factors - one
        result.vectors[name] = vectors[name]
    if absorber.matrix is None:
        return
    rows = factors
    if absorber.heads is not None:
        q_heads, kv_heads, head_dim = absorber.heads
        rows = factors.reshape(kv_heads, q_heads // kv_heads, head_dim)[:, 0].reshape(-1)
    matrix = weights[absorber.matrix].copy()
    matrix[slice(None) if absorber.rows is None else absorber.rows] /= rows[:, None]
    weights[absorber.matrix] = matrix
    if absorber.bias is not None:
        vectors[absorber.bias] = vectors[absorber.bias] / rows
        result.vectors[absorber.bias] = vectors[absorber.bias]


def _round(
    group: LinearGroup,
    weights: Mapping[str, Float32Array],
    moments: Float32Array | None,
    settings: QuantizeSettings,
    scale_dtype: ScaleDtype,
    result: LayerResult,
) -> None:
    spec = _spec(settings, group.k, scale_dtype)
    search = settings.clip and settings.method in ("awq", "gptq")
    grids = [
        clip_search(weights[name], spec, moments, name=name)
        if search and may_clip
        else fit_grid(weights[name], spec, name)
        for name, may_clip in zip(group.weights, group.clip, strict=True)
    ]
    matrices = [weights[name] for name in group.weights]
    if settings.method == "gptq":
        assert moments is not None
        # One pass over the inputs for all that share them.
        joined = Grid(
            spec, np.concatenate([grid.scales for grid in grids]), np.concatenate([grid.zeros for grid in grids])
        )
        whole = gptq(
            np.concatenate(matrices),
            moments,
            joined,
            damping=settings.damping,
            act_order=settings.act_order,
            name=group.weights[0],
        )
        ends = np.cumsum([len(matrix) for matrix in matrices])
        rounded = [whole.rows(int(end) - len(matrix), int(end)) for matrix, end in zip(matrices, ends, strict=True)]
    else:
        rounded = [round_to_grid(matrix, grid) for matrix, grid in zip(matrices, grids, strict=True)]
    for name, matrix, found in zip(group.weights, matrices, rounded, strict=True):
        result.matrices[name] = found
        result.errors[name] = relative_error(found.dequantized() - matrix, matrix, moments)


def relative_error(error: Float32Array, matrix: Float32Array, moments: Float32Array | None) -> float:
    """The squared error of outputs (of weights, without moments) as a share of the whole."""
    if moments is None:
        return float(np.square(error).sum() / max(float(np.square(matrix).sum()), 1e-30))
    whole = float(np.vdot(matrix @ moments, matrix))
    return float(np.vdot(error @ moments, error)) / max(whole, 1e-30)
