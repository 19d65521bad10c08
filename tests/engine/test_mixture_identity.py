"""Mixtures of experts and latent attention answer with the same bits alone, batched, in chunks and from the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.frontend.llm import LLM
from octavo.sampling.params import SamplingParams
from tests.models.tiny import TINY_MODELS, make_tiny_model, random_tokens

PROMPTS = [random_tokens(length, seed=length) for length in (50, 3, 33, 17)]
SMALL = {"max_model_len": 128, "kv_cache_bytes": 4 << 20, "max_num_seqs": 4}


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of every prompt's answer, exactly."""
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, logprobs=0, ignore_eos=True)
    found = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        ids = list(completion.token_ids)
        found.append((ids, [each[token].logprob for token, each in zip(ids, completion.logprobs, strict=True)]))
    return found


@pytest.mark.parametrize(("family", "quantization"), [("qwen2_moe", "w8"), ("gpt_oss", None), ("deepseek_v3", "w4")])
def test_answers_are_the_same_bits_alone_batched_chunked_and_cached(
    family: str, quantization: str | None, tmp_path: Path
) -> None:
    path = str(make_tiny_model(TINY_MODELS[family], tmp_path))
    with LLM(path, quantization=quantization, **SMALL) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        assert answers(llm, PROMPTS) == alone  # the cache has the prompts by now
    with LLM(path, quantization=quantization, max_num_batched_tokens=24, threads=1, **SMALL) as llm:
        assert answers(llm, PROMPTS[::-1]) == alone[::-1]
