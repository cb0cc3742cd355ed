"""What is asked of the bucket, seen from the daemon: calls that worker processes make.

Contract: as `Movers`, in lanes of their own: nothing local waits for a store that does not answer,
and what somebody waits for neither waits behind uploads nor has so little of a CPU. Small calls
that wait share a worker, which makes them at once: they end together. What fails is a StoreError,
an OSError of the local file, or a TierError of the movers. Not for deciding what to ask.
"""

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, TypeVar, cast

import trio

from kvfs.catalog import PackedCopy, Stored
from kvfs.errors import TierError
from kvfs.movement import (
    asking,
    downloading,
    finding,
    looking,
    peeking,
    renaming,
    stores,
    streaming,
    uploading,
)
from kvfs.movement.finding import Answer, Ask
from kvfs.movement.movers import Moved, Movers, patience_for
from kvfs.movement.publishing import About, Target, Uploaded
from kvfs.s3 import header
from kvfs.s3.errors import StoreError
from kvfs.s3.nodes import Node
from kvfs.s3.place import Place
from kvfs.s3.store import Head, Page
from kvfs.s3.transfer import Terms
from kvfs.tiers import Bucket

T = TypeVar("T")
Lane = Literal["up", "down", "ask", "look", "list"]

ASK_PATIENCE = 60.0  # s
LOOK_PATIENCE = 15.0  # s; of a worker that has yet to begin: who waits does so for less
LOOKS = 2  # workers that look names up, each many at once
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
            Movers.open(workers, counters, preloaded=PRELOADED, niceness=NICENESS) as movers,
            Movers.open(workers, counters, preloaded=PRELOADED, niceness=0) as urgent,
        ):
            yield cls(movers, bucket, urgent)

    def __init__(self, movers: Movers, bucket: Bucket, urgent: Movers | None = None) -> None:
        """urgent: workers for what somebody waits for."""
        self.movers = movers
        self.urgent = urgent or movers
        self.bucket = bucket
        workers = 2 * movers.workers
        self.uploads = self.downloads = GROUP * workers  # that are on their way at once
        self._lanes: dict[Lane, _Lane] = {
            "up": _Lane(self.movers, workers),
            "down": _Lane(self.urgent, workers),
            "ask": _Lane(self.movers, 2),
            "look": _Lane(self.urgent, LOOKS),
            "list": _Lane(self.movers, LOOKS),
        }

    async def _run(
        self, lane: Lane, size: int, destinations: Sequence[str], do: Callable[..., T],
        *arguments: object,
    ) -> T:  # fmt: skip
        """size: bytes that are read or written, about. Small calls may share a worker."""
        terms = self.bucket.terms
        if terms is None:
            raise TierError(f"{self.bucket.place} could not be asked yet what it honours")
        if lane == "look":
            what = (self.bucket.place, do, *arguments)
            found = await self._lanes[lane].ask(stores.glance, *what, patience=LOOK_PATIENCE)
            return cast("T", found)
        call = _Call(size, destinations, stores.Job(do, arguments))
        await self._lanes[lane].run(call, self.bucket.place, terms)
        if isinstance(call.found, Exception):
            raise call.found
        return cast("T", call.found)

    async def warm(self) -> None:
        """Start the workers that somebody will wait for. Raises TierError."""
        terms, lane = self.bucket.terms, self._lanes["down"]
        if terms is None:
            return
        async with trio.open_nursery() as nursery:
            for _ in range(int(lane.tokens.total_tokens)):
                start = partial(lane.ask, stores.ready, self.bucket.place, terms, WARMING)
                nursery.start_soon(start)

    async def upload(
        self,
        source: str,
        touched_ns: int,
        about: About,
        target: Target,
        notes: str,
        scratch: str | None,
        copy: PackedCopy | None = None,
    ) -> Uploaded:
        """See `uploading.upload`."""
        wanted = (source, touched_ns, about, target, notes, scratch, copy)
        return await self._run("up", about.size, (), uploading.upload, *wanted)

    async def copy(self, source: Stored, about: About, target: Target, notes: str) -> Uploaded:
        """See `renaming.copy`."""
        return await self._run("up", about.size, (), renaming.copy, source, about, target, notes)

    async def remove(
        self, keys: Sequence[str], attempts: Mapping[str, tuple[str, ...]]
    ) -> dict[str, StoreError]:
        """See `uploading.remove`."""
        return await self._run("ask", 0, (), uploading.remove, keys, attempts)

    async def sweep(self, notes: str) -> int:
        """See `uploading.sweep`."""
        return await self._run("ask", 0, (), uploading.sweep, notes)

    async def download(
        self, stored: Stored, destination: str, size: int, digest: bytes, touched_ns: int
    ) -> Moved:
        """See `downloading.download`."""
        job = downloading.download
        return await self._run(
            *("down", size, [destination], job, stored, destination, size, digest, touched_ns)
        )

    async def stream(
        self,
        stored: Stored,
        destination: str,
        size: int,
        digest: bytes,
        touched_ns: int,
        ends: streaming.Ends,
    ) -> Moved:
        """See `streaming.stream`. It shares no worker: others would end with it, however small."""
        job = streaming.stream
        wanted = (stored, destination, size, digest, touched_ns, ends)
        alone = max(size, GROUP * (self.bucket.terms or Terms()).part)
        return await self._run("down", alone, [destination], job, *wanted)

    async def peek(self, stored: Stored, size: int, digest: bytes) -> bytes:
        """See `peeking.peek`."""
        return await self._run("down", header.SIZE, (), peeking.peek, stored, size, digest)

    async def look(self, asks: Sequence[Ask], *, bulk: bool = False) -> list[Answer | StoreError]:
        """See `finding.look`. `bulk`: nobody waits for it, and it may take its time."""
        return await self._run("list" if bulk else "look", 0, (), finding.look, asks)

    async def listed(self, prefix: str, after: str, delimiter: str = "") -> Page:
        """See `finding.page`."""
        return await self._run("list", 0, (), finding.page, prefix, after, delimiter)

    async def records(self, keys: Sequence[str]) -> list[bytes | StoreError]:
        """See `finding.records`."""
        return await self._run("list", 0, (), finding.records, keys)

    async def page(self, after: str) -> Page:
        """What is below the prefix, see `Store.list`."""
        prefix = self.bucket.place.prefix
        return await self._run("ask", 0, (), looking.page, prefix, after)

    async def heads(self, keys: Sequence[str]) -> list[Head | None]:
        """See `looking.heads`."""
        return await self._run("ask", 0, (), looking.heads, keys)

    async def verify(self, stored: Stored, size: int, digest: bytes) -> str:
        """See `looking.verify`."""
        return await self._run("down", stored.size, (), looking.verify, stored, size, digest)

    async def announce(self, node: Node, *, keep: bool) -> Node:
        """See `asking.announce`."""
        prefix = self.bucket.place.prefix
        return await self._run("ask", 0, (), asking.announce, prefix, node, keep)

    async def ask(self, identity: str) -> None:
        """Whether it answers; at the first time, what it honours. Raises why not."""
        lane, place = self._lanes["ask"], self.bucket.place
        if self.bucket.terms is not None:
            await lane.ask(asking.alive, place)
            return
        self.bucket.terms = await lane.ask(asking.check, place, identity, self.bucket.exclusive)


class _Call:
    """One that somebody waits for. `found`: what it returned, or why it failed."""

    def __init__(self, size: int, destinations: Sequence[str], job: stores.Job) -> None:
        self.size = size
        self.destinations = destinations
        self.job = job
        self.begun = False
        self.ended = trio.Event()
        self.found: object = None


class _Lane:
    """Calls that wait for workers of their own, in turn; small ones share the next that is free."""

    def __init__(self, movers: Movers, workers: int) -> None:
        self.movers = movers
        self.tokens = trio.CapacityLimiter(workers)
        self._turns = trio.CapacityLimiter(workers)
        self._waiting: deque[_Call] = deque()

    async def ask(
        self, do: Callable[..., T], *arguments: object, patience: float = ASK_PATIENCE
    ) -> T:
        """A call that says itself which client it needs."""
        return await self.movers.run(do, *arguments, limiter=self.tokens, patience=patience)

    async def run(self, call: _Call, place: Place, terms: Terms) -> None:
        """Return when it has ended. Raises nothing but Cancelled."""
        self._waiting.append(call)
        try:
            async with self._turns:
                if not call.begun:
                    await self._run_together(self._with_others(call, terms), place, terms)
            await call.ended.wait()
        finally:
            if not call.begun:
                self._waiting.remove(call)

    def _with_others(self, call: _Call, terms: Terms) -> list[_Call]:
        """It, and the first that wait, as many as one worker can have on their way at once."""
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

    async def _run_together(self, calls: list[_Call], place: Place, terms: Terms) -> None:
        found: Sequence[object] = [TierError("the mount ends")] * len(calls)
        try:
            found = await self.movers.run(
                *(stores.run_all, place, terms, [call.job for call in calls]),
                limiter=self.tokens,
                patience=patience_for(2 * sum(call.size for call in calls)),
                destinations=[path for call in calls for path in call.destinations],
            )
        except Exception as error:  # noqa: BLE001 (whoever waits for one of them raises it)
            found = [error] * len(calls)
        finally:
            for call, one in zip(calls, found, strict=True):
                call.found = one
                call.ended.set()
