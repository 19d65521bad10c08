"""The queue of sequences that wait for admission, and the order in which they are tried."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from octavo.engine.sequence import Sequence

__all__ = ["WaitingQueue", "by_rank"]


def by_rank(seq: Sequence) -> tuple[int, ...]:
    """The key of every sorted list of sequences: (priority when that is the policy, arrival, index)."""
    return seq.rank


class WaitingQueue:
    """Sequences in rank order. A preempted sequence keeps its rank, so it comes back to its old place."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __getitem__(self, position: int) -> Sequence:
        return self._items[position]

    def add(self, seq: Sequence) -> None:
        """Put a sequence where its rank says, which is the end for a new arrival."""
        items = self._items
        if not items or items[-1].rank < seq.rank:
            items.append(seq)
        else:
            insort(items, seq, key=by_rank)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out."""
        del self._items[bisect_left(self._items, seq.rank, key=by_rank)]

    def first(self, count: int) -> list[Sequence]:
        """The first ``count`` sequences by rank."""
        return self._items[:count]

    def candidates(self, count: int) -> Iterable[Sequence]:
        """The first ``count`` sequences in the order in which they are to be admitted."""
        return self.first(count)
