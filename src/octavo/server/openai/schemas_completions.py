"""The body of /v1/completions, and the form of its answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.server.about import NotBuilt, about
from octavo.server.openai.schemas import GenerationRequest
from octavo.server.openai.usage import Usage

__all__ = ["CompletionAnswer", "CompletionChoice", "CompletionLogprobs", "CompletionRequest"]


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/completions``: ``prompt`` is a text, token ids, or a list of either."""

    prompt: Annotated[
        str | list[str | int | list[int]] | None,
        about("a text, token ids, or a list of either, up to --max-client-batch-size (1024)"),
    ] = None
    logprobs: Annotated[
        int | None, about("report so many likeliest tokens at each place, up to --max-logprobs (20)", "off", minimum=-1)
    ] = None
    best_of: Annotated[
        int | None,
        about(
            "answers made for each prompt, of which the ``n`` likeliest are given; not in streams",
            "n",
            minimum=1,
            maximum=16384,
        ),
    ] = None

    # Not built.
    suffix: NotBuilt = None
    prompt_embeds: NotBuilt = None


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
