"""The four forms of a prompt, and how prompts are cut to and measured against the context."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from octavo.errors import ParameterError
from octavo.frontend.tokenizer import Tokenizer
from octavo.server.failures import Failure
from octavo.server.openai.prompts import LONG_TEXT, EncodedPrompt, as_prompts, encode_prompts, fit_context
from octavo.server.openai.schemas_completions import CompletionRequest
from tests.frontend.fakes import BOS, VOCAB, byte_tokenizer


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_has_four_forms(given: Any, prompts: list[Any]) -> None:
    assert as_prompts(given) == prompts


@pytest.mark.parametrize("given", [None, "", []])
def test_no_prompt_is_refused_in_vllms_words(given: Any) -> None:
    with pytest.raises(Failure, match="Either prompt or prompt_embeds must be provided and non-empty"):
        as_prompts(given)


@pytest.mark.parametrize("given", [[1, "a"], ["a", [1]], [1, [1]]])
def test_forms_of_prompts_are_not_mixed(given: Any) -> None:
    with pytest.raises(ParameterError, match="prompt must be"):
        as_prompts(given)


def encode(prompts: list[Any], *, special: bool = True, tokenizer: Tokenizer | None = None) -> list[EncodedPrompt]:
    return asyncio.run(
        encode_prompts(tokenizer or byte_tokenizer(), prompts, add_special_tokens=special, vocab_size=VOCAB)
    )


def test_texts_get_special_tokens_unless_told_otherwise_and_ids_never() -> None:
    assert [prompt.token_ids for prompt in encode(["a", [98]])] == [[BOS, 97], [98]]
    assert [prompt.token_ids for prompt in encode(["a"], special=False)] == [[97]]


@pytest.mark.parametrize("wrong", [VOCAB, -1, 10**9, 10**30])
def test_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    with pytest.raises(Failure, match=f"Token id {wrong} is out of vocabulary") as caught:
        encode([[97, wrong]])
    assert caught.value.param == "prompt"


def test_long_texts_are_read_in_another_thread() -> None:
    class Watched:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            threads.append(threading.current_thread())
            return [1]

    threads: list[threading.Thread] = []
    encode(["a"], tokenizer=Watched())  # type: ignore[arg-type]
    encode(["a" * (LONG_TEXT // 2), "b" * LONG_TEXT], tokenizer=Watched())  # type: ignore[arg-type]
    assert threads[0] is threading.main_thread()
    assert threading.main_thread() not in threads[1:]


def fitted(length: int, requested: int | None, *, context: int = 10, **fields: Any) -> list[int]:
    prompt = EncodedPrompt(list(range(length)), "text")
    fit_context(prompt, msgspec.convert({"prompt": "a", **fields}, CompletionRequest), requested, context)
    assert (prompt.text is None) == (len(prompt.token_ids) < length)
    return prompt.token_ids


def test_prompt_and_answer_may_fill_the_context_and_no_more() -> None:
    assert len(fitted(6, 4)) == 6
    with pytest.raises(Failure) as caught:
        fitted(7, 4)
    failure = caught.value
    assert failure.message == (
        "This model's maximum context length is 10 tokens. However, you requested 4 output tokens and your prompt "
        "contains 7 input tokens, for a total of 11 tokens. Please reduce the length of the input prompt or the number "
        "of requested output tokens."
    )
    assert (failure.status, failure.param, failure.code) == (400, "input_tokens", "context_length_exceeded")


def test_an_answer_of_no_given_length_needs_one_token() -> None:
    assert len(fitted(9, None)) == 9
    with pytest.raises(Failure, match="maximum context length is 10 tokens"):
        fitted(10, None)


def test_prompts_are_cut_from_the_side_asked_for() -> None:
    assert fitted(8, 2, truncate_prompt_tokens=3) == [5, 6, 7]
    assert fitted(8, 2, truncate_prompt_tokens=3, truncation_side="left") == [5, 6, 7]
    assert fitted(8, 2, truncate_prompt_tokens=3, truncation_side="right") == [0, 1, 2]
    assert fitted(8, 2, truncate_prompt_tokens=9) == list(range(8))


def test_minus_one_cuts_to_what_leaves_room_for_the_answer() -> None:
    assert fitted(20, 4, truncate_prompt_tokens=-1) == list(range(14, 20))
    assert fitted(20, None, truncate_prompt_tokens=-1) == list(range(11, 20))


def test_a_cut_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ParameterError, match="truncate_prompt_tokens must be at most the context of 10 tokens"):
        fitted(3, 2, truncate_prompt_tokens=11)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(Failure, match="The prompt is empty"):
        fitted(0, 2)
