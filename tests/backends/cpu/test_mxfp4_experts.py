"""gpt-oss with experts in MXFP4, as it is published: the numbers of the blocks, and what they give on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.backends.cpu import CpuBackend
from octavo.models.derived import derived_source
from octavo.models.reference import reference_logits
from octavo.models.registry import build_graph, check_weights
from octavo.models.rewrites import optimize
from octavo.weights.checkpoint import open_checkpoint
from tests.backends.cpu.emulation import relative_error
from tests.models.tiny import TINY_MODELS, make_tiny_model, random_tokens, read_config, transformers_logits

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
TOKENS = random_tokens(40)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model with experts in MXFP4, and with what they stand for."""
    recipe = TINY_MODELS["gpt_oss"]
    recipe = replace(recipe, values={**recipe.values, "intermediate_size": 64})
    whole = make_tiny_model(recipe, tmp_path_factory.mktemp("whole"))
    blocks = tmp_path_factory.mktemp("blocks")
    tensors, packed = load_file(whole / "model.safetensors"), {}
    rng = np.random.default_rng(0)
    for name in list(tensors):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = tensors[name]
            continue
        experts, k, rows = tensors[name].shape
        codes = rng.integers(0, 16, (experts, rows, k // 32, 32), dtype=np.uint8)
        exponents = rng.integers(122, 126, (experts, rows, k // 32), dtype=np.uint8)
        packed[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        packed[f"{name}_scales"] = exponents
        signed = np.where(codes & 8, -1, 1) * VALUES[codes & 7] * np.exp2(exponents.astype(np.float32) - 127)[..., None]
        tensors[name] = np.ascontiguousarray(signed.reshape(experts, rows, k).swapaxes(1, 2).astype(np.float32))
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    save_file(packed, blocks / "model.safetensors")
    config = {**read_config(whole), "quantization_config": {"quant_method": "mxfp4"}}
    (blocks / "config.json").write_text(json.dumps(config))
    return whole, blocks


def test_experts_in_mxfp4_are_the_numbers_of_their_blocks(directories: tuple[Path, Path]) -> None:
    whole, blocks = directories
    checkpoint = open_checkpoint(blocks)
    graph = optimize(build_graph(checkpoint.config))
    check_weights(graph, checkpoint)
    weights = derived_source(checkpoint, graph.derived)
    found = reference_logits(graph, lambda name: weights.tensor(name).read_f32(), TOKENS)
    expected = transformers_logits(whole, TOKENS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_experts_in_mxfp4_run_as_integers_of_a_table(directories: tuple[Path, Path]) -> None:
    whole, blocks = directories
    expected = transformers_logits(whole, TOKENS)
    found = {}
    for directory in directories:
        checkpoint = open_checkpoint(directory)
        graph = optimize(build_graph(checkpoint.config))
        settings = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 96, "num_blocks": 1, "threads": 2}
        found[directory] = CpuBackend.load(graph, checkpoint, **settings).prompt_logits(TOKENS)
    # Rounding activations to int8 in groups of 32 is all that sets the two apart.
    rows = [relative_error(*row) for row in zip(found[blocks], expected, strict=True)]
    assert np.quantile(rows, 0.25) < 0.1
    assert np.quantile([relative_error(*row) for row in zip(found[blocks], found[whole], strict=True)], 0.25) < 0.1
