"""The bucket, as the daemon uses it: calls that worker processes make.

Contract: calls run as jobs of a `MoverPool`, in lanes of their own. So local jobs never wait for a
store that does not answer. Calls for which a program waits do not wait behind uploads, and get more
of a CPU. Small waiting calls share a worker, which runs them at once, and they end together. A
failure is a StoreError, an OSError of the local file, or a TierError of the movers. Not for
deciding what to ask.
"""

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Concatenate, Literal, ParamSpec, TypeVar, cast

import trio

from kvfs.errors import TierError
from kvfs.movement import downloading, stores
from kvfs.movement.movers import Moved, MoverPool, patience_for
from kvfs.movement.streams import Ends
from kvfs.s3.place import BucketPlace
from kvfs.s3.transfer import StoreTransfers, Terms
from kvfs.tiers import Bucket

P = ParamSpec("P")
T = TypeVar("T")
Lane = Literal["up", "down", "ask", "look", "list"]

ASK_PATIENCE = 60.0  # s
LOOK_PATIENCE = 15.0  # s; including a worker's start: programs wait less than this
LOOKS = 2  # workers that look up names, many at once each
NICENESS = 5  # of uploads: lower than that of copies, so that dirty bytes do not pile up
GROUP = 4  # small calls that one worker makes at once
WARMING = 0.1  # s that each new worker stays busy, so that the pool starts all of them
PRELOADED = ("kvfs.movement.preloaded",)


class Remote:
    """Calls about one bucket."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, workers: int, counters: Counter[str], bucket: Bucket
    ) -> AsyncIterator["Remote"]:
        """Start the workers: forks of one process that has loaded boto3 (0.4 s, 30 MB)."""
        async with (
            MoverPool.open(workers, counters, preloaded=PRELOADED, niceness=NICENESS) as movers,
            MoverPool.open(workers, counters, preloaded=PRELOADED, niceness=0) as urgent,
        ):
            yield cls(movers, bucket, urgent)

    def __init__(self, movers: MoverPool, bucket: Bucket, urgent: MoverPool | None = None) -> None:
        """urgent: the workers for calls for which a program waits; None: the movers."""
        self.movers = movers
        self.urgent = urgent or movers
        self.bucket = bucket
        workers = 2 * movers.workers
        self.most_uploads = self.most_downloads = GROUP * workers  # under way at once
        self._lanes: dict[Lane, _Lane] = {
            "up": _Lane(self.movers, workers),
            "down": _Lane(self.urgent, workers),
            "ask": _Lane(self.movers, 2),
            "look": _Lane(self.urgent, LOOKS),
            "list": _Lane(self.movers, LOOKS),
        }

    async def call(
        self,
        lane: Lane,
        size: int,
        destinations: Sequence[str],
        do: Callable[Concatenate[StoreTransfers, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        """Run `do` in a worker, with the worker's client of the bucket. Returns the result of `do`.

        size: bytes that are read or written, approximately: small calls may share a worker.
        destinations: if the daemon kills the worker, it removes the half-made files of these.
        """
        terms = self.bucket.terms
        if terms is None:
            why = self.bucket.health.why or "it was not asked yet"
            raise TierError(
                f"{self.bucket.place} cannot be reached: {why}; {self.bucket.place.cure}"
            )
        job = stores.StoreCall(do, arguments, options)
        if lane == "look":  # a program waits: a slow store is a miss
            what = (self.bucket.place, job)
            return await self._lanes[lane].ask(stores.glance, *what, patience=LOOK_PATIENCE)
        call = _LaneCall(size, destinations, job)
        await self._lanes[lane].run(call, self.bucket.place, terms)
        if isinstance(call.found, Exception):
            raise call.found
        return cast("T", call.found)

    async def start_workers(self) -> None:
        """Start the workers for calls for which programs wait. Raises TierError."""
        terms, lane = self.bucket.terms, self._lanes["down"]
        if terms is None:
            return
        async with trio.open_nursery() as nursery:
            for _ in range(int(lane.tokens.total_tokens)):
                start = partial(lane.ask, stores.start_client, self.bucket.place, terms, WARMING)
                nursery.start_soon(start)

    async def stream(self, wanted: downloading.DownloadJob, ends: Ends) -> Moved:
        """See `downloading.stream`.

        This call shares no worker, because the other calls would end only with it.
        """
        alone = max(wanted.size, GROUP * (self.bucket.terms or Terms()).part)
        return await self.call(
            "down", alone, [wanted.destination], downloading.stream, wanted, ends
        )

    async def ask(self, identity: str) -> None:
        """Ask whether the bucket answers; the first time, also which conditions it honours.

        Raises TierError or ConfigError if the bucket does not answer, or is not usable.
        """
        lane, place = self._lanes["ask"], self.bucket.place
        if self.bucket.terms is not None:
            await lane.ask(stores.alive, place)
            return
        self.bucket.terms = await lane.ask(stores.check, place, identity, self.bucket.exclusive)


@dataclass(eq=False, slots=True)
class _LaneCall:
    """One call that a task waits for. `found`: its result, or its exception."""

    size: int
    destinations: Sequence[str]
    job: stores.StoreCall
    begun: bool = False
    ended: trio.Event = field(default_factory=trio.Event)
    found: object = None


class _Lane:
    """Calls in turn on workers of their own; small ones share the next free worker."""

    def __init__(self, movers: MoverPool, workers: int) -> None:
        self.movers = movers
        self.tokens = trio.CapacityLimiter(workers)
        self._turns = trio.CapacityLimiter(workers)
        self._waiting: deque[_LaneCall] = deque()

    async def ask(
        self, do: Callable[..., T], *arguments: object, patience: float = ASK_PATIENCE
    ) -> T:
        """Run a function that makes or finds its client itself."""
        return await self.movers.run(do, *arguments, limiter=self.tokens, patience=patience)

    async def run(self, call: _LaneCall, place: BucketPlace, terms: Terms) -> None:
        """Run a call; return when it has ended. Raises nothing except Cancelled."""
        self._waiting.append(call)
        try:
            async with self._turns:
                if not call.begun:
                    await self._run(self._with_others(call, terms), place, terms)
            await call.ended.wait()
        finally:
            if not call.begun:
                self._waiting.remove(call)

    def _with_others(self, call: _LaneCall, terms: Terms) -> list[_LaneCall]:
        """This call, and the calls that wait longest: as many as one worker can run at once."""
        self._waiting.remove(call)
        calls, room = [call], terms.part - max(terms.part // GROUP, call.size)
        while self._waiting and len(calls) < GROUP:
            room -= max(terms.part // GROUP, self._waiting[0].size)
            if room < 0:
                break
            calls.append(self._waiting.popleft())
        for one in calls:
            one.begun = True
        return calls

    async def _run(self, calls: list[_LaneCall], place: BucketPlace, terms: Terms) -> None:
        found: Sequence[object] = [TierError("the mount ends")] * len(calls)
        try:
            found = await self.movers.run(
                *(stores.run_all, place, terms, [call.job for call in calls]),
                limiter=self.tokens,
                patience=patience_for(2 * sum(call.size for call in calls)),
                destinations=[path for call in calls for path in call.destinations],
            )
        except Exception as error:  # noqa: BLE001 (each waiting task raises it)
            found = [error] * len(calls)
        finally:
            for call, one in zip(calls, found, strict=True):
                call.found = one
                call.ended.set()
