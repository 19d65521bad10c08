"""One sequence in the engine: its tokens, its blocks, how far it is computed, and the work handed to the back end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.backends.interface import SequenceWork
from octavo.engine.prefix_index import extend_chain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo.backends.interface import SampledToken
    from octavo.engine.request import EngineRequest
    from octavo.sampling.rows import RowSampling

__all__ = ["FINISHED", "HELD", "PAUSED", "RUNNING", "WAITING", "Group", "Sequence"]

# Held: not to be scheduled before sequence 0 has computed the prompt. Paused: not before the request is resumed.
HELD, WAITING, RUNNING, FINISHED, PAUSED = range(5)


class Group:
    """The sequences of one request: one for each answer, all with the same prompt."""

    __slots__ = ("num_cached_tokens", "paused_at", "prompt", "request", "root", "seed", "sequences", "unfinished")

    def __init__(self, request: EngineRequest, prompt: NDArray[np.int32], root: bytes, seed: int) -> None:
        self.request = request
        self.prompt = prompt
        self.root = root
        self.seed = seed
        self.sequences: list[Sequence] = []
        self.unfinished = 0
        self.num_cached_tokens = -1  # until first admitted
        self.paused_at = -1  # admissions counted when it was paused; -1 while it is not


class Sequence:
    """A sequence and what the scheduler knows of it.

    Token buffer, block table and work object are made when the sequence is first admitted and stay until it finishes,
    so that a decode step changes a few fields only. ``num_tokens`` counts known tokens (prompt and output), of which
    ``computed`` have their keys and values in ``blocks``; the first ``indexed`` blocks are in the prefix index.
    """

    __slots__ = (
        "blocked_since",
        "blocks",
        "computed",
        "deferrals",
        "digests",
        "group",
        "index",
        "indexed",
        "inflight_end",
        "limit",
        "matched",
        "min_total",
        "most_blocks",
        "num_tokens",
        "priority",
        "prompt_len",
        "queued_at",
        "rank",
        "request_id",
        "reserved",
        "row",
        "scores",
        "scoring",
        "status",
        "stop_ids",
        "table",
        "tokens",
        "uncached",
        "work",
    )

    def __init__(self, group: Group, index: int, rank: tuple[int, ...], limit: int, block_size: int) -> None:
        request = group.request
        params = request.params
        self.group = group
        self.index = index
        self.rank = rank
        self.request_id = request.request_id
        self.priority = request.priority
        self.prompt_len = len(group.prompt)
        self.num_tokens = self.prompt_len
        self.limit = limit  # num_tokens at which the sequence ends
        self.most_blocks = -(-(limit - 1) // block_size)  # the last token is never read, so it needs no place
        self.min_total = self.prompt_len + params.min_tokens
        eos = () if params.ignore_eos else request.eos_ids
        self.stop_ids = frozenset(eos) | frozenset(params.stop_token_ids or ())
        self.computed = 0
        self.blocks: list[int] = []
        self.indexed = 0
        self.inflight_end = 0  # blocks up to here may be announced in the scheduler's table of blocks being computed
        self.reserved = 0  # blocks promised by the pool and not taken yet
        self.digests: list[bytes] = []
        self.matched = 0  # blocks of the prefix index that matched when last looked at
        self.uncached = self.prompt_len
        self.deferrals = 0
        self.queued_at = 0
        self.blocked_since = -1
        self.status = WAITING
        # Positions served from the prefix cache have no logits, so a sequence that is scored does not read it.
        self.scoring = index == 0 and params.prompt_logprobs is not None and self.prompt_len > 1
        self.scores: list[SampledToken | None] | None = (
            [None] if index == 0 and params.prompt_logprobs is not None else None
        )
        self.row: RowSampling | None = None
        self.tokens: NDArray[np.int32] = group.prompt
        self.table: NDArray[np.int32] | None = None
        self.work: SequenceWork | None = None

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far: the position of the next one among the random numbers of the sequence."""
        return self.num_tokens - self.prompt_len

    def materialise(self) -> SequenceWork:
        """Make the buffers for the longest the sequence can get. Untouched pages of them cost no memory."""
        if self.work is None:
            tokens = np.empty(self.limit, dtype=np.int32)
            tokens[: self.prompt_len] = self.group.prompt
            self.tokens = tokens
            self.table = np.zeros(self.most_blocks, dtype=np.int32)
            self.work = SequenceWork(tokens, self.table)
        return self.work

    def restore(self, output: NDArray[np.int32]) -> None:
        """Make this a sequence that was preempted after this output; its prompt needs no log-probabilities again."""
        self.materialise()
        self.num_tokens = self.prompt_len + output.size
        self.tokens[self.prompt_len : self.num_tokens] = output
        self.scoring = False
        self.scores = None

    def chain(self, count: int, block_size: int) -> list[bytes]:
        """The digests of at least the first ``count`` blocks, which must be full of known tokens."""
        digests = self.digests
        if len(digests) < count:
            new = self.tokens[len(digests) * block_size : count * block_size].tobytes()
            extend_chain(digests, self.group.root, new, block_size * 4)
        return digests

    def drop_buffers(self) -> None:
        """Free what only a live sequence needs."""
        self.work = None
        self.table = None
        self.row = None
        self.tokens = self.group.prompt
        self.digests = []
