"""Prompts as token ids: read off the event loop when they are long, cut as asked, measured against the context."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from octavo.errors import ParameterError
from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.frontend.tokenizer import Tokenizer
    from octavo.server.openai.schemas import GenerationRequest

__all__ = [
    "LONG_TEXT",
    "EncodedPrompt",
    "as_prompts",
    "check_ids",
    "check_length",
    "encode_off_loop",
    "encode_prompts",
    "fit_context",
]

# Characters above which a text is read in a worker thread, so that the event loop goes on serving others.
LONG_TEXT = 8_000

T = TypeVar("T")


@dataclass(slots=True)
class EncodedPrompt:
    """A prompt the engine can run. ``text`` is what it was made from; None for token ids and for what was cut."""

    token_ids: list[int]
    text: str | None

    def read(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> str:
        """The text of the prompt, for ``echo``."""
        return tokenizer.decode(self.token_ids, skip_special_tokens) if self.text is None else self.text


def as_prompts(prompt: str | list[str | int | list[int]] | None, field: str = "prompt") -> list[str | list[int]]:
    """Tell apart the four forms of ``prompt`` (which a client calls ``field``): a list of integers is one prompt."""
    if isinstance(prompt, str):
        prompt = [prompt] if prompt else None
    if not prompt:
        what = "Either prompt or prompt_embeds" if field == "prompt" else field
        raise Failure(Kind.invalid, f"{what} must be provided and non-empty.", param=field)
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise ParameterError(field, prompt, "a text, token ids, a list of texts, or a list of lists of token ids")
    if kinds == {int}:
        return [list(prompt)]  # type: ignore[arg-type]  # integers all of them
    return list(prompt)  # type: ignore[arg-type]  # all texts, or all lists


def check_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Refuse token ids that the model does not have."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise Failure(
            Kind.invalid, f"Token id {wrong} is out of vocabulary (0 to {vocab_size - 1})", param=field
        )  # fmt: skip


def check_length(
    tokenizer: Tokenizer, text: str, request: GenerationRequest, requested: int | None, max_model_len: int
) -> None:
    """Refuse a text of so many characters that its tokens cannot fit the context, before it costs the time to read."""
    if request.truncate_prompt_tokens is None:
        least = 1 if requested is None else max(1, requested)
        length = tokenizer.least_tokens(text)
        if length and length + least > max_model_len:
            raise _too_long(f"at least {length}", least, length + least, max_model_len, "input_text")


async def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str | list[int]], *, add_special_tokens: bool, vocab_size: int
) -> list[EncodedPrompt]:
    """Every prompt as token ids, in the order given."""

    def encode() -> list[EncodedPrompt]:
        found = []
        for prompt in prompts:
            if isinstance(prompt, str):
                found.append(EncodedPrompt(tokenizer.encode(prompt, add_special_tokens), prompt))
            else:
                check_ids(prompt, vocab_size, "prompt")
                found.append(EncodedPrompt(prompt, None))
        return found

    return await encode_off_loop(encode, prompts)


async def encode_off_loop(encode: Callable[[], T], prompts: Sequence[str | list[int]]) -> T:
    """What ``encode`` makes of prompts, in a worker thread when they are long."""
    if sum(len(prompt) for prompt in prompts) > LONG_TEXT:
        return await asyncio.to_thread(encode)
    return encode()


def fit_context(prompt: EncodedPrompt, request: GenerationRequest, requested: int | None, max_model_len: int) -> None:
    """Cut the prompt as asked; refuse it, with the three numbers, when it and the answer do not fit the context.

    ``requested`` is the length of the answer that was asked for, None for what is left (one token at least).
    """
    least = 1 if requested is None else max(1, requested)
    keep = request.truncate_prompt_tokens
    if keep is not None:
        if keep > max_model_len:
            raise ParameterError("truncate_prompt_tokens", keep, f"at most the context of {max_model_len} tokens")
        if keep == -1:
            keep = max(1, max_model_len - least)
        if len(prompt.token_ids) > keep:
            ids = prompt.token_ids
            prompt.token_ids = ids[:keep] if request.truncation_side == "right" else ids[-keep:]
            prompt.text = None
    length = len(prompt.token_ids)
    if length == 0:
        raise Failure(Kind.invalid, "The prompt is empty: it must have at least one token.", param="prompt")
    if length + least > max_model_len:
        raise _too_long(str(length), least, length + least, max_model_len, "input_tokens")


def _too_long(given: str, requested: int, total: int, max_model_len: int, param: str) -> Failure:
    at_least = "at least " if given.startswith("at least") else ""
    return Failure(
        Kind.invalid,
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {requested} output "
        f"tokens and your prompt contains {given} input tokens, for a total of {at_least}{total} tokens. Please "
        "reduce the length of the input prompt or the number of requested output tokens.",
        param=param,
        code="context_length_exceeded",
    )
