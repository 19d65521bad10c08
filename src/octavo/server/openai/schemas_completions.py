"""The body of /v1/completions, and the form of its answer."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.server.openai.schemas import GenerationRequest
from octavo.server.openai.usage import Usage

__all__ = ["CompletionAnswer", "CompletionChoice", "CompletionLogprobs", "CompletionRequest"]


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/completions``: ``prompt`` is a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    best_of: int | None = None

    # Not built.
    suffix: Any = None
    prompt_embeds: Any = None


class CompletionLogprobs(Struct):
    """The log-probabilities of a choice: four lists with one entry a token.

    ``text_offset`` counts characters from the start of the choice's text. A prompt's first token (with ``echo``) has
    neither a log-probability nor alternatives.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    """One answer; ``stop_reason`` is the stop string or token id that ended it, null for an end-of-sequence token."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | UnsetType = UNSET


class CompletionAnswer(Struct, kw_only=True):
    """The answer of ``/v1/completions`` without ``stream``."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None = None
