"""The fields that chat and text completions have in common: OpenAI's, vLLM's extra ones, and those not built yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import Struct

from octavo.errors import ParameterError
from octavo.server.about import NotBuilt, about

__all__ = ["GenerationRequest", "StreamOptions", "refuse_not_built"]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream tells beside the text.

    ``include_usage`` (as in vLLM true where it is left out of the object): a last event with the numbers of tokens;
    ``continuous_usage_stats``: such numbers in every event too.
    """

    include_usage: Annotated[bool | None, about("end the stream with an event that counts the tokens", "true")] = None
    continuous_usage_stats: Annotated[bool | None, about("count the tokens in every event", "false")] = None
    include_obfuscation: NotBuilt = None

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

    The fields typed ``NotBuilt`` are those of OpenAI and vLLM that octavo has not.
    """

    model: Annotated[str | None, about("a name of /v1/models", "the model that is served")] = None

    # How tokens are chosen.
    temperature: Annotated[
        float | None, about("0 takes the likeliest token, more makes answers vary", "1", minimum=0, maximum=2)
    ] = None
    top_p: Annotated[
        float | None,
        about(
            "choose among the likeliest tokens that together have this probability",
            "1: all",
            exclusiveMinimum=0,
            maximum=1,
        ),
    ] = None
    top_k: Annotated[
        int | None, about("choose among this many of the likeliest tokens; 0 and -1 are all", "all", minimum=-1)
    ] = None
    min_p: Annotated[
        float | None,
        about("leave out tokens less likely than this share of the likeliest one", "0", minimum=0, maximum=1),
    ] = None
    typical_p: Annotated[
        float | None,
        about(
            "choose among the most typical tokens that together have this probability",
            "1: all",
            exclusiveMinimum=0,
            maximum=1,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None, about("taken once from the score of each token already generated", "0", minimum=-2, maximum=2)
    ] = None
    frequency_penalty: Annotated[
        float | None,
        about("taken from the score of a token for each time it was generated", "0", minimum=-2, maximum=2),
    ] = None
    repetition_penalty: Annotated[
        float | None, about("above 1 makes tokens of prompt and answer less likely", "1", exclusiveMinimum=0)
    ] = None
    seed: Annotated[int | None, about("makes random choices repeatable; 64-bit, -1 draws one", "drawn")] = None
    n: Annotated[
        int | None,
        about("choices for each prompt; more than 1 needs a temperature above 0", "1", minimum=1, maximum=16384),
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None, about("token ids to numbers added to their scores, clamped to -100 .. 100")
    ] = None
    allowed_token_ids: Annotated[list[int] | None, about("choose among these tokens only")] = None
    bad_words: Annotated[list[str] | None, about("texts that must not be generated", maxItems=128)] = None
    watermark: Annotated[bool | None, about("mark the answer as generated", "false")] = None
    watermark_gamma: Annotated[
        float | None,
        about("share of the vocabulary that the mark prefers", "0.5", exclusiveMinimum=0, exclusiveMaximum=1),
    ] = None
    watermark_delta: Annotated[
        float | None, about("how much the mark prefers it", "2", exclusiveMinimum=0, maximum=100)
    ] = None

    # When the answer ends.
    max_tokens: Annotated[
        int | None,
        about("longest answer in tokens; 0 with ``echo`` only", "16; of a chat, what the context leaves", minimum=0),
    ] = None
    min_tokens: Annotated[int | None, about("shortest answer in tokens, at most ``max_tokens``", "0", minimum=0)] = None
    stop: Annotated[str | list[str] | None, about("a text that ends the answer, or up to 4", maxItems=4)] = None
    stop_token_ids: Annotated[list[int] | None, about("tokens that end the answer")] = None
    include_stop_str_in_output: Annotated[bool | None, about("leave the text that ended the answer in it", "false")] = (
        None
    )
    ignore_eos: Annotated[bool | None, about("go on after the end token", "false")] = None

    # How the prompt is read.
    add_special_tokens: Annotated[
        bool | None, about("let the tokenizer add its special tokens to the prompt", "true; of a chat, false")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, about("keep so many tokens of the prompt; -1: as many as fit", "off", minimum=-1)
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, about("where tokens are left out", "left")] = None

    # What comes back.
    stream: Annotated[bool | None, about("send the answer as events while it is made", "false")] = None
    stream_options: Annotated[StreamOptions | None, about("what a stream tells beside the text")] = None
    stream_interval: Annotated[int | None, about("tokens gathered for an event", "1", minimum=1, maximum=1 << 20)] = (
        None
    )
    echo: Annotated[
        bool | None, about("begin the answer with the prompt; of a chat, with the message that is continued", "false")
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        about(
            "report so many likeliest tokens at each place of the prompt, up to --max-logprobs (20), -1: that many; "
            "not in streams",
            "off",
            minimum=-1,
        ),
    ] = None
    skip_special_tokens: Annotated[bool | None, about("leave special tokens out of the text", "true")] = None
    spaces_between_special_tokens: Annotated[
        bool | None, about("accepted; no spaces are added in any case", "true")
    ] = None
    return_token_ids: Annotated[bool | None, about("report the token ids of prompt and answer", "false")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, about("write tokens as ``token_id:N`` in log-probabilities", "false")
    ] = None

    # How the request is treated.
    priority: Annotated[int | None, about("lower comes earlier; needs --scheduling-policy priority", "0")] = None
    request_id: Annotated[str | None, about("becomes the end of the answer's ``id``", "drawn", maxLength=128)] = None
    cache_salt: Annotated[
        str | None,
        about("share cached prompts with requests of the same salt only", "none", minLength=1, maxLength=1024),
    ] = None

    # Labels that OpenAI's and vLLM's clients send along; they change no answer.
    user: Annotated[str | None, about("a label that changes no answer")] = None
    session_id: Annotated[str | None, about("a label that changes no answer")] = None
    metadata: Annotated[dict[str, str] | None, about("labels that change no answer")] = None
    safety_identifier: Annotated[str | None, about("a label that changes no answer")] = None
    prompt_cache_key: Annotated[str | None, about("a label that changes no answer")] = None

    # Not built.
    response_format: NotBuilt = None
    structured_outputs: NotBuilt = None
    use_beam_search: NotBuilt = None
    length_penalty: NotBuilt = None
    early_stopping: NotBuilt = None
    logprob_token_ids: NotBuilt = None
    repetition_detection: NotBuilt = None
    thinking_token_budget: NotBuilt = None
    kv_transfer_params: NotBuilt = None
    ec_transfer_params: NotBuilt = None
    vllm_xargs: NotBuilt = None
    routed_experts_prompt_start: NotBuilt = None
    return_token_offsets: NotBuilt = None
    return_mm_kwargs: NotBuilt = None
    service_tier: NotBuilt = None
    store: NotBuilt = None
    prompt_cache_retention: NotBuilt = None
    prompt_cache_options: NotBuilt = None


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
