"""Built models: the same answers as the checkpoint, written whole or not at all, refused when anything is not right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from octavo.backends.cpu import built
from octavo.errors import ConfigError, ModelError, ParameterError, WeightsError
from octavo.frontend.building import build_model
from octavo.frontend.description import describe_model
from octavo.frontend.llm import LLM
from octavo.sampling.params import SamplingParams
from octavo.weights.built import MANIFEST, TUNING, VECTORS, WEIGHTS, BuiltCheckpoint, write_manifest
from tests.models.tiny import TINY_MODELS, make_tiny_model, random_tokens

TOKENS = random_tokens(70)
SMALL = {"max_model_len": 128, "kv_cache_bytes": 1 << 20, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(TINY_MODELS["llama"], tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def pristine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("built") / "model"
    build_model(checkpoint, output, name="tiny", quantization="w8")
    return output


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def logits(path: Path, quantization: str | None = None) -> np.ndarray:
    with LLM(str(path), quantization=quantization, **SMALL) as llm:
        return llm.prompt_logits(TOKENS)


def test_scales_of_an_fp8_kv_cache_are_used_and_kept(checkpoint: Path, tmp_path: Path) -> None:
    scaled = Path(shutil.copytree(checkpoint, tmp_path / "scaled"))
    tensors = load_file(scaled / "model.safetensors")
    layers = json.loads((scaled / "config.json").read_text())["num_hidden_layers"]
    for name in [f"model.layers.{i}.self_attn.{which}_scale" for i in range(layers) for which in "kv"]:
        tensors[name] = np.array([1e-3], np.float32)
    save_file(tensors, scaled / "model.safetensors")
    build_model(scaled, tmp_path / "built")

    def run(path: Path, kv: str) -> np.ndarray:
        with LLM(str(path), kv_cache_dtype=kv, **SMALL) as llm:
            return llm.prompt_logits(TOKENS)

    expected = run(scaled, "fp8")  # which saturates
    assert np.abs(expected - run(checkpoint, "fp8")).max() > 0.05 * np.abs(expected).max()
    np.testing.assert_array_equal(run(tmp_path / "built", "fp8"), expected)
    np.testing.assert_array_equal(run(scaled, "int8"), run(checkpoint, "int8"))


@pytest.mark.parametrize("quantization", [None, "none", "w8", "w8-wide", "w4"])
def test_a_built_model_computes_the_same_bits(
    checkpoint: Path, tmp_path: Path, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built, "_BATCH_BYTES", 20_000)  # so that there are several
    output = tmp_path / "deep" / "er"
    told: list[tuple[int, int]] = []
    result = build_model(
        checkpoint, output, quantization=quantization, progress=lambda what, done, total: told.append((done, total))
    )
    assert len(told) > 3
    assert told[-1][0] == told[-1][1]
    assert result.path == output
    assert result.total_bytes == sum(file.stat().st_size for file in output.iterdir())
    assert np.array_equal(logits(output), logits(checkpoint, quantization))


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "cohere with head norms", "deepseek_v2", "gpt_oss"])
def test_weights_that_are_views_of_tensors_are_built_as_what_they_are(family: str, tmp_path: Path) -> None:
    """Transposed, interleaved by heads, parts of a stack; learned positions; experts, and the expansion of latents."""
    checkpoint = make_tiny_model(TINY_MODELS[family], tmp_path / "checkpoint")
    build_model(checkpoint, tmp_path / "built", quantization="w8")
    assert np.array_equal(logits(tmp_path / "built"), logits(checkpoint, "w8"))


def test_the_real_model_built_from_gguf_answers_the_same(smollm2_path: Path, tmp_path: Path) -> None:
    build_model(smollm2_path, tmp_path / "built")
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2)
    answers = []
    for path in (smollm2_path, tmp_path / "built"):
        with LLM(str(path), max_model_len=512, kv_cache_bytes=32 << 20) as llm:
            answers.append(llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)[0])
    first, second = (answer.outputs[0] for answer in answers)
    assert first.text == second.text
    assert first.logprobs == second.logprobs
    assert len(first.token_ids) == 12


def test_the_form_that_was_built_may_be_named_and_no_other(model: Path) -> None:
    assert np.array_equal(logits(model, "w8"), logits(model))
    with pytest.raises(ParameterError, match="build it again from tiny with --quantization w4") as refused:
        LLM(str(model), quantization="w4", **SMALL)
    assert refused.value.field == "quantization"


def test_a_built_model_describes_itself(model: Path) -> None:
    with describe_model(model) as description:
        assert "built (w8)" in description.summary


def test_the_folder_is_left_alone_when_it_is_something_else(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("notes", "file"):
        with pytest.raises(ConfigError, match="left alone"):
            build_model(checkpoint, tmp_path / name, force=True)
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


def test_a_built_model_is_replaced_only_when_asked(checkpoint: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="--force"):
        build_model(checkpoint, model)
    with LLM(str(model), **SMALL) as running:
        before = running.prompt_logits(TOKENS)
        build_model(checkpoint, model, quantization="w4", force=True)
        assert np.array_equal(running.prompt_logits(TOKENS), before)
    assert BuiltCheckpoint(model).manifest.quantization == "w4"
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_a_build_that_fails_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="built model already"):
        build_model(model, tmp_path / "again")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tiles_measured_while_building_are_used(checkpoint: Path, tmp_path: Path) -> None:
    build_model(checkpoint, tmp_path / "tuned", tune_seconds=0.05)
    with LLM(str(tmp_path / "tuned"), **SMALL) as llm:
        assert str(tmp_path / "tuned" / TUNING) in llm.memory_report
    assert np.array_equal(logits(tmp_path / "tuned"), logits(checkpoint))


# -- refusals


def test_a_damaged_weight_is_refused_by_name(model: Path) -> None:
    manifest = BuiltCheckpoint(model).manifest
    data = bytearray((model / WEIGHTS).read_bytes())
    start = 0
    for weight in manifest.weights:
        changed = bytearray(data)
        changed[start + weight.bytes // 2] ^= 4
        (model / WEIGHTS).write_bytes(changed)
        with pytest.raises(WeightsError, match="damaged") as refused:
            logits(model)
        assert weight.names[0] in str(refused.value)
        assert "build the model again from tiny" in str(refused.value)
        start += weight.bytes


@pytest.mark.parametrize("change", ["short", "long", "gone", "a folder"])
def test_weights_of_another_size_are_refused(model: Path, change: str) -> None:
    path = model / WEIGHTS
    data = path.read_bytes()
    path.unlink()
    if change == "a folder":
        path.mkdir()
    elif change != "gone":
        path.write_bytes(data[:-1] if change == "short" else data + b"\0")
    with pytest.raises(WeightsError, match=WEIGHTS):
        logits(model)


def test_every_other_file_is_refused_when_damaged_or_gone(model: Path) -> None:
    for name in BuiltCheckpoint(model).manifest.files:
        data = (model / name).read_bytes()
        (model / name).write_bytes(data + b" ")
        with pytest.raises(WeightsError, match=name):
            BuiltCheckpoint(model)
        (model / name).unlink()
        with pytest.raises(WeightsError, match=name):
            BuiltCheckpoint(model)
        (model / name).write_bytes(data)
    BuiltCheckpoint(model)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_manifest_is_refused(pristine: Path, model: Path, data: st.DataObject) -> None:
    original = (pristine / MANIFEST).read_bytes()
    changed = bytearray(original)
    if data.draw(st.booleans()):
        changed[data.draw(st.integers(0, len(original) - 2))] ^= data.draw(st.integers(1, 127))
    else:
        del changed[data.draw(st.integers(0, len(original) - 2)) :]
    (model / MANIFEST).write_bytes(changed)
    with pytest.raises(WeightsError, match=MANIFEST):
        BuiltCheckpoint(model)


def test_another_format_or_layout_says_to_build_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built, "LAYOUT", built.LAYOUT + 1)
    with pytest.raises(WeightsError, match=r"layout .* build the model again from tiny"):
        logits(model)
    envelope = json.loads((model / MANIFEST).read_text())
    (model / MANIFEST).write_text(json.dumps({**envelope, "format": 99}))
    with pytest.raises(WeightsError, match="built in format 99"):
        logits(model)


def test_a_forged_manifest_cannot_reach_outside(model: Path) -> None:
    manifest = BuiltCheckpoint(model).manifest
    first, *others = manifest.weights
    for forged in (
        msgspec.structs.replace(manifest, weights=[msgspec.structs.replace(first, columns=1 << 40), *others]),
        msgspec.structs.replace(manifest, weights=[msgspec.structs.replace(first, form={"form": "W9"}), *others]),
        msgspec.structs.replace(manifest, weights=[msgspec.structs.replace(first, form={}), *others]),
        msgspec.structs.replace(manifest, weights=[msgspec.structs.replace(first, rows=[1, 2]), *others]),
        msgspec.structs.replace(manifest, weights=others),
        msgspec.structs.replace(manifest, weights=[*manifest.weights, first]),
        msgspec.structs.replace(manifest, weights_bytes=manifest.weights_bytes + 1),
        msgspec.structs.replace(manifest, files={**manifest.files, "../checkpoint": "00"}),
    ):
        write_manifest(model, forged)
        with pytest.raises((WeightsError, ModelError)):
            logits(model)


def test_packed_rows_cannot_be_read_back(model: Path) -> None:
    checkpoint = BuiltCheckpoint(model)
    with pytest.raises(WeightsError, match="packed for running"):
        checkpoint.tensor("model.embed_tokens.weight").read_f32()
    assert checkpoint.tensor("model.norm.weight").read_f32().shape == (96,)
    assert (model / VECTORS).is_file()
