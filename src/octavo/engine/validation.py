"""What a request must be for the engine to take it: token ids of the vocabulary, a length that can ever fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.engine.config import EngineConfig
from octavo.engine.request import EngineRequest
from octavo.errors import CapacityError, ParameterError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["checked_ids", "checked_limit", "checked_produced"]


def checked_ids(field: str, ids: Sequence[int] | NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """A copy of token ids as an array, if every one is in the vocabulary; there may be none."""
    try:
        given = np.asarray(ids)
        copy = given.astype(np.int32)
    except (ValueError, TypeError, OverflowError):
        raise ParameterError(field, ids, "a list of token ids") from None
    if copy.ndim != 1:
        raise ParameterError(field, f"shape {copy.shape}", "a list of token ids")
    if copy.size == 0:
        return copy
    if given.dtype.kind not in "iu":
        raise ParameterError(field, f"type {given.dtype}", "integer token ids")
    low, high = int(given.min()), int(given.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ParameterError(
            field, wrong, f"below {vocab_size}", f"Token id {wrong} is out of vocabulary (0 to {vocab_size - 1})"
        )
    return copy


def checked_limit(config: EngineConfig, max_tokens: int | None, prompt_len: int) -> int:
    """The length at which a sequence of a request ends, if the KV cache can ever hold one that long.

    The last token needs no place: its keys and values are never read. Without ``max_tokens`` an answer may be as
    long as both the model and the KV cache allow.
    """
    size = config.block_size
    longest = config.max_model_len
    pool = config.num_blocks * size
    if max_tokens is None:
        limit = max(min(longest, pool + 1), prompt_len + 1)
    else:
        limit = min(longest, prompt_len + max_tokens)
    if prompt_len + 1 > longest:
        raise CapacityError(
            f"the prompt has {prompt_len} tokens and leaves no room for an answer: max_model_len is {longest} "
            f"(KV cache: {pool} tokens); shorten the prompt to {longest - 1} tokens or raise max_model_len",
            needed=prompt_len + 1,
            available=longest,
            unit="tokens",
        )
    needed = -(-(limit - 1) // size)
    if needed > config.num_blocks:
        raise CapacityError(
            f"the request needs up to {limit - 1} tokens ({needed} blocks of {size}), the KV cache holds {pool} "
            f"({config.num_blocks} blocks) and max_model_len is {longest}; shorten the prompt ({prompt_len} "
            f"tokens), lower max_tokens or enlarge the KV cache",
            needed=needed,
            available=config.num_blocks,
        )
    return limit


def checked_produced(request: EngineRequest, prompt_len: int, limit: int, vocab_size: int) -> list[NDArray[np.int32]]:
    """The output each sequence of a request is to go on from; empty lists for a request that starts anew."""
    produced, params = request.produced, request.params
    count = params.num_sequences
    if not produced:
        return [np.empty(0, np.int32)] * count
    if len(produced) != count:
        raise ParameterError("produced", f"{len(produced)} sequences", f"one entry for each of the {count} sequences")
    if all(sequence.finished for sequence in produced):
        raise ParameterError("produced", "finished sequences only", "at least one sequence that has not finished")
    outputs = [checked_ids("produced", sequence.token_ids, vocab_size) for sequence in produced]
    for sequence, output in zip(produced, outputs, strict=True):
        if not sequence.finished and prompt_len + output.size >= limit:
            raise ParameterError(
                "produced", f"{output.size} tokens", f"below {limit - prompt_len}, where the sequence ends"
            )
    if any(output.size for output in outputs) and not params.greedy and params.seed is None and request.seed is None:
        raise ParameterError("seed", None, "the seed the tokens were produced with")
    return outputs
