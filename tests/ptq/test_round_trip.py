"""What is written is read by octavo's own readers as exactly the weights the codes stand for, and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM
from octavo.evaluation.texts import Text
from octavo.ptq import pipeline
from octavo.ptq.grid import QuantizedMatrix
from octavo.ptq.layer import LayerResult
from octavo.ptq.pipeline import quantize_checkpoint
from octavo.ptq.settings import QuantizeSettings
from octavo.weights.checkpoint import open_checkpoint
from tests.models.tiny import TINY_MODELS, make_tiny_model

TEXT = Text("words", "A sheet folded three times makes an octavo: sixteen pages, eight leaves, one signature. " * 6)
CASES: list[dict[str, Any]] = [
    {"method": "rtn", "format": "gptq", "bits": 2},
    {"method": "rtn", "format": "gptq", "bits": 3},
    {"method": "gptq", "format": "gptq", "bits": 4, "symmetric": True},
    {"method": "rtn", "format": "gptq", "bits": 8, "group_size": -1},
    {"method": "awq", "format": "awq", "bits": 4},
    {"method": "rtn", "format": "compressed-tensors", "bits": 4},
    {"method": "rtn", "format": "compressed-tensors", "bits": 8, "symmetric": True},
    {"method": "smoothquant", "format": "compressed-tensors", "bits": 8, "group_size": -1},
    {"method": "smoothquant", "format": "compressed-tensors", "bits": 8, "group_size": -1, "static_scales": "mse"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(TINY_MODELS["llama"], tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
@pytest.mark.filterwarnings("ignore")  # what a load says of static scales is no matter here
def test_written_weights_are_read_exactly(
    tiny: Path, tmp_path: Path, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, QuantizedMatrix] = {}
    vectors: dict[str, np.ndarray] = {}
    quantize = pipeline.quantize_layer

    def keeping(*arguments: Any) -> LayerResult:
        result = quantize(*arguments)
        made.update(result.matrices)
        vectors.update(result.vectors)
        return result

    monkeypatch.setattr(pipeline, "quantize_layer", keeping)
    settings = QuantizeSettings(**{"samples": 4, "seq_len": 24, "group_size": 32, **case})
    text = TEXT if settings.calibrated else None
    quantize_checkpoint(tiny, tmp_path / "out", settings, text)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert len(made) == 21
    for name, matrix in made.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).read_f32(), matrix.dequantized())
    for name, vector in vectors.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).read_f32(), vector)
    checkpoint.close()
    with LLM(str(tmp_path / "out"), threads=1, max_model_len=64, num_gpu_blocks_override=8) as llm:
        assert np.isfinite(llm.prompt_logits([5, 6, 7])).all()
