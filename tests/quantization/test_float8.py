"""Rounding to e4m3: the same codes as torch gives, a scale for each row, and what cannot be rounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.errors import ModelError
from octavo.quantization.float8 import float8_view, round_to_e4m3
from octavo.weights.float8 import float8_table
from tests.backends.cpu.tensors import dense


def test_codes_are_those_of_torch() -> None:
    table = np.array([value for value in float8_table("e4m3") if np.isfinite(value)], np.float32)
    middles = (np.sort(table)[1:] + np.sort(table)[:-1]) / 2
    rng = np.random.default_rng(0)
    values = np.concatenate([table, middles, rng.standard_normal(5000) * 100, rng.standard_normal(5000) * 1e-3])
    values = np.clip(values, -448, 448).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(round_to_e4m3(values), expected)
    assert round_to_e4m3(np.array([1e9, -1e9], np.float32)).tolist() == [0x7E, 0xFE]


def test_every_row_has_a_scale_of_its_own() -> None:
    weights = (np.random.default_rng(1).standard_normal((6, 64)) * np.logspace(-4, 3, 6)[:, None]).astype(np.float32)
    weights[2] = 0
    view = float8_view(dense(weights))
    assert (view.kind, view.group, view.bits) == ("e4m3", 64, 8)
    np.testing.assert_allclose(view.read_f32(), weights, rtol=0.0625, atol=0)
    codes, scales = view.read(3, 5)
    assert scales.shape == (2, 1)
    assert np.all((codes & 0x7F).max(axis=1) == 0x7E)


def test_weights_that_are_no_numbers_are_refused_by_name() -> None:
    weights = np.ones((2, 32), np.float32)
    weights[1, 3] = np.nan
    with pytest.raises(ModelError, match="not finite"):
        float8_view(dense(weights)).read()
