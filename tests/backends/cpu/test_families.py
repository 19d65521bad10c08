"""Tiny models of every family give on the CPU what numpy and transformers give, in every weight form."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from octavo._native import available_levels
from octavo.backends.cpu import CpuBackend
from octavo.models.derived import derived_source
from octavo.models.graph import Graph
from octavo.models.mixture import MoeExperts
from octavo.models.nodes import Embedding
from octavo.models.reference import reference_logits
from octavo.models.registry import build_graph, fit_names
from octavo.models.rewrites import optimize
from octavo.quantization.float8 import float8_view
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from tests.backends.cpu.emulation import emulated_logits, relative_error
from tests.backends.cpu.tensors import Array
from tests.models.tiny import TINY_MODELS, random_tokens, transformers_logits

TOKENS = 70


@cache
def opened(directory: Path) -> Checkpoint:
    return open_checkpoint(directory)


def load(directory: Path, quantization: str | None, kv: str = "auto", **options: int) -> CpuBackend:
    checkpoint = opened(directory)
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 96, "num_blocks": 1, "threads": 2}
    return CpuBackend.load(
        graph_of(directory),
        checkpoint,
        quantization=quantization,
        kv_cache_dtype=kv,
        **{**settings, **options},
    )


@cache
def graph_of(directory: Path) -> Graph:
    checkpoint = opened(directory)
    return fit_names(optimize(build_graph(checkpoint.config)), checkpoint.names())


def is_mixture(directory: Path) -> bool:
    return any(isinstance(node, MoeExperts) for node in graph_of(directory).nodes)


def logits_error(directory: Path, found: Array, expected: Array) -> float:
    """Of a mixture, the error of the better quarter of rows: in others experts of close scores may change places."""
    if not is_mixture(directory):
        return relative_error(found, expected)
    rows = [relative_error(*row) for row in zip(found, expected, strict=True)]
    return float(np.quantile(rows, 0.25))


def tokens_of(directory: Path) -> list[int]:
    return random_tokens(TOKENS, opened(directory).config["vocab_size"])


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("name", TINY_MODELS)
def test_in_f32_logits_equal_numpy(
    name: str, level: str, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_ISA", level)
    backend = load(tiny_models[name], "f32", "f32")
    assert backend.plan.level == level
    tokens, graph = tokens_of(tiny_models[name]), graph_of(tiny_models[name])
    weights = derived_source(opened(tiny_models[name]), graph.derived)
    expected = reference_logits(graph, lambda each: weights.tensor(each).read_f32(), tokens)
    found = backend.prompt_logits(tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", TINY_MODELS)
def test_prefill_chunks_and_decode_give_the_same_logits(name: str, tiny_models: dict[str, Path]) -> None:
    directory = tiny_models[name]
    tokens = tokens_of(directory)
    expected = load(directory, "f32", "f32", max_num_batched_tokens=96).prompt_logits(tokens).view(np.uint32)
    for step in (1, 7):
        found = load(directory, "f32", "f32", max_num_batched_tokens=step, threads=1).prompt_logits(tokens)
        np.testing.assert_array_equal(found.view(np.uint32), expected)


@pytest.mark.parametrize("quantization", ["none", "w8", "w8-wide", "w4"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_in_every_form_logits_equal_numpy_with_that_rounding(
    name: str, quantization: str, tiny_models: dict[str, Path]
) -> None:
    """What differs is a rare activation that lies between two roundings, and what becomes of it in later layers."""
    directory = tiny_models[name]
    found = load(directory, quantization, "f32").prompt_logits(tokens_of(directory))
    expected = emulated_logits(graph_of(directory), opened(directory), quantization, tokens_of(directory))
    assert logits_error(directory, found, expected) < 0.02


@pytest.mark.parametrize("quantization", ["w8-channel", "w4-g64", "w4-g128"])
def test_wider_groups_equal_numpy_with_that_rounding_whatever_the_steps(
    quantization: str, tiny_models: dict[str, Path]
) -> None:
    directory = tiny_models["llama3"]
    tokens = tokens_of(directory)
    found = load(directory, quantization, "f32").prompt_logits(tokens)
    expected = emulated_logits(graph_of(directory), opened(directory), quantization, tokens)
    assert relative_error(found, expected) < 0.02
    chunked = load(directory, quantization, "f32", max_num_batched_tokens=7, threads=1).prompt_logits(tokens)
    np.testing.assert_array_equal(chunked.view(np.uint32), found.view(np.uint32))


def test_fp8_equals_the_reference_on_rounded_weights(tiny_models: dict[str, Path]) -> None:
    directory = tiny_models["llama3"]
    tokens, graph, source = tokens_of(directory), graph_of(directory), opened(directory)
    vocabulary = {node.weight for node in graph.nodes if isinstance(node, Embedding)}

    def weight(name: str) -> np.ndarray:
        tensor = source.tensor(name)
        return tensor.read_f32() if len(tensor.shape) == 1 or name in vocabulary else float8_view(tensor).read_f32()

    found = load(directory, "fp8", "f32").prompt_logits(tokens)
    # The rest: embedding and head in w8, activations in bf16.
    assert relative_error(found, reference_logits(graph, weight, tokens)) < 0.05
    chunked = load(directory, "fp8", "f32", max_num_batched_tokens=7, threads=1).prompt_logits(tokens)
    np.testing.assert_array_equal(chunked.view(np.uint32), found.view(np.uint32))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_by_default_logits_are_within_bf16_of_transformers(name: str, tiny_models: dict[str, Path]) -> None:
    directory = tiny_models[name]
    tokens = tokens_of(directory)
    expected = transformers_logits(directory, tokens)
    found = load(directory, None).prompt_logits(tokens)
    np.testing.assert_array_equal(found, load(directory, "none").prompt_logits(tokens))
    # What rounding the inputs of products loses by itself is the measure; the cache is rounded too.
    emulated = emulated_logits(graph_of(directory), opened(directory), "none", tokens)
    rounding = logits_error(directory, emulated, expected)
    assert logits_error(directory, found, expected) < 1.5 * rounding < (0.06 if is_mixture(directory) else 0.05)
    assert logits_error(directory, load(directory, "w8").prompt_logits(tokens), expected) < 0.1


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("mistral", form) for form in (None, "w8", "w8-wide", "w4", "f32")]
    + [("qwen2_moe", form) for form in (None, "w8", "w4")]
    + [("deepseek_v3", form) for form in (None, "w8")]
    + [(name, "w8") for name in ("bloom", "cohere with head norms", "gpt2", "gpt_oss")],
)
def test_logits_do_not_depend_on_the_step_size_or_threads(
    name: str, quantization: str | None, tiny_models: dict[str, Path]
) -> None:
    directory = tiny_models[name]
    tokens = tokens_of(directory)
    expected = load(directory, quantization, max_num_batched_tokens=96).prompt_logits(tokens).view(np.uint32)
    for step, threads in [(1, 1), (7, 2), (16, 3), (69, 1)]:
        backend = load(directory, quantization, max_num_batched_tokens=step, threads=threads)
        np.testing.assert_array_equal(backend.prompt_logits(tokens).view(np.uint32), expected)
