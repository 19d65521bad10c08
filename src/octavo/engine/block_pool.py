"""The pool of KV blocks: ids, reference counts, reservations, and the order in which cached blocks are evicted."""

from __future__ import annotations

from collections import OrderedDict

from octavo.engine.prefix_index import PrefixIndex

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out block ids. Every operation on one block is O(1).

    A block is referenced (by one or more sequences), or cached (unreferenced, but its content is in the prefix index:
    it can be taken again or evicted), or free. Cached blocks are evicted in the order they were given up.
    A reservation is a promise of blocks to a sequence without naming them; ``available`` is what nobody was promised.
    """

    __slots__ = ("_cached", "_free", "evictions", "index", "num_blocks", "references", "reserved")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks)
        self.references = [0] * num_blocks
        self.reserved = 0
        self.evictions = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks without content worth keeping."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content can still be found by its prefix."""
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be taken without breaking a promise."""
        return len(self._free) + len(self._cached) - self.reserved

    def allocate(self) -> int:
        """Take a block nobody holds, evicting the cached one given up longest ago when none is free."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self.index.remove(block)
            self.evictions += 1
        self.references[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to a block that is held or cached."""
        if self.references[block] == 0:
            del self._cached[block]
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; the last one makes the block cached when it is in the prefix index, else free."""
        count = self.references[block] - 1
        self.references[block] = count
        if count == 0:
            if self.index.digest_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def release_chain(self, blocks: list[int]) -> None:
        """Release the blocks of a sequence, last first: the end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            self.release(block)

    def drop_cached(self) -> int:
        """Forget every unreferenced cached block and say how many there were."""
        dropped = len(self._cached)
        for block in self._cached:
            self.index.remove(block)
            self._free.append(block)
        self._cached.clear()
        return dropped

    def cached_blocks(self) -> list[int]:
        """The unreferenced cached blocks, next to be evicted first."""
        return list(self._cached)

    def free_blocks(self) -> list[int]:
        """The free blocks."""
        return list(self._free)
