"""The Python API on the default model: every way to ask gives the same answer, and its parts agree with each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, AsyncLLM, RequestOutput, SamplingParams

PROMPT = "The three primary colours are"
QUESTION = [{"role": "user", "content": "What is the capital of Italy? Answer in one word."}]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), max_model_len=512, max_num_batched_tokens=256, num_gpu_blocks_override=128) as llm:
        yield llm


def answer(llm: LLM, prompt: object = PROMPT, **params: object) -> RequestOutput:
    values = {"temperature": 0.0, "max_tokens": 12, **params}
    (output,) = llm.generate(prompt, SamplingParams(**values), use_tqdm=False)  # type: ignore[arg-type]
    return output


def test_the_text_is_what_the_tokens_decode_to(llm: LLM) -> None:
    output = answer(llm)
    completion = output.outputs[0]
    assert len(completion.token_ids) == 12
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids, continues=True)
    assert output.prompt_token_ids == llm.get_tokenizer().encode(PROMPT)


def test_a_chat_ends_at_the_end_of_the_turn(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    completion = output.outputs[0]
    assert "Rome" in completion.text
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert "<|im_end|>" not in completion.text


def test_logprobs_are_those_of_the_prompt_logits(llm: LLM) -> None:
    output = answer(llm, logprobs=3, prompt_logprobs=2, max_tokens=4)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    ids = output.prompt_token_ids + completion.token_ids
    logits = llm.prompt_logits(ids).astype(np.float64)
    expected = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    reported = [*output.prompt_logprobs[1:], *completion.logprobs]
    for position, entry in enumerate(reported):
        assert entry is not None
        taken = ids[position + 1]
        assert next(iter(entry)) == taken
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected[position, token], abs=1e-4)
            assert logprob.rank == 1 + int((logits[position] > logits[position, token]).sum())
    assert [int(logits[len(output.prompt_token_ids) + step - 1].argmax()) for step in range(4)] == completion.token_ids
    assert completion.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True))
    )


def test_a_stop_string_cuts_the_text_of_the_unstopped_answer(llm: LLM) -> None:
    whole = answer(llm).outputs[0].text
    stop = whole[10:14]
    stopped = answer(llm, stop=[stop]).outputs[0]
    assert stopped.text == whole[: whole.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_a_stream_ends_as_generate_does(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12)
    streamed = list(llm.stream(PROMPT, params))
    (generated,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert streamed[-1].outputs == generated.outputs
    assert all(streamed[-1].outputs[0].text.startswith(output.outputs[0].text) for output in streamed)


def test_the_second_time_the_prompt_comes_from_the_prefix_cache(llm: LLM) -> None:
    prompt = "A long enough beginning. " * 8
    llm.reset_prefix_cache()
    cold, warm = answer(llm, prompt, logprobs=0), answer(llm, prompt, logprobs=0)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens > 16
    assert warm.outputs == cold.outputs


def test_answers_of_one_request_differ_and_come_again(llm: LLM) -> None:
    first = answer(llm, n=3, temperature=1.0, seed=1)
    second = answer(llm, n=3, temperature=1.0, seed=1)
    assert first.outputs == second.outputs
    assert len({completion.text for completion in first.outputs}) == 3
    best = answer(llm, n=1, best_of=3, temperature=1.0, seed=1, logprobs=0).outputs[0]
    candidates = answer(llm, n=3, temperature=1.0, seed=1, logprobs=0).outputs
    assert best.cumulative_logprob == max(each.cumulative_logprob or 0.0 for each in candidates)


def test_bad_words_are_not_said(llm: LLM) -> None:
    word = answer(llm).outputs[0].text.split()[0]
    assert word not in answer(llm, bad_words=[word]).outputs[0].text.split()


async def test_async_answers_are_those_of_the_offline_llm(llm: LLM, smollm2_path: Path) -> None:
    prompts = [PROMPT, "Once upon a time", "def add(a, b):"]
    params = SamplingParams(temperature=0.7, seed=9, max_tokens=10, logprobs=1)
    expected = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
    concurrent = AsyncLLM(str(smollm2_path), max_model_len=512, num_gpu_blocks_override=128)
    try:

        async def last(prompt: str) -> RequestOutput:
            outputs = [output async for output in concurrent.generate(prompt, params)]
            return outputs[-1]

        results = await asyncio.gather(*(last(prompt) for prompt in prompts))
        assert [result.outputs for result in results] == expected
    finally:
        concurrent.shutdown()


def test_long_texts_have_the_ids_and_places_of_short_ones(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = "the naïve 日本 \n\n<|im_start|>xxxxxxxxxxxxxxx " * 200
    encoding = tokenizer.backend.encode(text, add_special_tokens=True)
    assert tokenizer.encode(text) == encoding.ids
    places = [(token, *place) for token, place in zip(encoding.ids, encoding.offsets, strict=True)]
    assert tokenizer.encode_with_offsets(text) == places
