"""A bounded number of places, given to namespaces by their weights: for the movers' jobs.

Contract: who is next is said by `kvfs.fairness.start_time`; with several in flight that is SFQ(D)
(Jin, Chase, Kaur: "Interposed Proportional Sharing for a Storage Service Utility", SIGMETRICS
2004). Of several places one is kept from bulk, so that a normal request never waits for a bulk one
to end. Cancelled while it waits, a request leaves no trace. For one trio run. Not for what may be
held as long as somebody likes, as open files are: `kvfs.fairness.shares`.
"""

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from kvfs.fairness.start_time import BULK_SHARE, StartTimeFair


class FairQueue:
    """`places`: how many requests are in flight at most; may change at any time.

    Raises ValueError for less than one, or a bulk share that is not between 0 and 1.
    """

    def __init__(self, places: int, *, bulk_share: float = BULK_SHARE) -> None:
        if places < 1:
            raise ValueError(f"{places} places: expected 1 or more")
        self.places = places
        self._queue = StartTimeFair(bulk_share)
        self._running = {False: 0, True: 0}  # normal and bulk

    @property
    def running(self) -> int:
        return sum(self._running.values())

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    @asynccontextmanager
    async def turn(
        self, namespace: Hashable, cost: float, *, weight: float = 100, bulk: bool = False
    ) -> AsyncIterator[None]:
        """Wait for a place, and hold it within the block.

        `cost` in bytes, say. Raises ValueError for a negative one, or a weight of 0 or less.
        """
        request = self._queue.add(namespace, cost, weight, bulk=bulk)
        self._fill()
        try:
            if not request.begun.is_set():
                await request.begun.wait()
            yield
        finally:
            if request.begun.is_set():
                self._running[bulk] -= 1
            else:
                self._queue.cancel(request)
            self._fill()

    def _fill(self) -> None:
        while self.running < self.places:
            piece = self._queue.begin(bulk=self._running[True] < max(1, self.places - 1))
            if piece is None:
                break
            self._running[piece.request.bulk] += 1
        if not self.running and not self.waiting:
            self._queue.forget()
