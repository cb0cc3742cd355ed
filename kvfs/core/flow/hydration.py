"""From the bucket: what only it has, and somebody opens, comes back into a tier.

Contract: `fetch` returns when the object has a copy here, whose digest was compared, or, if that
will do, when it can be read while it comes. One fetch for an object at a time, whoever waits for
it; who has waited too long has a miss, the fetch goes on. A store that is down is not asked: that
is a miss at once. What it cannot give, or gives wrongly, is a miss for good, and the name goes. All
fetches together have a bound on bytes.
Not for the choice of a copy that is here: `core/copies.py`, nor for what comes when: `streaming`.
"""

import logging
import time
from collections import Counter, deque

import trio

from kvfs import failpoints
from kvfs.catalog import Inode, Stored
from kvfs.compression.container import DamagedError
from kvfs.core.flow import streaming
from kvfs.core.flow.transfers import Transfers
from kvfs.core.room import Room
from kvfs.core.stream import Stream
from kvfs.errors import KvfsError, NoSpaceError, NotFoundError, TierError
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


class _Fetch:
    """One that runs. `problem`: why there is no copy; None if there is one.

    streamed: it is to be read while it comes; then it has a stream when it is `ready`, mostly.
    """

    def __init__(self, now: float, *, streamed: bool) -> None:
        self.began = now
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


class Hydration:
    """`jobs` are inodes that movers work on."""

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
        self._in_flight = 0
        self._waiting: deque[tuple[int, trio.Event]] = deque()
        self._spoiled: set[tuple[int, int]] = set()  # (inode, version): began well, ended wrongly
        self.reading: Counter[str] = Counter()  # keys of what is read while it comes

    @property
    def streaming(self) -> int:
        """Objects that are read, or could be, while they come."""
        return sum(one.stream is not None for one in self._running.values())

    async def fetch(self, inode: Inode, *, whole: bool = True) -> Stream | None:
        """None: it has a copy here. whole: nothing less will do, but it may be a stream otherwise.

        Raises NotFoundError. The caller holds the inode's lock.
        """
        bucket, ino = self.bucket, inode.ino
        if bucket.health.down or bucket.terms is None:
            raise NotFoundError(f"inode {ino} is in {bucket.place} only: {bucket.health.why}")
        running = self._running.get(ino)
        if running is None:
            streamed = not whole and self._may_stream(inode)
            running = self._running[ino] = _Fetch(trio.current_time(), streamed=streamed)
            trio.lowlevel.spawn_system_task(self._run, inode.copy(), running)
        since = running.began if running.stream is None else trio.current_time()
        enough = running.ended if whole else running.ready
        with trio.move_on_at(since + bucket.wait):
            await enough.wait()
        if not enough.is_set():
            raise NotFoundError(f"inode {ino} is not here within {bucket.wait:.0f} s")
        if not running.ended.is_set():
            bucket.hits += 1
            return running.stream
        if running.problem is not None:
            raise NotFoundError(f"inode {ino}: {running.problem}") from running.problem
        bucket.hits += 1
        return None

    def stop(self) -> None:
        """Bring nothing more: it was unmounted."""
        for running in self._running.values():
            running.scope.cancel()

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
            running.problem = error
            if running.stream is not None:  # its opens are to fail, not its reads
                self._spoiled.add((inode.ino, inode.version))
            self._give_up(inode, error)
        except (StoreError, TierError) as error:
            running.problem = error
            self.bucket.counters["failures"] += 1
            self.bucket.health.failed(time.monotonic(), f"download: {error}")
            log.warning("inode %d stays in the bucket: %s", inode.ino, error)
        except (KvfsError, OSError) as error:
            running.problem = error
            log.log(
                logging.DEBUG if isinstance(error, NotFoundError) else logging.WARNING,
                "inode %d stays in the bucket: %s",
                *(inode.ino, error),
            )
        except Exception as error:
            running.problem = TierError(f"a defect of kvfs: {error!r}")
            log.exception("inode %d stays in the bucket: a defect of kvfs", inode.ino)
        finally:
            del self._running[inode.ino]
            running.end()

    async def _fetch(self, inode: Inode, running: _Fetch) -> None:
        ino, version = inode.ino, inode.version
        stored = self.residency.dirty.stored(ino)
        if stored is None:
            raise NoObjectError(f"inode {ino}: nothing says where it is in {self.bucket.place}")
        cost = max(Tier.cost(inode.blocks), Tier.cost(-(-inode.size // 4096) * 8))
        await self._admit(cost)
        try:
            while ino in self._jobs:  # noqa: ASYNC110 (a job that tells of its end is none of ours)
                await trio.sleep(PERIOD)
            self._jobs.add(ino)
            try:
                tier = self._reserve(inode, cost)
                try:
                    await self._wait_for_trash(tier, ino, version)
                    self._enter(inode, tier, await self._download(inode, stored, tier, running))
                finally:
                    tier.reserved -= cost
            finally:
                self._jobs.discard(ino)
                self.residency.wake()
        finally:
            self._release(cost)

    async def _download(self, inode: Inode, stored: Stored, tier: Tier, running: _Fetch) -> Moved:
        if running.streamed:
            self.reading[stored.key] += 1
            try:
                return await streaming.bring(self.remote, inode, stored, tier, running.begin)
            finally:
                self.reading -= Counter({stored.key: 1})
        path = tier.path(inode.ino, inode.version)
        wanted = (stored, path, inode.size, inode.digest, inode.backing_mtime_ns)
        try:
            return await self.remote.download(*wanted)
        except WrongBytesError as error:  # before anything is given up for it
            log.warning("inode %d is fetched once more: %s", inode.ino, error)
            return await self.remote.download(*wanted)

    def _enter(self, inode: Inode, tier: Tier, moved: Moved) -> None:
        """It is here: say so. Raises CatalogError, NotFoundError if it has changed meanwhile."""
        residency, ino, version = self.residency, inode.ino, inode.version
        if failpoints.active:
            failpoints.reach("flow.hydrated")
        current = self._fit(ino, version)
        if current is None or tier in residency.holders(current):
            if current is None:
                residency.throw_away(tier, ino, version)
            raise NotFoundError(f"inode {ino} has changed while it was fetched")
        current.session = residency.session  # it is not synced: after a crash its digest tells
        try:
            residency.add_copy(current, tier, moved.blocks, moved.digest)
        except KvfsError:
            residency.throw_away(tier, ino, version)
            raise
        self.bucket.counters["downloads"] += 1
        self.bucket.counters["download_bytes"] += inode.size

    def _fit(self, ino: int, version: int) -> Inode | None:
        """As `Transfers` has it. Who reads what was unlinked meanwhile has it to the end."""
        held = self.residency.open.get(ino)
        if held is not None and held.stream is not None and held.inode.version == version:
            return None if held.writers else held.inode
        return self.transfers.fit(ino, version)

    def _give_up(self, inode: Inode, error: Exception) -> None:
        """The bucket cannot produce what it should have: a miss, now and later."""
        log.error("inode %d is lost, %s: %s", inode.ino, self.bucket.place, error)
        current = self.transfers.fit(inode.ino, inode.version)
        if current is None or self.residency.holders(current) or inode.ino in self.residency.open:
            return
        try:
            self.residency.drop(current, "lost", stored=isinstance(error, OURS))
        except KvfsError as refused:
            log.error("inode %d keeps its name for now: %s", inode.ino, refused)

    # Room

    def _reserve(self, inode: Inode, cost: int) -> Tier:
        """Set room aside in the fastest tier that has it. Raises NoSpaceError."""
        residency = self.residency
        namespace = residency.namespaces.of(inode)
        for tier in residency.tiers:
            last = tier is residency.tiers[-1]
            if not namespace.takes(tier) or tier.health.down:
                continue
            if (last or cost <= tier.capacity // 2) and self.room.reserve(tier, cost):
                return tier
        raise NoSpaceError(f"no tier has room for {cost} bytes")

    async def _wait_for_trash(self, tier: Tier, ino: int, version: int) -> None:
        """A copy that was evicted has the same name, and may yet be unlinked by it."""
        while any(trash[:3] == (tier, ino, version) for trash in self.residency.trash):
            self.residency.wake()
            await trio.sleep(PERIOD)

    async def _admit(self, cost: int) -> None:
        """Wait until its bytes may be on their way, in turn."""
        if self._in_flight and (self._waiting or self._in_flight + cost > IN_FLIGHT):
            turn = trio.Event()
            self._waiting.append((cost, turn))
            await turn.wait()  # who lets it in has counted it
        else:
            self._in_flight += cost

    def _release(self, cost: int) -> None:
        self._in_flight -= cost
        while self._waiting and (
            not self._in_flight or self._in_flight + self._waiting[0][0] <= IN_FLIGHT
        ):
            more, turn = self._waiting.popleft()
            self._in_flight += more
            turn.set()
