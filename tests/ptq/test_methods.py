"""GPTQ, AWQ and SmoothQuant on single matrices: each loses less than plain rounding where its paper says it does."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.ptq.awq import scale_search
from octavo.ptq.gptq import gptq
from octavo.ptq.grid import GridSpec, fit_grid, round_to_grid
from octavo.ptq.smoothquant import AbsHistogram, smoothing_factors

RNG = np.random.default_rng(0)
WEIGHTS = (RNG.standard_normal((48, 160)) * 0.05).astype(np.float32)
# Inputs that have much in common, as those of linears do, and a few that are much larger than others.
INPUTS = (
    RNG.standard_normal((400, 12)) @ RNG.standard_normal((12, 160)) + RNG.standard_normal((400, 160)) * 0.4
).astype(np.float32)
INPUTS[:, [3, 77]] *= 12
MOMENTS = INPUTS.T @ INPUTS / np.float32(len(INPUTS))
SPEC = GridSpec(4, 32)


def output_error(weights: np.ndarray) -> float:
    return float(np.square((weights - WEIGHTS) @ INPUTS.T).sum())


PLAIN = output_error(round_to_grid(WEIGHTS, fit_grid(WEIGHTS, SPEC)).dequantized())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("spec", [SPEC, GridSpec(4, 160), GridSpec(3, 32), GridSpec(4, 32, symmetric=True)])
def test_gptq_halves_the_error_of_outputs(spec: GridSpec, act_order: bool) -> None:
    grid = fit_grid(WEIGHTS, spec)
    found = gptq(WEIGHTS, MOMENTS, grid, act_order=act_order)
    assert found.grid is grid
    assert found.codes.max() <= spec.largest
    assert output_error(found.dequantized()) < 0.5 * output_error(round_to_grid(WEIGHTS, grid).dequantized())


def test_gptq_rounds_plainly_where_inputs_have_nothing_in_common() -> None:
    grid = fit_grid(WEIGHTS, SPEC)
    found = gptq(WEIGHTS, np.eye(160, dtype=np.float32), grid)
    np.testing.assert_array_equal(found.codes, round_to_grid(WEIGHTS, grid).codes)


def test_gptq_needs_neither_all_inputs_nor_more_samples_than_inputs() -> None:
    few = INPUTS[:20].copy()
    few[:, 50:60] = 0
    found = gptq(WEIGHTS, few.T @ few / np.float32(20), fit_grid(WEIGHTS, SPEC))
    np.testing.assert_allclose(found.dequantized(), WEIGHTS, atol=0.2)
    plain = round_to_grid(WEIGHTS, fit_grid(WEIGHTS, SPEC))
    np.testing.assert_array_equal(found.codes[:, 50:60], plain.codes[:, 50:60])


def test_gptq_refuses_inputs_that_are_no_numbers() -> None:
    moments = MOMENTS.copy()
    moments[3, 3] = np.inf
    with pytest.raises(ModelError, match=r"tensor a\.weight: its calibration inputs are not finite"):
        gptq(WEIGHTS, moments, fit_grid(WEIGHTS, SPEC), name="a.weight")


def test_awq_scales_lower_the_error_of_outputs() -> None:
    factors = scale_search([WEIGHTS[:20], WEIGHTS[20:]], MOMENTS, np.abs(INPUTS).mean(axis=0), SPEC)
    scaled = WEIGHTS * factors
    found = round_to_grid(scaled, fit_grid(scaled, SPEC)).dequantized() / factors
    assert output_error(found) < 0.8 * PLAIN
    assert factors[3] > 2 * np.median(factors)


def test_awq_scales_of_query_heads_that_share_a_kv_head_are_the_same() -> None:
    factors = scale_search([WEIGHTS], MOMENTS, np.abs(INPUTS).mean(axis=0), SPEC, heads=(10, 5, 16))
    heads = factors.reshape(5, 2, 16)
    np.testing.assert_array_equal(heads[:, 0], heads[:, 1])
    assert len(np.unique(factors)) > 1


def test_smoothing_is_the_papers_formula() -> None:
    factors = smoothing_factors([WEIGHTS[:10], WEIGHTS[10:]], np.abs(INPUTS).max(axis=0), 0.5)
    expected = np.sqrt(np.abs(INPUTS).max(axis=0) / np.abs(WEIGHTS).max(axis=0))
    np.testing.assert_allclose(factors, expected, rtol=1e-6)


def test_a_histogram_does_not_depend_on_order() -> None:
    parts = [np.full(10, 0.3), np.linspace(0, 5, 1000), np.array([900.0]), np.linspace(-2, 2, 500)]
    one, other = AbsHistogram(), AbsHistogram()
    for part in parts:
        one.add(part.astype(np.float32))
    for part in parts[::-1]:
        other.add(part.astype(np.float32))
    np.testing.assert_array_equal(one.counts, other.counts)
    assert one.limit == other.limit == 1024


def test_static_scales_are_of_the_largest_a_percentile_or_the_least_error() -> None:
    values = np.random.default_rng(5).standard_normal(100_000).astype(np.float32)
    values[0] = 40
    histogram = AbsHistogram()
    histogram.add(values)
    largest, share, least = (histogram.scale(kind, 99) for kind in ("max", "percentile", "mse"))
    assert largest == 40 / 127
    assert abs(share * 127 - np.percentile(np.abs(values), 99)) < 0.05

    def error(scale: float) -> float:
        return float(np.square(values - np.clip(np.rint(values / scale), -127, 127) * scale).sum())

    assert error(least) <= min(error(largest), error(share))
    assert AbsHistogram().scale("mse") == 1.0
