"""What the engine asks of a back end: the batch of one step, its result, and the protocol a back end implements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo.sampling.rows import RowSampling

__all__ = ["Backend", "SampledToken", "SequenceWork", "StepBatch", "StepOutput", "StepTimes", "step_kind"]


@dataclass(slots=True, eq=False)
class SequenceWork:
    """The part of one sequence computed in one step.

    The engine keeps one object per sequence and changes it from step to step; a back end may read it during
    `execute` and must neither keep it nor write to it.
    """

    token_ids: NDArray[np.int32]
    """All known tokens of the sequence (prompt, then output): a buffer of at least ``start + count`` entries, one more
    when ``prompt_logprobs`` is set and ``sample`` is not. What lies beyond is undefined."""

    block_table: NDArray[np.int32]
    """Block ids, valid for the first ``ceil((start + count) / block_size)`` entries; the rest is undefined."""

    start: int = 0
    """The first position computed. The KV cache holds every position before it."""

    count: int = 0
    """How many positions are computed, at least 1: ``[start, start + count)``."""

    sample: bool = False
    """Whether a token is sampled from the logits of the last computed position."""

    prompt_logprobs: bool = False
    """Whether the log-probability of the *next* token is wanted at each computed position. The position a token is
    sampled from is left out: so ``count`` entries, one fewer when ``sample`` is set."""

    row: RowSampling | None = None
    """The sampling state of the sequence; None unless ``sample`` or ``prompt_logprobs`` is set."""


@dataclass(slots=True, eq=False)
class StepBatch:
    """Everything a back end computes in one step. Each sequence appears at most once."""

    work: list[SequenceWork] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block), to be copied in every layer before anything of the step is computed. No
    destination is the source or the destination of another copy, so the order does not matter."""

    decodes: int = 0
    """How many of the sequences had only their newest token left to compute, for profiles."""


def step_kind(decodes: int, sequences: int) -> str:
    """What a profile calls a step in which so many of the sequences are decoded and the others' prompts computed."""
    return "decode" if decodes == sequences else "mixed" if decodes else "prefill"


class SampledToken(msgspec.Struct, array_like=True, eq=False):
    """A token and its raw log-probability: one that was sampled, or a prompt token that was scored.

    A msgspec struct, since it goes from the engine's process to the front end's as it is.
    """

    token: int
    logprob: float
    rank: int
    """The token's rank in the vocabulary by log-probability, 1 for the most likely."""

    top: list[tuple[int, float]]
    """The most likely (token, log-probability) pairs, as many as the request asked for, best first."""

    error: str | None = None
    """Why no token could be sampled, such as non-finite logits; the sequence then fails and others go on."""


@dataclass(slots=True)
class StepTimes:
    """Seconds that a back end spent in the parts of a step."""

    tables: float
    """Writing tokens, positions and block tables where they are read, and copying blocks."""

    binding: float
    """Writing the sampling parameters of the step's rows."""

    native: float
    """Computing, sampling included."""

    results: float
    """Reading what was sampled."""


@dataclass(slots=True, eq=False)
class StepOutput:
    """What a step produced. Both lists are aligned with ``batch.work``."""

    sampled: list[SampledToken | None]
    """The sampled token of each sequence, None where ``sample`` was not set."""

    prompt_logprobs: list[list[SampledToken] | None] = field(default_factory=list)
    """For each sequence with ``prompt_logprobs`` one entry per scored position in order, else None. Entry ``i`` is
    about the token at position ``start + i + 1``. May be empty when no sequence of the batch wants any."""

    times: StepTimes | None = None
    """Where the time went, if the back end says."""


class Backend(Protocol):
    """Runs a model over a paged KV cache of ``num_blocks`` blocks, ids 0 to ``num_blocks - 1``."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV cache."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens the model knows: every id is below it."""
        ...

    @property
    def max_model_len(self) -> int:
        """The longest sequence (prompt and output) the model can be run with."""
        ...

    def execute(self, batch: StepBatch) -> StepOutput:
        """Copy the blocks, compute every position of the batch, write its keys and values, and sample.

        The engine guarantees that the batch holds at most ``max_num_batched_tokens`` positions and
        ``max_num_seqs`` sequences. The result of a sequence must depend on its tokens and its row only.
        """
        ...
