"""The scheduler: which positions of which sequences the next step computes, and in which blocks.

Each step has a budget of tokens. Running decodes come first (one token each), then running prefills, then admissions,
the last of them cut to fit. While others wait, one prefill takes at most three quarters of what is left, so that a
short prompt behind long ones starts soon; what the others leave is given back to it in the same step.

Memory: an admitted sequence is promised the blocks of its known tokens (``max_utilization``) or of its longest possible
self (``no_evict``), so a prefill never waits for memory in its middle. A decode that needs a block when none is left
preempts the youngest sequence, which frees its blocks and comes back to its old place in the queue with its output.
Admission leaves the running sequences their next two blocks: on a mixed load in a full pool this cut recomputation from
59 % of the work to 4 % for 5 % more steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from typing import NamedTuple

from octavo.engine.block_pool import BlockPool
from octavo.engine.config import EngineConfig
from octavo.engine.fairness import FairQueue
from octavo.engine.pace import StepPace
from octavo.engine.sequence import FINISHED, HELD, PAUSED, RUNNING, WAITING, Group, Sequence
from octavo.engine.stats import Counters
from octavo.engine.waiting import WaitingQueue, by_rank

__all__ = ["Scheduler"]

_SCAN = 128  # waiting sequences that one step looks at
_MISSES = 8  # of those, how many may turn out not to fit before the step stops trying
_HEADROOM = 2  # blocks left at admission for the growth of each running sequence
_DEFERRALS = 256  # steps an admission waits for a prefix that makes no progress before it computes the prefix itself


class _Plan(NamedTuple):
    """How a sequence could be admitted."""

    shared: list[int]  # blocks taken over from the prefix index or a sibling
    start: int  # first position to compute
    copy: bool  # position ``start`` lies in the last shared block, which is therefore copied
    need: int  # blocks to promise
    taken: int  # shared blocks that nobody references now, so that they stop being available


class Scheduler:
    """Owns the queue, the running sequences and their blocks. Per step: `schedule`, `end_step`,
    then `computed` for every sequence that was scheduled."""

    def __init__(self, config: EngineConfig, pool: BlockPool, counters: Counters) -> None:
        self.config = config
        self.pool = pool
        self.counters = counters
        self._fair = FairQueue() if config.policy == "fair" else None
        self.waiting: WaitingQueue = WaitingQueue() if self._fair is None else self._fair
        self.running: list[Sequence] = []  # in rank order: the last one is the first to be preempted
        self.scheduled: list[Sequence] = []
        self.started: list[str] = []  # requests admitted for the first time in this step
        self.decodes = 0  # sequences of this step that had one token left to compute when it began
        self.copies: list[tuple[int, int]] = []
        # The running sequence that is going to compute the block of a digest.
        self.inflight: dict[bytes, Sequence] = {}
        # Every running sequence can have a token of every step.
        self.max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._block_size = config.block_size
        self._budget = config.max_num_batched_tokens
        self.pace: StepPace | None = None
        if config.max_step_seconds is not None:
            # Whatever was measured, prompts get on by four blocks a step at least beside the decodes.
            least = config.max_num_seqs + 4 * config.block_size
            self.pace = StepPace(config.max_step_seconds, config.max_num_batched_tokens, least)
        self._caching = config.enable_prefix_caching
        self._reserve_all = config.capacity == "no_evict"
        self._by_priority = config.policy == "priority"
        self._by_length = config.policy == "shortest"
        self._held_sources: list[int] = []  # blocks copied from in this step, held until it is over
        self._copied: set[int] = set()  # blocks copied to in this step

    # -- the step

    def schedule(self) -> list[Sequence]:
        """Choose the work of the next step and set the work objects; the list returned is valid until the next call."""
        scheduled = self.scheduled
        scheduled.clear()
        if self.started:
            self.started = []  # the list before belongs to whoever took it
        if self.copies:
            self.copies.clear()
            self._copied.clear()
        if self._by_priority and len(self.waiting) and self.running and not self._reserve_all:
            self._make_room()
        budget = self._budget
        prefills: list[Sequence] = []
        running = self.running
        size = self._block_size
        position = 0
        while position < len(running):  # it shrinks when one is preempted: the last, so never one passed already
            seq = running[position]
            start = seq.computed
            if seq.num_tokens - start == 1:
                if start == len(seq.blocks) * size and not self._grow(seq):
                    continue
                work = seq.work
                assert work is not None
                work.start = start
                work.count = 1
                work.sample = True
                work.row = seq.row
                scheduled.append(seq)
                budget -= 1
            else:
                prefills.append(seq)
            position += 1
        self.decodes = len(scheduled)
        if self.pace is not None and scheduled:
            budget = min(budget, self.pace.budget - len(scheduled))
        if self._fair is not None:
            for seq in scheduled:
                self._fair.charge(seq, 1)
        cut: list[Sequence] = []
        left = len(prefills)
        for seq in prefills:
            left -= 1
            if budget == 0:
                break
            budget -= self._chunk(seq, budget, left > 0 or len(self.waiting) > 0, cut)
        if budget and len(self.waiting) and len(running) < self.max_running:
            budget = self._admit(budget, cut)
        for seq in cut:
            if budget == 0:
                break
            work = seq.work
            assert work is not None
            more = min(budget, seq.num_tokens - seq.computed - work.count)
            self._assign(seq, work.count + more)
            budget -= more
        return scheduled

    def computed(self, seq: Sequence) -> None:
        """Note that the back end has computed what was scheduled for a sequence: its full blocks can now be shared."""
        work = seq.work
        assert work is not None
        seq.computed = work.start + work.count
        if self._caching and seq.computed >= (seq.indexed + 1) * self._block_size:
            self._index(seq)

    def end_step(self) -> None:
        """Give up the blocks that were only held to be copied from, before anything before them is given up."""
        held = self._held_sources
        if held:
            for block in held:
                self.pool.release(block)
            held.clear()

    def abandon_step(self) -> None:
        """Undo a step the back end failed to compute: what it should have written or copied cannot be relied on."""
        self.end_step()
        for seq in self.scheduled:
            if seq.status == RUNNING:
                self._preempt(seq)

    # -- sequences coming and going

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, at once or when its request is resumed."""
        paused_at = seq.group.paused_at
        if paused_at >= 0:
            seq.status = PAUSED
            seq.queued_at = paused_at
        else:
            seq.status = WAITING
            seq.queued_at = self.counters.admissions
            self.waiting.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence wherever it is; its blocks are free at once."""
        if seq.status == RUNNING:
            self._stop_running(seq)
        elif seq.status == WAITING:
            self.waiting.remove(seq)
        seq.status = FINISHED

    def pause(self, group: Group) -> None:
        """Take the sequences of a request out of the batch and the queue; their full blocks stay in the index."""
        group.paused_at = self.counters.admissions
        for seq in group.sequences:
            if seq.status == RUNNING:
                self._stop_running(seq)
            elif seq.status == WAITING:
                self.waiting.remove(seq)
            else:
                continue
            seq.status = PAUSED

    def resume(self, group: Group) -> None:
        """Queue the sequences of a paused request where their rank says. The pause does not count as waiting."""
        pause = self.counters.admissions - group.paused_at
        group.paused_at = -1
        for seq in group.sequences:
            if seq.status == PAUSED:
                seq.status = WAITING
                seq.deferrals = 0
                seq.queued_at += pause
                if seq.blocked_since >= 0:
                    seq.blocked_since += pause
                self.waiting.add(seq)

    def _stop_running(self, seq: Sequence) -> None:
        running = self.running
        if running[-1] is seq:
            running.pop()
        else:
            del running[bisect_left(running, seq.rank, key=by_rank)]
        if seq.inflight_end:
            self._withdraw(seq, seq.inflight_end)
            seq.inflight_end = 0
        pool = self.pool
        pool.release_chain(seq.blocks)
        seq.blocks.clear()
        pool.reserved -= seq.reserved
        seq.reserved = 0
        seq.indexed = 0
        seq.computed = 0

    def _preempt(self, seq: Sequence) -> None:
        self._stop_running(seq)
        seq.status = WAITING
        seq.deferrals = 0
        self.waiting.add(seq)
        self.counters.preemptions += 1

    # -- blocks

    def _grow(self, seq: Sequence) -> bool:
        """Give a decode its next block; false when the sequence had to be preempted itself."""
        pool = self.pool
        if seq.reserved == 0:
            running = self.running
            while pool.available <= 0:
                victim = running[-1]
                self._preempt(victim)
                if victim is seq:
                    return False
        self._take(seq)
        return True

    def _take(self, seq: Sequence) -> int:
        """Append a block to a sequence, from its promise if it has one."""
        pool = self.pool
        if seq.reserved:
            seq.reserved -= 1
            pool.reserved -= 1
        block = pool.allocate()
        table = seq.table
        assert table is not None
        table[len(seq.blocks)] = block
        seq.blocks.append(block)
        return block

    def _index(self, seq: Sequence) -> None:
        """Put the newly full blocks of a sequence in the prefix index.

        If an equal block is there already (two sequences computed the same at the same time) the sequence goes on with
        that one: same tokens, same bits. So a block is held by whoever holds the blocks after it, always.
        """
        pool = self.pool
        index = pool.index
        full = seq.computed // self._block_size
        digests = seq.chain(full, self._block_size)
        if seq.inflight_end:
            self._withdraw(seq, min(full, seq.inflight_end))
        blocks = seq.blocks
        for position in range(seq.indexed, full):
            digest = digests[position]
            known = index.block_of.get(digest)
            if known is None:
                index.add(digest, digests[position - 1] if position else None, blocks[position])
            elif known != blocks[position]:
                pool.acquire(known)
                pool.release(blocks[position])
                blocks[position] = known
                assert seq.table is not None
                seq.table[position] = known
                self.counters.blocks_shared_late += 1
        seq.indexed = full
        if full >= seq.inflight_end:
            seq.inflight_end = 0

    def _withdraw(self, seq: Sequence, end: int) -> None:
        inflight = self.inflight
        for digest in seq.digests[seq.indexed : end]:
            if inflight.get(digest) is seq:
                del inflight[digest]

    # -- chunks

    def _chunk(self, seq: Sequence, budget: int, contended: bool, cut: list[Sequence]) -> int:
        """Schedule as much of a prefill as its share of the budget allows and say how much that is."""
        remaining = seq.num_tokens - seq.computed
        count = min(remaining, budget)
        if contended and count == budget:
            count = min(count, max(self._block_size, budget * 3 // 4))
        self._assign(seq, count)
        self.scheduled.append(seq)
        if count < remaining:
            cut.append(seq)
        return count

    def _assign(self, seq: Sequence, count: int) -> None:
        """Set the work of a prefill to ``count`` positions, with the blocks they need."""
        work = seq.work
        assert work is not None
        start = seq.computed
        end = start + count
        for _ in range(len(seq.blocks), -(-end // self._block_size)):
            self._take(seq)
        final = end == seq.num_tokens
        work.start = start
        work.count = count
        work.sample = final
        work.prompt_logprobs = seq.scoring
        work.row = seq.row if final or seq.scoring else None

    # -- admission

    def _admit(self, budget: int, cut: list[Sequence]) -> int:
        """Admit waiting sequences in order while budget, places and memory last; return the budget that is left.

        One that does not fit yet is overtaken by those behind it, but only so often: after that nobody is admitted
        before it, and it fits at the latest when the running ones have ended.
        """
        counters = self.counters
        bound = self.config.starvation_bound
        count = min(len(self.waiting), _SCAN)
        candidates = self._by_uncached_length() if self._by_length else self.waiting.candidates(count)
        misses = 0
        headroom = sum(map(self._growth, self.running))
        for position, seq in enumerate(candidates):
            plan = self._plan(seq)
            if plan is None:
                counters.deferrals += 1
                continue
            if plan.need + plan.taken + headroom > self.pool.available:
                if seq.blocked_since < 0:
                    seq.blocked_since = counters.admissions
                misses += 1
                if misses == _MISSES or counters.admissions - seq.blocked_since >= bound:
                    break
                continue
            self.waiting.remove(seq)
            self._start(seq, plan)
            headroom += self._growth(seq)
            budget -= self._chunk(seq, budget, position + 1 < count, cut)
            if budget == 0 or len(self.running) >= self.max_running:
                break
        return budget

    def _growth(self, seq: Sequence) -> int:
        """The blocks an admission leaves to a running sequence; it was promised all of them under ``no_evict``."""
        return min(_HEADROOM, seq.most_blocks - len(seq.blocks) - seq.reserved)

    def _by_uncached_length(self) -> list[Sequence]:
        """The candidates of the ``shortest`` policy: those overtaken often enough, then by uncached length."""
        candidates = self.waiting.first(_SCAN)
        admissions = self.counters.admissions
        bound = self.config.starvation_bound
        index = self.pool.index
        size = self._block_size
        aged: list[Sequence] = []
        others: list[Sequence] = []
        for seq in candidates:
            if admissions - seq.queued_at >= bound:
                aged.append(seq)
                continue
            if self._caching and not seq.scoring:
                full = seq.num_tokens // size
                seq.matched = index.match(seq.chain(full, size), full, seq.matched)
                seq.uncached = max(1, seq.num_tokens - seq.matched * size)
            others.append(seq)
        others.sort(key=lambda seq: (seq.uncached, seq.rank))
        return aged + others

    def _plan(self, seq: Sequence) -> _Plan | None:
        """How to admit a sequence now; None when it is better to wait for a prefix that is being computed."""
        size = self._block_size
        known = seq.num_tokens
        shared: list[int] = []
        start = 0
        full = 0
        if self._caching:
            full = known // size
            digests = seq.chain(full, size)
            readable = (len(seq.scores) - 1) // size if seq.scoring and seq.scores else full
            matched = self.pool.index.match(digests, readable, seq.matched)
            if matched > seq.matched:
                seq.deferrals = 0
            seq.matched = matched
            if matched < readable and digests[matched] in self.inflight and seq.deferrals < _DEFERRALS:
                seq.deferrals += 1
                return None
            start = min(matched * size, known - 1)
            shared = [self.pool.index.block_of[digest] for digest in digests[:matched]]
        if len(seq.group.sequences) > 1 and not seq.scoring:
            sibling = self._sibling(seq)
            if sibling is not None:
                if sibling.computed < sibling.prompt_len:
                    return None
                # The sibling's last prompt block may hold its own output too: that is overwritten in the copy.
                fork = min(seq.prompt_len, known - 1)
                if fork > start:
                    start = fork
                    shared = sibling.blocks[: -(-seq.prompt_len // size)]
        copy = len(shared) * size > start
        total = seq.most_blocks if self._reserve_all else -(-known // size)
        references = self.pool.references
        taken = sum(1 for block in shared if references[block] == 0)
        need = total - len(shared) + copy
        if copy and need + taken > self.pool.available:
            # Without room for a copy beside its source, the last block is computed anew.
            taken -= references[shared[-1]] == 0
            shared = shared[:-1]
            return _Plan(shared, len(shared) * size, False, total - len(shared), taken)
        return _Plan(shared, start, copy, need, taken)

    def _sibling(self, seq: Sequence) -> Sequence | None:
        """A running sequence of the same request, one that has computed the prompt if there is one.

        One whose last prompt block is only copied in this very step has nothing to give yet: the one it is copied
        from is found instead.
        """
        found = None
        last = (seq.prompt_len - 1) // self._block_size
        for other in seq.group.sequences:
            if other.status == RUNNING:
                if other.computed < other.prompt_len:
                    found = other
                elif other.blocks[last] not in self._copied:
                    return other
        return found

    def _start(self, seq: Sequence, plan: _Plan) -> None:
        """Make a sequence run as planned."""
        pool = self.pool
        seq.materialise()
        table = seq.table
        assert table is not None
        shared = plan.shared
        for block in shared:
            pool.acquire(block)
        seq.blocks.extend(shared)
        if shared:
            table[: len(shared)] = shared
        seq.reserved = plan.need
        pool.reserved += plan.need
        seq.computed = plan.start
        if plan.copy:
            source = seq.blocks.pop()
            self._held_sources.append(source)
            destination = self._take(seq)
            self.copies.append((source, destination))
            self._copied.add(destination)
            self.counters.block_copies += 1
        if self._caching:
            # A full block is indexed as soon as it is computed, so every full block shared is.
            seq.indexed = plan.start // self._block_size
            seq.inflight_end = seq.num_tokens // self._block_size
            inflight = self.inflight
            for digest in seq.digests[seq.indexed : seq.inflight_end]:
                inflight.setdefault(digest, seq)
        seq.deferrals = 0
        seq.blocked_since = -1
        seq.status = RUNNING
        insort(self.running, seq, key=by_rank)
        counters = self.counters
        counters.admissions += 1
        if self._fair is not None:
            self._fair.charge(seq, seq.num_tokens - plan.start)
        group = seq.group
        if group.num_cached_tokens < 0:
            group.num_cached_tokens = plan.start
            self.started.append(seq.request_id)
            if self._caching:
                counters.prefix_queries += seq.prompt_len
                counters.prefix_hits += plan.start

    def _make_room(self) -> None:
        """Preempt running sequences of lower priority when the first waiting one needs their memory, and only then."""
        head = self.waiting[0]
        running = self.running
        if running[-1].priority <= head.priority:
            return
        plan = self._plan(head)
        if plan is None:
            return
        pool = self.pool
        missing = plan.need + plan.taken + sum(map(self._growth, running)) - pool.available
        if missing <= 0:
            return
        references = pool.references
        wanted = set(plan.shared)
        dropped: Counter[int] = Counter()
        victims = 0
        gain = 0
        for seq in reversed(running):
            if seq.priority <= head.priority or gain >= missing:
                break
            dropped.update(seq.blocks)
            gain += seq.reserved + self._growth(seq)
            gain += sum(1 for block in seq.blocks if dropped[block] == references[block] and block not in wanted)
            victims += 1
        if gain < missing:
            return
        for _ in range(victims):
            self._preempt(running[-1])

    def release_held(self, sequences: list[Sequence]) -> None:
        """Queue the sequences that waited for the first of their request to compute the prompt."""
        for seq in sequences:
            if seq.status == HELD:
                self.add(seq)
