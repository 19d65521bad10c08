"""The rules of Text Generation Inference for a request, with its texts, and what a valid one asks of the engine.

These bounds are TGI's, not the engine's: ``top_p`` of 1 is wrong here and right elsewhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.sampling.params import SamplingParams
from octavo.server.tgi.dialect import invalid
from octavo.server.tgi.schemas import GenerateRequest, Parameters

if TYPE_CHECKING:
    from octavo.server.serving import Serving

__all__ = ["Asked", "Limits", "validate"]

_MAX_SEED = (1 << 64) - 1
# Parameters of a request that brings none: then, and only then, TGI samples without being asked to.
_NO_PARAMETERS = Parameters(do_sample=True)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server allows one request; the names and defaults are those of TGI's launcher."""

    max_input_tokens: int
    max_total_tokens: int
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5

    @classmethod
    def of(cls, serving: Serving) -> Limits:
        """The limits of a server: its options, and the length of the context where they say nothing."""
        options = serving.options
        context = serving.llm.max_model_len
        total = context if options.max_total_tokens is None else min(context, options.max_total_tokens)
        longest = total - 1 if options.max_input_tokens is None else min(total - 1, options.max_input_tokens)
        return cls(
            max_input_tokens=longest,
            max_total_tokens=total,
            max_best_of=options.max_best_of,
            max_stop_sequences=options.max_stop_sequences,
            max_top_n_tokens=options.max_top_n_tokens,
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that obeys every rule that can be checked without its tokens.

    ``sampling`` is whether tokens are drawn (and a seed is reported); ``top_n`` 0 when no alternatives are asked for.
    """

    inputs: str
    sampling: bool
    best_of: int
    seed: int | None
    max_new_tokens: int | None
    truncate: int | None
    details: bool
    prefill: bool
    top_n: int
    return_full_text: bool
    temperature: float
    repetition_penalty: float
    frequency_penalty: float
    top_k: int
    top_p: float
    typical_p: float
    watermark: bool
    stop: tuple[str, ...]

    def fit(self, token_ids: list[int], limits: Limits) -> tuple[list[int], int]:
        """The tokens of the prompt after truncation (its last ones are kept), and how many tokens may be generated."""
        if self.truncate is not None:
            token_ids = token_ids[-self.truncate :]
        length = len(token_ids)
        self.check_length(length, limits)
        if length == 0:
            raise invalid("`inputs` cannot be empty", "inputs")
        new = self.max_new_tokens
        return token_ids, limits.max_total_tokens - length if new is None else new

    def check_length(self, length: int, limits: Limits) -> None:
        """Refuse a prompt of so many tokens (or at least so many) that it does not fit."""
        longest, total = limits.max_input_tokens, limits.max_total_tokens
        new = self.max_new_tokens
        if new is not None and length + new > total:
            raise invalid(
                f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
                f"Given: {length} `inputs` tokens and {new} `max_new_tokens`",
                "max_new_tokens",
                "context_length_exceeded",
            )
        if length > longest:
            raise invalid(
                f"`inputs` must have less than {longest} tokens. Given: {length}", "inputs", "context_length_exceeded"
            )

    def draw_seed(self) -> int | None:
        """The seed to generate with: the one given, else a fresh one; None when nothing is drawn."""
        if not self.sampling:
            return None
        return int.from_bytes(os.urandom(8), "little") if self.seed is None else self.seed

    def sampling_params(self, max_new_tokens: int, seed: int | None, *, logprobs: bool) -> SamplingParams:
        """What the engine is asked for. TGI's log-probabilities are those the tokens were drawn with."""
        return SamplingParams(
            temperature=self.temperature if self.sampling else 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed,
            max_tokens=max_new_tokens,
            stop=self.stop,
            include_stop_str_in_output=True,
            watermark=self.watermark,
            logprobs=self.top_n if logprobs else None,
            prompt_logprobs=0 if self.prefill else None,
            logprobs_mode="processed",
        )


def validate(
    request: GenerateRequest, limits: Limits, *, streaming: bool = False, return_full_text: bool = False
) -> Asked:
    """Check everything about a request but the number of its tokens; ``return_full_text`` is the route's default."""
    parameters = _NO_PARAMETERS if request.parameters is None else request.parameters
    best_of = _best_of(parameters, limits, streaming)
    if streaming and parameters.decoder_input_details:
        raise invalid("`decoder_input_details` == true is not supported when streaming tokens", "decoder_input_details")
    _check_numbers(parameters)
    _check_counts(parameters, limits)
    _check_seed(parameters.seed, best_of)
    _check_not_built(parameters)
    if not request.inputs:
        raise invalid("`inputs` cannot be empty", "inputs")
    full = parameters.return_full_text
    return Asked(
        inputs=request.inputs,
        # Equal answers would be no choice, so best_of draws wherever TGI lets it through.
        sampling=bool(parameters.do_sample) or _warps(parameters) or best_of > 1,
        best_of=best_of,
        seed=parameters.seed,
        max_new_tokens=parameters.max_new_tokens,
        truncate=parameters.truncate,
        details=bool(parameters.details or parameters.decoder_input_details),
        prefill=bool(parameters.decoder_input_details),
        top_n=parameters.top_n_tokens or 0,
        return_full_text=return_full_text if full is None else full,
        temperature=_or(parameters.temperature, 1.0),
        repetition_penalty=_or(parameters.repetition_penalty, 1.0),
        frequency_penalty=_or(parameters.frequency_penalty, 0.0),
        top_k=parameters.top_k or 0,
        top_p=_or(parameters.top_p, 1.0),
        typical_p=_or(parameters.typical_p, 1.0),
        watermark=bool(parameters.watermark),
        stop=tuple(parameters.stop or ()),
    )


def _or(value: float | None, absent: float) -> float:
    return absent if value is None else value


def _warps(parameters: Parameters) -> bool:
    """Whether a parameter is set that makes TGI sample without ``do_sample``."""
    shares = (parameters.top_k, parameters.top_p, parameters.typical_p)
    return parameters.temperature not in (None, 1.0) or any(value is not None for value in shares)


def _best_of(parameters: Parameters, limits: Limits, streaming: bool) -> int:
    best_of = parameters.best_of
    if best_of is None:
        return 1
    if streaming and best_of != 1:
        raise invalid("`best_of` != 1 is not supported when streaming tokens", "best_of")
    if limits.max_best_of == 1 and best_of != 1:
        raise invalid("`best_of` != 1 is not allowed for this endpoint", "best_of")
    if not 0 < best_of <= limits.max_best_of:
        raise invalid(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}", "best_of")
    if best_of > 1 and not (parameters.do_sample or parameters.temperature is not None or _warps(parameters)):
        raise invalid("you must use sampling when `best_of` is > 1", "best_of")
    return best_of


def _check_numbers(parameters: Parameters) -> None:
    temperature, repetition_penalty = parameters.temperature, parameters.repetition_penalty
    if temperature is not None and not temperature > 0:
        raise invalid("`temperature` must be strictly positive", "temperature")
    if repetition_penalty is not None and not repetition_penalty > 0:
        raise invalid("`repetition_penalty` must be strictly positive", "repetition_penalty")
    if parameters.frequency_penalty is not None and not -2.0 <= parameters.frequency_penalty <= 2.0:
        raise invalid("`frequency_penalty` must be >= -2.0 and <= 2.0", "frequency_penalty")
    for name, share in (("top_p", parameters.top_p), ("typical_p", parameters.typical_p)):
        if share is not None and not 0.0 < share < 1.0:
            raise invalid(f"`{name}` must be > 0.0 and < 1.0", name)
    if parameters.top_k is not None and parameters.top_k <= 0:
        raise invalid("`top_k` must be strictly positive", "top_k")


def _check_counts(parameters: Parameters, limits: Limits) -> None:
    if parameters.max_new_tokens == 0:
        raise invalid("`max_new_tokens` must be strictly positive", "max_new_tokens")
    stops = len(parameters.stop or ())
    if stops > limits.max_stop_sequences:
        raise invalid(f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {stops}", "stop")
    top_n = parameters.top_n_tokens or 0
    if top_n > limits.max_top_n_tokens:
        raise invalid(f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {top_n}", "top_n_tokens")
    truncate = parameters.truncate
    if truncate is not None and not 0 < truncate <= limits.max_input_tokens:
        raise invalid(
            f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. Given: {truncate}",
            "truncate",
        )


def _check_seed(seed: int | None, best_of: int) -> None:
    if seed is None:
        return
    if best_of > 1:
        raise invalid("`seed` must not be set when `best_of` > 1", "seed")
    if seed > _MAX_SEED:
        raise invalid(f"`seed` must be <= {_MAX_SEED}. Given: {seed}", "seed")


def _check_not_built(parameters: Parameters) -> None:
    if parameters.grammar is not None:
        raise invalid("grammar is not supported", "grammar")
    if parameters.adapter_id is not None:
        message = f"`adapter_id` is not supported: no adapters are loaded. Given: {parameters.adapter_id}"
        raise invalid(message, "adapter_id")
