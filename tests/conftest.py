"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.weights.hub import resolve_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, fetched into the model cache when it is not there."""
    return resolve_model("smollm2-135m")
