"""How many tokens a request took."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["PromptTokensDetails", "Usage", "usage_of"]


class PromptTokensDetails(Struct):
    """``cached_tokens``: how many tokens of the prompts were found in the prefix cache."""

    cached_tokens: int


class Usage(Struct, kw_only=True, omit_defaults=True):
    """Tokens of the prompts, of the answers, and of both; every choice counts, a prompt only once."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


def usage_of(prompt: int, completion: int, cached: int | None = None) -> Usage:
    """The usage of a request, or (without ``cached``) of a stream so far."""
    return Usage(
        prompt_tokens=prompt,
        total_tokens=prompt + completion,
        completion_tokens=completion,
        prompt_tokens_details=None if cached is None else PromptTokensDetails(cached),
    )
