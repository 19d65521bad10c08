"""Models measured through the engine: figures of a tiny model against transformers, windows, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM
from octavo.errors import ModelError
from octavo.evaluation.evaluate import evaluate, open_model, windows_of
from octavo.evaluation.measures import log_softmax
from octavo.evaluation.texts import Text
from octavo.evaluation.windows import Window, text_windows
from tests.models.tiny import TINY_MODELS, make_tiny_model, transformers_logits

TEXT = Text("words", "Sixteen pages, eight leaves, one signature; a sheet folded three times makes an octavo. " * 3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(TINY_MODELS["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def exact(tiny: Path) -> Iterator[LLM]:
    with open_model(str(tiny), 40, quantization="f32", kv_cache_dtype="f32", threads=1) as llm:
        yield llm


def test_perplexity_is_that_of_transformers(tiny: Path, exact: LLM) -> None:
    windows = windows_of(exact, TEXT, 40)
    losses = []
    for window in windows:
        rows = log_softmax(transformers_logits(tiny, window.ids))
        losses += [-rows[place, token] for place, token in enumerate(window.ids[1:])]
    found = evaluate(exact.prompt_logits, windows).summary()
    assert found["windows"] == len(windows) > 3
    assert found["perplexity"]["tokens"] == len(losses)
    assert math.isclose(found["perplexity"]["mean_nll"], float(np.mean(losses)), rel_tol=1e-5)
    assert "divergence" not in found


def test_a_form_is_compared_with_float32(tiny: Path, exact: LLM) -> None:
    windows = windows_of(exact, TEXT, 40, most=3)
    with open_model(str(tiny), 40, quantization="w4", threads=1) as llm:
        found = evaluate(llm.prompt_logits, windows, reference=exact.prompt_logits).summary()
    assert found["divergence"]["positions"] == sum(len(window.ids) for window in windows)
    assert 1e-4 < found["divergence"]["mean_kl"] < 1
    same = evaluate(exact.prompt_logits, windows, reference=exact.prompt_logits).summary()
    assert (same["divergence"]["max_kl"], same["divergence"]["top1"]) == (0, 1)
    assert same["nll_difference"] == 0
    assert same["tokens_sha256"] == found["tokens_sha256"]


def test_a_stride_counts_positions_once_with_more_context(exact: LLM) -> None:
    ids = list(exact.get_tokenizer().encode(TEXT.content, add_special_tokens=False))
    windows = list(text_windows("t", ids, 40, stride=20))
    found = evaluate(exact.prompt_logits, windows, reference=exact.prompt_logits).summary()
    assert found["perplexity"]["tokens"] == len(ids) - 1
    assert found["divergence"]["positions"] == len(ids)


def test_progress_is_told_window_by_window(exact: LLM) -> None:
    told: list[tuple[int, int]] = []
    windows = windows_of(exact, TEXT, 40, most=2)
    evaluate(exact.prompt_logits, windows, progress=lambda window, so_far: told.append((window.start, so_far.windows)))
    assert told == [(windows[0].start, 1), (windows[1].start, 2)]


def test_models_of_other_vocabularies_are_refused(exact: LLM) -> None:
    window = Window("t", 0, [1, 2, 3])
    with pytest.raises(ModelError, match=r"\(3, 300\), the reference \(3, 7\)"):
        evaluate(exact.prompt_logits, [window], reference=lambda ids: np.zeros((len(ids), 7), np.float32))


def test_no_text_gives_no_figures(exact: LLM) -> None:
    with pytest.raises(ModelError, match="too short"):
        evaluate(exact.prompt_logits, [])
