"""A step of the CPU back end samples and scores the rows the engine asks for, from the cache the engine laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends.cpu import CpuBackend, cpu_sizes
from octavo.backends.cpu.backend import instruction_set
from octavo.backends.interface import SampledToken, SequenceWork, StepBatch
from octavo.errors import ConfigError, ModelError, ParameterError
from octavo.kv_cache import KV_CACHE_TYPES
from octavo.models.graph import Graph
from octavo.models.registry import build_graph
from octavo.models.rewrites import optimize
from octavo.sampling.params import SamplingParams
from octavo.sampling.rows import RowSampling
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from tests.backends.cpu.tensors import Array
from tests.models.tiny import random_tokens

# Types for heads of 16 such as this model has.
ANY_HEAD = [name for name in KV_CACHE_TYPES if name != "int4"]


@pytest.fixture(scope="module")
def model(tiny_models: dict[str, Path]) -> tuple[Graph, Checkpoint]:
    checkpoint = open_checkpoint(tiny_models["llama"])
    return optimize(build_graph(checkpoint.config)), checkpoint


def load(model: tuple[Graph, Checkpoint], **options: Any) -> CpuBackend:
    graph, checkpoint = model
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 5, "max_model_len": 80, "num_blocks": 20, "threads": 2}
    return CpuBackend.load(graph, checkpoint, **{**settings, **options})


@pytest.fixture(scope="module")
def backend(model: tuple[Graph, Checkpoint]) -> CpuBackend:
    return load(model)


def greedy(prompt: list[int], **more: Any) -> RowSampling:
    return RowSampling(SamplingParams(temperature=0.0, **more), 0, 0, prompt, vocab_size=300)


def work(tokens: list[int], table: list[int], start: int, count: int, **more: Any) -> SequenceWork:
    return SequenceWork(np.array(tokens, np.int32), np.array(table, np.int32), start, count, **more)


def log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def assert_scores(found: SampledToken, token: int, logits: Array, top: int) -> None:
    """The token with its log-probability, rank and the best others, as the logits give them."""
    scores = log_softmax(logits)
    assert found.token == token
    assert found.logprob == pytest.approx(scores[token], abs=1e-5)
    assert found.rank == 1 + int((scores > scores[token]).sum())
    best = np.argsort(-scores, kind="stable")[:top]
    assert [each for each, _ in found.top] == best.tolist()
    assert [score for _, score in found.top] == pytest.approx(scores[best].tolist(), abs=1e-5)


def test_a_step_samples_the_sequences_that_ask_for_it(backend: CpuBackend) -> None:
    prompts = [random_tokens(n, 300, seed=n) for n in (20, 7, 16)]
    tables = [[3, 9], [0], [5]]
    logits = [backend.prompt_logits(prompt) for prompt in prompts]
    flags = [True, False, True]
    output = backend.execute(
        StepBatch(
            [
                work(p, t, 0, len(p), sample=flag, row=greedy(p, logprobs=3) if flag else None)
                for p, t, flag in zip(prompts, tables, flags, strict=True)
            ]
        )
    )
    assert output.sampled[1] is None
    for i in (0, 2):
        found = output.sampled[i]
        assert found is not None
        assert found.error is None
        assert_scores(found, int(logits[i][-1].argmax()), logits[i][-1], 3)


def test_chunks_and_decodes_continue_from_the_cache(backend: CpuBackend) -> None:
    tokens = random_tokens(40, 300, seed=1)
    table = [7, 2, 11]
    expected = backend.prompt_logits(tokens)
    other = random_tokens(30, 300, seed=2)
    for start, count in [(0, 10), (10, 13), (23, 16), (39, 1)]:
        sample = start + count == 40
        pieces = [
            work(other, [14, 15], 0 if start == 0 else start % 20, 3),
            work(tokens, table, start, count, sample=sample, row=greedy(tokens, logprobs=1) if sample else None),
        ]
        output = backend.execute(StepBatch(pieces))
    assert output.sampled[0] is None
    found = output.sampled[1]
    assert found is not None
    assert_scores(found, int(expected[-1].argmax()), expected[-1], 1)


def test_prompt_tokens_are_scored_with_and_without_sampling(backend: CpuBackend) -> None:
    first, second, third = (random_tokens(n, 300, seed=n) for n in (30, 9, 4))
    logits = [backend.prompt_logits(prompt) for prompt in (first, second, third)]
    rows = [greedy(prompt, prompt_logprobs=2, logprobs=2) for prompt in (first, second)]
    output = backend.execute(
        StepBatch(
            [
                work(first, [1, 2], 0, 20, prompt_logprobs=True, row=rows[0]),
                work(second, [3], 0, 9, prompt_logprobs=True, sample=True, row=rows[1]),
                work(third, [4], 0, 4, sample=True, row=greedy(third)),
            ]
        )
    )
    chunk, whole, none = output.prompt_logprobs
    assert none is None
    assert chunk is not None
    assert len(chunk) == 20
    for i, found in enumerate(chunk):
        assert_scores(found, first[i + 1], logits[0][i], 2)
    assert whole is not None
    assert len(whole) == 8
    for i, found in enumerate(whole):
        assert_scores(found, second[i + 1], logits[1][i], 2)
    assert output.sampled[0] is None
    for i in (1, 2):
        sampled = output.sampled[i]
        assert sampled is not None
        assert sampled.token == logits[i][-1].argmax()


def test_blocks_are_copied_before_the_step(backend: CpuBackend) -> None:
    tokens = random_tokens(33, 300, seed=3)
    expected = backend.prompt_logits(tokens)
    backend.execute(StepBatch([work(tokens, [6, 8], 0, 32)]))
    # Another sequence overwrites the source in the very step that copies it.
    output = backend.execute(
        StepBatch(
            [
                work(tokens, [16, 8, 17], 32, 1, sample=True, row=greedy(tokens, logprobs=1)),
                work(random_tokens(16, 300, seed=4), [6], 0, 16),
            ],
            [(6, 16)],
        )
    )
    found = output.sampled[0]
    assert found is not None
    assert_scores(found, int(expected[-1].argmax()), expected[-1], 1)


def test_prompt_logits_leave_the_cache_of_the_engine_alone(backend: CpuBackend) -> None:
    tokens = random_tokens(40, 300, seed=5)
    expected = backend.prompt_logits(tokens)
    backend.execute(StepBatch([work(tokens, [0, 1, 2], 0, 39)]))
    backend.prompt_logits(random_tokens(80, 300, seed=6))
    row = greedy(tokens, logprobs=1)
    output = backend.execute(StepBatch([work(tokens, [0, 1, 2], 39, 1, sample=True, row=row)]))
    found = output.sampled[0]
    assert found is not None
    assert_scores(found, int(expected[-1].argmax()), expected[-1], 1)


@pytest.mark.parametrize(("tokens", "value"), [([], 0), ([0] * 81, 81), ([0, 300], 300), ([5, -1], -1)])
def test_prompts_out_of_range_are_refused(backend: CpuBackend, tokens: list[int], value: int) -> None:
    with pytest.raises(ParameterError, match="prompt_token_ids") as refusal:
        backend.prompt_logits(tokens)
    assert refusal.value.value == value


def test_a_last_block_may_be_longer_than_the_model(model: tuple[Graph, Checkpoint]) -> None:
    backend = load(model, max_model_len=17, max_num_batched_tokens=9)
    assert np.isfinite(backend.prompt_logits(random_tokens(17, 300))).all()


@pytest.mark.parametrize("quantization", [None, "w8", "w8-wide", "w4"])
@pytest.mark.parametrize("kv", ["auto", *ANY_HEAD])
def test_sizes_foretold_are_those_taken(model: tuple[Graph, Checkpoint], quantization: str | None, kv: str) -> None:
    graph, checkpoint = model
    options = {"quantization": quantization, "kv_cache_dtype": kv, "max_num_batched_tokens": 64, "max_num_seqs": 5}
    sizes = cpu_sizes(graph, checkpoint, **options)  # type: ignore[arg-type]
    plan = load(model, quantization=quantization, kv_cache_dtype=kv).plan
    assert sizes.block_bytes == plan.block_bytes
    assert sizes.arena_bytes == len(plan.arena)
    assert sizes.weights_bytes > 0


@pytest.mark.parametrize("kv", ANY_HEAD)
def test_logits_with_every_type_are_near_those_of_float32(model: tuple[Graph, Checkpoint], kv: str) -> None:
    tokens = random_tokens(75, 300, seed=4)
    exact = load(model, quantization="f32", kv_cache_dtype="f32").prompt_logits(tokens)
    found = load(model, quantization="f32", kv_cache_dtype=kv).prompt_logits(tokens)
    error = np.sqrt(((found - exact) ** 2).mean()) / np.abs(exact).max()
    assert error <= {"f32": 0, "f16": 5e-4, "bf16": 5e-3, "int8": 0.012, "fp8_e5m2": 0.12}.get(kv, 0.06)


def test_heads_that_4_bits_cannot_have_are_refused(model: tuple[Graph, Checkpoint]) -> None:
    with pytest.raises(ModelError, match="int4 needs heads of a multiple of 32; this model's head_dim is 16: use int8"):
        load(model, kv_cache_dtype="int4")


def test_scales_of_fp8_are_used(model: tuple[Graph, Checkpoint]) -> None:
    tokens = random_tokens(40, 300, seed=4)
    layers = model[0].num_layers
    plain = load(model, kv_cache_dtype="fp8_e4m3").prompt_logits(tokens)
    ones = load(model, kv_cache_dtype="fp8_e4m3", kv_scales=[(1.0, 1.0)] * layers).prompt_logits(tokens)
    np.testing.assert_array_equal(ones, plain)
    halves = load(model, kv_cache_dtype="fp8_e4m3", kv_scales=[(0.5, 0.25)] * layers).prompt_logits(tokens)
    np.testing.assert_allclose(halves, plain, atol=0.05 * np.abs(plain).max())
    saturated = load(model, kv_cache_dtype="fp8_e4m3", kv_scales=[(1e-4, 1e-4)] * layers).prompt_logits(tokens)
    assert np.abs(saturated - plain).max() > 0.05 * np.abs(plain).max()


def test_the_profile_of_steps_is_sorted_and_has_rates(backend: CpuBackend) -> None:
    backend.set_profiling(True)
    backend.prompt_logits(random_tokens(50, 300))
    rows = backend.profile()
    backend.set_profiling(False)
    assert {"embedding", "q, k, v", "attention", "gate, up", "down", "head"} <= {row["op"] for row in rows}
    assert [row["time_ms"] for row in rows] == sorted((row["time_ms"] for row in rows), reverse=True)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    linears = [row for row in rows if row["op"] == "down"]
    assert linears[0]["GBps"] > 0
    assert linears[0]["GOPS"] > 0
    assert backend.profile() == []


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_ISA", "sse9")
    with pytest.raises(ConfigError, match="OCTAVO_ISA is 'sse9'; this build and machine have portable"):
        instruction_set()


def test_a_closed_back_end_lets_go_of_its_plan(model: tuple[Graph, Checkpoint]) -> None:
    backend = load(model)
    backend.close()
    assert not hasattr(backend, "plan")
    backend.close()


def test_weights_that_lose_something_are_reported(
    model: tuple[Graph, Checkpoint], caplog: pytest.LogCaptureFixture
) -> None:
    load(model)
    assert "tensors stored as f32 are rounded to bf16" in caplog.text
    caplog.clear()
    load(model, quantization="none")
    assert caplog.text == ""
