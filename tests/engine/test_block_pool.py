"""The block pool against a plain model: who holds what, what is evicted next, and that nothing is lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.engine.block_pool import BlockPool

BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """The model is a dictionary of references and a list of cached blocks in the order they were given up."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.references: dict[int, int] = {}
        self.cached: list[int] = []
        self.indexed: set[int] = set()
        self.serial = 0

    @precondition(lambda self: len(self.references) < BLOCKS)
    @rule()
    def allocate(self) -> None:
        free = BLOCKS - len(self.references) - len(self.cached)
        block = self.pool.allocate()
        assert block not in self.references
        if free:
            assert block not in self.cached
        else:
            assert block == self.cached.pop(0)
            self.indexed.remove(block)
        self.references[block] = 1

    @precondition(lambda self: self.references or self.cached)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted([*self.references, *self.cached])))
        self.pool.acquire(block)
        if block in self.cached:
            self.cached.remove(block)
        self.references[block] = self.references.get(block, 0) + 1

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.release(block)
        self.references[block] -= 1
        if self.references[block] == 0:
            del self.references[block]
            if block in self.indexed:
                self.cached.append(block)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def index(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        if block not in self.indexed:
            self.serial += 1
            self.pool.index.add(b"%d" % self.serial, None, block)
            self.indexed.add(block)

    @rule()
    def drop_cached(self) -> None:
        assert self.pool.drop_cached() == len(self.cached)
        self.indexed -= set(self.cached)
        self.cached.clear()

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        assert pool.cached_blocks() == self.cached
        assert [pool.references[block] for block in range(BLOCKS)] == [
            self.references.get(block, 0) for block in range(BLOCKS)
        ]
        assert pool.num_referenced == len(self.references)
        assert pool.num_cached == len(self.cached)
        assert pool.num_free == BLOCKS - len(self.references) - len(self.cached)
        assert {block for block in range(BLOCKS) if pool.index.digest_of[block]} == self.indexed
        assert len(pool.index) == len(self.indexed)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(4)
    chain = [pool.allocate() for _ in range(4)]
    for block in chain:
        pool.index.add(b"%d" % block, None, block)
    pool.release_chain(chain)
    assert [pool.allocate() for _ in range(4)] == chain[::-1]
    assert pool.evictions == 4


def test_blocks_without_content_are_used_before_a_cached_one_is_evicted() -> None:
    pool = BlockPool(3)
    kept, other = pool.allocate(), pool.allocate()
    pool.index.add(b"kept", None, kept)
    pool.release(kept)
    pool.release(other)
    taken = {pool.allocate(), pool.allocate()}
    assert kept not in taken
    assert pool.allocate() == kept


def test_a_promise_takes_blocks_out_of_what_is_available() -> None:
    pool = BlockPool(5)
    pool.reserved = 3
    pool.allocate()
    assert pool.available == 1
