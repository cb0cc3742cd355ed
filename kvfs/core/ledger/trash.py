"""Backing files that no record names any more: unlinked, or moved into quarantine.

Contract: a file in RAM goes at once; one on a disk waits in `files` for `core/moves/trash.py`,
since a disk may hang. Synchronous.

Under passthrough a mapping keeps a file after its reader has closed it, and the kernel does not
tell the daemon. So a file lease (`Tier.is_in_use`) shows whether a process has a file when it is
unlinked. That costs some 14 us, so kvfs does not ask for files that no reader had open. A moment
later the bytes of a file that a process has are counted to its tier and its namespace.
`core/capacity/watch.py` looks again each second, until no process has the file. The next daemon
does not know such files.
"""

import logging
import os
from collections import Counter
from typing import NamedTuple

import trio

from kvfs.core.ledger.wakeup import Wakeup
from kvfs.core.namespaces.namespace import Namespace
from kvfs.tiers import Reservation, Tier

log = logging.getLogger(__name__)

MAPPED_MAX = 16384  # descriptors of mapped files; the bytes of further ones stay counted to the end


class Unlinked(Reservation):
    """Bytes of a file without a name, counted to the namespace that wrote it."""

    __slots__ = ("space",)

    def __init__(self, tier: Tier, size: int, space: Namespace) -> None:
        self.space = space
        super().__init__(tier, size)

    def resize(self, size: int) -> None:
        """Count so many bytes for the file from now on."""
        self.space.unlinked += size - self.size
        super().resize(size)


class MappedFile(Unlinked):
    """An unlinked file that a process has mapped, or open. `fd` is a descriptor of it."""

    __slots__ = ("fd",)

    def __init__(self, tier: Tier, space: Namespace, fd: int) -> None:
        super().__init__(tier, 0, space)
        self.fd = fd


class TrashFile(NamedTuple):
    """A backing file that no record names any more.

    space: its namespace, if a process may have it mapped. keep: quarantine the file, for a human to
    look at. why: the reason of a quarantine, for the log.
    """

    tier: Tier
    ino: int
    version: int
    space: Namespace | None = None
    keep: bool = False
    why: str = ""

    def remove(self) -> tuple[bool | None, int]:
        """Remove the file; return whether it is gone, and a descriptor if a process has it, or -1.

        None in place of the first: there was no file to quarantine. May wait for a disk.
        """
        if self.keep:
            return self.tier.quarantine(self.ino, self.version), -1
        if self.space is None:
            return self.tier.unlink(self.ino, self.version), -1
        return self.tier.unlink_watched(self.ino, self.version)


class Trash:
    """`files` wait for the task that unlinks them, and descriptors in `closing` for their close.

    `mapped` are counted. `appeared` is set when files were unlinked that `count` has not looked at.
    `read` are inodes that readers had open; all inodes older than `first_new` count as read, too.
    """

    def __init__(self, counters: Counter[str], wakeup: Wakeup) -> None:
        self.counters = counters
        self.wakeup = wakeup
        self.files: list[TrashFile] = []
        self.closing: list[int] = []
        self.read: set[int] = set()
        self.first_new = 0  # inode numbers from here on were made in this session
        self.mapped: set[MappedFile] = set()
        self.appeared = trio.Event()
        self._new: list[MappedFile] = []

    def throw_away(
        self,
        tier: Tier,
        ino: int,
        version: int,
        *,
        space: Namespace | None = None,
        keep: bool = False,
        why: str = "",
    ) -> None:
        """Unlink a backing file: in RAM at once, since a writer may need the room now.

        In RAM an unlink costs 0.13 to 0.34 ms for 32 MiB. On a disk it may wait for the journal.

        space: the file's namespace; None: the file is new, and no client has had it.
        keep: put the file into quarantine instead.
        why: see `TrashFile`.
        """
        if ino >= self.first_new and ino not in self.read:
            space = None
        trash = TrashFile(tier, ino, version, space, keep, why)
        if tier.slow:
            self.files.append(trash)
            self.wakeup.wake()
        else:
            self.removed(trash, *trash.remove())

    def removed(self, trash: TrashFile, done: bool | None, fd: int) -> None:  # noqa: FBT001 (of `remove`)
        """Count and log a file that went into quarantine, and note one that a process has.

        No other place counts or logs quarantined files, so both tell of files that are really in
        quarantine. A check of the whole mount reports its findings itself, and gives no `why`.
        done, fd: the result of `TrashFile.remove`.
        """
        if fd >= 0 and trash.space is not None:
            self._new.append(MappedFile(trash.tier, trash.space, fd))
            self.appeared.set()
        if not (trash.keep and done):
            return
        self.counters["quarantined"] += 1
        if trash.why:
            where = trash.tier.path(trash.ino, trash.version)
            log.error("%s tier: %s is quarantined: %s", trash.tier.name, where, trash.why)

    def count(self) -> set[Namespace]:
        """Look at the files unlinked since the last call; return the namespaces of mapped ones."""
        new, self._new, self.appeared = self._new, [], trio.Event()
        return {file.space for file in new if self.look_at(file)}

    def look_at(self, file: MappedFile) -> bool:
        """Count a file's bytes, or close it if no process has it; return whether one has it."""
        self.mapped.discard(file)
        shared = file.tier.is_in_use(file.fd)
        if shared:
            file.resize(file.tier.cost(os.fstat(file.fd).st_blocks))
            if len(self.mapped) < MAPPED_MAX:
                self.mapped.add(file)
                return True
        else:
            file.release()
        if file.tier.slow:
            self.closing.append(file.fd)
            self.wakeup.wake()
        else:
            os.close(file.fd)
        return shared
