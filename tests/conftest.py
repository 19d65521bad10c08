"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from octavo.weights.hub import resolve_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, fetched into the model cache when it is not there."""
    return resolve_model("smollm2-135m")


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_works() -> None:
    """A suite started in the background inherits Ctrl-C ignored, and so would the programs it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
