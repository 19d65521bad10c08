"""Streams one answer of a model to the terminal and measures it; shared by ``run`` and ``chat``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM
    from octavo.sampling.params import SamplingParams

__all__ = ["Answer", "Message", "prompt_ids", "stream_answer"]

Message = dict[str, str]


@dataclass(slots=True)
class Answer:
    """An answer and how it went. ``finish_reason`` is None when it was stopped by the user."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_s: float
    total_s: float
    finish_reason: str | None

    def stats(self) -> str:
        """One line: tokens, time to the first token, speed."""
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        line = f"{self.prompt_tokens} tokens in{cached}, {self.output_tokens} out"
        if self.output_tokens:
            line += f", first after {self.first_token_s:.2f} s"
        decode_s = self.total_s - self.first_token_s
        if self.output_tokens > 1 and decode_s > 0:
            line += f", then {(self.output_tokens - 1) / decode_s:.1f} tokens/s"
        if self.finish_reason == "length":
            line += ", cut off by the token limit"
        return line


def prompt_ids(llm: LLM, messages: list[Message]) -> list[int]:
    """The conversation as the model's chat template writes it, ready for an answer."""
    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template is None:
        if len(messages) > 1:
            raise ConfigError("the model has no chat template: use `octavo run --raw` without a system prompt")
        return list(tokenizer.encode(messages[0]["content"]))
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    # The template writes the special tokens itself.
    return list(tokenizer.encode(text, add_special_tokens=False))


def stream_answer(
    llm: LLM,
    ids: list[int],
    params: SamplingParams,
    write: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Generate an answer to the prompt ``ids``, passing text on as it comes, until it ends or ``stopped`` says so."""
    began = time.monotonic()
    first = None
    text = ""
    output_tokens = cached = 0
    reason = None
    stream = llm.stream({"prompt_token_ids": ids}, params)
    try:
        for output in stream:
            completion = output.outputs[0]
            if completion.token_ids and first is None:
                first = time.monotonic()
            output_tokens, cached = len(completion.token_ids), output.num_cached_tokens
            new, text = completion.text[len(text) :], completion.text
            if new:
                write(new)
            reason = completion.finish_reason
            if stopped():
                break
    finally:
        # Closing the stream aborts the request, so that an answer broken off frees its memory.
        stream.close()
    ended = time.monotonic()
    return Answer(
        text=text,
        prompt_tokens=len(ids),
        cached_tokens=cached,
        output_tokens=output_tokens,
        first_token_s=(first or ended) - began,
        total_s=ended - began,
        finish_reason=reason,
    )
