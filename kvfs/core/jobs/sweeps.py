"""Jobs that go through all files of trees because somebody asked: `kvfs evict`, `du`, `pin`.

Contract: `start` takes files and directories, and who visits them, and gives a job's number; `look`
says how far it is. Files are visited in reading order, for SLICE seconds between two turns of the
loop; what a visit cannot do at once is an errand, AT_ONCE of them at a time. A job keeps no list:
what comes or goes meanwhile is visited or not. `cancel` ends what is not begun. Jobs are in memory:
they end with the daemon. Not for what is brought to faster tiers (`warm`).
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from kvfs.catalog import Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.errors import KvfsError, NoSpaceError

AT_ONCE = 32  # errands; beyond what the movers do at a time they only wait
SLICE = 0.002  # s
STEP = 128  # entries that are read at once, in about 1 ms
ALIVE_MOST = 64
KEPT = 64  # jobs that are over, for who looks later

Errand = Callable[[], Awaitable[None]]


class Visitor(Protocol):
    """Counts for itself what it did, and why it did not."""

    def visit(self, inode: Inode) -> Errand | None: ...
    def failed(self, inode: Inode, error: Exception) -> None:
        """A visit or an errand has raised this KvfsError or OSError."""

    def describe(self) -> dict[str, Any]: ...


@dataclass(eq=False, slots=True)
class _Job:
    number: int
    roots: tuple[int, ...]
    visitor: Visitor
    files: int = 0
    bytes: int = 0
    problem: str = ""
    cancelled: bool = False
    over: bool = False


def below(ledger: Ledger, root: int) -> Iterator[Inode | None]:
    """Files below, or itself; None for what is none. It goes on where names come and go.

    Raises CatalogError.
    """
    first = ledger.table.inode(root)
    if first is None or not first.is_dir:
        yield first if first is not None and first.is_file else None
        return
    left = [(root, 0)]
    while left:
        directory, cookie = left.pop()
        entries = ledger.catalog.entries_after(directory, cookie, STEP)
        if entries:
            left.append((directory, entries[-1].cookie))
        deeper = []
        for entry in entries:
            inode = ledger.table.inode(entry.ino)
            if inode is not None and inode.is_dir:
                deeper.append((inode.ino, 0))
            yield inode if inode is not None and inode.is_file else None
        left += reversed(deeper)


class Sweeps:
    """Of one mount."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        self._waiting: list[_Job] = []
        self._more = trio.Event()
        self._last = 0

    def start(self, roots: Sequence[int], visitor: Visitor) -> int:
        """The number of a new job. Raises NoSpaceError."""
        if sum(not job.over for job in self._jobs.values()) >= ALIVE_MOST:
            raise NoSpaceError(f"{ALIVE_MOST} orders about trees are not over: try again later")
        self._last += 1
        job = _Job(self._last, tuple(dict.fromkeys(roots)), visitor)
        self._jobs[job.number] = job
        self._waiting.append(job)
        self._more.set()
        return job.number

    def look(self, number: int) -> dict[str, Any] | None:
        """How far it is; None if it is not known, or not any more."""
        job = self._jobs.get(number)
        if job is None:
            return None
        return {
            "over": job.over,
            "files": job.files,
            "bytes": job.bytes,
            "problem": job.problem,
            **job.visitor.describe(),
        }

    def cancel(self, number: int) -> None:
        """What it has not begun is not begun any more."""
        if (job := self._jobs.get(number)) is not None:
            job.cancelled = True

    async def run(self) -> None:
        """For ever."""
        async with trio.open_nursery() as nursery:
            while True:
                self._more = trio.Event()
                while self._waiting:
                    nursery.start_soon(self._sweep, self._waiting.pop(0))
                await self._more.wait()

    async def _sweep(self, job: _Job) -> None:
        slots = trio.Semaphore(AT_ONCE)
        try:
            async with trio.open_nursery() as nursery:
                for root in job.roots:
                    await self._go_through(job, root, slots, nursery)
        finally:
            job.over = True
            while len(self._jobs) > KEPT and next(iter(self._jobs.values())).over:
                self._jobs.popitem(last=False)

    async def _go_through(
        self, job: _Job, root: int, slots: trio.Semaphore, nursery: trio.Nursery
    ) -> None:
        began = time.perf_counter()
        try:
            for inode in below(self.ledger, root):
                if job.cancelled:
                    job.problem = "it was cancelled"
                    return
                if inode is not None and (errand := self._visit(job, inode)) is not None:
                    await slots.acquire()
                    nursery.start_soon(self._run, job, inode, errand, slots)
                    began = time.perf_counter()
                elif time.perf_counter() - began > SLICE:
                    await trio.lowlevel.checkpoint()
                    began = time.perf_counter()
        except KvfsError as error:  # the catalog
            job.problem = str(error)

    @staticmethod
    def _visit(job: _Job, inode: Inode) -> Errand | None:
        job.files += 1
        job.bytes += inode.size
        try:
            return job.visitor.visit(inode)
        except (KvfsError, OSError) as error:
            job.visitor.failed(inode, error)
            return None

    @staticmethod
    async def _run(job: _Job, inode: Inode, errand: Errand, slots: trio.Semaphore) -> None:
        try:
            await errand()
        except (KvfsError, OSError) as error:
            job.visitor.failed(inode, error)
        finally:
            slots.release()
