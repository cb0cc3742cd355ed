"""Backing files that no record names any more: unlinked, or moved into quarantine.

Contract: a file in RAM goes at once; one on a disk waits in `files` for `core/moves/trash.py`,
since a disk may hang. Synchronous.

Under passthrough a mapping keeps the file of a reader who has closed it, and the kernel does not
tell of it. So a lease (`Tier.shared`) shows whether anybody has a file when it is unlinked. That
costs some 14 us, so files that no reader had open are not asked. A moment later what such a file
takes is counted to its tier and its namespace, until nobody has it any more:
`core/capacity/watch.py` looks again each second. A next daemon does not know of such files.
"""

import logging
import os
from collections import Counter
from typing import NamedTuple

import trio

from kvfs.core.ledger.work import Work
from kvfs.core.namespaces.namespace import Namespace
from kvfs.tiers import Reservation, Tier

log = logging.getLogger(__name__)

MAPPED_MAX = 16384  # descriptors of files that are mapped; what others take counts to the end


class Unlinked(Reservation):
    """Bytes of a file that has no name any more, and that a namespace has put there."""

    __slots__ = ("space",)

    def __init__(self, tier: Tier, size: int, space: Namespace) -> None:
        self.space = space
        super().__init__(tier, size)

    def resize(self, size: int) -> None:
        """It takes so many bytes by now."""
        self.space.unlinked += size - self.size
        super().resize(size)


class MappedFile(Unlinked):
    """One that somebody outside has mapped, or open; `fd` is it."""

    __slots__ = ("fd",)

    def __init__(self, tier: Tier, space: Namespace, fd: int) -> None:
        super().__init__(tier, 0, space)
        self.fd = fd


class TrashFile(NamedTuple):
    """A backing file that no record names any more; `keep`: for a human to look at.

    space: whose it is, if somebody may have it mapped. why: what the log says of one that is kept.
    """

    tier: Tier
    ino: int
    version: int
    space: Namespace | None = None
    keep: bool = False
    why: str = ""

    def remove(self) -> tuple[bool | None, int]:
        """Whether it is gone from where it was, and a descriptor if somebody has it; else -1.

        None: there was nothing to keep. May wait for a disk.
        """
        if self.keep:
            return self.tier.quarantine(self.ino, self.version), -1
        if self.space is None:
            return self.tier.unlink(self.ino, self.version), -1
        return self.tier.discard(self.ino, self.version)


class Trash:
    """`files` wait for the task that unlinks them, and descriptors in `closing` for their close.

    `mapped` are counted; what has just been unlinked is `appeared` before, and not yet looked at.
    `read` are inodes that readers had open, beside all those that are older than `first_new`.
    """

    def __init__(self, counters: Counter[str], work: Work) -> None:
        self.counters = counters
        self.work = work
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
        """Unlink a backing file: at once where a writer may need the room in this very moment.

        In RAM that costs 0.13 to 0.34 ms for 32 MiB; on a disk it may wait for its journal.
        space: whose it is; None: it is new, and no client has had it.
        keep: put it into quarantine instead. why: see `removed`.
        """
        if ino >= self.first_new and ino not in self.read:
            space = None
        trash = TrashFile(tier, ino, version, space, keep, why)
        if tier.slow:
            self.files.append(trash)
            self.work.wake()
        else:
            self.removed(trash, *trash.remove())

    def removed(self, trash: TrashFile, done: bool | None, fd: int) -> None:  # noqa: FBT001 (of `remove`)
        """What was thrown away was removed, if that is `done`: count and say what was kept.

        That is the one place which does, so that both tell of files that are in the quarantine. A
        check of the whole mount tells what it has found itself, and gives no reason. fd: somebody
        has it yet.
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
        """Look at what was unlinked since; whose files are mapped indeed."""
        new, self._new, self.appeared = self._new, [], trio.Event()
        return {file.space for file in new if self.look_at(file)}

    def look_at(self, file: MappedFile) -> bool:
        """Count what a file takes by now, or let go of it; whether somebody has it yet."""
        self.mapped.discard(file)
        shared = file.tier.shared(file.fd)
        if shared:
            file.resize(file.tier.cost(os.fstat(file.fd).st_blocks))
            if len(self.mapped) < MAPPED_MAX:
                self.mapped.add(file)
                return True
        else:
            file.release()
        if file.tier.slow:
            self.closing.append(file.fd)
            self.work.wake()
        else:
            os.close(file.fd)
        return shared
