"""Long work on files and trees that a user asked for: start it, look at it, cancel it.

Contract: `begin` gives a job its number. `look` tells its progress and, once `over` is true, its
result. `cancel` keeps the job from beginning more work; work that it has begun goes on. Jobs are in
memory and end with the daemon. The last `kept` jobs that are over are remembered for later looks.
Not for the work on a file: the kinds of jobs have it (`tree_jobs`, `warm`).
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
    """Counts files that were refused, by reason."""

    def note(self, reason: str, files: int = 1) -> None:
        known = reason in self or len(self) < REASONS_MOST
        self[reason if known else "other reasons"] += files


class Job:
    """One job. `roots` are the files and directories that the user named."""

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
    """The jobs of one kind. `alive` is the number of jobs that are not over."""

    def __init__(self, kept: int) -> None:
        self.alive = 0
        self._kept = kept
        self._jobs: OrderedDict[int, AnyJob] = OrderedDict()
        self._waiting: list[AnyJob] = []
        self._more = trio.Event()
        self._last = 0

    def begin(self, job: AnyJob) -> int:
        """Enter a job and return its number."""
        self._last += 1
        self.alive += 1
        job.number = self._last
        self._jobs[job.number] = job
        self._waiting.append(job)
        self._more.set()
        return job.number

    async def next(self) -> AnyJob:
        """Wait for a job to begin, and return the first one."""
        while not self._waiting:
            self._more = trio.Event()
            await self._more.wait()
        return self._waiting.pop(0)

    def look(self, number: int) -> dict[str, Any] | None:
        """Return the job's progress; None if the number is unknown or forgotten."""
        job = self._jobs.get(number)
        return None if job is None else job.describe()

    def cancel(self, number: int) -> None:
        """Keep a job from beginning more work."""
        job = self._jobs.get(number)
        if job is not None and not job.over:
            job.cancelled = True

    def cancel_all(self) -> None:
        for number in self._jobs:
            self.cancel(number)

    def end(self, job: AnyJob) -> None:
        """Mark a job as over, and forget the oldest jobs beyond `kept`."""
        job.over = True
        self.alive -= 1
        while len(self._jobs) > self._kept and next(iter(self._jobs.values())).over:
            self._jobs.popitem(last=False)


def below(table: OpenTable, root: int) -> Iterator[Inode | None]:
    """Yield the files below a root, or the root itself, and None for each entry that is no file.

    It continues when names come and go meanwhile. Raises CatalogError.
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
