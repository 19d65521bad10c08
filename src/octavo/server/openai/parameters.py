"""From the fields of a request to SamplingParams, with the checks and the words of vLLM where a client can see them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from octavo.errors import ParameterError
from octavo.sampling.params import GREEDY_BELOW, SamplingParams
from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from octavo.server.openai.schemas import GenerationRequest

__all__ = ["check_common", "check_logprobs", "number_of_choices", "priority_of", "requested_tokens", "sampling_params"]

MAX_STOP_STRINGS = 4
MAX_TEMPERATURE = 2.0
MAX_CHOICES = 16384  # of one call, over all its prompts
MAX_STREAM_INTERVAL = 1 << 20
_INT64 = 1 << 63
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")

# Sampling fields for which a model's generation_config may have another default than OpenAI.
_WITH_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
)
# Fields passed on as they are, where they are given.
_AS_GIVEN = (
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
    "skip_special_tokens",
    "watermark",
    "watermark_gamma",
    "watermark_delta",
)


def _invalid(param: str, message: str) -> Failure:
    return Failure(Kind.invalid, message, param=param)


def check_common(request: GenerationRequest, *, max_logprobs: int) -> None:
    """Check what needs no knowledge of the prompt, so that a wrong request costs nothing."""
    if request.stream_options is not None:
        if not request.stream:
            raise _invalid("stream_options", "Stream options can only be defined when `stream=True`.")
        if request.stream_options.continuous and not request.stream_options.usage:
            raise _invalid(
                "stream_options.continuous_usage_stats", "continuous_usage_stats needs include_usage to be true as well"
            )
    interval = request.stream_interval
    if interval is not None and not 1 <= interval <= MAX_STREAM_INTERVAL:
        raise ParameterError("stream_interval", interval, f"an integer from 1 to {MAX_STREAM_INTERVAL}")
    if request.temperature is not None and not 0.0 <= request.temperature <= MAX_TEMPERATURE:
        raise ParameterError("temperature", request.temperature, f"a number from 0 to {MAX_TEMPERATURE:g}")
    if request.seed is not None and not -_INT64 <= request.seed < _INT64:
        raise ParameterError("seed", request.seed, "an integer of 64 bits")
    if isinstance(request.stop, list) and len(request.stop) > MAX_STOP_STRINGS:
        raise ParameterError("stop", len(request.stop), f"at most {MAX_STOP_STRINGS} strings")
    if request.prompt_logprobs is not None:
        if request.stream:
            raise _invalid("prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`.")
        _check_logprobs("prompt_logprobs", "prompt", request.prompt_logprobs, max_logprobs)
    keep = request.truncate_prompt_tokens
    if keep is not None and (keep < -1 or keep == 0):
        raise ParameterError("truncate_prompt_tokens", keep, "-1 (as many as fit) or at least 1")
    if request.truncation_side is not None and request.truncate_prompt_tokens is None:
        raise _invalid("truncation_side", "truncation_side needs truncate_prompt_tokens to be set as well")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= 1024:
        raise ParameterError("cache_salt", request.cache_salt, "a string of 1 to 1024 characters")
    if request.request_id is not None and not _SANE_ID.fullmatch(request.request_id):
        raise ParameterError("request_id", request.request_id, "1 to 128 printable ASCII characters without spaces")


def _check_logprobs(field: str, what: str, value: int, most: int) -> None:
    if value < -1:
        raise _invalid(field, f"`{field}` must be a positive value or -1.")
    if value > most:
        raise _invalid(field, f"Requested {what} logprobs of {value}, which is greater than max allowed: {most}")


def check_logprobs(field: str, value: int, max_logprobs: int) -> int:
    """The number of log-probabilities asked for, checked against the limit of the server."""
    _check_logprobs(field, "sample", value, max_logprobs)
    return value


def number_of_choices(request: GenerationRequest, *, prompts: int = 1, best_of: int | None = None) -> int:
    """The choices asked for each prompt; more than one cannot be had greedily, as all would be the same."""
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_CHOICES:
        raise ParameterError("n", n, f"an integer from 1 to {MAX_CHOICES}")
    if best_of is not None and not n <= best_of <= MAX_CHOICES:
        raise ParameterError("best_of", best_of, f"an integer from n ({n}) to {MAX_CHOICES}")
    if prompts * max(n, best_of or 1) > MAX_CHOICES:
        raise ParameterError("n", n, f"at most {MAX_CHOICES // prompts} with {prompts} prompts")
    return n


def priority_of(request: GenerationRequest, header: str | None) -> int:
    """The priority, lower first. The header ``X-Vllm-Priority`` is what a proxy says, and wins over the body."""
    if header is None:
        return request.priority or 0
    try:
        priority = int(header.strip())
    except ValueError:
        raise ParameterError("X-Vllm-Priority", header[:80], "an integer") from None
    if not -_INT64 <= priority < _INT64:
        raise ParameterError("X-Vllm-Priority", priority, "an integer of 64 bits")
    return priority


def requested_tokens(field: str, value: int | None, *, least: int = 1) -> int | None:
    """The length of the answer a request names, None when it names none."""
    if value is not None and value < least:
        raise ParameterError(field, value, f"at least {least}")
    return value


def sampling_params(
    request: GenerationRequest,
    defaults: SamplingParams,
    *,
    n: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    best_of: int | None = None,
) -> SamplingParams:
    """The parameters of the engine for one prompt. ``defaults`` are those of the model's generation_config."""
    values: dict[str, Any] = {}
    for name in _WITH_DEFAULTS:
        given = getattr(request, name)
        values[name] = getattr(defaults, name) if given is None else given
    for name in _AS_GIVEN:
        given = getattr(request, name)
        if given is not None:
            values[name] = given
    if values["temperature"] < GREEDY_BELOW and n > 1:
        raise Failure(Kind.invalid, f"n must be 1 when using greedy sampling, got {n}.", param="n")
    return SamplingParams(
        **values,
        n=n,
        best_of=best_of,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
