"""The engine: takes requests of token ids, runs one step at a time, and hands out the tokens of each sequence."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from octavo.backends.interface import Backend, SampledToken, StepBatch, StepOutput, StepTimes
from octavo.engine.block_pool import BlockPool
from octavo.engine.config import EngineConfig
from octavo.engine.integrity import check_engine
from octavo.engine.phases import PhaseProfile
from octavo.engine.prefix_index import root_digest
from octavo.engine.request import EngineRequest, ProducedSequence, SequenceOutput
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence import FINISHED, HELD, Group, Sequence
from octavo.engine.stats import Counters, EngineStats
from octavo.engine.validation import checked_ids, checked_limit, checked_produced
from octavo.errors import CapacityError, ConfigError, EngineDeadError, ParameterError
from octavo.sampling.rows import RowSampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Engine", "EngineConfig", "EngineRequest", "EngineStats", "ProducedSequence", "RowFactory", "SequenceOutput"]

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

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        *,
        row_factory: RowFactory = make_row,
        phases: PhaseProfile | None = None,
    ) -> None:
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
        self.phases = phases
        self.counters = Counters()
        self.pool = BlockPool(config.num_blocks)
        self.scheduler = Scheduler(config, self.pool, self.counters)
        self._row_factory = row_factory
        self._groups: dict[str, Group] = {}
        self._batch = StepBatch()
        self._batch.copies = self.scheduler.copies
        self._arrivals = 0
        self._unfinished = 0  # sequences
        self._paused = 0  # of those, sequences of paused requests
        # Of the last step.
        self._step_tokens = 0
        self._step_decode_tokens = 0
        self._schedule_seconds = 0.0
        self._execute_seconds = 0.0
        self._process_seconds = 0.0

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
        prompt = checked_ids("prompt_ids", request.prompt_ids, self.backend.vocab_size)
        if prompt.size == 0:
            raise ParameterError("prompt_ids", f"shape {prompt.shape}", "a list of at least one token id")
        try:
            limit = checked_limit(self.config, params.max_tokens, prompt.size)
        except CapacityError:
            self.counters.refused += 1
            raise
        outputs = checked_produced(request, prompt.size, limit, self.backend.vocab_size)
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
        live = self._restore(group, outputs)
        first = live[0]
        if first.row is None:
            # Made here, so that sampling parameters the model cannot honour are refused at once.
            first.row = self._make_row(first)
        group.unfinished = len(live)
        self._unfinished += len(live)
        self._groups[request_id] = group
        if first.index == 0 and first.num_outputs == 0:
            self.scheduler.add(first)
        else:
            self.scheduler.release_held(live)

    def _restore(self, group: Group, outputs: list[NDArray[np.int32]]) -> list[Sequence]:
        """Put each sequence where another engine left it, if one did; the sequences that have not finished."""
        produced = group.request.produced
        if not produced:
            return group.sequences
        live = []
        for seq, before, output in zip(group.sequences, produced, outputs, strict=True):
            if output.size:
                group.num_cached_tokens = 0  # reported with the first token
            if before.finished:
                seq.status = FINISHED
                continue
            live.append(seq)
            if output.size:
                seq.restore(output)
                seq.row = self._make_row(seq)
                seq.row.reset(output.tolist())
        return live

    def _make_row(self, seq: Sequence) -> RowSampling:
        group = seq.group
        return self._row_factory(group.request, group.prompt, group.seed, seq.index, self.backend.vocab_size)

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

    def pause(self, request_id: str) -> bool:
        """Take a request out of the batch until `resume`; false when it is paused already, unknown or finished.

        Its blocks are free when this returns; the full ones stay in the prefix index as long as there is room. It
        keeps its place in the order, and goes on later with the tokens it would have had without the pause.
        """
        group = self._groups.get(request_id)
        if group is None or group.paused_at >= 0:
            return False
        self.scheduler.pause(group)
        self._paused += group.unfinished
        self.counters.pauses += 1
        return True

    def resume(self, request_id: str) -> bool:
        """Let a paused request run again; false when it is not paused."""
        group = self._groups.get(request_id)
        if group is None or group.paused_at < 0:
            return False
        self.scheduler.resume(group)
        self._paused -= group.unfinished
        return True

    @property
    def started(self) -> list[str]:
        """The requests whose first sequence was scheduled for the first time in the last step. Valid until the next."""
        return self.scheduler.started

    def has_work(self) -> bool:
        """Whether any request is unfinished and not paused."""
        return self._unfinished > self._paused

    def _end(self, seq: Sequence, reason: str) -> None:
        self.scheduler.remove(seq)
        seq.drop_buffers()
        finished = self.counters.finished
        finished[reason] = finished.get(reason, 0) + 1
        group = seq.group
        group.unfinished -= 1
        self._unfinished -= 1
        if group.paused_at >= 0:
            self._paused -= 1
        if group.unfinished == 0:
            del self._groups[seq.request_id]
        elif seq.index == 0:
            self.scheduler.release_held(group.sequences)

    # -- the step

    def step(self, announce: Callable[[list[str]], None] | None = None) -> list[SequenceOutput]:
        """Compute one step and return what changed. Does nothing without work.

        ``announce`` is given the requests that are scheduled for the first time before anything of them is computed, so
        that whoever looks after the engine knows what it was doing if it does not come back.

        When the back end raises, the sequences of the step give their blocks back and wait to be computed again, and
        the error goes on to the caller.
        """
        begin = perf_counter()
        scheduler = self.scheduler
        scheduled = scheduler.schedule()
        if not scheduled:
            if self.has_work():
                raise EngineDeadError("the scheduler found nothing to run although requests are unfinished")
            return []
        batch = self._batch
        work = batch.work
        work.clear()
        batch.decodes = scheduler.decodes
        tokens = 0
        for seq in scheduled:
            item = seq.work
            assert item is not None
            if item.row is None and (item.sample or item.prompt_logprobs):
                seq.row = item.row = self._make_row(seq)
            tokens += item.count
            work.append(item)
        if announce is not None and scheduler.started:
            announce(scheduler.started)
        ready = perf_counter()
        try:
            result = self.backend.execute(batch)
        except BaseException:
            scheduler.abandon_step()
            raise
        executed = perf_counter()
        if scheduler.pace is not None:
            scheduler.pace.note(tokens, executed - ready)
        scheduler.end_step()
        outputs = self._take(scheduled, result)
        decodes = scheduler.decodes
        if self.config.debug and not self._groups:
            self._check_idle()
        counters = self.counters
        counters.steps += 1
        counters.computed_tokens += tokens
        counters.prefill_tokens += tokens - decodes
        counters.generated_tokens += len(outputs)
        self._step_tokens = tokens
        self._step_decode_tokens = decodes
        end = perf_counter()
        self._schedule_seconds = ready - begin
        self._execute_seconds = executed - ready
        self._process_seconds = end - executed
        counters.busy_seconds += end - begin
        if self.phases is not None:
            self._note_phases(result.times)
        return outputs

    def _note_phases(self, times: StepTimes | None) -> None:
        """Add the last step to the profile."""
        assert self.phases is not None
        seconds = {"scheduling": self._schedule_seconds, "bookkeeping": self._process_seconds}
        if times is None:
            seconds["native"] = self._execute_seconds
        else:
            seconds["block tables"], seconds["binding"] = times.tables, times.binding
            seconds["native"], seconds["sampling"] = times.native, times.results
        self.phases.step(self._step_decode_tokens, len(self.scheduler.scheduled), self._step_tokens, seconds)

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
            waiting=self._unfinished - self._paused - running,
            paused=self._paused,
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
            step_prefill_tokens=self._step_tokens - self._step_decode_tokens,
            step_decode_tokens=self._step_decode_tokens,
            schedule_seconds=self._schedule_seconds,
            execute_seconds=self._execute_seconds,
            process_seconds=self._process_seconds,
            counters=self.counters,
        )

    def check(self) -> list[str]:
        """Compare the pool, the index and the tables with what the sequences hold; every contradiction, in words."""
        problems = check_engine(self._groups.values(), self.scheduler)
        groups = self._groups.values()
        unfinished = sum(group.unfinished for group in groups)
        paused = sum(group.unfinished for group in groups if group.paused_at >= 0)
        if (self._unfinished, self._paused) != (unfinished, paused):
            problems.append(
                f"{self._unfinished} sequences are counted as unfinished and {self._paused} of them as paused; "
                f"there are {unfinished} and {paused}"
            )
        return problems

    def _check_idle(self) -> None:
        """Report contradictions and start over with an empty cache: serving goes on."""
        problems = self.check()
        if problems:
            _log.error("the KV cache was inconsistent and has been reset: %s", "; ".join(problems[:20]))
            self.pool = BlockPool(self.config.num_blocks)
            started = self.scheduler.started
            self.scheduler = Scheduler(self.config, self.pool, self.counters)
            self.scheduler.started = started
            self._batch.copies = self.scheduler.copies
