"""Long work on files and trees that somebody asked for: begun, looked at, cancelled.

Contract: `begin` gives a job its number; `look` tells its progress and, once `over` is true, its
result; `cancel` ends what is not begun, while what was begun goes on. Jobs are in memory: they end
with the daemon, and those that are over are remembered for who looks later, `kept` of them.
Not for what is done to a file: the kinds of jobs say that (`tree_jobs`, `warm`).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import trio

from kvfs.catalog import Inode
from kvfs.core.ledger.open_table import OpenTable

STEP = 128  # entries that are read at once, in about 1 ms
REASONS_MOST = 16  # different ones that are remembered


class Reasons(Counter[str]):
    """Why files were refused, and how many."""

    def note(self, reason: str, files: int = 1) -> None:
        known = reason in self or len(self) < REASONS_MOST
        self[reason if known else "other reasons"] += files


class Job:
    """`roots` are the files and directories that were asked for."""

    def __init__(self, roots: Sequence[int]) -> None:
        self.number = 0
        self.roots = tuple(dict.fromkeys(roots))
        self.files = 0
        self.bytes = 0
        self.cancelled = False
        self.over = False

    def describe(self) -> dict[str, Any]:
        return {"over": self.over, "files": self.files, "bytes": self.bytes}


AnyJob = TypeVar("AnyJob", bound=Job)


class Jobs(Generic[AnyJob]):
    """Those of one kind. `alive` are not over."""

    def __init__(self, kept: int) -> None:
        self.alive = 0
        self._kept = kept
        self._jobs: OrderedDict[int, AnyJob] = OrderedDict()
        self._waiting: list[AnyJob] = []
        self._more = trio.Event()
        self._last = 0

    def begin(self, job: AnyJob) -> int:
        """Return its number."""
        self._last += 1
        self.alive += 1
        job.number = self._last
        self._jobs[job.number] = job
        self._waiting.append(job)
        self._more.set()
        return job.number

    async def next(self) -> AnyJob:
        """The first that waits, once there is one."""
        while not self._waiting:
            self._more = trio.Event()
            await self._more.wait()
        return self._waiting.pop(0)

    def look(self, number: int) -> dict[str, Any] | None:
        """How far it is; None if it is not known, or not any more."""
        job = self._jobs.get(number)
        return None if job is None else job.describe()

    def cancel(self, number: int) -> None:
        """What it has not begun is not begun any more."""
        job = self._jobs.get(number)
        if job is not None and not job.over:
            job.cancelled = True

    def cancel_all(self) -> None:
        for number in self._jobs:
            self.cancel(number)

    def end(self, job: AnyJob) -> None:
        """It is over."""
        job.over = True
        self.alive -= 1
        while len(self._jobs) > self._kept and next(iter(self._jobs.values())).over:
            self._jobs.popitem(last=False)


def below(table: OpenTable, root: int) -> Iterator[Inode | None]:
    """Files below, or itself; None for what is none. It goes on where names come and go.

    Raises CatalogError.
    """
    first = table.inode(root)
    if first is None or not first.is_dir:
        yield first if first is not None and first.is_file else None
        return
    left = [(root, 0)]
    while left:
        directory, cookie = left.pop()
        entries = table.catalog.entries_after(directory, cookie, STEP)
        if entries:
            left.append((directory, entries[-1].cookie))
        deeper = []
        for entry in entries:
            inode = table.inode(entry.ino)
            if inode is not None and inode.is_dir:
                deeper.append((inode.ino, 0))
            yield inode if inode is not None and inode.is_file else None
        left += reversed(deeper)
