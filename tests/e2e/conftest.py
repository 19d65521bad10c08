"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.smollm2 import FORMS, Form, write_hugging_face_form


@pytest.fixture(scope="session")
def smollm2_directory(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as a bf16 Hugging Face directory."""
    return write_hugging_face_form(smollm2_path, tmp_path_factory.mktemp("models") / "smollm2")


@pytest.fixture(scope="session", params=FORMS)
def form(request: pytest.FixtureRequest, smollm2_path: Path, smollm2_directory: Path) -> Form:
    """Each weight form in turn."""
    return Form(request.param, smollm2_path, smollm2_directory)
