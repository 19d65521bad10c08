"""The rotation is the Hadamard matrix, its own inverse, and the same whatever rows are rotated together."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.quantization.rotation import rotate_rows
from tests.native.harness import hadamard


@pytest.mark.parametrize("block", [32, 64])
def test_rows_are_multiplied_with_the_hadamard_matrix_block_by_block(block: int) -> None:
    rows = np.random.default_rng(0).standard_normal((7, 3 * block)).astype(np.float32)
    rotated = rotate_rows(rows, block)
    exact = (rows.astype(np.float64).reshape(-1, block) @ hadamard(block)).reshape(rows.shape)
    np.testing.assert_allclose(rotated, exact, rtol=0, atol=1e-6)
    np.testing.assert_allclose(rotate_rows(rotated, block), rows, rtol=0, atol=1e-6)
    for row in range(7):  # to the last bit
        np.testing.assert_array_equal(rotate_rows(rows[row : row + 1], block), rotated[row : row + 1])
