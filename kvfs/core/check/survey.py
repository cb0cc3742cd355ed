"""The shared part of a check: access to the catalog and tiers, findings, and speed.

Contract: `report` is called in the step of the loop in which a suspicion was confirmed. It mends in
that same step, so that the finding is true of the state that it changes. `step` passes findings on.
`step` may wait: for the reader of the findings, and beside a mount for the other tasks of the loop.
Not for finding faults.
"""

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import trio

from kvfs.catalog import ROOT_INO, Batch, Dentry, Inode, audit, keys
from kvfs.core.ledger.ledger import Ledger
from kvfs.movement.movers import MoverPool
from kvfs.movement.remote import Remote
from kvfs.tiers import TierCall

T = TypeVar("T")
STEP = 0.0003  # s of this thread's work between two turns of the loop
STEP_MAX = 0.002  # s of work counted at most: other tasks' work during a wait is in there, too
SHARE = 4  # beside a mount: seconds for all other tasks, for each second of work
JOB_PERIOD = 0.01  # s between two looks whether a mover has finished with an object
SHOWN = 128  # names of a path, from the end; each costs two look-ups, for each finding below


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault. `cure` says what a repair does or did, or why a repair left the fault."""

    kind: str
    ino: int
    path: str
    what: str
    cure: str
    state: Literal["found", "repaired", "left"]


class Survey:
    """One check's state. `live`: beside a mount that serves; `tell` takes each finding."""

    def __init__(
        self,
        ledger: Ledger,
        movers: MoverPool,
        jobs: set[int],
        tell: Callable[[Finding], Awaitable[None]],
        *,
        repair: bool,
        hashes: bool,
        live: bool,
        remote: Remote | None = None,
    ) -> None:
        """remote: calls of the bucket, if the bucket is checked as well."""
        self.ledger = ledger
        self.catalog = ledger.catalog
        self.movers = movers
        self.jobs = jobs  # inodes that movers work on
        self.repair = repair
        self.hashes = hashes
        self.live = live
        self.remote = remote
        self.started = time.time()
        self.notes = Counter[str]()  # facts that are no faults, but worth knowing
        self.phase, self.done, self.total = "", 0, 0
        self.inodes = 0  # how many there are, once they are counted
        self.reports = 0
        self.bytes = 0  # in all copies
        self.unreadable: set[int] = set()  # inodes whose records make no sense
        self.doubtful = False  # changes of the catalog are lost, with names perhaps
        self.said: set[tuple[object, ...]] = set()  # reported faults that show elsewhere as well
        self._tell = tell
        self._pending: list[Finding] = []
        self._turn = time.thread_time()

    # Findings

    def report(
        self,
        kind: str,
        ino: int,
        path: str,
        what: str,
        cure: str,
        mend: Callable[[], object] | None,
    ) -> None:
        """Report a fault, and mend it if this is a repair.

        `mend` does what `cure` says; None if nothing can be done, and `cure` says why.
        """
        state: Literal["found", "repaired", "left"] = "found"
        if self.repair:
            state = "left" if mend is None else "repaired"
            if mend is not None:
                mend()
        self.reports += 1
        self._pending.append(Finding(kind, ino, path, what, cure, state))

    def report_inode(
        self, kind: str, inode: Inode, what: str, cure: str, mend: Callable[[], object] | None
    ) -> None:
        """Report a fault of an inode that exists, by one of its names."""
        self.report(kind, inode.ino, self.path(inode), what, cure, mend)

    def begin(self, phase: str, total: int) -> None:
        self.phase, self.done, self.total = phase, 0, total

    async def step(self, done: int = 1) -> None:
        """Count `done` things as checked, pass findings on, and let other tasks run."""
        self.done += done
        while self._pending:
            await self._tell(self._pending.pop(0))
        worked = min(time.thread_time() - self._turn, STEP_MAX)
        if worked > STEP:
            if self.live:
                await trio.sleep(worked * SHARE)
            else:
                await trio.lowlevel.checkpoint()
            self._turn = time.thread_time()

    def answer(self, findings: list[Finding], *, ended: bool, failed: str) -> dict[str, Any]:
        """Return the progress for clients, with the findings since they last asked."""
        return {
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "inodes": self.inodes,
            "notes": {name: count for name, count in self.notes.items() if count},
            "findings": [asdict(finding) for finding in findings],
            "ended": ended,
            "failed": failed,
        }

    async def io(self, do: Callable[[], T]) -> T:
        """Run `do`, which may read any of the disks. Raises TierError if there is no answer.

        The caller may hold an inode meanwhile, and then other tasks would wait for that disk, too.
        """
        slowest = self.ledger.tiers.local[-1]
        return await slowest.calls.call(TierCall("a look at its files", do))

    # The state of the mount

    def inode(self, ino: int) -> Inode | None:
        """Return the inode as the core sees it; None also if its record makes no sense."""
        held = self.ledger.table.open.get(ino)
        if held is not None:
            return held.inode
        return None if ino in self.unreadable else self.catalog.inode(ino)

    def sealed(self, ino: int) -> Inode | None:
        """Return the object if it is a file that is sealed and has a name, else None."""
        inode = self.inode(ino)
        fits = inode is not None and inode.is_file and inode.sealed and inode.links
        return inode if fits else None

    def in_use(self, ino: int) -> bool:
        """Whether the inode is open, or may be about to be opened."""
        ledger = self.ledger
        return ino in ledger.table.open or ino in ledger.orphans.rooms or ino in ledger.table.busy

    def to_be_recovered(self, ino: int) -> bool:
        """Whether a daemon died over the inode, so that the next mount must recover it first."""
        return not self.live and self.marked(ino)

    def marked(self, ino: int) -> bool:
        return self.catalog.record(keys.MARKS, keys.number_key(ino)) is not None

    def dropped(self, ino: int) -> bool:
        """Whether the inode is the top of a tree that a walk is to remove."""
        return ino in self.ledger.namespaces.dropped

    def unlinked(self, inode: Inode) -> bool:
        """Whether the inode is meant to have no name; otherwise it gets one in /lost+found."""
        meant = self.dropped(inode.ino) or self.in_use(inode.ino) or self.marked(inode.ino)
        return meant and not inode.links

    def path(self, inode: Inode) -> str:
        """Return one path of the inode, from the root, as far as its directories are known."""
        for parent, cookie in inode.links:
            value = self.catalog.record(keys.COOKIES, keys.cookie_key(parent, cookie))
            found = None if value is None else audit.by_cookie(b"\0" * 16, value)
            if found is not None:
                return self.entry_path(parent, found[1].name)
        return "/" if inode.ino == ROOT_INO else "(no name)"

    def entry_path(self, parent: int, name: bytes) -> str:
        """Return the path of an entry, on one line for any name."""
        parts = [name]
        for _ in range(SHOWN):
            if parent == ROOT_INO:
                parts.append(b"")
                break
            directory = self.inode(parent)
            link = directory.links[0] if directory and directory.links else (0, 0)
            value = self.catalog.record(keys.COOKIES, keys.cookie_key(*link))
            if value is None:
                parts.append(b"(directory %d)" % parent)
                break
            parts.append(value[8:])
            parent = link[0]
        else:
            parts.append(b"(directory %d)" % parent)
        path = b"/".join(reversed(parts)).decode(errors="backslashreplace")
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in path)

    # Repairs that many parts have

    def change(self, change: Callable[[Batch], None]) -> None:
        with self.catalog.batch() as batch:
            change(batch)

    def erase(self, kind: bytes, key: bytes) -> None:
        self.change(lambda batch: batch.erase(kind, key))

    def put(self, inode: Inode) -> None:
        self.change(lambda batch: batch.put(inode))

    def remove(self, parent: int, entry: Dentry) -> None:
        """Remove the entry. The caller changes the inode's links."""
        self.change(lambda batch: batch.unlink(parent, entry))
        self.ledger.invalidate_name(parent, entry.name, entry.ino)

    @asynccontextmanager
    async def hold(self, ino: int) -> AsyncIterator[None]:
        """Keep an inode from being opened, moved or evicted. It may be renamed or unlinked."""
        while True:
            async with self.ledger.table.locked(ino):
                if ino not in self.jobs:
                    self.jobs.add(ino)
                    try:
                        yield
                    finally:
                        self.jobs.discard(ino)
                        self.ledger.wakeup.wake()
                    return
            await trio.sleep(JOB_PERIOD)
