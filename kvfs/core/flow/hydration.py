"""From the bucket: what only it has, and somebody opens, comes back into a tier.

Contract: `fetch` returns when the object has a copy here, whose digest was compared, or, if that
will do, when it can be read while it comes. One fetch for an object at a time, whoever waits for
it; who has waited too long has a miss, the fetch goes on. A store that is down is not asked: that
is a miss at once. What it cannot give, or gives wrongly, is a miss for good, and the name goes. All
fetches together have a bound on bytes (`budget`).
`ahead` has an object fetched for which no open waits, as long as an `Errand` wants it; an open that
comes makes it its own. It takes no room from what was used lately, and is no miss when it fails.
Not for the choice of a copy that is here: `core/copies.py`; nor for what is wanted ahead, nor for
what comes when: `streaming`.
"""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from kvfs import failpoints
from kvfs.catalog import Inode, Stored
from kvfs.compression.container import DamagedError
from kvfs.core.adoption import is_bare
from kvfs.core.flow import streaming
from kvfs.core.flow.budget import Budget, Turn
from kvfs.core.flow.transfers import Transfers
from kvfs.core.room import Room
from kvfs.core.stream import Stream
from kvfs.errors import KvfsError, NoSpaceError, NotFoundError, StaleError, TierError
from kvfs.movement.movers import Moved
from kvfs.movement.remote import Remote
from kvfs.s3.chunks import LEAST
from kvfs.s3.errors import (
    MetadataError,
    NoObjectError,
    ObjectChangedError,
    StoreError,
    WrongBytesError,
)
from kvfs.tiers import Bucket, Tier

log = logging.getLogger(__name__)

IN_FLIGHT = 256 << 20  # bytes of all fetches, or one
PERIOD = 0.002  # s between two looks at what nothing tells of
FOR_GOOD = (NoObjectError, ObjectChangedError, WrongBytesError, MetadataError, DamagedError)
OURS = (WrongBytesError, MetadataError, DamagedError)  # what is there was made by this node


class Errand(Protocol):
    """Who wants objects here that nobody has opened."""

    def wanted(self, inode: Inode) -> bool:
        """Whether still; asked before anything is done for it."""

    def take(self, inode: Inode, tier: Tier, cost: int) -> bool:
        """Whether it may have so many bytes of a tier. It has them when `ended` says so."""

    def ended(self, inode: Inode, problem: Exception | None, *, joined: bool) -> None:
        """It is here, or why not; `joined`: an open has come to wait for it meanwhile."""


class UnwantedError(NotFoundError):
    """It is not fetched ahead: nobody wants it any more, or it would be in the way."""


class _Fetch:
    """One that runs. `problem`: why there is no copy; None if there is one.

    streamed: it is to be read while it comes; then it has a stream when it is `ready`, mostly.
    """

    def __init__(
        self, now: float, cost: int, errand: Errand | None = None, *, streamed: bool = False
    ) -> None:
        self.began = now
        self.turn = Turn(cost, urgent=errand is None)
        self.errand = errand
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.ready = trio.Event()
        self.streamed = streamed
        self.stream: Stream | None = None
        self.problem: KvfsError | OSError | None = TierError("it was given up")

    def begin(self, stream: Stream) -> None:
        """It can be read."""
        stream.join()
        self.stream = stream
        self.ready.set()

    def end(self) -> None:
        """Tell all who wait."""
        if self.stream is not None:
            self.stream.end(self.problem)
            self.stream.leave()
        self.ended.set()
        self.ready.set()


def _ignore(inode: Inode) -> None:
    """Nobody is told of opens."""


async def _nobody(ino: int) -> Inode | None:
    """Brings no facts."""


class Hydration:
    """`jobs` are inodes that movers work on; `opening(inode)` is told of opens before they wait."""

    def __init__(
        self, transfers: Transfers, room: Room, remote: Remote, bucket: Bucket, jobs: set[int]
    ) -> None:
        self.residency = transfers.residency
        self.transfers = transfers
        self.room = room
        self.remote = remote
        self.bucket = bucket
        self._jobs = jobs
        self._running: dict[int, _Fetch] = {}
        self._spoiled: set[tuple[int, int]] = set()  # (inode, version): began well, ended wrongly
        self.reading: Counter[str] = Counter()  # keys of what is read while it comes
        self.opening: Callable[[Inode], None] = _ignore
        # What brings the facts of an object that only a listing told of; None if they do not come.
        self.complete: Callable[[int], Awaitable[Inode | None]] = _nobody
        self.budget = Budget(IN_FLIGHT, remote.downloads)

    @property
    def streaming(self) -> int:
        """Objects that are read, or could be, while they come."""
        return sum(one.stream is not None for one in self._running.values())

    async def fetch(self, inode: Inode, *, whole: bool = True) -> Stream | None:
        """None: it has a copy here. whole: nothing less will do, but it may be a stream otherwise.

        Raises NotFoundError; StaleError if it changed. The caller holds the inode's lock.
        """
        bucket, ino = self.bucket, inode.ino
        if bucket.health.down or bucket.terms is None:
            raise NotFoundError(f"inode {ino} is in {bucket.place} only: {bucket.health.why}")
        if is_bare(inode):
            raise NotFoundError(f"inode {ino}: {bucket.place} has not said yet what it is")
        running = self._running.get(ino)
        if running is None:
            running = self._begin(inode, streamed=not whole and self._may_stream(inode))
        elif not running.turn.urgent:
            self._join(running)
        self.opening(inode)
        since = running.began if running.stream is None else trio.current_time()
        enough = running.ended if whole else running.ready
        with trio.move_on_at(since + bucket.wait):
            await enough.wait()
        if not enough.is_set():
            raise NotFoundError(f"inode {ino} is not here within {bucket.wait:.0f} s")
        if not running.ended.is_set():
            return running.stream
        if isinstance(running.problem, StaleError):  # its name may mean another file by now
            raise StaleError(str(running.problem)) from running.problem
        if running.problem is not None:
            raise NotFoundError(f"inode {ino}: {running.problem}") from running.problem
        return None

    def ahead(self, inode: Inode, errand: Errand) -> bool:
        """Have it fetched for an errand; False if it is under way already, or not to be had."""
        if self.bucket.health.down or self.bucket.terms is None or is_bare(inode):
            return False
        if inode.ino in self._running:
            return False
        self._begin(inode, errand)
        return True

    async def until_ended(self, ino: int) -> None:
        """Until the fetch that is under way is over, however it ends."""
        running = self._running.get(ino)
        if running is not None:
            await running.ended.wait()

    def stop(self) -> None:
        """Bring nothing more: it was unmounted."""
        for running in self._running.values():
            running.scope.cancel()

    def _begin(
        self, inode: Inode, errand: Errand | None = None, *, streamed: bool = False
    ) -> _Fetch:
        stored = self.residency.dirty.stored(inode.ino)
        packed = stored is not None and stored.codec != "none"
        cost = _cost(inode, packed=packed)
        running = _Fetch(trio.current_time(), cost, errand, streamed=streamed)
        self._running[inode.ino] = running
        self.budget.ask(running.turn)
        trio.lowlevel.spawn_system_task(self._run, inode.copy(), running)
        return running

    def _join(self, running: _Fetch) -> None:
        """An open waits for what is fetched ahead: from now on it is the open's."""
        running.began = trio.current_time()
        self.budget.hurry(running.turn)

    def _may_stream(self, inode: Inode) -> bool:
        stored = self.residency.dirty.stored(inode.ino)
        return (
            0 < self.bucket.stream <= inode.size
            and inode.size > LEAST
            and stored is not None
            and stored.codec == "none"
            and (inode.ino, inode.version) not in self._spoiled
        )

    async def _run(self, inode: Inode, running: _Fetch) -> None:
        try:
            with running.scope:
                await self._fetch(inode, running)
                running.problem = None
        except FOR_GOOD as error:
            if running.stream is not None:  # its opens are to fail, not its reads
                self._spoiled.add((inode.ino, inode.version))
            running.problem = self._give_up(inode, error)
        except (StoreError, TierError) as error:
            running.problem = error
            self.bucket.counters["failures"] += 1
            self.bucket.health.failed(time.monotonic(), f"download: {error}")
            log.warning("inode %d stays in the bucket: %s", inode.ino, error)
        except (KvfsError, OSError) as error:
            running.problem = error
            expected = isinstance(error, StaleError) or not running.turn.urgent
            log.log(
                logging.DEBUG if expected else logging.WARNING,
                "inode %d stays in the bucket: %s",
                *(inode.ino, error),
            )
        except Exception as error:
            running.problem = TierError(f"a defect of kvfs: {error!r}")
            log.exception("inode %d stays in the bucket: a defect of kvfs", inode.ino)
        finally:
            self.budget.leave(running.turn)
            del self._running[inode.ino]
            running.end()
            if running.errand is not None:
                running.errand.ended(inode, running.problem, joined=running.turn.urgent)

    async def _fetch(self, inode: Inode, running: _Fetch) -> None:
        ino, version, cost = inode.ino, inode.version, running.turn.cost
        await running.turn.come.wait()
        while ino in self._jobs:  # noqa: ASYNC110 (a job that tells of its end is none of ours)
            await trio.sleep(PERIOD)
        self._jobs.add(ino)
        try:
            tier = self._reserve(inode, running)
            try:
                stored = self._stored(ino)  # a job may have given it another name
                await self._wait_for_trash(tier, ino, version)
                self._enter(inode, tier, await self._download(inode, stored, tier, running))
            finally:
                tier.reserved -= cost
        finally:
            self._jobs.discard(ino)
            self.residency.wake()

    def _stored(self, ino: int) -> Stored:
        """Where it is. Raises NoObjectError."""
        found = self.residency.dirty.stored(ino)
        if found is None:
            raise NoObjectError(f"inode {ino}: nothing says where it is in {self.bucket.place}")
        return found

    async def _download(self, inode: Inode, stored: Stored, tier: Tier, running: _Fetch) -> Moved:
        try:
            return await self._bring(inode, stored, tier, running)
        except WrongBytesError as error:  # before anything is given up for it
            if running.stream is not None:  # of that the chunk was fetched once more
                raise
            log.warning("inode %d is fetched once more: %s", inode.ino, error)
            return await self._bring(inode, stored, tier, running)

    async def _bring(self, inode: Inode, stored: Stored, tier: Tier, running: _Fetch) -> Moved:
        if running.streamed:
            self.reading[stored.key] += 1
            try:
                return await streaming.bring(self.remote, inode, stored, tier, running.begin)
            finally:
                self.reading -= Counter({stored.key: 1})
        path = tier.path(inode.ino, inode.version)
        wanted = (stored, path, inode.size, inode.digest, inode.backing_mtime_ns)
        return await self.remote.download(*wanted)

    def _enter(self, inode: Inode, tier: Tier, moved: Moved) -> None:
        """It is here: say so. Raises CatalogError, StaleError if it has changed meanwhile."""
        residency, ino, version = self.residency, inode.ino, inode.version
        if failpoints.active:
            failpoints.reach("flow.hydrated")
        current = self._fit(ino, version)
        if current is None or tier in residency.holders(current):
            if current is None:
                residency.throw_away(tier, ino, version)
            raise StaleError(f"inode {ino} has changed while it was fetched")
        current.session = residency.session  # it is not synced: after a crash its digest tells
        try:
            residency.add_copy(current, tier, moved.blocks, moved.digest)
        except KvfsError:
            residency.throw_away(tier, ino, version)
            raise
        self.bucket.counters["downloads"] += 1
        self.bucket.counters["download_bytes"] += inode.size
        if moved.cpu_seconds:
            self.bucket.counters["decompressed"] += 1
            self.bucket.counters["decompress_cpu_us"] += round(moved.cpu_seconds * 1e6)

    def _fit(self, ino: int, version: int) -> Inode | None:
        """As `Transfers` has it. Who reads what was unlinked meanwhile has it to the end."""
        held = self.residency.open.get(ino)
        if held is not None and held.stream is not None and held.inode.version == version:
            return None if held.writers else held.inode
        return self.transfers.fit(ino, version)

    def _give_up(self, inode: Inode, error: KvfsError) -> KvfsError:
        """The bucket cannot produce what it should have: a miss, now and later.

        Unless nobody means that any more; what it comes to for those who wait.
        """
        current = self.transfers.fit(inode.ino, inode.version)
        if current is None:
            return StaleError(f"inode {inode.ino} has changed while it was fetched: {error}")
        log.error("inode %d is lost, %s: %s", inode.ino, self.bucket.place, error)
        if self.residency.holders(current) or inode.ino in self.residency.open:
            return error
        try:
            self.residency.drop(current, "lost", stored=isinstance(error, OURS))
        except KvfsError as refused:
            log.error("inode %d keeps its name for now: %s", inode.ino, refused)
        return error

    # Room

    def _reserve(self, inode: Inode, running: _Fetch) -> Tier:
        """Set room aside in the fastest tier that has it. Raises NoSpaceError, UnwantedError."""
        residency, cost = self.residency, running.turn.cost
        errand = None if running.turn.urgent else running.errand
        if errand is not None:
            self._check_wanted(inode, errand)
        namespace = residency.namespaces.of(inode)
        for tier in residency.tiers:
            last = tier is residency.tiers[-1]
            if not namespace.takes(tier) or tier.health.down:
                continue
            if not last and cost > tier.capacity // 2:
                continue
            if errand is None:
                if self.room.reserve(tier, cost):
                    return tier
            elif errand.take(inode, tier, cost) and self.room.reserve_gently(tier, cost, inode.ino):
                return tier
        if errand is not None:
            raise UnwantedError("no tier has room that is free, or was not used lately")
        raise NoSpaceError(f"no tier has room for {cost} bytes")

    def _check_wanted(self, inode: Inode, errand: Errand) -> None:
        """Raises UnwantedError for what it would be useless to fetch ahead."""
        residency, bucket = self.residency, self.bucket
        current = self.transfers.fit(inode.ino, inode.version)
        if current is None or residency.is_gone(current):
            raise UnwantedError("it was unlinked or written meanwhile")
        if residency.holders(current) or not current.in_bucket:
            raise UnwantedError("it is not in the bucket only any more")
        if bucket.health.down:
            raise UnwantedError(f"{bucket.place} is down: {bucket.health.why}")
        if not errand.wanted(inode):
            raise UnwantedError("it is not wanted any more")

    async def _wait_for_trash(self, tier: Tier, ino: int, version: int) -> None:
        """A copy that was evicted has the same name, and may yet be unlinked by it."""
        while any(trash[:3] == (tier, ino, version) for trash in self.residency.trash):
            self.residency.wake()
            await trio.sleep(PERIOD)


def _cost(inode: Inode, *, packed: bool) -> int:
    """Bytes of a tier that it takes to come; both forms are there while it is decompressed."""
    cost = max(Tier.cost(inode.blocks), Tier.cost(-(-inode.size // 4096) * 8))
    return cost * 2 if packed else cost
