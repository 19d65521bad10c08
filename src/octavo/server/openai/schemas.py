"""The fields that chat and text completions have in common: OpenAI's, vLLM's extra ones, and those not built yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from msgspec import Struct

from octavo.errors import ParameterError

__all__ = ["GenerationRequest", "StreamOptions", "refuse_not_built"]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream tells beside the text.

    ``include_usage`` (as in vLLM true where it is left out of the object): a last event with the numbers of tokens;
    ``continuous_usage_stats``: such numbers in every event too.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None

    @property
    def usage(self) -> bool:
        """Whether the stream ends with an event of usage."""
        return self.include_usage is not False

    @property
    def continuous(self) -> bool:
        """Whether every event tells the usage so far."""
        return self.continuous_usage_stats is True


class GenerationRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of completions can be asked for. Null is the same as absent.

    The fields typed ``Any`` are those of OpenAI and vLLM that octavo has not: they are there so that the value that
    changes nothing is accepted, and any other refused by name.
    """

    model: str | None = None

    # How tokens are chosen.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    watermark: bool | None = None
    watermark_gamma: float | None = None
    watermark_delta: float | None = None

    # When the answer ends.
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None

    # How the prompt is read.
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None

    # What comes back.
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # How the request is treated.
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None

    # Labels that OpenAI's and vLLM's clients send along; they change no answer.
    user: str | None = None
    session_id: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Not built.
    response_format: Any = None
    structured_outputs: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    routed_experts_prompt_start: Any = None
    return_token_offsets: Any = None
    return_mm_kwargs: Any = None
    service_tier: Any = None
    store: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


def _empty(value: Any) -> bool:
    return value in ([], {}, ())


def _text_format(value: Any) -> bool:
    return isinstance(value, Mapping) and dict(value) == {"type": "text"}


def _one_of(*values: Any) -> Callable[[Any], bool]:
    # Compared with their types, as True == 1.
    return lambda value: any(type(value) in (type(item), int, float) and value == item for item in values)


def _false(value: Any) -> bool:
    return value is False


def _true(value: Any) -> bool:
    return value is True


# For every field that is not built: which values beside null change nothing, and what it would take.
_NEUTRAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "response_format": (_text_format, 'null or {"type": "text"}: this server does not constrain the form of answers'),
    "structured_outputs": (_empty, "null: this server does not constrain the form of answers"),
    "use_beam_search": (_false, "false: this server has no beam search"),
    "length_penalty": (_one_of(1.0), "1.0: this server has no beam search"),
    "early_stopping": (_false, "false: this server has no beam search"),
    "logprob_token_ids": (_empty, "null: log-probabilities are reported of the most probable tokens (logprobs)"),
    "repetition_detection": (_empty, "null: this server does not look for repetitions"),
    "thinking_token_budget": (_one_of(-1), "null or -1: this server does not tell thoughts from answers"),
    "kv_transfer_params": (_empty, "null: this server shares no KV cache with others"),
    "ec_transfer_params": (_empty, "null: this server shares no encoder cache with others"),
    "vllm_xargs": (_empty, "null: this server has no custom extensions"),
    "routed_experts_prompt_start": (_one_of(0), "0: this server does not report the routing of experts"),
    "return_token_offsets": (_false, "false: this server does not report the places of tokens"),
    "return_mm_kwargs": (_true, "true: the model takes text only"),
    "service_tier": (_one_of("auto", "default"), '"auto" or "default": this server has one tier'),
    "store": (_false, "false: this server stores no answers"),
    "prompt_cache_retention": (_one_of("in_memory"), '"in_memory": this server keeps prefixes in memory'),
    "prompt_cache_options": (_empty, "null: equal prefixes are found without markers"),
    "include_obfuscation": (_false, "false: this server does not pad its events"),
    # Chat only.
    "tools": (_empty, "null: this server has no tool calls"),
    "functions": (_empty, "null: this server has no tool calls"),
    "function_call": (_one_of("none"), 'null or "none": this server has no tool calls'),
    "audio": (_empty, "null: the model makes text only"),
    "modalities": (lambda value: value == ["text"], 'null or ["text"]: the model makes text only'),
    "moderation": (_empty, "null: this server does not moderate"),
    "prediction": (_empty, "null: this server takes no predicted outputs"),
    "verbosity": (_one_of("medium"), 'null or "medium": the model has no such control'),
    "web_search_options": (lambda value: False, "null: this server does not search the web"),
    "include_reasoning": (_true, "true: this server does not tell thoughts from answers"),
    "media_io_kwargs": (_empty, "null: the model takes text only"),
    "mm_processor_kwargs": (_empty, "null: the model takes text only"),
    "return_assistant_tokens_mask": (_false, "false: this server does not mark the tokens of roles"),
    # Completions only.
    "suffix": (lambda value: value == "", "null: the model cannot fill in the middle"),
    "prompt_embeds": (_empty, "null: prompts are text or token ids"),
}


@cache
def _not_built(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field for field in kind.__struct_fields__ if field in _NEUTRAL)


def refuse_not_built(request: Struct) -> None:
    """Refuse, by name, a field that asks for what octavo does not have."""
    for field in _not_built(type(request)):
        value = getattr(request, field)
        if value is not None and not _NEUTRAL[field][0](value):
            raise ParameterError(field, value, _NEUTRAL[field][1])
    options = getattr(request, "stream_options", None)
    if options is not None:
        refuse_not_built(options)
