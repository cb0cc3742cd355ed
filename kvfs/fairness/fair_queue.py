"""Start-time fair queueing between namespaces, with two priorities.

Contract: the algorithm of Goyal, Vin, Cheng: "Start-time Fair Queueing: A Scheduling Algorithm for
Integrated Services Packet Switching Networks", SIGCOMM 1996. While two namespaces both have waiting
requests, take the cost begun for each, divided by its weight. These two differ by no more than the
sum of their largest requests, so divided (theorem 1 there). With several requests in flight, in the
places of a `FairQueue`, that is SFQ(D) (Jin, Chase, Kaur: "Interposed Proportional Sharing for a
Storage Service Utility", SIGMETRICS 2004).

An idle namespace saves up nothing; a namespace that waits alone gets everything. A namespace
competes only with its waiting requests. If it sends one request at a time, and the next only after
that is done, it misses turns. Within a namespace requests begin in the order of arrival.

While normal requests wait, bulk ones get `BULK_SHARE` of the cost and no more; else they get all.
Between the two priorities it is start-time fair queueing again, one level up (as the paper does for
link sharing).

O(log n) for n namespaces with waiting requests. No clock. Not for limits:
`kvfs.fairness.token_bucket`.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import trio

from kvfs.fairness.token_bucket import LATE, TokenBucket

BULK_SHARE = 0.05
PIECE = 16 << 20  # bytes; at 10 GB/s 600 charges a second, and 1.7 ms for each


@dataclass(slots=True, eq=False)
class Flow:
    """One namespace's requests. Only `StartTimeFair` uses its fields."""

    finish: float = 0.0  # virtual time at which its begun cost is done
    waiting: "OrderedDict[QueuedRequest, None]" = field(default_factory=OrderedDict)
    listed: bool = False  # in its priority's heap; after a cancellation perhaps with nothing


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """`begun` is set when its first piece is begun; `cost` is the part still to begin."""

    cost: float
    weight: float
    bulk: bool
    flow: Flow
    begun: trio.Event = field(default_factory=trio.Event)


class Piece(NamedTuple):
    """The cost to handle now: a whole request, or a part of a large one."""

    request: QueuedRequest
    cost: float


class _Priority:
    """The flows of one priority, by their start tags."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.finish = 0.0  # virtual time one level up
        self._virtual = 0.0  # the start tag of the piece begun last
        self._flows: dict[Hashable, Flow] = {}
        self._heap: list[tuple[float, int, Flow]] = []
        self._order = count()

    def flow(self, namespace: Hashable) -> Flow:
        return self._flows.setdefault(namespace, Flow())

    def list(self, flow: Flow) -> None:
        if not flow.listed:
            start = max(self._virtual, flow.finish)
            heapq.heappush(self._heap, (start, next(self._order), flow))
            flow.listed = True

    def backlogged(self) -> bool:
        while self._heap and not self._heap[0][2].waiting:
            heapq.heappop(self._heap)[2].listed = False
        return bool(self._heap)

    def begin(self, most: float) -> Piece:
        """Begin with the flow that has the least start tag; there must be one."""
        self._virtual, _, flow = heapq.heappop(self._heap)
        flow.listed = False
        request = next(iter(flow.waiting))
        piece = Piece(request, min(most, request.cost))
        request.cost -= piece.cost
        if not request.cost:
            del flow.waiting[request]
        flow.finish = self._virtual + piece.cost / request.weight
        if flow.waiting:
            self.list(flow)
        return piece

    def forget(self) -> None:
        self._flows.clear()
        self._heap.clear()


class StartTimeFair:
    """The queue itself. `waiting`: requests with a part still to begin."""

    def __init__(self) -> None:
        self._normal = _Priority(1 - BULK_SHARE)
        self._bulk = _Priority(BULK_SHARE)
        self._virtual = 0.0
        self.waiting = 0

    def add(self, namespace: Hashable, cost: float, weight: float, *, bulk: bool) -> QueuedRequest:
        """Queue a request. Raises ValueError for a negative cost, or a weight of 0 or less."""
        if cost < 0 or weight <= 0:
            raise ValueError(f"cost {cost}, weight {weight}: expected 0 or more, more than 0")
        priority = self._bulk if bulk else self._normal
        flow = priority.flow(namespace)
        request = QueuedRequest(cost, weight, bulk, flow)
        flow.waiting[request] = None
        priority.list(flow)
        self.waiting += 1
        return request

    def cancel(self, request: QueuedRequest) -> None:
        """Take back a request of which nothing was begun."""
        del request.flow.waiting[request]
        self.waiting -= 1

    def begin(self, *, most: float = math.inf, bulk: bool = True) -> Piece | None:
        """Begin the next request, or `most` of its cost; None if nothing waits.

        Without `bulk` only normal requests may begin.
        """
        ready = [self._normal] if self._normal.backlogged() else []
        if bulk and self._bulk.backlogged():
            ready.append(self._bulk)
        if not ready:
            return None
        priority = min(ready, key=self._start)  # in a tie the first, which is normal
        self._virtual = self._start(priority)
        piece = priority.begin(most)
        priority.finish = self._virtual + piece.cost / priority.share
        if not piece.request.cost:
            self.waiting -= 1
        piece.request.begun.set()
        return piece

    def forget(self) -> None:
        """Forget the past, when nothing waits and nothing runs: earlier cost counts no more."""
        self._virtual = max(self._virtual, self._normal.finish, self._bulk.finish)
        self._normal.forget()
        self._bulk.forget()

    def _start(self, priority: _Priority) -> float:
        return max(self._virtual, priority.finish)


class FairQueue:
    """A bounded number of places, given to namespaces by their weights: for the movers' jobs.

    If there are several places, one is kept from bulk, so that a normal request never waits for the
    end of a bulk one. A request that is cancelled while it waits leaves no trace. For one trio run.
    Not for places that programs hold without limit, such as open files: `Shares`. `places`: how
    many requests are in flight at most; may change at any time. Raises ValueError for less than
    one.
    """

    def __init__(self, places: int) -> None:
        if places < 1:
            raise ValueError(f"{places} places: expected 1 or more")
        self.places = places
        self._queue = StartTimeFair()
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

        `cost` in bytes, for example. Raises ValueError for a negative one, or a weight of 0 or
        less.
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


class Shares:
    """Shares of one bandwidth of a mount, for reads and writes of all namespaces.

    Bytes do not pass the daemon. Therefore an open, or the close of a written file, waits until the
    object's size may be charged at the mount's rate. The next request is chosen at the last moment,
    when all earlier charges are paid. So a program that reads one object after the other is in the
    queue again.

    A large object may pass when its first piece of 16 MiB is charged. It delays other namespaces by
    at most a piece at a time, but its own namespace by the rest. Without a rate no request waits,
    and weights mean nothing. The limits of one namespace come before:
    `kvfs.core.namespaces.namespace`.

    `total.rate` is the bandwidth in bytes/s, 0 for no limit; it may change at any time. A task in
    the nursery charges while a request waits.
    """

    def __init__(self, nursery: trio.Nursery, rate: float = 0.0) -> None:
        self.total = TokenBucket(rate, LATE)
        self._queue = StartTimeFair()
        self._nursery = nursery
        self._charging = False

    async def acquire(
        self, namespace: Hashable, cost: int, *, weight: float = 100, bulk: bool = False
    ) -> None:
        """Wait until `cost` bytes, or their first piece, are charged."""
        if not self.total.rate:
            return
        if not self._charging and cost <= PIECE and self.total.try_acquire(cost):
            return  # no debt and no waiting request: nothing to share
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
            if piece is not None:  # otherwise the waiting request was cancelled
                self.total.charge(piece.cost)
        self._queue.forget()
        self._charging = False
