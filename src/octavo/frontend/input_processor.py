"""Turns what callers give (strings, token ids, conversations and sampling parameters) into engine requests."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from octavo.engine.request import EngineRequest
from octavo.errors import ConfigError, ParameterError
from octavo.frontend.output_processor import RequestState
from octavo.sampling.params import SamplingParams

if TYPE_CHECKING:
    from octavo.frontend.loading import ModelFacts
    from octavo.frontend.tokenizer import Tokenizer

__all__ = ["InputProcessor", "Prompt", "PromptText", "default_sampling_params", "parse_prompt", "split_prompts"]

# A text, token ids, or a dictionary with one of them ("prompt" or "prompt_token_ids") and maybe a "cache_salt".
Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_GENERATION_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class PromptText:
    """A prompt taken apart: its text or token ids (one of them set), and its cache salt."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[PromptText]:
    """Tell one prompt from a list of prompts: a list of integers is one prompt given as token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [parse_prompt(prompts)]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise ParameterError("prompts", prompts, "a string, token ids, a dictionary, or a list of them")
    if len(prompts) > 0 and all(_is_integer(item) for item in prompts):
        return [parse_prompt(prompts)]
    return [parse_prompt(prompt) for prompt in prompts]


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def parse_prompt(prompt: object) -> PromptText:
    """Take one prompt apart; what is not a prompt is refused."""
    if isinstance(prompt, str):
        return PromptText(prompt, None)
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        for item in prompt:
            if not _is_integer(item):
                raise ParameterError("prompt_token_ids", item, "integers only")
        return PromptText(None, [int(item) for item in prompt])
    raise ParameterError("prompt", prompt, "a string, token ids, or a dictionary with prompt or prompt_token_ids")


def _parse_mapping(prompt: Mapping[Any, Any]) -> PromptText:
    for key in prompt:
        if key not in _PROMPT_KEYS:
            raise ParameterError(
                "prompt",
                key,
                f"a dictionary with {', '.join(_PROMPT_KEYS)}",
                f"a prompt has no key {key!r}: its keys are {', '.join(_PROMPT_KEYS)}",
            )
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ParameterError("cache_salt", salt, "a non-empty string")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if (text is None) == (ids is None):
        raise ParameterError("prompt", sorted(prompt), "a dictionary with either prompt or prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ParameterError("prompt", text, "a string")
    if ids is not None and (isinstance(ids, (str, Mapping)) or not isinstance(ids, (Sequence, np.ndarray))):
        raise ParameterError("prompt_token_ids", ids, "a list of integers")
    parsed = parse_prompt(text if text is not None else ids)
    parsed.cache_salt = salt
    return parsed


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a request that brings none: the model's generation_config where it says something (as vLLM)."""
    values: dict[str, Any] = {
        name: generation_config[name] for name in _GENERATION_DEFAULTS if generation_config.get(name) is not None
    }
    if generation_config.get("max_new_tokens") is not None:
        values["max_tokens"] = generation_config["max_new_tokens"]
    try:
        return SamplingParams(**values)
    except ParameterError as error:
        raise ConfigError(
            f"the model's generation_config sets {error.field} to {error.value!r}, which must be {error.limit}: "
            "give sampling_params yourself"
        ) from error


class InputProcessor:
    """Checks prompts and parameters against the model and makes the engine's and the front end's view of a request.

    A request without a seed gets one drawn from the engine's seed and the number of the request, so a program that
    makes the same calls in the same order on an engine with the same seed gets the same answers.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        seed: int | None = 0,
        max_logprobs: int = 20,
        priorities: bool = True,
        default_params: SamplingParams | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.default_params = default_params if default_params is not None else SamplingParams()
        self._seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed & _MASK
        self._numbers = itertools.count()
        self._max_logprobs = max_logprobs
        self._priorities = priorities

    @classmethod
    def for_model(cls, loaded: ModelFacts) -> InputProcessor:
        """The processor for a loaded model and the options it was loaded with."""
        options = loaded.options
        return cls(
            loaded.tokenizer,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            seed=options.seed,
            max_logprobs=options.max_logprobs,
            priorities=options.scheduling_policy == "priority",
            default_params=default_sampling_params(loaded.generation_config),
        )

    def next_seed(self) -> int:
        """The seed of the next request without one: SplitMix64 of the engine's seed and the request's number."""
        value = (self._seed + (next(self._numbers) + 1) * _GOLDEN) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        return (value ^ (value >> 31)) >> 1

    def encode(self, prompts: Sequence[PromptText], add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of each prompt."""
        encode = self.tokenizer.encode
        return [
            prompt.token_ids if prompt.token_ids is not None else encode(prompt.text or "", add_special_tokens)
            for prompt in prompts
        ]

    def request(
        self,
        request_id: str,
        prompt: PromptText,
        params: SamplingParams | None = None,
        *,
        token_ids: list[int] | None = None,
        add_special_tokens: bool = True,
        arrival: float | None = None,
        priority: int | None = None,
    ) -> tuple[EngineRequest, RequestState]:
        """Make a request; ``token_ids`` is the prompt already encoded, ``priority`` replaces the parameters' own."""
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise ParameterError("sampling_params", params, "a SamplingParams")
        if token_ids is None:
            (token_ids,) = self.encode([prompt], add_special_tokens)
        token_ids = self._fit(token_ids, params)
        params = params.with_bad_words_ids(self.tokenizer)
        params.check_for_model(
            self.vocab_size,
            max_logprobs=self._max_logprobs,
            prompt_tokens=len(token_ids),
            max_model_len=self.max_model_len,
        )
        priority = params.priority if priority is None else priority
        if priority and not self._priorities:
            raise ParameterError("priority", priority, "0 unless the engine runs with scheduling_policy='priority'")
        arrival = time.monotonic() if arrival is None else arrival
        # Drawn whether or not it is needed, so that a request's seed depends on its number alone.
        drawn = self.next_seed()
        seed = drawn if params.seed is None else params.seed
        state = RequestState(request_id, prompt.text, token_ids, params, self.tokenizer, seed=seed, arrival=arrival)
        request = EngineRequest(
            request_id=request_id,
            prompt_ids=np.asarray(token_ids, dtype=np.int32),
            params=params,
            eos_ids=self.tokenizer.eos_ids,
            arrival=arrival,
            priority=priority,
            cache_salt=prompt.cache_salt,
            seed=seed,
        )
        return request, state

    def _fit(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """Truncate as asked, from the left; refuse what cannot be run, with the numbers."""
        keep = params.truncate_prompt_tokens
        if keep is not None:
            if keep == -1:  # as many as leave room for the answer
                keep = max(1, self.max_model_len - (params.max_tokens or 1))
            token_ids = token_ids[-keep:]
        if not token_ids:
            raise ParameterError("prompt", "", "at least one token long", "the prompt is empty")
        if len(token_ids) >= self.max_model_len:
            raise ParameterError(
                "prompt",
                len(token_ids),
                f"at most {self.max_model_len - 1} tokens long",
                f"the prompt has {len(token_ids)} tokens and max_model_len is {self.max_model_len}, which must hold "
                "the prompt and at least one more token: shorten it or set truncate_prompt_tokens",
            )
        self.check_vocabulary(token_ids)
        return token_ids

    def check_vocabulary(self, token_ids: Sequence[int]) -> None:
        """Refuse token ids the model does not have."""
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise ParameterError(
                "prompt_token_ids",
                wrong,
                f"token ids from 0 to {self.vocab_size - 1}",
                f"prompt_token_ids must be from 0 to {self.vocab_size - 1} (the vocabulary), got {wrong}",
            )
