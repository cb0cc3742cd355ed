"""The bucket, as the daemon uses it: calls that worker processes make.

Contract: as `MoverPool`, in lanes of their own. Local jobs never wait for a store that does not
answer. Calls that a program waits for do not wait behind uploads, and get more of a CPU. Small
waiting calls share a worker, which makes them at once: they end together. A failure is a
StoreError, an OSError of the local file, or a TierError of the movers. Not for deciding what to
ask.
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
from kvfs.s3.place import BucketPlace
from kvfs.s3.transfer import StoreTransfers, Terms
from kvfs.tiers import Bucket

P = ParamSpec("P")
T = TypeVar("T")
Lane = Literal["up", "down", "ask", "look", "list"]

ASK_PATIENCE = 60.0  # s
LOOK_PATIENCE = 15.0  # s; including a worker's start: programs wait less than this
LOOKS = 2  # workers that look up names, many at once each
NICENESS = 5  # of uploads: they give way, but their bytes must not pile up while CPUs are busy
GROUP = 4  # small calls that one worker makes at once
WARMING = 0.1  # s that a worker is kept from its next call, so that all of them are started
PRELOADED = ("kvfs.movement.preloaded",)


class Remote:
    """Calls about one bucket."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, workers: int, counters: Counter[str], bucket: Bucket
    ) -> AsyncIterator["Remote"]:
        """Workers are forks of a process that has boto3 loaded: it takes 0.4 s, and 30 MB."""
        async with (
            MoverPool.open(workers, counters, preloaded=PRELOADED, niceness=NICENESS) as movers,
            MoverPool.open(workers, counters, preloaded=PRELOADED, niceness=0) as urgent,
        ):
            yield cls(movers, bucket, urgent)

    def __init__(self, movers: MoverPool, bucket: Bucket, urgent: MoverPool | None = None) -> None:
        """urgent: workers for calls that a program waits for."""
        self.movers = movers
        self.urgent = urgent or movers
        self.bucket = bucket
        workers = 2 * movers.workers
        self.uploads = self.downloads = GROUP * workers  # most that are on their way at once
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
        """Run `do` in a worker with its client of the bucket; return its result, or raise.

        size: bytes that are read or written, approximately: small calls may share a worker.
        destinations: files whose parts are removed if the worker has to be killed.
        """
        terms = self.bucket.terms
        if terms is None:
            raise TierError(f"{self.bucket.place} could not be asked yet what it honours")
        job = stores.StoreCall(do, arguments, options)
        if lane == "look":  # a program waits: a slow store is a miss
            what = (self.bucket.place, job)
            return await self._lanes[lane].ask(stores.glance, *what, patience=LOOK_PATIENCE)
        call = _LaneCall(size, destinations, job)
        await self._lanes[lane].run(call, self.bucket.place, terms)
        if isinstance(call.found, Exception):
            raise call.found
        return cast("T", call.found)

    async def warm(self) -> None:
        """Start the workers for calls that programs wait for. Raises TierError."""
        terms, lane = self.bucket.terms, self._lanes["down"]
        if terms is None:
            return
        async with trio.open_nursery() as nursery:
            for _ in range(int(lane.tokens.total_tokens)):
                start = partial(lane.ask, stores.ready, self.bucket.place, terms, WARMING)
                nursery.start_soon(start)

    async def stream(self, wanted: downloading.DownloadJob, ends: downloading.Ends) -> Moved:
        """See `downloading.stream`.

        It shares no worker, because the others would end only with it.
        """
        alone = max(wanted.size, GROUP * (self.bucket.terms or Terms()).part)
        return await self.call(
            "down", alone, [wanted.destination], downloading.stream, wanted, ends
        )

    async def ask(self, identity: str) -> None:
        """Ask whether the bucket answers; the first time, also what it honours.

        Raises if it does not.
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
        """Run a call that chooses its own client."""
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
        """This call and the first waiting ones, as many as one worker can run at once."""
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
