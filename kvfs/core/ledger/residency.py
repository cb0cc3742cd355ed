"""Which copies there are, and what room they take.

Contract: all methods are synchronous and change the catalog and the accounts in one step, so an
await elsewhere never sees half of a change. The record is committed first, and what follows from
it (accounts, lists, files, invalidation) by `Batch.then`: a crash between the two leaves files that
nothing names, never a name without its file, and a commit that fails has changed nothing. Unlinking
backing files, which may wait for a disk, is left to whoever empties `trash`.

Invariants, between any two awaits of the daemon:
- `inode(ino)` is the one truth in memory: the open object's record, else the catalog's.
- A sealed object without a writer is accounted: its cost is in `used` of each tier that holds it,
  and it is in the one order of its namespace that `Namespace.order` says for each of them.
- An object with a writer has one copy, is in no list, and its room is `reserved`. What it has by
  now is `staged` of its namespace, unless it is cut off.
- An unlinked file that nobody has open is in `limbo`, its room reserved, until the kernel forgets
  it: somebody may have looked it up and be about to open it, and must not be told ESTALE. So is a
  removed directory or another inode without bytes: whoever has it open may ask for its attributes.
- What the census has not yet reached is neither accounted nor a victim.
Not for opening files, nor for moving bytes, nor for choosing what goes (that is `Victims`).
"""

import logging
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import trio

from kvfs.catalog import Batch, Catalog, Dentry, Inode, PackedCopy, Stored
from kvfs.core.ledger.dirty import Dirty
from kvfs.core.ledger.followers import Followers
from kvfs.core.ledger.header import Header
from kvfs.core.ledger.latencies import Latencies
from kvfs.core.ledger.prefixes import Prefixes
from kvfs.core.ledger.stream import Stream
from kvfs.core.ledger.verified import Verified
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.core.namespaces.order import key_of
from kvfs.errors import CatalogError, KvfsError
from kvfs.tiers import Bucket, NvmeTier, RamTier, Reservation, Tier

log = logging.getLogger(__name__)

NVME_USED = "nvme_used"  # a fact of the catalog: bytes, a second before the last change or later
NVME_WRITTEN = "nvme_written"  # a day, and the bytes written on it
HOUR = 3600 * 10**9
AHEAD_MAX = 256 << 20  # bytes set aside beyond what a file has
CLOSING, CLOSING_MAX = 0.002, 10  # s between looks at what is just closed: twice as many as its own
NOWHERE = bytes(8)  # the directory of what is cut off, where others have the one they will be in
COUNTERS = (  # those that are 0 until something happens; each is explained in SEMANTICS.md
    "opens_passthrough",
    "opens_served",
    "opens_lent",
    "misses",
    "created",
    "sealed",
    "settled",
    "verified",
    "demoted",
    "promoted",
    "dropped",
    "missing",
    "quarantined",
    "swept",
    "inodes_unreadable",
    "mover_failures",
    "job_failures",
)


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
    leases: int = 0  # of the readers those that the kernel knows nothing of: core/lending/leases.py
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


class Trash(NamedTuple):
    """A backing file that no record names any more; `keep`: for a human to look at.

    why: what the log says of one that is kept.
    """

    tier: Tier
    ino: int
    version: int
    keep: bool = False
    why: str = ""

    def remove(self) -> bool | None:
        """Whether it is gone from where it was; None: there was nothing to keep.

        May wait for a disk.
        """
        act = self.tier.quarantine if self.keep else self.tier.unlink
        return act(self.ino, self.version)


Away = Callable[[Tier, int, int], None]


class Residency:
    """`gone(parent, name, ino)` is called for each name that eviction takes away."""

    def __init__(
        self,
        catalog: Catalog,
        ram: RamTier | None,
        nvme: NvmeTier | None,
        *,
        bucket: Bucket | None = None,
        session: int,
        suspect: range = range(0),
        gone: Callable[[int, bytes, int], None],
    ) -> None:
        self.catalog = catalog
        self.ram = ram
        self.nvme = nvme
        self.session = session
        self.suspect = suspect  # sessions whose bytes on NVMe only a digest can vouch for
        self.gone = gone
        self.tiers: list[Tier] = [tier for tier in (ram, nvme) if tier is not None]
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.open: dict[int, OpenObject] = {}
        # Inodes whose backing is being opened or changed, with who waits for that.
        self.busy: dict[int, trio.lowlevel.ParkingLot | None] = {}
        self.namespaces = Namespaces(catalog, tiered=len(self.tiers) > 1)
        self.prefixes = Prefixes(self)
        self.bucket = bucket
        self.dirty = Dirty(catalog, self.namespaces, bucket)
        self.latencies = Latencies(self.media)
        self.spilled = 0  # objects that only the bucket has
        self.followers = Followers()  # of those, which block comes after which
        self.clean_bytes = self.clean_objects = 0  # in RAM, but on NVMe as well
        self.staging: dict[int, OpenObject] = {}  # objects with writers
        self.writing = trio.Event()  # set while there are any
        # Inode -> the room of its copy; a directory has none.
        self.limbo: OrderedDict[int, Reservation | None] = OrderedDict()
        self.trash: list[Trash] = []
        self.late: deque[Callable[[], Awaitable[None]]] = deque()  # what the catalog has refused
        self.work = trio.Event()  # something for the movers, or for whoever empties the trash
        self.census_done = trio.Event()
        self.census_step = trio.Event()
        self.verified = Verified()
        self._losing: set[tuple[int, int, str]] = set()  # copies that are in `late` to be lost
        # Copies of them were given up: what the kernel has of their bytes may be wrong.
        self.uncached: set[int] = set()
        self.counted_to = 0  # inode number that the census has reached
        self.first_new = 0  # inode numbers from here on were made in this session
        self._counted_early: set[int] = set()

    @property
    def media(self) -> list[str]:
        """The names of the tiers that are mounted, the bucket's among them."""
        lower = [] if self.bucket is None else [self.bucket.name]
        return [*(tier.name for tier in self.tiers), *lower]

    def wake(self) -> None:
        self.work.set()

    def stage(self, held: OpenObject) -> None:
        self.staging[held.inode.ino] = held
        self.weigh(held, held.taken)
        self.writing.set()

    def unstage(self, held: OpenObject, *, stays: bool = False) -> None:
        """Nobody writes it any more. `stays`: it has no name, and somebody has it open."""
        self.staging.pop(held.inode.ino, None)
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

    # The inode's lock; core/objects/objects.py says who may hold it

    async def lock(self, ino: int) -> None:
        """Take the inode's lock; without a rival it costs no turn of the loop."""
        busy = self.busy
        if ino not in busy:
            busy[ino] = None
            return
        waiting = busy[ino]
        if waiting is None:
            waiting = busy[ino] = trio.lowlevel.ParkingLot()
        await waiting.park()  # who unlocks hands the lock over

    def unlock(self, ino: int) -> None:
        waiting = self.busy[ino]
        if waiting:
            waiting.unpark()
        else:
            del self.busy[ino]

    # What there is

    def inode(self, ino: int) -> Inode | None:
        held = self.open.get(ino)
        return self.catalog.inode(ino) if held is None else held.inode

    def holders(self, inode: Inode) -> list[Tier]:
        """The tiers that hold a copy, fastest first."""
        found: list[Tier] = []
        if self.ram is not None and inode.ram_epoch == self.ram.epoch:
            found.append(self.ram)
        if self.nvme is not None and inode.on_nvme:
            found.append(self.nvme)
        return found

    def cost(self, inode: Inode, tier: Tier) -> int:
        """Bytes to account for its copy in a tier, be it packed."""
        if inode.packed is not None and tier is self.nvme:
            return tier.cost(inode.packed.blocks)
        return tier.cost(inode.blocks)

    def is_packed_in(self, inode: Inode, tier: Tier) -> bool:
        """Whether its copy in a tier is one that cannot be opened."""
        return inode.packed is not None and tier is self.nvme

    def can_open(self, inode: Inode) -> bool:
        """Whether there is a copy that can be opened as it is."""
        return any(not self.is_packed_in(inode, tier) for tier in self.holders(inode))

    def set_holder(self, inode: Inode, tier: Tier, *, holds: bool) -> None:
        """A copy that NVMe gets is no packed one, unless that is said afterwards."""
        if self.ram is not None and tier is self.ram:
            inode.ram_epoch = self.ram.epoch if holds else 0
        else:
            inode.on_nvme = holds
            inode.packed = None

    def is_lost(self, inode: Inode) -> bool:
        """Whether nothing holds the bytes of this file any more: the RAM tier went away."""
        if not inode.is_file or inode.in_bucket or inode.ino in self.open:
            return False
        return not self.holders(inode)

    def is_gone(self, inode: Inode) -> bool:
        """Whether nobody may find it any more: its namespace was dropped, or its time is over.

        What has expired is dropped, unless it is in use.
        """
        namespaces = self.namespaces
        if namespaces.is_dropped(inode):
            return True
        if not namespaces.of(inode).expired(inode):
            return False
        if inode.ino not in self.open and inode.ino not in self.busy:
            self.drop(inode, "expired")
        return True

    # Accounts

    def accounted(self, inode: Inode) -> bool:
        """Whether it is in the accounts of its tiers and its namespace."""
        held = self.open.get(inode.ino)
        if held is not None:
            return held.accounted
        if not inode.is_file or not inode.sealed or not inode.links:
            return False
        return inode.in_bucket or bool(self.holders(inode))

    def _counted(self, ino: int) -> bool:
        return (
            self.census_done.is_set()
            or ino <= self.counted_to
            or ino >= self.first_new
            or ino in self._counted_early
        )

    def count_past(self, inode: Inode) -> None:
        """The census reached an inode of an earlier session."""
        if inode.ino in self._counted_early:
            self._counted_early.remove(inode.ino)
        elif inode.is_file and inode.sealed and inode.links and inode.ino not in self.staging:
            self._add_past(inode)
            for tier in self.holders(inode):
                tier.uncounted = max(0, tier.uncounted - self.cost(inode, tier))
        self.counted_to = inode.ino

    def _add_past(self, inode: Inode) -> None:
        """A sealed object enters the accounts, as old as it is."""
        self._count(inode)
        namespace, holders = self.namespaces.of(inode), self.holders(inode)
        for tier in holders:
            order = namespace.order(inode, tier, holders)
            if tier.slow and namespace.blocks is None:
                order.add_past(inode.ino, inode.atime_ns // HOUR)
            else:  # of prefixes what comes before what is to be known, for leaves go first
                order.touch(inode)
        self.enter_whole(inode)

    def enter_whole(self, inode: Inode) -> None:
        """An object of its namespace, as old as it is, may have to go for its quota."""
        namespace, holders = self.namespaces.of(inode), self.holders(inode)
        whole = namespace.whole
        if whole is None or inode.kept or inode in whole or not holders:
            return
        if holders[0].slow and namespace.blocks is None:
            whole.add_past(inode.ino, inode.atime_ns // HOUR)
        else:
            whole.touch(inode)

    def count_anew(self, inode: Inode) -> None:
        """It was dismissed, and is accounted to another namespace now."""
        if not self._counted(inode.ino):
            self._counted_early.add(inode.ino)
        self._add_past(inode)

    def estimate(self) -> None:
        """Say what the tiers hold before that is counted. Call with reservations made."""
        if self.ram is not None:
            self.ram.estimate()
        if self.nvme is not None:
            noted = self.catalog.fact(NVME_USED)
            self.nvme.uncounted = self.nvme.capacity if noted is None else int(noted)

    def nvme_written(self) -> tuple[int, int]:
        """The day (since 1970) of the last estimate, and the bytes written to NVMe on it."""
        day, _, used = (self.catalog.fact(NVME_WRITTEN) or "0 0").partition(" ")
        return int(day), int(used)

    def note_used(self, spent: tuple[int, int] = (0, 0)) -> None:
        """Leave an estimate for the next daemon, with the next change of the catalog.

        A change of its own would hold up the daemon where the disk takes no writes.
        """
        if self.nvme is None or not self.census_done.is_set():
            return
        self.catalog.carried[NVME_USED] = str(self.nvme.used + self.nvme.reserved)
        self.catalog.carried[NVME_WRITTEN] = f"{spent[0]} {spent[1]}"

    def end_census_step(self) -> None:
        """Some more is counted: who waits for room may look again."""
        step, self.census_step = self.census_step, trio.Event()
        step.set()

    def end_census(self) -> None:
        for tier in self.tiers:
            tier.uncounted = 0
        self.census_done.set()
        self.end_census_step()
        self._counted_early.clear()

    def _count(self, inode: Inode, sign: int = 1) -> None:
        holders = self.holders(inode)
        for tier in holders:
            tier.used += sign * self.cost(inode, tier)
            tier.objects += sign
        if len(holders) > 1:
            self.clean_bytes += sign * Tier.cost(inode.blocks)
            self.clean_objects += sign
        bucket = self.bucket if inode.in_bucket else None
        if bucket is not None:
            bucket.used += sign * inode.size
            bucket.objects += sign
        if inode.in_bucket and not holders:
            self.spilled += sign
            self.followers.count(inode, sign)
        costs = {tier.name: self.cost(inode, tier) for tier in holders}
        self.namespaces.count(inode, costs, bucket, sign)

    @property
    def objects(self) -> int:
        """Files, each counted once."""
        local = sum(tier.objects for tier in self.tiers) - self.clean_objects
        return local + self.spilled + len(self.staging)

    def admit(self, inode: Inode) -> None:
        """A sealed object without writers enters the accounts, as the youngest."""
        if not self._counted(inode.ino):
            self._counted_early.add(inode.ino)
        self._count(inode)
        self.touch(inode)
        self.wake()

    def touch(self, inode: Inode) -> None:
        """As `Namespace.order` says, without the lists: it is on the way of every open."""
        namespace, ram = self.namespaces.of(inode), self.ram
        if namespace.spare:
            namespace.take_back(inode)
        in_ram = ram is not None and inode.ram_epoch == ram.epoch
        if namespace.whole is not None and not inode.kept and (in_ram or inode.on_nvme):
            namespace.whole.touch(inode)
        if inode.on_nvme and self.nvme is not None:
            (namespace.nvme_kept if inode.kept else namespace.on_nvme).touch(inode)
            if in_ram:
                namespace.ram_clean.touch(inode)
        elif in_ram:
            (namespace.ram_kept if inode.kept else namespace.ram_only).touch(inode)

    def dismiss(self, inode: Inode) -> None:
        """An object leaves the accounts: it is rewritten, unlinked or dropped."""
        namespace = self.namespaces.of(inode)
        namespace.take_back(inode)
        for order in namespace.orders:
            order.discard(inode)
        if self._counted(inode.ino):
            self._count(inode, -1)
        else:
            self._counted_early.add(inode.ino)  # and the census will pass it by

    def throw_away(
        self, tier: Tier, ino: int, version: int, *, keep: bool = False, why: str = ""
    ) -> None:
        """Unlink a backing file: at once where a writer may need the room in this very moment.

        In RAM that costs 0.13 to 0.34 ms for 32 MiB; on a disk it may wait for its journal.
        keep: put it into quarantine instead. why: see `removed`.
        """
        trash = Trash(tier, ino, version, keep, why)
        if tier.slow:
            self.trash.append(trash)
            self.wake()
        else:
            self.removed(trash, done=trash.remove())

    def removed(self, trash: Trash, *, done: bool | None) -> None:
        """What was thrown away was removed, if that is `done`: count and say what was kept.

        That is the one place which does, so that both tell of files that are in the quarantine. A
        check of the whole mount tells what it has found itself, and gives no reason.
        """
        if not (trash.keep and done):
            return
        self.counters["quarantined"] += 1
        if trash.why:
            where = trash.tier.path(trash.ino, trash.version)
            log.error("%s tier: %s is quarantined: %s", trash.tier.name, where, trash.why)

    async def retry(self) -> None:
        """Do what the catalog has refused; what it refuses again is there again.

        Raises what the last of those met, when all had their turn.
        """
        refused: KvfsError | None = None
        for _ in range(len(self.late)):  # what is added meanwhile, by any thread, is for the next
            again = self.late.popleft()
            try:
                await again()
            except KvfsError as error:
                self.late.append(again)
                refused = error
        if refused is not None:
            raise refused

    # Changes of a sealed object that no writer has

    def lose(self, inode: Inode, tier: Tier, *, quarantine: bool = False, why: str = "") -> None:
        """A copy is no more, or not what it should be: no open is served from it any more.

        The last one takes the object along. That somebody has it open, or is about to, changes
        nothing: handles that read this copy read on, and nobody else opens it until they are
        closed. The kernel would refuse an open with another backing file, EIO. `quarantine` and
        `why` are those of `throw_away`. Raises CatalogError; then it is done when the catalog takes
        it, and no open is served from the copy meanwhile.
        """
        current = self.inode(inode.ino)
        if (
            current is None
            or current.version != inode.version
            or tier not in self.holders(current)
            or inode.ino in self.staging
        ):
            return
        self.verified.forget(inode.ino)
        self.distrust(inode, tier)
        try:
            if current.in_bucket or len(self.holders(current)) > 1:
                self.uncached.add(inode.ino)
                self.drop_copy(current, tier, quarantine=quarantine, why=why)
            else:
                self.drop(current, "lost", quarantine=quarantine, why=why)
        except CatalogError as error:
            again = partial(self._lose_again, inode.copy(), tier, quarantine=quarantine, why=why)
            self._lose_when_it_can((inode.ino, inode.version, tier.name), again, error)
            raise
        self.verified.end_doubt(inode.ino, inode.version, tier.name)

    async def _lose_again(
        self, inode: Inode, tier: Tier, *, quarantine: bool = False, why: str = ""
    ) -> None:
        self.lose(inode, tier, quarantine=quarantine, why=why)
        self._losing.discard((inode.ino, inode.version, tier.name))

    def _lose_when_it_can(
        self, copy: tuple[int, int, str], again: Callable[[], Awaitable[None]], error: CatalogError
    ) -> None:
        if copy in self._losing:  # each open of it may ask for that
            return
        log.error(
            "the copy of inode %d, version %d, on %s is wrong, and no open is served from it; its "
            "record goes when the catalog works: %s",
            *(*copy, error),
        )
        self._losing.add(copy)
        self.late.append(again)

    def distrust(self, inode: Inode, tier: Tier) -> None:
        """A copy is known not to be what it should be, and the catalog has it yet.

        The next open compares it, and without a digest takes it for lost. Nobody makes a copy of
        one without a digest. Handles that read it read on, and nobody else opens it before they
        are closed.
        """
        self.verified.doubt(inode.ino, inode.version, tier.name)
        held = self.open.get(inode.ino)
        if held is not None and held.reads(tier):
            held.lost = True

    def is_distrusted(self, inode: Inode) -> bool:
        """Whether nothing can tell what a copy of it should be that is known to be wrong."""
        return not inode.digest and any(
            self.verified.is_doubted(inode.ino, inode.version, tier.name)
            for tier in self.holders(inode)
        )

    def add_copy(
        self,
        inode: Inode,
        tier: Tier,
        blocks: int,
        digest: bytes,
        packed: PackedCopy | None = None,
    ) -> None:
        """A mover has made a copy. What the caller had reserved for it, the caller gives back.

        packed: it is this one, on NVMe. A plain one takes the place of a packed one.
        """
        before = inode.copy()
        self.set_holder(inode, tier, holds=True)
        inode.digest = digest
        if packed is None:
            inode.blocks = max(inode.blocks, blocks)
        else:
            inode.packed = packed
        with self.catalog.batch() as batch:
            batch.put(inode)
            batch.then(partial(self._held_otherwise, before, inode))
        if tier is self.nvme:
            self.verified.note(inode.ino)

    def add_stored(self, inode: Inode, stored: Stored, digest: bytes, *, clean: bool) -> None:
        """The bucket has it; `clean`: as it is called now."""
        before = inode.copy()
        inode.digest = digest
        with self.catalog.batch() as batch:
            self.dirty.uploaded(inode, stored, batch, clean=clean)
            batch.put(inode)
            batch.then(partial(self._held_otherwise, before, inode))

    def take_from_bucket(
        self, inode: Inode, *, dirty: bool = False, contested: bool = False, delete: bool = True
    ) -> None:
        """A copy is here, and what the bucket has is not to be there; `delete`: it is ours.

        dirty: it is to be there again; contested: when no other node has its name any more.
        """
        before = inode.copy()
        inode.in_bucket = False
        with self.catalog.batch() as batch:
            self.dirty.gone(inode.ino, batch, delete=delete)
            if dirty:
                self.dirty.lacking(inode, batch)
            elif contested:
                self.dirty.contest(inode.ino, batch)
            batch.put(inode)
            batch.then(partial(self._held_otherwise, before, inode))

    def described(self, before: Inode, inode: Inode) -> None:
        """More is known of what only the bucket has: its size, for the accounts."""
        self._held_otherwise(before, inode)

    def let_go(self, inode: Inode, *, delete: bool = False) -> None:
        """The bucket has something else by its name, or nothing: its names go.

        delete: and so does what the bucket has of it elsewhere, which is ours.
        """
        self._drop(inode, "stale", stored=delete)
        if self.bucket is not None:
            self.bucket.counters["stale"] += 1

    def _held_otherwise(self, before: Inode, inode: Inode) -> None:
        """A sealed object has other copies than before. In orders that both share it stays."""
        if not self._counted(inode.ino):
            self._counted_early.add(inode.ino)
        else:
            self._count(before, -1)
        self._count(inode)
        namespace = self.namespaces.of(inode)
        held, holds = self.holders(before), self.holders(inode)
        left = [namespace.order(before, tier, held) for tier in held]
        namespace.take_back(before)
        if namespace.whole is not None and bool(held) != bool(holds):
            if not holds:
                namespace.whole.discard(before)
            elif not inode.kept:
                namespace.whole.touch(inode)
        orders = [namespace.order(inode, tier, holds) for tier in holds]
        for order in left:
            if order not in orders:
                order.discard(before)
        for order in orders:
            if order not in left:
                order.touch(inode)
        if namespace.blocks is not None:  # it need not stay for what follows it
            namespace.release(key_of(inode))
        self.wake()

    def drop_copy(
        self, inode: Inode, tier: Tier, *, quarantine: bool = False, why: str = ""
    ) -> None:
        """One copy goes, another one stays, if only in the bucket."""
        before = inode.copy()
        self.set_holder(inode, tier, holds=False)
        away = partial(self.throw_away, keep=quarantine, why=why)
        with self.catalog.batch() as batch:
            batch.put(inode)
            batch.then(partial(away, tier, inode.ino, inode.version))
            batch.then(partial(self._held_otherwise, before, inode))

    def evict(self, inode: Inode) -> None:
        """Its room is needed: what the bucket has as well stays there, with its names."""
        if not inode.in_bucket:
            self.drop(inode, "evicted")
            return
        before = inode.copy()
        with self.catalog.batch() as batch:
            for tier in self.holders(before):
                self.set_holder(inode, tier, holds=False)
                batch.then(partial(self.throw_away, tier, inode.ino, inode.version))
            batch.put(inode)
            batch.then(partial(self._held_otherwise, before, inode))
        if self.bucket is not None:
            self.bucket.counters["spilled"] += 1
        self.namespaces.left(before, "spilled")

    def drop(
        self,
        inode: Inode,
        reason: str,
        *,
        quarantine: bool = False,
        why: str = "",
        stored: bool = True,
    ) -> None:
        """The object goes with all its names, and what else is here of its group.

        stored: what the bucket has of them goes as well.
        """
        self._drop(inode, reason, quarantine=quarantine, why=why, stored=stored)
        for ino in self.namespaces.of(inode).members(inode):
            other = self.inode(ino)
            if other is None or self.namespaces.places.is_pinned(other):
                continue
            if ino not in self.open and ino not in self.busy:
                self._drop(other, "incomplete", stored=stored)  # half a group is a miss

    def _drop(
        self,
        inode: Inode,
        reason: str,
        *,
        quarantine: bool = False,
        why: str = "",
        stored: bool = True,
    ) -> None:
        """Kernel entries are invalidated. What is open goes as what was unlinked does."""
        away = partial(self.throw_away, keep=quarantine, why=why)
        names: list[tuple[int, Dentry]] = []
        with self.catalog.batch() as batch:
            for parent, cookie in inode.links:
                entry = self.catalog.dentry(parent, cookie)
                if entry is not None:
                    batch.unlink(parent, entry)
                    names.append((parent, entry))
            if inode.ino in self.open:
                self._drop_open(inode, batch, away)
            else:
                self.forget(inode, batch, stored=stored, away=away)
        self.counters["dropped"] += 1
        self.counters[f"dropped_{reason}"] += 1
        self.namespaces.left(inode, f"dropped_{reason}")
        for parent, entry in names:
            self.gone(parent, entry.name, inode.ino)

    def _drop_open(self, inode: Inode, batch: Batch, away: Away) -> None:
        """Its copies leave the accounts at once, its record goes when it is closed."""
        before, held = inode.copy(), self.open[inode.ino]
        inode.links, inode.in_bucket = (), False
        for tier in self.holders(before):
            self.set_holder(inode, tier, holds=False)
            batch.then(partial(away, tier, inode.ino, inode.version))
        if held.accounted:
            batch.then(partial(self.dismiss, before))
            batch.then(partial(setattr, held, "accounted", False))  # noqa: FBT003 (setattr's)
        self.unlinked_open(inode, batch)

    def forget(
        self,
        inode: Inode,
        batch: Batch,
        *,
        accounted: bool | None = None,
        stored: bool = True,
        away: Away | None = None,
    ) -> None:
        """Remove the record and all copies of an inode; its names are the caller's.

        away: has its files thrown away.
        """
        batch.delete(inode)
        self.dirty.gone(inode.ino, batch, delete=stored)
        batch.mark_finished(inode.ino)
        if not inode.links:
            batch.unmark(b"p", inode.ino)
        if inode.ino in self.namespaces.unaccounted:
            self.namespaces.end_account_anew(inode.ino, batch)
        known = inode.is_file and (inode.sealed if accounted is None else accounted)
        away = away or self.throw_away
        batch.then(partial(self._forgotten, inode, accounted=known, away=away))

    def _forgotten(self, inode: Inode, *, accounted: bool, away: Away) -> None:
        if inode.ino in self.limbo:
            self._leave_limbo(inode.ino)
        elif accounted:
            self.dismiss(inode)
        self.namespaces.hot.discard(inode.ino)
        for tier in self.holders(inode):
            away(tier, inode.ino, inode.version)

    def take_names(self, held: OpenObject, why: bytes) -> None:
        """Nobody finds it any more, though its writer has it. `why` is for the next daemon.

        Raises CatalogError, and has changed nothing then.
        """
        inode, names = held.inode, list[tuple[int, Dentry]]()
        links, found = inode.links, bool(inode.links or held.publish)
        try:
            with self.catalog.batch() as batch:
                for parent, cookie in links:
                    entry = self.catalog.dentry(parent, cookie)
                    if entry is not None:
                        batch.unlink(parent, entry)
                        names.append((parent, entry))
                inode.links = ()
                batch.mark(b"p", inode.ino, NOWHERE + why)
                self.unlinked_open(inode, batch)
        except BaseException:
            inode.links = links
            raise
        held.publish = None
        if found:
            self.counters["dropped"] += 1
            self.counters["dropped_too_large"] += 1
            self.namespaces.left(inode, "dropped_too_large")
        for parent, entry in names:
            self.gone(parent, entry.name, inode.ino)

    def unlinked_open(self, inode: Inode, batch: Batch) -> None:
        """The last name of what somebody has open is gone; its record stays until it is closed."""
        before = inode.copy()
        self.dirty.gone(inode.ino, batch)
        inode.in_bucket = False
        batch.put(inode)
        batch.mark_unfinished(inode.ino)
        held = self.open[inode.ino]
        if before.in_bucket and held.accounted:
            batch.then(partial(self._held_otherwise, before, inode))

    # Unlinked, but perhaps about to be opened

    def to_limbo(self, inode: Inode, batch: Batch) -> None:
        """The last name of what nobody has open is gone; keep its fastest copy a while."""
        before = inode.copy()
        for tier in self.holders(inode)[1:]:
            self.set_holder(inode, tier, holds=False)
        self.dirty.gone(inode.ino, batch)
        inode.in_bucket = False
        batch.put(inode)
        batch.mark_unfinished(inode.ino)
        batch.then(partial(self._in_limbo, before))

    def _in_limbo(self, inode: Inode) -> None:
        if inode.is_file:
            self.dismiss(inode)
        for tier in self.holders(inode)[1:]:
            self.throw_away(tier, inode.ino, inode.version)
        self.enter_limbo(inode)

    def enter_limbo(self, inode: Inode) -> None:
        """Reserve what its fastest copy takes, until the kernel has forgotten it."""
        if not inode.is_file:
            self.limbo[inode.ino] = None
            return
        keep = self.holders(inode)[0]
        self.limbo[inode.ino] = Reservation(keep, self.cost(inode, keep))

    def back_to_limbo(self, held: OpenObject) -> None:
        """Its last reader has closed it: another may have looked its name up, when it had one."""
        inode = held.inode
        if held.accounted:
            with self.catalog.batch() as batch:
                self.to_limbo(inode, batch)
        else:
            self.limbo[inode.ino] = held.reservation or Reservation(held.tier, 0)

    def from_limbo(self, ino: int) -> Reservation | None:
        """It is opened after all: the caller owns its room."""
        return self.limbo.pop(ino, None)

    def _leave_limbo(self, ino: int) -> None:
        room = self.limbo.pop(ino)
        if room is not None:
            room.release()

    def orphaned(self, tier: Tier) -> int:
        """Bytes of a tier that unlinked files have, of which the kernel still knows."""
        return sum(
            room.size for room in self.limbo.values() if room is not None and room.tier is tier
        )

    def purge(self, ino: int) -> bool:
        """The kernel has forgotten it, or its room is needed. Returns whether it has gone.

        Raises CatalogError.
        """
        if ino not in self.limbo or ino in self.busy:
            return False
        inode = self.catalog.inode(ino)
        if inode is None:  # its record is damaged, or was never there: the sweep finds its files
            self._leave_limbo(ino)
            return True
        with self.catalog.batch() as batch:
            self.forget(inode, batch)
        return True
