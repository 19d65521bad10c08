"""The integrity check of the KV cache: recomputes what the pool and the index should hold from the sequences alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence import FINISHED, HELD, PAUSED, RUNNING, WAITING, Group, Sequence

__all__ = ["check_engine"]


def check_engine(groups: Iterable[Group], scheduler: Scheduler) -> list[str]:
    """Every contradiction found between two steps, in words; none is the answer hoped for."""
    sequences = [seq for group in groups for seq in group.sequences if seq.status != FINISHED]
    problems: list[str] = []
    _check_queues(sequences, scheduler, problems)
    _check_references(sequences, scheduler, problems)
    _check_index(scheduler, problems)
    for seq in sequences:
        _check_sequence(seq, scheduler, problems)
    return problems


def _name(seq: Sequence) -> str:
    return f"{seq.request_id}[{seq.index}]"


def _check_queues(sequences: list[Sequence], scheduler: Scheduler, problems: list[str]) -> None:
    for name, queue, status in (("running", scheduler.running, RUNNING), ("waiting", list(scheduler.waiting), WAITING)):
        if [seq.rank for seq in queue] != sorted(seq.rank for seq in queue):
            problems.append(f"the {name} sequences are not in rank order")
        expected = sorted(_name(seq) for seq in sequences if seq.status == status)
        found = sorted(_name(seq) for seq in queue)
        if expected != found:
            problems.append(f"{name} sequences are {expected}, the scheduler has {found}")
    for seq in sequences:
        if seq.status == HELD and seq.group.sequences[0].status == FINISHED:
            problems.append(f"{_name(seq)} is held although sequence 0 has ended")
        paused = seq.group.paused_at >= 0
        if seq.status in ((WAITING, RUNNING) if paused else (PAUSED,)):
            problems.append(f"{_name(seq)} and its request do not agree on whether it is paused")
    if len(scheduler.running) > scheduler.max_running:
        problems.append(f"{len(scheduler.running)} sequences run, {scheduler.max_running} may")


def _check_references(sequences: list[Sequence], scheduler: Scheduler, problems: list[str]) -> None:
    pool = scheduler.pool
    held: Counter[int] = Counter()
    for seq in sequences:
        held.update(seq.blocks)
    free, cached = pool.free_blocks(), pool.cached_blocks()
    for block in range(pool.num_blocks):
        if pool.references[block] != held[block]:
            problems.append(f"block {block} has {pool.references[block]} references, {held[block]} sequences hold it")
    if sorted([*free, *cached, *held]) != list(range(pool.num_blocks)):
        problems.append("the free, cached and held blocks are not every block once")
    reserved = sum(seq.reserved for seq in sequences)
    if pool.reserved != reserved:
        problems.append(f"{pool.reserved} blocks are promised, sequences count {reserved}")
    if pool.available < 0:
        problems.append(f"{-pool.available} more blocks are promised than there are")
    for block in cached:
        if pool.index.digest_of[block] is None:
            problems.append(f"block {block} is cached but not in the prefix index")
    for block in free:
        if pool.index.digest_of[block] is not None:
            problems.append(f"block {block} is free but in the prefix index")


def _check_index(scheduler: Scheduler, problems: list[str]) -> None:
    pool = scheduler.pool
    index = pool.index
    there = {block: digest for block, digest in enumerate(index.digest_of) if digest is not None}
    if {digest: block for block, digest in there.items()} != index.block_of:
        problems.append("the prefix index does not name the same blocks in both directions")
        return
    order = {block: place for place, block in enumerate(pool.cached_blocks())}
    for block in there:
        parent_digest = index.parent_of[block]
        if parent_digest is None:
            continue
        parent = index.block_of.get(parent_digest)
        if parent is None:
            problems.append(f"block {block} is in the prefix index without the block before it")
        elif parent in order and order[parent] < order.get(block, pool.num_blocks):
            problems.append(f"block {parent} would be evicted before block {block}, which follows it")
    for digest, seq in scheduler.inflight.items():
        if seq.status != RUNNING or digest not in seq.digests[seq.indexed : seq.inflight_end]:
            problems.append(f"{_name(seq)} is said to compute a block that it does not")


def _check_sequence(seq: Sequence, scheduler: Scheduler, problems: list[str]) -> None:
    name = _name(seq)
    size = scheduler.config.block_size
    if seq.status != RUNNING:
        if seq.blocks or seq.reserved or seq.computed:
            problems.append(f"{name} does not run but holds {len(seq.blocks)} blocks, {seq.reserved} promised")
        return
    if seq.table is None or seq.table[: len(seq.blocks)].tolist() != seq.blocks:
        problems.append(f"the block table of {name} is not the list of its blocks")
    if not 0 <= seq.computed < seq.num_tokens <= seq.limit:
        problems.append(f"{name} has computed {seq.computed} of {seq.num_tokens} tokens, limit {seq.limit}")
    if len(seq.blocks) != -(-seq.computed // size):
        problems.append(f"{name} holds {len(seq.blocks)} blocks for {seq.computed} tokens")
    if not scheduler.config.enable_prefix_caching:
        return
    if seq.indexed != seq.computed // size:
        problems.append(f"{name} has {seq.indexed} blocks in the index, {seq.computed // size} are full")
    digests = seq.chain(seq.indexed, size)
    for position in range(seq.indexed):
        if scheduler.pool.index.block_of.get(digests[position]) != seq.blocks[position]:
            problems.append(f"block {position} of {name} is not the one in the prefix index")
