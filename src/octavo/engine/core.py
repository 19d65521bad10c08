"""The engine: takes requests of token ids, runs one step at a time, and hands out the tokens of each sequence."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Protocol

import numpy as np

from octavo.backends.interface import Backend, SampledToken, StepBatch, StepOutput
from octavo.engine.block_pool import BlockPool
from octavo.engine.config import EngineConfig
from octavo.engine.integrity import check_engine
from octavo.engine.prefix_index import root_digest
from octavo.engine.request import EngineRequest, SequenceOutput
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence import FINISHED, HELD, Group, Sequence
from octavo.engine.stats import Counters, EngineStats
from octavo.errors import CapacityError, ConfigError, EngineDeadError, ParameterError
from octavo.sampling.rows import RowSampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Engine", "EngineConfig", "EngineRequest", "EngineStats", "RowFactory", "SequenceOutput"]

_log = logging.getLogger(__name__)


class RowFactory(Protocol):
    """Makes the sampling state of one sequence."""

    def __call__(
        self, request: EngineRequest, prompt: NDArray[np.int32], seed: int, index: int, vocab_size: int
    ) -> RowSampling: ...


def make_row(request: EngineRequest, prompt: NDArray[np.int32], seed: int, index: int, vocab_size: int) -> RowSampling:
    """The sampling state octavo's back ends use."""
    return RowSampling(request.params, seed, index, prompt, request.eos_ids, vocab_size=vocab_size)


class Engine:
    """Continuous batching over a paged KV cache.

    Not thread-safe: one thread calls everything, `add` and `abort` between two steps. What a request produces does not
    depend on what else runs: the engine only decides when a position is computed and where its keys and values lie.
    """

    def __init__(self, config: EngineConfig, backend: Backend, *, row_factory: RowFactory = make_row) -> None:
        if config.block_size != backend.block_size:
            raise ConfigError(
                f"block_size is {config.block_size}, the back end's is {backend.block_size}: make them equal"
            )
        if config.num_blocks > backend.num_blocks:
            raise ConfigError(f"num_blocks is {config.num_blocks}, the back end has {backend.num_blocks}: lower it")
        if config.max_model_len > backend.max_model_len:
            raise ConfigError(
                f"max_model_len is {config.max_model_len}, the back end was made for {backend.max_model_len}: lower it"
            )
        self.config = config
        self.backend = backend
        self.counters = Counters()
        self.pool = BlockPool(config.num_blocks)
        self.scheduler = Scheduler(config, self.pool, self.counters)
        self._row_factory = row_factory
        self._groups: dict[str, Group] = {}
        self._batch = StepBatch()
        self._batch.copies = self.scheduler.copies
        self._arrivals = 0
        self._step_tokens = 0

    # -- requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request. `CapacityError` when it could never run, `ParameterError` when something in it is wrong."""
        request_id = request.request_id
        params = request.params
        if request_id in self._groups:
            raise ParameterError("request_id", request_id, "different from that of every unfinished request")
        if request.priority != 0 and self.config.policy != "priority":
            raise ParameterError(
                "priority", request.priority, f"0 with the scheduling policy {self.config.policy} (or choose priority)"
            )
        prompt = self._checked_prompt(request)
        limit = self._checked_limit(request, len(prompt))
        seed = params.seed if params.seed is not None else request.seed
        if seed is None:
            seed = secrets.randbits(63)
        group = Group(request, prompt, root_digest(request.adapter, request.cache_salt), seed)
        arrival = self._arrivals
        self._arrivals += 1
        for index in range(params.num_sequences):
            rank = (request.priority, arrival, index) if self.config.policy == "priority" else (arrival, index)
            seq = Sequence(group, index, rank, limit, self.config.block_size)
            seq.status = HELD
            group.sequences.append(seq)
        # The first row is made here, so that sampling parameters the model cannot honour are refused at once.
        group.sequences[0].row = self._make_row(group.sequences[0])
        group.unfinished = len(group.sequences)
        self._groups[request_id] = group
        self.scheduler.add(group.sequences[0])

    def _make_row(self, seq: Sequence) -> RowSampling:
        group = seq.group
        return self._row_factory(group.request, group.prompt, group.seed, seq.index, self.backend.vocab_size)

    def _checked_prompt(self, request: EngineRequest) -> NDArray[np.int32]:
        try:
            given = np.asarray(request.prompt_ids)
            prompt = given.astype(np.int32)
        except (ValueError, TypeError, OverflowError):
            raise ParameterError("prompt_ids", request.prompt_ids, "a list of token ids") from None
        if prompt.ndim != 1 or prompt.size == 0:
            raise ParameterError("prompt_ids", f"shape {prompt.shape}", "a list of at least one token id")
        if given.dtype.kind not in "iu":
            raise ParameterError("prompt_ids", f"type {given.dtype}", "integer token ids")
        vocab = self.backend.vocab_size
        low, high = int(given.min()), int(given.max())
        if low < 0 or high >= vocab:
            wrong = low if low < 0 else high
            raise ParameterError(
                "prompt_ids", wrong, f"below {vocab}", f"Token id {wrong} is out of vocabulary (0 to {vocab - 1})"
            )
        return prompt

    def _checked_limit(self, request: EngineRequest, prompt_len: int) -> int:
        """The length at which a sequence of the request ends, if the KV cache can ever hold one that long.

        The last token needs no place: its keys and values are never read. Without ``max_tokens`` an answer may be as
        long as both the model and the KV cache allow.
        """
        config = self.config
        size = config.block_size
        longest = config.max_model_len
        pool = config.num_blocks * size
        max_tokens = request.params.max_tokens
        if max_tokens is None:
            limit = max(min(longest, pool + 1), prompt_len + 1)
        else:
            limit = min(longest, prompt_len + max_tokens)
        if prompt_len + 1 > longest:
            self.counters.refused += 1
            raise CapacityError(
                f"the prompt has {prompt_len} tokens and leaves no room for an answer: max_model_len is {longest} "
                f"(KV cache: {pool} tokens); shorten the prompt to {longest - 1} tokens or raise max_model_len",
                needed=prompt_len + 1,
                available=longest,
                unit="tokens",
            )
        needed = -(-(limit - 1) // size)
        if needed > config.num_blocks:
            self.counters.refused += 1
            raise CapacityError(
                f"the request needs up to {limit - 1} tokens ({needed} blocks of {size}), the KV cache holds {pool} "
                f"({config.num_blocks} blocks) and max_model_len is {longest}; shorten the prompt ({prompt_len} "
                f"tokens), lower max_tokens or enlarge the KV cache",
                needed=needed,
                available=config.num_blocks,
            )
        return limit

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """End a request now: its blocks are free when this returns. The last outputs of its unfinished sequences.

        An unknown or finished request is not an error: aborting races with finishing.
        """
        group = self._groups.get(request_id)
        if group is None:
            return []
        outputs = []
        for seq in group.sequences:
            if seq.status != FINISHED:
                outputs.append(SequenceOutput(request_id, seq.index, [], True, "abort"))
                self._end(seq, "abort")
        return outputs

    def finish(self, request_id: str, index: int, reason: str = "stop") -> bool:
        """End one sequence now, such as at a stop string; false when it had ended already."""
        group = self._groups.get(request_id)
        if group is None or not 0 <= index < len(group.sequences) or group.sequences[index].status == FINISHED:
            return False
        self._end(group.sequences[index], reason)
        return True

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._groups)

    def _end(self, seq: Sequence, reason: str) -> None:
        self.scheduler.remove(seq)
        seq.drop_buffers()
        finished = self.counters.finished
        finished[reason] = finished.get(reason, 0) + 1
        group = seq.group
        group.unfinished -= 1
        if group.unfinished == 0:
            del self._groups[seq.request_id]
        elif seq.index == 0:
            self.scheduler.release_held(group.sequences)

    # -- the step

    def step(self) -> list[SequenceOutput]:
        """Compute one step and return what changed. Does nothing without work.

        When the back end raises, the sequences of the step give their blocks back and wait to be computed again, and
        the error goes on to the caller.
        """
        scheduler = self.scheduler
        scheduled = scheduler.schedule()
        if not scheduled:
            if self._groups:
                raise EngineDeadError("the scheduler found nothing to run although requests are unfinished")
            return []
        batch = self._batch
        work = batch.work
        work.clear()
        tokens = 0
        for seq in scheduled:
            item = seq.work
            assert item is not None
            if item.row is None and (item.sample or item.prompt_logprobs):
                seq.row = item.row = self._make_row(seq)
            tokens += item.count
            work.append(item)
        try:
            result = self.backend.execute(batch)
        except BaseException:
            scheduler.abandon_step()
            raise
        counters = self.counters
        counters.steps += 1
        counters.computed_tokens += tokens
        self._step_tokens = tokens
        scheduler.end_step()
        outputs = self._take(scheduled, result)
        counters.generated_tokens += len(outputs)
        counters.prefill_tokens += tokens - len(outputs)
        if self.config.debug and not self._groups:
            self._check_idle()
        return outputs

    def _take(self, scheduled: list[Sequence], result: StepOutput) -> list[SequenceOutput]:
        """Give the results of a step to its sequences."""
        outputs: list[SequenceOutput] = []
        sampled = result.sampled
        note_computed = self.scheduler.computed
        for position, seq in enumerate(scheduled):
            note_computed(seq)
            item = seq.work
            assert item is not None
            if item.prompt_logprobs:
                self._score(seq, result.prompt_logprobs[position])
            if not item.sample:
                continue
            token = sampled[position]
            if token is None:
                raise EngineDeadError(f"the back end returned no token for sequence {seq.index} of {seq.request_id}")
            if token.error is not None:
                outputs.append(SequenceOutput(seq.request_id, seq.index, [], True, "error", error=token.error))
                self._end(seq, "error")
                continue
            known = seq.num_tokens
            token_id = token.token
            seq.tokens[known] = token_id
            known += 1
            seq.num_tokens = known
            row = seq.row
            assert row is not None
            row.append(token_id)
            output = SequenceOutput(seq.request_id, seq.index, [token])
            outputs.append(output)
            if known == seq.prompt_len + 1:
                self._first_token(seq, output)
            if token_id in seq.stop_ids and known >= seq.min_total:
                output.finished = True
                output.finish_reason = "stop"
                if token_id not in seq.group.request.eos_ids or seq.group.request.params.ignore_eos:
                    output.stop_reason = token_id
                self._end(seq, "stop")
            elif known >= seq.limit:
                output.finished = True
                output.finish_reason = "length"
                self._end(seq, "length")
        return outputs

    def _first_token(self, seq: Sequence, output: SequenceOutput) -> None:
        output.num_cached_tokens = seq.group.num_cached_tokens
        if seq.index == 0:
            output.prompt_logprobs = seq.scores
            seq.scores = None
            if len(seq.group.sequences) > 1:
                self.scheduler.release_held(seq.group.sequences)

    def _score(self, seq: Sequence, scored: list[SampledToken] | None) -> None:
        """Keep the log-probabilities of prompt tokens, without those a preempted sequence had before."""
        scores, item = seq.scores, seq.work
        assert scores is not None
        assert item is not None
        if scored is None or len(scored) != item.count - item.sample:
            raise EngineDeadError(f"the back end returned no prompt log-probabilities for {seq.request_id}")
        scores.extend(scored[len(scores) - 1 - item.start :])
        if len(scores) == seq.prompt_len:
            seq.scoring = False
            item.prompt_logprobs = False

    # -- looking inside

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix that no running sequence holds; true when that was all of them."""
        self.pool.drop_cached()
        return len(self.pool.index) == 0

    def stats(self) -> EngineStats:
        """A snapshot. Counts what is running now, so it costs a little per running sequence."""
        pool = self.pool
        size = self.config.block_size
        allocated = pool.num_referenced * size
        # Full blocks may be shared; the last, partly filled one never is between two steps.
        unused = sum(len(seq.blocks) * size - seq.computed for seq in self.scheduler.running)
        running = len(self.scheduler.running)
        return EngineStats(
            running=running,
            waiting=sum(group.unfinished for group in self._groups.values()) - running,
            num_blocks=pool.num_blocks,
            block_size=size,
            referenced_blocks=pool.num_referenced,
            cached_blocks=pool.num_cached,
            free_blocks=pool.num_free,
            reserved_blocks=pool.reserved,
            evictions=pool.evictions,
            allocated_slots=allocated,
            used_slots=allocated - unused,
            step_tokens=self._step_tokens,
            counters=self.counters,
        )

    def check(self) -> list[str]:
        """Compare the pool, the index and the tables with what the sequences hold; every contradiction, in words."""
        return check_engine(self._groups.values(), self.scheduler)

    def _check_idle(self) -> None:
        """Report contradictions and start over with an empty cache: serving goes on."""
        problems = self.check()
        if problems:
            _log.error("the KV cache was inconsistent and has been reset: %s", "; ".join(problems[:20]))
            self.pool = BlockPool(self.config.num_blocks)
            self.scheduler = Scheduler(self.config, self.pool, self.counters)
            self._batch.copies = self.scheduler.copies
