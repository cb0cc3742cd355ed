"""Open objects, the locks of inodes, and the files that are being written.

Contract: `inode(ino)` is the one truth in memory: the open object's record, else the catalog's.
An object with a writer is in `staging`. The bytes that it has by now are in `staged` of its
namespace, unless it is cut off. An inode's lock is the only lock of the core; `core/objects` says
which task may hold it across which await. All else is synchronous. Not for the bytes of sealed
objects (`accounts`).
"""

import math
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from kvfs.catalog import Catalog, Inode
from kvfs.core.ledger.header import Header
from kvfs.core.ledger.stream import Stream
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.errors import KvfsError
from kvfs.layouts import Kind
from kvfs.tiers import Reservation, Tier

AHEAD_MAX = 256 << 20  # bytes set aside beyond what a file has
CLOSED_FOR = 1.0  # s after its close in which a file is released, if no other descriptor has it
UNSEALED = (-1, -1, -1)  # `sealed_as` of an object without a seal that counts
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
    promised: int = 0  # bytes that it will have once those writes are done
    space: Namespace | None = None  # the namespace to which `staged` is counted
    grows: bool = False  # it had more than at the look before
    most: int = 0  # bytes for which it was lent; 0: it has no such bound
    doom: KvfsError | None = None  # why it is cut off: core/capacity/bounds.py
    leaving: int = 0  # bytes that it still has after that, while its writer writes on
    # Size, time of change and blocks that the catalog has.
    sealed_as: tuple[int, int, int] = UNSEALED
    # Size and time of the bytes that none of its writers wrote. A new file and version have none.
    unwritten: tuple[int, int] = (0, -1)
    closed_at: float = -math.inf  # trio's s: a writer was told that its close went well
    expected: int = 0  # bytes that it is thought to take in the end; 0: not known
    guess: int = 0  # bytes of RAM instead, for a block of unknown size: no quota counts them
    kind: Kind = ()  # of the name that it was made under; (): not known
    accounted: bool = False  # sealed and in the accounts of its tiers; never with a writer
    reopened: bool = False  # fd is another open of the file than that of the backing id
    lost: bool = False  # kvfs distrusts its copy: handles read on, but no new open gets it
    mapped: bool = False  # one of the writers is a mapping: its handle is gone, it may write on
    charged: int = 0  # bytes of it for which a writer has waited: its share of the bandwidth
    publish: tuple[int, bytes] | None = None  # the name that it gets when its writer closes it
    direct: bool = False  # the daemon serves it past the page cache: it was opened while it came
    stream: Stream | None = None  # its readers' bytes come from there, if it is direct
    header: Header | None = None  # only that, while no program has read on
    leases: int = (
        0  # readers, among `readers`, that the kernel does not know: core/lending/read_leases.py
    )
    lent: int = -1  # a descriptor for them, which cannot be written
    brought_from: str = ""  # the medium that its first open waited for, until that is counted

    @property
    def path(self) -> str:
        """The path of its backing file."""
        return self.tier.path(self.inode.ino, self.inode.version)

    @property
    def reserved(self) -> int:
        """Bytes of its tier that are set aside for it."""
        return 0 if self.reservation is None else self.reservation.size

    def reserve(self, size: int) -> None:
        """Set so many bytes aside for it, in place of those before."""
        if self.reservation is not None:
            self.reservation.resize(size)
        elif size:
            self.reservation = Reservation(self.tier, size)

    @property
    def just_closed(self) -> bool:
        """Whether its writer's close succeeded a moment ago, and no bytes were added since.

        kvfs may not lose such a file before its release. A file that is not released within
        `CLOSED_FOR` has another descriptor.
        """
        if self.fd < 0 or trio.current_time() - self.closed_at > CLOSED_FOR:
            return False
        found = os.fstat(self.fd)
        return (found.st_size, found.st_mtime_ns) == self.sealed_as[:2]

    @property
    def refused(self) -> bool:
        """Whether no open may get it: kvfs distrusts its copy, or its writer was cut off."""
        return self.lost or self.doom is not None

    @property
    def readable(self) -> bool:
        """Whether its bytes are here or on their way. A direct one may lack them."""
        if not self.direct or self.fd >= 0:
            return True
        return self.stream is not None and self.stream.problem is None

    @property
    def only_lent(self) -> bool:
        """Whether only leases have it: the kernel has no handle, and no backing file is open."""
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
        """Bytes to set aside for the bytes that come until the next looks.

        They double the file, as vectors grow, but not beyond its expected size. At first a writer
        of 10 GB/s gets ahead by 20 MB between two looks, or by 200 MB where much is free. Later it
        gets ahead by no more than it has reserved.
        """
        lacks = self.expected - self.staged
        return min(self.staged, lacks if lacks > 0 else AHEAD_MAX, AHEAD_MAX)

    @property
    def content(self) -> tuple[int, int, int]:
        """Size, time of change and blocks, as they were measured last: compare `sealed_as`."""
        return self.inode.size, self.inode.backing_mtime_ns, self.inode.blocks

    @property
    def changed(self) -> bool:
        """Whether its writers have changed the file, as it was measured last."""
        return self.content[:2] != self.unwritten

    @property
    def written(self) -> int:
        """Bytes that its writers wrote: the growth of a file that grew, else all of its bytes."""
        size, before = self.inode.size, self.unwritten[0]
        if not self.changed:
            return 0
        return size - before if size > before else size

    @property
    def measured(self) -> int:
        """`taken`, as the record was measured last."""
        return max(self.promised, self.inode.blocks * 512)

    @property
    def taken(self) -> int:
        """Bytes that it takes by now, being written: less than was set aside for it."""
        return 0 if self.fd < 0 else max(self.promised, os.fstat(self.fd).st_blocks * 512)


class OpenObjects(dict[int, OpenObject]):
    """Open objects by inode number. To ask for one takes it out of the fast opens first.

    `take(ino)` does that. So a caller that decides by the absence of an inode decides rightly:
    nobody has it open, and no open is answered before the caller's next await.
    """

    def __init__(self, opened: Mapping[int, OpenObject], take: Callable[[int], None]) -> None:
        super().__init__(opened)
        self.take = take

    def __contains__(self, ino: object) -> bool:
        assert isinstance(ino, int)
        self.take(ino)
        return super().__contains__(ino)

    def __getitem__(self, ino: int) -> OpenObject:
        self.take(ino)
        return super().__getitem__(ino)

    def get(self, ino: int) -> OpenObject | None:  # type: ignore[override]
        self.take(ino)
        return super().get(ino)


class OpenTable:
    """Open objects by inode number."""

    def __init__(self, catalog: Catalog, namespaces: Namespaces) -> None:
        self.catalog = catalog
        self.namespaces = namespaces
        self.open: dict[int, OpenObject] = {}  # `OpenObjects` while there are fast opens
        self.take: Callable[[int], None] = lambda _: None
        # Inodes whose backing is being opened or changed, with the tasks that wait for that.
        self.busy: dict[int, trio.lowlevel.ParkingLot | None] = {}
        # Inodes whose backing file may have the next version's name already: `Creation`.
        self.renaming: set[int] = set()
        self.staging: dict[int, OpenObject] = {}  # objects with writers
        self.changes = 0  # how often an object came into or left `staging`
        self.writing = trio.Event()  # set while there are any

    def peek(self, ino: int) -> OpenObject | None:
        """The open object, for a caller that decides nothing by it: the fast opens keep theirs."""
        return dict.get(self.open, ino)

    def inode(self, ino: int) -> Inode | None:
        """The record; that of an object of the fast opens is the catalog's."""
        held = self.peek(ino)
        return self.catalog.inode(ino) if held is None else held.inode

    def inodes(self, inos: Sequence[int]) -> dict[int, Inode | None]:
        """Many records at once, as `inode` returns them; None also for an unreadable one."""
        closed = [ino for ino in inos if self.peek(ino) is None]
        found = dict(zip(closed, self.catalog.inodes(closed), strict=True))
        return {ino: found[ino] if ino in found else self.inode(ino) for ino in inos}

    def stage(self, held: OpenObject, taken: int | None = None) -> None:
        """Enter an object with a writer. taken: bytes that it takes; None: measure it."""
        self.staging[held.inode.ino] = held
        self.changes += 1
        self.weigh(held, held.taken if taken is None else taken)
        self.writing.set()

    def unstage(self, held: OpenObject, *, stays: bool = False) -> None:
        """Take out an object without a writer. stays: it has no name, and a program has it open."""
        self.staging.pop(held.inode.ino, None)
        self.changes += 1
        if held.space is not None and not stays:
            held.space.staged -= held.staged
            held.space.ahead -= held.ahead
            held.space, held.staged = None, 0

    def weigh(self, held: OpenObject, taken: int) -> None:
        """Count an object's present bytes (`taken`) to its present namespace."""
        if held.space is not None:
            held.space.staged -= held.staged
            held.space.ahead -= held.ahead
        held.space, held.staged = self.namespaces.of(held.inode), taken
        held.space.staged += taken
        held.space.ahead += held.ahead

    async def closed(self) -> bool:
        """Wait a moment for just closed files to be accounted; return whether all of them are.

        kvfs may drop nothing of a file until the kernel releases it, a moment after its flush.
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
        """Hold the inode's lock. A free lock costs no turn of the loop."""
        await self._lock(ino)
        try:
            yield
        finally:
            self._unlock(ino)

    async def _lock(self, ino: int) -> None:
        busy = self.busy
        if ino not in busy:
            busy[ino] = None
            self.take(ino)
            return
        waiting = busy[ino]
        if waiting is None:
            waiting = busy[ino] = trio.lowlevel.ParkingLot()
        await waiting.park()  # the task that unlocks hands the lock over

    def _unlock(self, ino: int) -> None:
        waiting = self.busy[ino]
        if waiting:
            waiting.unpark()
        else:
            del self.busy[ino]
