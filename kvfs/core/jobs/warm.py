"""Files and whole trees come into the fastest tier that takes them, because somebody asked for it.

Contract: `start` takes files and directories and gives a job's number; `look` says how far it is.
A job first lists its files, a few at a time, then brings them in that order, AT_ONCE at a time,
behind every open, and into room that is free or was not used lately. What cannot come is counted
with its reason. What a lower tier has already counts as here if a faster one has no such room.
`cancel` ends what is not begun. Jobs are in memory: they end with the daemon. Not for what nobody
asked for (`prefetch`), nor for fetching (`hydration`).
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import trio

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.bucket.download.hydration import Hydration
from kvfs.core.bucket.listing.adoption import is_bare
from kvfs.core.capacity.room import Room
from kvfs.core.jobs.sweeps import below
from kvfs.core.moves.transfers import Transfers
from kvfs.core.moves.unpacking import Unpacking
from kvfs.errors import KvfsError, NoSpaceError
from kvfs.movement.movers import SourceChangedError
from kvfs.tiers import Tier

AT_ONCE = 32  # objects on their way; beyond what the movers do at a time they only wait
FILES_MOST = 1 << 20  # of one job, 8 MiB
JOBS_MOST = 1 << 16  # that are not over
KEPT = 256  # jobs that are over, for who looks later
STEP = 128  # entries between two turns of the loop, some 2 ms
DEPTH_MOST = 4096 // 2  # directories in a path
REASONS_MOST = 16  # different ones that a job remembers


@dataclass(eq=False, slots=True)
class _Job:
    """`roots` are what was asked for."""

    number: int
    roots: tuple[int, ...]
    inos: "array[int]" = field(default_factory=lambda: array("q"))
    listed: bool = False
    cancelled: bool = False
    over: bool = False
    files: int = 0
    bytes: int = 0
    running: int = 0
    done: int = 0
    done_bytes: int = 0
    failed: int = 0
    why: Counter[str] = field(default_factory=Counter)

    def fail(self, reason: str, files: int = 1) -> None:
        self.failed += files
        known = reason in self.why or len(self.why) < REASONS_MOST
        self.why[reason if known else "other reasons"] += files


class _Wait:
    """The errand of one object of a job."""

    def __init__(self, job: _Job) -> None:
        self.job = job
        self.over = trio.Event()
        self.problem: Exception | None = None

    def wanted(self, inode: Inode) -> bool:  # noqa: ARG002 (an errand may ask about it)
        return not self.job.cancelled

    def take(self, inode: Inode, tier: Tier, cost: int) -> bool:  # noqa: ARG002
        return True

    def ended(self, inode: Inode, problem: Exception | None, *, joined: bool) -> None:  # noqa: ARG002
        self.problem = problem
        self.over.set()


class Warm:
    """`hydration` is None without a bucket; `jobs` are inodes that movers work on."""

    def __init__(
        self,
        transfers: Transfers,
        room: Room,
        hydration: Hydration | None,
        unpacking: Unpacking,
        jobs: set[int],
    ) -> None:
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.unpacking = unpacking
        self.room = room
        self.hydration = hydration
        self._busy = jobs
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        self._by_root: dict[int, _Job] = {}  # the last one of those that are not over
        self._alive = 0  # that are not over
        self._queue: OrderedDict[int, _Job] = OrderedDict()  # not begun, or not all begun
        self._last = 0
        self._more = trio.Event()

    # What is asked

    def start(self, inos: Sequence[int]) -> int:
        """The number of a new job. Raises NoSpaceError."""
        if self._alive >= JOBS_MOST:
            raise NoSpaceError(f"{JOBS_MOST} orders to warm wait: try again later")
        self._last += 1
        self._alive += 1
        job = _Job(self._last, tuple(dict.fromkeys(inos)))
        self._jobs[job.number] = self._queue[job.number] = job
        self._by_root.update(dict.fromkeys(job.roots, job))
        self._more.set()
        return job.number

    def start_root(self, inode: Inode) -> None:
        """As `start`, unless it was asked for and is not over."""
        if inode.ino not in self._by_root:
            self.start([inode.ino])

    def look(self, number: int) -> dict[str, Any] | None:
        """How far it is; None if it is not known, or not any more."""
        job = self._jobs.get(number)
        if job is None:
            return None
        return {
            "listed": job.listed,
            "over": job.over,
            "cancelled": job.cancelled,
            "files": job.files,
            "bytes": job.bytes,
            "done": job.done,
            "done_bytes": job.done_bytes,
            "failed": job.failed,
            "why": dict(job.why),
        }

    def cancel(self, number: int) -> None:
        """What it has not begun is not begun any more."""
        job = self._jobs.get(number)
        if job is not None and not job.over:
            job.cancelled = True
            self._close(job)

    def cancel_root(self, inode: Inode) -> None:
        """As `cancel`, for what was asked for by this file or directory."""
        if inode.ino in self._by_root:
            self.cancel(self._by_root[inode.ino].number)

    def is_wanted(self, inode: Inode) -> bool:
        """Whether it is to come, by its own order or that of a directory above, and is not here."""
        if not self._by_root or (inode.is_file and self.ledger.tiers.holders(inode)):
            return False
        at: Inode | None = inode
        for _ in range(DEPTH_MOST):
            if at is None:
                return False
            job = self._by_root.get(at.ino)
            if job is not None and not job.cancelled:
                return True
            if at.ino == ROOT_INO or not at.links:
                return False
            at = self.ledger.table.inode(at.links[0][0])
        return False

    def end(self) -> None:
        """The mount ends: nothing more is begun."""
        for number in list(self._jobs):
            self.cancel(number)

    # Doing it

    async def run(self) -> None:
        """For ever."""
        slots = trio.Semaphore(AT_ONCE)
        async with trio.open_nursery() as nursery:
            while True:
                self._more = trio.Event()
                while self._queue:
                    job = next(iter(self._queue.values()))
                    try:
                        await self._begin(job, slots, nursery)
                    except KvfsError as error:  # the catalog
                        job.fail(str(error))
                    finally:
                        self._queue.pop(job.number, None)
                        job.listed = True
                        self._close(job)
                await self._more.wait()

    async def _begin(self, job: _Job, slots: trio.Semaphore, nursery: trio.Nursery) -> None:
        await self._list(job)
        job.listed = True
        for begun, ino in enumerate(job.inos):
            await slots.acquire()
            if job.cancelled:
                slots.release()
                job.fail("cancelled", len(job.inos) - begun)
                return
            job.running += 1
            nursery.start_soon(self._one, job, ino, slots)

    def _close(self, job: _Job) -> None:
        """Whether it is over is seen after each change."""
        if job.running or job.over or not job.listed or job.number in self._queue:
            return
        job.over = True
        job.inos = array("q")
        self._alive -= 1
        for root in job.roots:
            if self._by_root.get(root) is job:
                del self._by_root[root]
        while len(self._jobs) > KEPT and next(iter(self._jobs.values())).over:
            self._jobs.popitem(last=False)

    async def _list(self, job: _Job) -> None:
        """All files below, in reading order. Raises CatalogError."""
        files = chain.from_iterable(below(self.ledger, root) for root in job.roots)
        for count, inode in enumerate(files):
            if inode is not None:
                if job.files >= FILES_MOST:
                    job.fail(f"only the first {FILES_MOST} files of one order are brought")
                    return
                job.files += 1
                job.bytes += inode.size
                job.inos.append(inode.ino)
            if count % STEP == STEP - 1:
                await trio.lowlevel.checkpoint()
            if job.cancelled:
                return

    async def _one(self, job: _Job, ino: int, slots: trio.Semaphore) -> None:
        try:
            inode = self.ledger.table.inode(ino)
            why = "it was unlinked meanwhile" if inode is None else await self._bring(job, inode)
            if why or inode is None:
                job.fail(why)
            else:
                job.done += 1
                job.done_bytes += inode.size
        except (KvfsError, OSError, SourceChangedError) as error:
            job.fail(str(error))
        finally:
            job.running -= 1
            slots.release()
            self._close(job)

    async def _bring(self, job: _Job, inode: Inode) -> str:
        """Why it is not here; "" if it is."""
        ledger = self.ledger
        current = self.transfers.fit(inode.ino)
        if current is None or ledger.removals.is_gone(current):
            return "it is being written, or was unlinked meanwhile"
        holders = ledger.tiers.holders(current)
        if holders:
            if holders == [ledger.tiers.nvme]:
                await self._to_ram(current)
            return ""
        if self.hydration is None or not current.in_bucket:
            return "no tier has its bytes, and no bucket that is mounted"
        if is_bare(current):
            current = await self.hydration.complete(current.ino)
            if current is None:
                return "the bucket has not said yet what it is, or has it no more"
        wait = _Wait(job)
        if not self.hydration.ahead(current, wait):
            return await self._other(current)
        await wait.over.wait()
        if wait.problem is not None:
            return "cancelled" if job.cancelled else str(wait.problem)
        self.hydration.bucket.counters["warmed"] += 1
        return ""

    async def _other(self, inode: Inode) -> str:
        """Somebody else fetches it, or the bucket is down."""
        assert self.hydration is not None
        bucket = self.hydration.bucket
        if bucket.health.down or bucket.terms is None:
            return f"{bucket.place} is down"
        await self.hydration.until_ended(inode.ino)
        current = self.ledger.table.inode(inode.ino)
        here = current is not None and self.ledger.tiers.holders(current)
        return "" if here else "an open of it has failed"

    async def _to_ram(self, inode: Inode) -> None:
        """From NVMe, if RAM takes it and has room."""
        ledger, ram, nvme = self.ledger, self.ledger.tiers.ram, self.ledger.tiers.nvme
        if ram is None or nvme is None or inode.ino in self._busy:
            return
        cost = ram.cost(inode.blocks)
        namespace = ledger.namespaces.of(inode)
        if not namespace.takes(ram) or cost > ram.capacity // 2:
            return
        room = self.room.reserve_gently(ram, cost, inode.ino)
        if room is None:
            return
        self._busy.add(inode.ino)
        try:
            with room:
                if inode.packed is not None:
                    await self.unpacking.carry(inode, ram)
                else:
                    await self.transfers.copy([inode], nvme, ram, "promoted")
        finally:
            self._busy.discard(inode.ino)
            ledger.work.wake()
