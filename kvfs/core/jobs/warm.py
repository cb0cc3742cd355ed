"""Warm files and whole trees on request: bring them into the fastest tier that takes them.

Contract: a job first lists its files, a few at a time. Then it brings them in that order, AT_ONCE
at a time. Opens go first, and files come only into room that is free or was not used lately. A file
that cannot come is counted with its reason. A file in a lower tier counts as here if a faster tier
has no such room. Not for files that no user asked for (`prefetch`), nor for the download itself
(`hydration`).
"""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import trio

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.bucket.download.hydration import Hydration
from kvfs.core.bucket.listing.remote_entries import is_stub
from kvfs.core.capacity.room import Room
from kvfs.core.jobs.job import Job, Jobs, Reasons, below
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.moves.unpacking import Unpacking
from kvfs.errors import KvfsError, NoSpaceError
from kvfs.movement.movers import SourceChangedError
from kvfs.tiers import Tier

AT_ONCE = 32  # objects on their way; more than the movers do at a time only wait
FILES_MOST = 1 << 20  # of one job, 8 MiB
JOBS_MOST = 1 << 16  # that are not over
KEPT = 256  # jobs that are over, for later looks
STEP = 128  # entries between two turns of the loop, some 2 ms
DEPTH_MOST = 4096 // 2  # directories in a path


class _Order(Job):
    def __init__(self, roots: Sequence[int]) -> None:
        super().__init__(roots)
        self.inos = array("q")
        self.listed = False
        self.begun = False  # all of it
        self.running = 0
        self.done = 0
        self.done_bytes = 0
        self.in_ram = 0  # of those done
        self.no_room = 0  # of those done: they stay on NVMe, because RAM has no room
        self.failed = 0
        self.why = Reasons()

    def fail(self, reason: str, files: int = 1) -> None:
        self.failed += files
        self.why.note(reason, files)

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "listed": self.listed,
            "cancelled": self.cancelled,
            "done": self.done,
            "done_bytes": self.done_bytes,
            "in_ram": self.in_ram,
            "no_room": self.no_room,
            "failed": self.failed,
            "why": dict(self.why),
        }


class _Wait:
    """The prefetch request for one object of a job."""

    def __init__(self, job: _Order) -> None:
        self.job = job
        self.over = trio.Event()
        self.problem: Exception | None = None

    def wanted(self, inode: Inode) -> bool:  # noqa: ARG002 (other requests ask about it)
        return not self.job.cancelled

    def admit(self, inode: Inode, tier: Tier, cost: int) -> bool:  # noqa: ARG002
        return True

    def ended(self, inode: Inode, problem: Exception | None, *, joined: bool) -> None:  # noqa: ARG002
        self.problem = problem
        self.over.set()


class Warm(Jobs[_Order]):
    """The warm jobs of one mount.

    `hydration` is None without a bucket; `jobs` are inodes that movers work on.
    """

    def __init__(
        self,
        transfers: TierTransfers,
        room: Room,
        hydration: Hydration | None,
        unpacking: Unpacking,
        jobs: set[int],
    ) -> None:
        super().__init__(KEPT)
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.unpacking = unpacking
        self.room = room
        self.hydration = hydration
        self._busy = jobs
        self._by_root: dict[int, _Order] = {}  # the last one of those that are not over

    # Requests

    def start(self, inos: Sequence[int]) -> int:
        """Start a job and return its number. Raises NoSpaceError."""
        if self.alive >= JOBS_MOST:
            raise NoSpaceError(f"{JOBS_MOST} orders to warm are waiting: try again later")
        job = _Order(inos)
        self._by_root.update(dict.fromkeys(job.roots, job))
        return self.begin(job)

    def start_root(self, inode: Inode) -> None:
        """Start a job for this file or directory, unless one for it is not over."""
        if inode.ino not in self._by_root:
            self.start([inode.ino])

    def cancel_root(self, inode: Inode) -> None:
        """Cancel the job that was started for this file or directory."""
        if inode.ino in self._by_root:
            self.cancel(self._by_root[inode.ino].number)

    def is_wanted(self, inode: Inode) -> bool:
        """Whether the object is not here, and a job for it or a directory above it is under way."""
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

    # The work

    async def run(self) -> None:
        """Run the jobs, until it is cancelled."""
        slots = trio.Semaphore(AT_ONCE)
        async with trio.open_nursery() as nursery:
            while True:
                job = await self.next()
                try:
                    await self._begin(job, slots, nursery)
                except KvfsError as error:  # the catalog
                    job.fail(str(error))
                finally:
                    job.listed = job.begun = True
                    self._close(job)

    async def _begin(self, job: _Order, slots: trio.Semaphore, nursery: trio.Nursery) -> None:
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

    def _close(self, job: _Order) -> None:
        """End the job if all its work is done. Called after each change."""
        if job.running or job.over or not job.begun:
            return
        job.inos = array("q")
        for root in job.roots:
            if self._by_root.get(root) is job:
                del self._by_root[root]
        self.end(job)

    async def _list(self, job: _Order) -> None:
        """List all files of the job, in reading order. Raises CatalogError."""
        files = chain.from_iterable(below(self.ledger.table, root) for root in job.roots)
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

    async def _one(self, job: _Order, ino: int, slots: trio.Semaphore) -> None:
        try:
            inode = self.ledger.table.inode(ino)
            why = "it was unlinked meanwhile" if inode is None else await self._bring(job, inode)
            if why or inode is None:
                job.fail(why)
            else:
                job.done += 1
                job.done_bytes += inode.size
                self._count_tier(job, inode)
        except (KvfsError, OSError, SourceChangedError) as error:
            job.fail(str(error))
        finally:
            job.running -= 1
            slots.release()
            self._close(job)

    def _count_tier(self, job: _Order, inode: Inode) -> None:
        """Count whether a file that is here came to RAM, or found no room there."""
        ram, current = self.ledger.tiers.ram, self.ledger.table.inode(inode.ino)
        if current is None:
            return
        if ram in self.ledger.tiers.holders(current):
            job.in_ram += 1
        elif self.ledger.namespaces.of(current).takes(ram):
            job.no_room += 1

    async def _bring(self, job: _Order, inode: Inode) -> str:
        """Bring one file. Returns why it is not here; "" if it is."""
        ledger = self.ledger
        current = self.transfers.still_current(inode.ino)
        if current is None or ledger.removals.is_gone(current):
            return "it is being written, or was unlinked meanwhile"
        holders = ledger.tiers.holders(current)
        if holders:
            if holders == [ledger.tiers.nvme]:
                await self._to_ram(current)
            return ""
        if self.hydration is None or not current.in_bucket:
            return "no tier has its bytes, and no bucket that is mounted"
        if is_stub(current):
            current = await self.hydration.fetch_metadata(current.ino)
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
        """Wait for another download of the object, if the bucket is up. Returns as `_bring`."""
        assert self.hydration is not None
        bucket = self.hydration.bucket
        if bucket.health.down or bucket.terms is None:
            return f"{bucket.place} is down"
        await self.hydration.until_ended(inode.ino)
        current = self.ledger.table.inode(inode.ino)
        here = current is not None and self.ledger.tiers.holders(current)
        return "" if here else "an open of it has failed"

    async def _to_ram(self, inode: Inode) -> None:
        """Promote the object from NVMe, if RAM takes it and has room."""
        ledger, ram, nvme = self.ledger, self.ledger.tiers.ram, self.ledger.tiers.nvme
        if inode.ino in self._busy:
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
            ledger.wakeup.wake()
