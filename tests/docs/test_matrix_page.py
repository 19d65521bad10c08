"""The page of what was tried with what has every family, format and KV type, and what it says holds for a sample."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.matrix import FORMATS, KV_TYPES, cells_of
from tests.models.tiny import TINY_MODELS, make_tiny_model

PAGE = Path(__file__).parents[2] / "docs/matrix.md"


def rows() -> dict[str, list[str]]:
    lines = re.findall(r"^\| (.+) \|$", PAGE.read_text(), re.M)
    return {cells[0]: cells[1:] for cells in (line.split(" | ") for line in lines)}


def test_the_page_has_every_family_format_and_kv_type() -> None:
    table = rows()
    assert table.pop("family") == list(FORMATS)
    assert list(table) == list(TINY_MODELS), "run scripts/matrix-page"
    assert f"({', '.join(KV_TYPES)})" in PAGE.read_text()


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
def test_the_page_tells_what_a_run_shows(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(TINY_MODELS[family], tmp_path / "model")
    refused: dict[str, set[str]] = {form: set() for form in FORMATS}
    for cell in cells_of(folder, tmp_path):
        if cell.refusal is not None:
            refused[cell.format].add(cell.kv)
    for (form, types), cell in zip(refused.items(), rows()[family], strict=True):
        assert cell == ("•" if not types else cell), form
        assert cell.startswith("•") == (len(types) < len(KV_TYPES)), form
