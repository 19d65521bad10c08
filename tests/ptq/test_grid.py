"""Integer grids: bounds of the error, zero points, clipped ranges, and what no scale can hold."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.ptq.grid import GridSpec, clip_search, fit_grid, round_to_grid


def normal(rows: int, k: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, k)) * 0.02).astype(np.float32)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weights_are_within_a_step_and_scales_as_stored(bits: int, symmetric: bool) -> None:
    weights = normal(20, 128)
    spec = GridSpec(bits, 32, symmetric)
    matrix = round_to_grid(weights, fit_grid(weights, spec))
    grid = matrix.grid
    assert matrix.codes.max() <= spec.largest
    np.testing.assert_array_equal(grid.scales, grid.scales.astype(np.float16).astype(np.float32))
    assert np.all((grid.zeros >= 0) & (grid.zeros <= spec.largest))
    steps = np.repeat(grid.scales, 32, axis=1)
    assert np.all(np.abs(matrix.dequantized() - weights) <= steps * 1.01)


def test_what_is_on_the_grid_stays_as_it_is() -> None:
    weights = normal(6, 64, 1)
    spec = GridSpec(4, 32, scale_dtype="bf16")
    once = round_to_grid(weights, fit_grid(weights, spec))
    again = round_to_grid(once.dequantized(), once.grid)
    np.testing.assert_array_equal(again.codes, once.codes)


def test_groups_of_one_sign_have_zero_on_their_grid_and_zero_points_a_least_value() -> None:
    weights = np.abs(normal(4, 32)) + np.float32(0.5)
    for least in (0, 1):
        grid = fit_grid(weights, GridSpec(4, 32, least_zero=least))
        assert np.all(grid.zeros == least)
    assert np.all(fit_grid(-weights, GridSpec(4, 32)).zeros == 15)


def test_all_zero_groups_stay_zero() -> None:
    weights = np.zeros((2, 32), np.float32)
    assert not round_to_grid(weights, fit_grid(weights, GridSpec(4, 32))).dequantized().any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 7e4])
def test_weights_no_scale_can_hold_are_refused_by_name(bad: float) -> None:
    weights = normal(2, 32)
    weights[1, 3] = bad
    with pytest.raises(ModelError, match=r"tensor a\.weight: has weights"):
        fit_grid(weights, GridSpec(4, 32), "a.weight")


def test_a_clipped_range_loses_less_where_few_weights_are_large() -> None:
    weights = normal(30, 128, 2)
    weights[:, 5] *= 3
    spec = GridSpec(3, 64)
    whole = round_to_grid(weights, fit_grid(weights, spec)).dequantized() - weights
    clipped = round_to_grid(weights, clip_search(weights, spec)).dequantized() - weights
    assert np.square(clipped).sum() < 0.9 * np.square(whole).sum()


def test_the_search_minds_how_large_inputs_are() -> None:
    rng = np.random.default_rng(3)
    weights = normal(30, 64, 3)
    weights[:, 7] *= 3
    inputs = rng.standard_normal((200, 64)).astype(np.float32)
    inputs[:, 7] *= 30  # the large weights are what matters here: cutting them off would cost most
    moments = inputs.T @ inputs / 200
    spec = GridSpec(3, 64)

    def loss(grid_of: object) -> float:
        error = round_to_grid(weights, grid_of).dequantized() - weights  # type: ignore[arg-type]
        return float(np.square(error @ inputs.T).sum())

    minding, blind = clip_search(weights, spec, moments), clip_search(weights, spec)
    assert loss(minding) < loss(blind)
    assert loss(minding) <= loss(fit_grid(weights, spec)) * 1.001
