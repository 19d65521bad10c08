"""What goes into the engine and what comes out: requests of token ids, and the tokens of each sequence per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from octavo.backends.interface import SampledToken

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo.sampling.params import SamplingParams

__all__ = ["EngineRequest", "FinishReason", "ProducedSequence", "SequenceOutput"]

FinishReason = Literal["stop", "length", "abort", "error"]


class ProducedSequence(msgspec.Struct, array_like=True, eq=False):
    """What a sequence had come to in an engine that was lost: its output so far, and whether it had finished."""

    token_ids: Sequence[int] = ()
    finished: bool = False


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A prompt to continue, in token ids.

    ``adapter`` names the exact *version* of the adapter that runs (never a name that can be loaded again with other
    weights) and ``cache_salt`` separates users: cached prefixes are shared only where both are equal. ``seed`` is used
    when ``params.seed`` is None; without either the engine draws one. ``tenant`` is whom the policy ``fair`` counts the
    request for.

    Positions served from the prefix cache have no logits, so with ``params.prompt_logprobs`` sequence 0 reads no cached
    prefix (but its blocks can be read by others).

    ``produced`` has one entry for each of the sequences of a request that another engine began. They go on after these
    tokens as they would have there, bit by bit, given the same prompt, parameters and seed; finished ones are not run.
    What came with the first token of sequence 0 (prompt log-probabilities, cached tokens) does not come again.
    """

    request_id: str
    prompt_ids: Sequence[int] | NDArray[np.int32]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    arrival: float = field(default_factory=time.monotonic)
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    seed: int | None = None
    tenant: str | None = None
    produced: Sequence[ProducedSequence] = ()


class SequenceOutput(msgspec.Struct, array_like=True, eq=False):
    """What one step did to one sequence of a request. It crosses to the front end's process as it is.

    ``new_tokens`` includes the stop token that ended the sequence. ``prompt_logprobs`` comes once, with the first token
    of sequence 0: one entry per prompt token, None for the first. ``num_cached_tokens`` counts the prompt tokens that
    the request found in the prefix cache when it was first admitted.
    """

    request_id: str
    index: int
    new_tokens: list[SampledToken]
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[SampledToken | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
