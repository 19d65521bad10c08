"""A tiny checkpoint quantised by every method: what is written, that a stopped run goes on, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.torch import load_file as torch_file
from tokenizers import Tokenizer

from octavo.errors import ConfigError, WeightsError
from octavo.evaluation.texts import Text
from octavo.models.reference import reference_logits
from octavo.models.registry import build_graph
from octavo.ptq.pipeline import quantize_checkpoint
from octavo.ptq.settings import QuantizeSettings
from octavo.ptq.state import FOLDER
from tests.models.tiny import TINY_MODELS, make_tiny_model, read_config, read_weights
from tests.ptq.unpacking import awq_weights, gptq_weights

TEXT = Text("words", "A sheet folded three times makes an octavo: sixteen pages, eight leaves, one signature. " * 12)
SMALL: dict[str, Any] = {"samples": 6, "seq_len": 24, "group_size": 32}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(TINY_MODELS["llama"], tmp_path_factory.mktemp("llama"))


def settings(method: str, format: str, **values: Any) -> QuantizeSettings:
    return QuantizeSettings(method=method, format=format, **{**SMALL, **values})  # type: ignore[arg-type]


def dense_weights(source: Path, made: Path, format: str) -> dict[str, np.ndarray]:
    """The weights of a written directory, its quantised ones read by the book."""
    stored = load_file(made / "model.safetensors")
    weights = {}
    for name in read_weights(source):
        module = name.removesuffix(".weight")
        if f"{module}.qweight" in stored:
            weights[name] = gptq_weights(stored, module, 4) if format == "gptq" else awq_weights(stored, module, 32)
        else:
            weights[name] = stored[name].astype(np.float32)
    return weights


def divergence(source: Path, weights: dict[str, np.ndarray]) -> float:
    graph = build_graph(read_config(source))
    ids = Tokenizer.from_file(str(source / "tokenizer.json")).encode(TEXT.content).ids[100:180]
    logits = [reference_logits(graph, each.__getitem__, ids) for each in (read_weights(source), weights)]
    p, q = (rows - np.log(np.exp(rows).sum(-1, keepdims=True)) for rows in (x.astype(np.float64) for x in logits))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rtn") / "out"
    done = quantize_checkpoint(tiny, out, settings("rtn", "gptq"), None)
    assert (done["sequences"], done["tokens"]) == (0, 0)
    return out


@pytest.fixture(scope="module")
def plain_errors(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What rounding alone does to the outputs of the first layer."""
    done = quantize_checkpoint(tiny, tmp_path_factory.mktemp("rtn") / "out", settings("rtn", "gptq"), TEXT)
    return dict(done["layers"][0]["errors"])


@pytest.mark.parametrize(
    ("method", "format", "gain"), [("gptq", "gptq", 0.5), ("awq", "awq", 0.9), ("gptq", "awq", 0.5)]
)
def test_methods_with_calibration_are_nearer_to_the_model(
    tiny: Path, plain_errors: dict[str, float], tmp_path: Path, method: str, format: str, gain: float
) -> None:
    out = tmp_path / "out"
    told: list[tuple[int, int, str]] = []
    done = quantize_checkpoint(tiny, out, settings(method, format), TEXT, lambda *state: told.append(state))
    assert [(finished, total) for finished, total, _ in told] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert [layer["layer"] for layer in done["layers"]] == [0, 1, 2]
    errors = done["layers"][0]["errors"]
    assert errors.keys() == plain_errors.keys()
    assert sum(errors.values()) < gain * sum(plain_errors.values())
    assert not (out / FOLDER).exists()
    # What was written is near the model, though how near so small a random model says little.
    assert divergence(tiny, dense_weights(tiny, out, format)) < 0.5


def test_everything_else_is_kept_as_it_is(tiny: Path, plain: Path) -> None:
    source, made = load_file(tiny / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
    ):
        np.testing.assert_array_equal(made[name], source[name])
    assert "model.layers.0.mlp.up_proj.weight" not in made
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (plain / file).read_bytes() == (tiny / file).read_bytes()
    config = json.loads((plain / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq"
    assert json.loads((plain / "quantize_config.json").read_text()) == config["quantization_config"]
    rest = {k: v for k, v in config.items() if k not in ("quantization_config", "torch_dtype", "dtype")}
    assert rest.items() <= read_config(tiny).items()


@pytest.mark.parametrize("static", [None, "max", "percentile", "mse"])
def test_smoothquant_writes_int8_with_one_scale_a_row(tiny: Path, tmp_path: Path, static: str | None) -> None:
    out = tmp_path / "out"
    values = settings("smoothquant", "compressed-tensors", bits=8, group_size=-1, static_scales=static)
    quantize_checkpoint(tiny, out, values, TEXT)
    stored = torch_file(out / "model.safetensors")  # bf16 scales, which numpy has no type for
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = config["config_groups"]["group_0"]
    assert (config["format"], config["ignore"]) == ("int-quantized", ["lm_head"])
    assert scheme["input_activations"]["dynamic"] is (static is None)
    assert ("model.layers.2.mlp.down_proj.input_scale" in stored) is (static is not None)
    norm = "model.layers.0.input_layernorm.weight"
    assert np.abs(stored[norm].numpy() / read_weights(tiny)[norm] - 1).max() > 0.1


def test_a_stopped_run_goes_on_to_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    values = settings("gptq", "gptq")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    quantize_checkpoint(tiny, whole, values, TEXT)

    class StopError(Exception):
        pass

    def stop(finished: int, total: int, state: str) -> None:
        if finished == 2:
            raise StopError

    with pytest.raises(StopError):
        quantize_checkpoint(tiny, stopped, values, TEXT, stop)
    assert sorted(path.name for path in (stopped / FOLDER).iterdir()) == [
        "after-0001.safetensors", "layer-0000.safetensors", "layer-0001.safetensors", "state.json"
    ]  # fmt: skip
    begun = tmp_path / "begun"
    shutil.copytree(stopped, begun)
    done = quantize_checkpoint(tiny, stopped, values, TEXT)
    assert done["taken_up_layers"] == 2
    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="was begun with other settings"):
        quantize_checkpoint(tiny, begun, settings("gptq", "gptq", damping=0.1), TEXT)
    with pytest.raises(ConfigError, match="was begun with other settings"):
        quantize_checkpoint(tiny, begun, values, Text("other", TEXT.content[7:]))
    damaged = begun / FOLDER / "layer-0001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(WeightsError, match=r"layer-0001\.safetensors: is missing or damaged"):
        quantize_checkpoint(tiny, begun, values, TEXT)


def test_a_folder_with_something_in_it_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="is not empty"):
        quantize_checkpoint(tiny, tmp_path, settings("rtn", "gptq"), None)


def test_groups_that_do_not_divide_are_refused_with_those_that_do(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"96 inputs do not divide into groups of 64; --group-size may be 32"):
        quantize_checkpoint(tiny, tmp_path / "out", settings("rtn", "gptq", group_size=64), None)
    assert not (tmp_path / "out").exists()


def test_too_little_text_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the calibration text has"):
        quantize_checkpoint(tiny, tmp_path / "out", settings("awq", "awq", seq_len=250), Text("short", "A few words."))
