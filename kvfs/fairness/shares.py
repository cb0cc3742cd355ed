"""Fair shares of a bandwidth that all namespaces of a mount have together, for reads and writes.

Contract: bytes do not pass the daemon, so an open, or the close of what was written, waits until
the object's size may be charged at the rate of the whole. Who is charged next is said by
`kvfs.fairness.fair_queue`, at the last moment: when all that was charged before is paid, so that
who reads one object after the other is there again. A large object is let in when its first piece
of 16 MiB is charged, and delays other namespaces by no more than a piece at a time, but its own
namespace by the rest. Without a rate nobody waits, and weights mean nothing. Not for the limits of
one namespace: it passes its own `TokenBucket` first.
"""

from collections.abc import Hashable

import trio

from kvfs.fairness.fair_queue import StartTimeFair
from kvfs.fairness.token_bucket import LATE, TokenBucket

PIECE = 16 << 20  # bytes; at 10 GB/s 600 charges a second, and 1.7 ms for each


class Shares:
    """`total.rate` is the bandwidth in bytes/s, 0 for no limit; it may change at any time.

    A task in the nursery charges while somebody waits.
    """

    def __init__(self, nursery: trio.Nursery, rate: float = 0.0) -> None:
        self.total = TokenBucket(rate, LATE)
        self._queue = StartTimeFair()
        self._nursery = nursery
        self._charging = False

    @property
    def waiting(self) -> int:
        """How many objects are not wholly charged, and neither let in, most of them."""
        return self._queue.waiting

    async def take(
        self, namespace: Hashable, cost: int, *, weight: float = 100, bulk: bool = False
    ) -> None:
        """Wait until `cost` bytes, or their first piece, are charged."""
        if not self.total.rate:
            return
        if not self._charging and cost <= PIECE and self.total.try_take(cost):
            return  # nothing is owed, nobody waits: there is nobody to be fair to
        request = self._queue.add(namespace, cost, weight, bulk=bulk)
        if not self._charging:
            self._charging = True
            self._nursery.start_soon(self._charge)
        try:
            await request.begun.wait()
        except trio.Cancelled:
            if not request.begun.is_set():
                self._queue.cancel(request)
            raise

    async def _charge(self) -> None:
        while self._queue.waiting:
            await self.total.wait()
            piece = self._queue.begin(most=PIECE)
            if piece is not None:  # or else who waited was cancelled
                self.total.charge(piece.cost)
        self._queue.forget()
        self._charging = False
