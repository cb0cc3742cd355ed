"""Jobs that go through all files of trees on request: `kvfs evict`, `du`, `pin`.

Contract: `start` takes files and directories, and their visitor. A job visits files in reading
order, for SLICE seconds between two turns of the loop. A visit may return deferred work, which runs
AT_ONCE at a time. A job keeps no list: a file that comes or goes meanwhile is visited or not.
Not for bringing files to faster tiers (`warm`).
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import trio

from kvfs.catalog import Inode
from kvfs.core.jobs.job import Job, Jobs, below
from kvfs.core.ledger.open_table import OpenTable
from kvfs.errors import KvfsError, NoSpaceError

AT_ONCE = 32  # pieces of deferred work; more than the movers do at a time only wait
SLICE = 0.002  # s
ALIVE_MOST = 64
KEPT = 64  # jobs that are over, for later looks

Deferred = Callable[[], Awaitable[None]]


class Visitor(Protocol):
    """Does the work on each file. It counts its results, and the reasons of refusals."""

    def visit(self, inode: Inode) -> Deferred | None: ...
    def failed(self, inode: Inode, error: Exception) -> None:
        """Count a visit or deferred work that raised this KvfsError or OSError."""

    def describe(self) -> dict[str, Any]: ...


class _TreeJob(Job):
    def __init__(self, roots: Sequence[int], visitor: Visitor, at_end: Callable[[], None]) -> None:
        super().__init__(roots)
        self.visitor = visitor
        self.at_end = at_end
        self.problem = ""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "problem": self.problem, **self.visitor.describe()}


class TreeJobs(Jobs[_TreeJob]):
    """The tree jobs of one mount."""

    def __init__(self, table: OpenTable) -> None:
        super().__init__(KEPT)
        self.table = table

    def start(
        self,
        roots: Sequence[int],
        visitor: Visitor,
        at_end: Callable[[], None] = lambda: None,
    ) -> int:
        """Start a job and return its number. Raises NoSpaceError.

        at_end: called after the last visit and its deferred work.
        """
        if self.alive >= ALIVE_MOST:
            raise NoSpaceError(f"{ALIVE_MOST} jobs over trees have not ended: try again later")
        return self.begin(_TreeJob(roots, visitor, at_end))

    async def run(self) -> None:
        """Run the jobs, until it is cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(self._sweep, await self.next())

    async def _sweep(self, job: _TreeJob) -> None:
        slots = trio.Semaphore(AT_ONCE)
        try:
            async with trio.open_nursery() as nursery:
                for root in job.roots:
                    await self._go_through(job, root, slots, nursery)
        finally:
            self.end(job)
            job.at_end()

    async def _go_through(
        self, job: _TreeJob, root: int, slots: trio.Semaphore, nursery: trio.Nursery
    ) -> None:
        began = time.perf_counter()
        try:
            for inode in below(self.table, root):
                if job.cancelled:
                    job.problem = "it was cancelled"
                    return
                if inode is not None and (deferred := self._visit(job, inode)) is not None:
                    await slots.acquire()
                    nursery.start_soon(self._run, job, inode, deferred, slots)
                    began = time.perf_counter()
                elif time.perf_counter() - began > SLICE:
                    await trio.lowlevel.checkpoint()
                    began = time.perf_counter()
        except KvfsError as error:  # the catalog
            job.problem = str(error)

    @staticmethod
    def _visit(job: _TreeJob, inode: Inode) -> Deferred | None:
        job.files += 1
        job.bytes += inode.size
        try:
            return job.visitor.visit(inode)
        except (KvfsError, OSError) as error:
            job.visitor.failed(inode, error)
            return None

    @staticmethod
    async def _run(job: _TreeJob, inode: Inode, deferred: Deferred, slots: trio.Semaphore) -> None:
        try:
            await deferred()
        except (KvfsError, OSError) as error:
            job.visitor.failed(inode, error)
        finally:
            slots.release()
