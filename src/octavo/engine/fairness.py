"""The queue of the policy ``fair``: tenants take turns, the one that was given the fewest tokens first."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from octavo.engine.sequence import RUNNING, Sequence
from octavo.engine.waiting import WaitingQueue, by_rank

__all__ = ["FairQueue"]

_KEPT_TENANTS = 1024


class FairQueue(WaitingQueue):
    """Sequences in rank order for each tenant, and how many tokens each tenant was given.

    A tenant pays for an admission what it leaves to compute, and one token for each decode. What it did not use while
    none of its requests waited is not saved up: when it comes back it starts from the least of those who wait now
    (the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models").
    """

    __slots__ = ("_floor", "_last", "_prune_at", "_queues", "_served", "_size")

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str | None, WaitingQueue] = {}  # only tenants with a sequence that waits
        self._served: dict[str | None, int] = {}
        self._last: str | None = None  # the tenant that was the last to wait
        self._floor = 0  # from where the last tenant to come started at least
        self._prune_at = _KEPT_TENANTS
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted((seq for queue in self._queues.values() for seq in queue), key=by_rank))

    def __getitem__(self, position: int) -> Sequence:
        return list(self)[position]

    def add(self, seq: Sequence) -> None:
        """Queue a sequence for its tenant."""
        tenant = seq.group.request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            self._come(tenant)
            queue = self._queues[tenant] = WaitingQueue()
        queue.add(seq)
        self._size += 1

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out."""
        tenant = seq.group.request.tenant
        queue = self._queues[tenant]
        queue.remove(seq)
        self._size -= 1
        if not len(queue):
            del self._queues[tenant]
            if not self._queues:
                self._last = tenant

    def charge(self, seq: Sequence, tokens: int) -> None:
        """Note that a sequence is given tokens of a step."""
        tenant = seq.group.request.tenant
        self._served[tenant] = self._served.get(tenant, self._floor) + tokens

    def candidates(self, count: int) -> Iterator[Sequence]:
        """The next ``count`` sequences, each chosen when it is asked for, by what its tenant has been given by then.

        One that is not admitted counts as if it had been: after it the other tenants have their turn.
        """
        served = self._served
        turns: list[tuple[int, tuple[int, ...], str | None, list[Sequence], int, int]] = []
        for tenant, queue in self._queues.items():
            own = queue.first(count)
            turns.append((served[tenant], own[0].rank, tenant, own, 0, 0))
        heapify(turns)
        while turns and count:
            count -= 1
            _, _, tenant, own, position, passed = turns[0]
            seq = own[position]
            yield seq
            if seq.status != RUNNING:
                passed += seq.num_tokens
            position += 1
            if position < len(own):
                heapreplace(turns, (served[tenant] + passed, own[position].rank, tenant, own, position, passed))
            else:
                heappop(turns)

    def _come(self, tenant: str | None) -> None:
        """Let a tenant wait that did not: what it would have been given meanwhile is not made up for."""
        served = self._served
        if self._queues:
            floor = min(served[other] for other in self._queues)
        else:
            floor = served.get(self._last, self._floor)
        self._floor = floor
        if len(served) >= self._prune_at:
            # Who was given no more than the floor would start from it anyway.
            self._served = served = {
                other: given for other, given in served.items() if given > floor or other in self._queues
            }
            self._prune_at = max(_KEPT_TENANTS, 2 * len(served))
        served[tenant] = max(served.get(tenant, floor), floor)
