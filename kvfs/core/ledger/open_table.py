"""Open objects, the locks of inodes, and what is being written.

Contract: `inode(ino)` is the one truth in memory: the open object's record, else the catalog's.
An object with a writer is in `staging`; what it has by now is `staged` of its namespace, unless
it is cut off. An inode's lock is the only lock of the core; `core/objects` says who may hold it
across which await. All else is synchronous. Not for what sealed objects take (`accounts`).
"""

import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from kvfs.catalog import Catalog, Inode
from kvfs.core.ledger.header import Header
from kvfs.core.ledger.stream import Stream
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.errors import KvfsError
from kvfs.tiers import Reservation, Tier

AHEAD_MAX = 256 << 20  # bytes set aside beyond what a file has
CLOSED_FOR = 1.0  # s after its close in which a file is released, if no other descriptor has it
CLOSING, CLOSING_MAX = 0.002, 10  # s between looks at what is just closed: twice as many as its own


@dataclass(slots=True, eq=False)
class OpenObject:
    """An inode with handles. All handles share its tier, its backing file and its backing id."""

    inode: Inode
    tier: Tier
    fd: int
    writable: bool  # whether fd is
    backing_id: int = 0  # 0: the daemon serves the bytes itself
    readers: int = 0
    writers: int = 0
    reservation: Reservation | None = None
    staged: int = 0  # bytes that it had at the last look, or was promised since, being written
    in_flight: int = 0  # writes that the daemon carries out
    promised: int = 0  # bytes that it will have when they are through
    space: Namespace | None = None  # to which those are counted
    grows: bool = False  # it had more than at the look before
    most: int = 0  # bytes that it was lent for; 0: it has no such bound
    doom: KvfsError | None = None  # why it is cut off: core/capacity/bounds.py
    leaving: int = 0  # bytes that it has all the same, as long as its writer writes on
    # Size, time of change and blocks that the catalog has.
    sealed_as: tuple[int, int, int] = (-1, -1, -1)
    closed_at: float = -math.inf  # trio's s: a writer was told that its close went well
    expected: int = 0  # bytes that it is thought to take in the end; 0: not known
    accounted: bool = False  # sealed and in the accounts of its tiers; never with a writer
    reopened: bool = False  # fd is another open of the file than that of the backing id
    lost: bool = False  # its copy was given up: handles read on, nobody opens it any more
    mapped: bool = False  # one of the writers is a mapping: its handle is gone, it may write on
    charged: int = 0  # bytes of it for which a writer has waited: its share of the bandwidth
    publish: tuple[int, bytes] | None = None  # the name that it gets when its writer closes it
    direct: bool = False  # the daemon serves it past the page cache: it was opened while it came
    stream: Stream | None = None  # where its readers have it from, if it is direct
    header: Header | None = None  # or only that, if nobody has read on
    leases: int = (
        0  # of the readers those that the kernel knows nothing of: core/lending/read_leases.py
    )
    lent: int = -1  # a descriptor for them, which cannot be written
    brought_from: str = ""  # the medium that its first open has waited for; until that is counted

    @property
    def reserved(self) -> int:
        """Bytes of its tier that are set aside for it."""
        return 0 if self.reservation is None else self.reservation.size

    def reserve(self, size: int) -> None:
        """Set aside so many bytes for it from now on."""
        if self.reservation is not None:
            self.reservation.resize(size)
        elif size:
            self.reservation = Reservation(self.tier, size)

    @property
    def just_closed(self) -> bool:
        """Whether its writer was told a moment ago that all is well, and has added nothing since.

        Until its release it may not be lost. What is not released soon has another descriptor.
        """
        if self.fd < 0 or trio.current_time() - self.closed_at > CLOSED_FOR:
            return False
        found = os.fstat(self.fd)
        return (found.st_size, found.st_mtime_ns) == self.sealed_as[:2]

    @property
    def refused(self) -> bool:
        """Whether nobody may open it any more: its copy was given up, or its writer was cut off."""
        return self.lost or self.doom is not None

    @property
    def readable(self) -> bool:
        """Whether its bytes are here or on their way. A direct one may lack them."""
        if not self.direct or self.fd >= 0:
            return True
        return self.stream is not None and self.stream.problem is None

    @property
    def only_lent(self) -> bool:
        """Whether the kernel has no part in it, and nothing is open for it."""
        return self.lent >= 0 and self.fd < 0 and not self.backing_id

    def reads(self, tier: Tier) -> bool:
        """Whether its handles have their bytes from the copy in a tier."""
        if self.tier is not tier:
            return False
        return not self.direct or self.fd >= 0 or self.stream is not None

    @property
    def coming(self) -> bool:
        """Whether it was opened before its bytes were here."""
        return self.stream is not None or self.header is not None

    @property
    def ahead(self) -> int:
        """Bytes to set aside for what comes until the next looks.

        As much again as it has, as vectors do, but no more than is expected: a writer of 10 GB/s
        gets ahead by 20 MB between two looks at first, by no more than it has reserved later.
        """
        lacks = self.expected - self.staged
        return min(self.staged, lacks if lacks > 0 else AHEAD_MAX, AHEAD_MAX)

    @property
    def taken(self) -> int:
        """Bytes that it takes by now, being written: less than was set aside for it."""
        return 0 if self.fd < 0 else max(self.promised, os.fstat(self.fd).st_blocks * 512)


class OpenTable:
    """Open objects by inode number."""

    def __init__(self, catalog: Catalog, namespaces: Namespaces) -> None:
        self.catalog = catalog
        self.namespaces = namespaces
        self.open: dict[int, OpenObject] = {}
        # Inodes whose backing is being opened or changed, with who waits for that.
        self.busy: dict[int, trio.lowlevel.ParkingLot | None] = {}
        self.staging: dict[int, OpenObject] = {}  # objects with writers
        self.changes = 0  # of those: how often one came or went
        self.writing = trio.Event()  # set while there are any

    def inode(self, ino: int) -> Inode | None:
        held = self.open.get(ino)
        return self.catalog.inode(ino) if held is None else held.inode

    def stage(self, held: OpenObject) -> None:
        self.staging[held.inode.ino] = held
        self.changes += 1
        self.weigh(held, held.taken)
        self.writing.set()

    def unstage(self, held: OpenObject, *, stays: bool = False) -> None:
        """Nobody writes it any more. `stays`: it has no name, and somebody has it open."""
        self.staging.pop(held.inode.ino, None)
        self.changes += 1
        if held.space is not None and not stays:
            held.space.staged -= held.staged
            held.space.ahead -= held.ahead
            held.space, held.staged = None, 0

    def weigh(self, held: OpenObject, taken: int) -> None:
        """So many bytes it has by now, of the namespace that it is accounted to by now."""
        if held.space is not None:
            held.space.staged -= held.staged
            held.space.ahead -= held.ahead
        held.space, held.staged = self.namespaces.of(held.inode), taken
        held.space.staged += taken
        held.space.ahead += held.ahead

    async def closed(self) -> bool:
        """Wait a moment for files that are just closed to be accounted; whether all of them are.

        Until the kernel lets go of a file, a moment after its flush, nothing of it may be dropped.
        """
        closing = [held for held in self.staging.values() if held.inode.sealed and not held.mapped]
        for _ in range(CLOSING_MAX):
            if not any(self.staging.get(held.inode.ino) is held for held in closing):
                break
            await trio.sleep(CLOSING)
        else:
            return False
        return bool(closing)

    # The inode's lock

    @asynccontextmanager
    async def locked(self, ino: int) -> AsyncIterator[None]:
        """Hold the inode's lock; without a rival it costs no turn of the loop."""
        await self._lock(ino)
        try:
            yield
        finally:
            self._unlock(ino)

    async def _lock(self, ino: int) -> None:
        busy = self.busy
        if ino not in busy:
            busy[ino] = None
            return
        waiting = busy[ino]
        if waiting is None:
            waiting = busy[ino] = trio.lowlevel.ParkingLot()
        await waiting.park()  # who unlocks hands the lock over

    def _unlock(self, ino: int) -> None:
        waiting = self.busy[ino]
        if waiting:
            waiting.unpark()
        else:
            del self.busy[ino]
