"""Which copies there are, what room they take, and what goes when room is needed.

Contract: all methods are synchronous and change the catalog and the accounts in one step, so an
await elsewhere never sees half of a change. The record is committed first, and what follows from
it (accounts, lists, files, invalidation) by `Batch.then`: a crash between the two leaves files that
nothing names, never a name without its file, and a commit that fails has changed nothing. Unlinking
backing files, which may wait for a disk, is left to whoever empties `trash`.

Invariants, between any two awaits of the daemon:
- `inode(ino)` is the one truth in memory: the open object's record, else the catalog's.
- A sealed object without a writer is accounted: its cost is in `used` of each tier that holds it,
  and it is in exactly one of `ram_only` and `ram_clean` if RAM holds it, in `on_nvme` if NVMe does.
- An object with a writer has one copy, is in no list, and its room is `reserved`.
- An unlinked file that nobody has open is in `limbo`, its room reserved, until the kernel forgets
  it: somebody may have looked it up and be about to open it, and must not be told ESTALE.
- What the census has not yet reached is neither accounted nor a victim.
Not for opening files, nor for moving bytes.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import trio

from kvfs.catalog import Batch, Catalog, Dentry, Inode
from kvfs.core.sizes import ExpectedSizes
from kvfs.errors import CatalogError, NoSpaceError, TierError
from kvfs.eviction import LeastRecentlyUsed
from kvfs.tiers import NvmeTier, RamTier, Tier

log = logging.getLogger(__name__)

Twins = Literal["uncopy", "spare", "lose"]

NVME_USED = "nvme_used"  # a fact of the catalog: bytes, at most a second old
HOUR = 3600 * 10**9
UNKNOWN_SIZE = 64 << 20  # reserved for a file of which nothing is known; no measurement behind it
COUNTERS = (  # those that are 0 until something happens; each is explained in SEMANTICS.md
    "opens_passthrough",
    "opens_served",
    "misses",
    "created",
    "sealed",
    "settled",
    "demoted",
    "promoted",
    "dropped",
    "missing",
    "quarantined",
    "swept",
    "mover_failures",
    "job_failures",
)
HEADROOM = 16  # a sixteenth of RAM is kept free for files that outgrow their reservation


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
    reserved: int = 0
    sealed_as: tuple[int, int] = (-1, -1)  # size and time of change that the catalog has
    accounted: bool = False  # sealed and in the accounts of its tiers; never with a writer
    reopened: bool = False  # fd is another open of the file than that of the backing id
    mapped: bool = False  # one of the writers is a mapping: its handle is gone, it may write on


class Trash(NamedTuple):
    """A backing file that no record names any more; `keep`: for a human to look at."""

    tier: Tier
    ino: int
    version: int
    keep: bool = False

    def remove(self) -> bool:
        """Whether it is gone from where it was. May wait for a disk."""
        act = self.tier.quarantine if self.keep else self.tier.unlink
        return act(self.ino, self.version)


class Residency:
    """`gone(parent, name, ino)` is called for each name that eviction takes away."""

    def __init__(
        self,
        catalog: Catalog,
        ram: RamTier | None,
        nvme: NvmeTier | None,
        *,
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
        self.sizes = ExpectedSizes()
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.open: dict[int, OpenObject] = {}
        # Inodes whose backing is being opened or changed, with who waits for that.
        self.busy: dict[int, trio.lowlevel.ParkingLot | None] = {}
        self.ram_only = LeastRecentlyUsed()
        self.ram_clean = LeastRecentlyUsed()
        self.on_nvme = LeastRecentlyUsed()
        self.clean_bytes = self.clean_objects = 0  # in RAM, but on NVMe as well
        self.staging: dict[int, OpenObject] = {}  # objects with writers
        self.writing = trio.Event()  # set while there are any
        self.limbo: OrderedDict[int, tuple[Tier, int]] = OrderedDict()  # inode -> where, bytes
        self.trash: list[Trash] = []
        self.late: list[Callable[[], Awaitable[None]]] = []  # what the catalog has refused
        self.work = trio.Event()  # something for the movers, or for whoever empties the trash
        self.census_done = trio.Event()
        self._census_step = trio.Event()
        self._noted = -1
        self.counted_to = 0  # inode number that the census has reached
        self.first_new = 0  # inode numbers from here on were made in this session
        self._counted_early: set[int] = set()

    def wake(self) -> None:
        self.work.set()

    def stage(self, held: OpenObject) -> None:
        self.staging[held.inode.ino] = held
        self.writing.set()

    # The inode's lock; core/objects.py says who may hold it

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

    def set_holder(self, inode: Inode, tier: Tier, *, holds: bool) -> None:
        if self.ram is not None and tier is self.ram:
            inode.ram_epoch = self.ram.epoch if holds else 0
        else:
            inode.on_nvme = holds

    def is_lost(self, inode: Inode) -> bool:
        """Whether nothing holds the bytes of this file any more: the RAM tier went away."""
        return inode.is_file and inode.ino not in self.open and not self.holders(inode)

    # Accounts

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
            self._count(inode)
            hour = inode.atime_ns // HOUR
            holders = self.holders(inode)
            for tier in holders:
                tier.uncounted = max(0, tier.uncounted - tier.cost(inode.blocks))
                if tier is self.nvme:
                    self.on_nvme.add_past(inode.ino, hour)
                else:
                    self._list_of(tier, holders).touch(inode.ino)
        self.counted_to = inode.ino

    def estimate(self) -> None:
        """Say what the tiers hold before that is counted. Call with reservations made."""
        if self.ram is not None:
            self.ram.estimate()
        if self.nvme is not None:
            noted = self.catalog.fact(NVME_USED)
            self.nvme.uncounted = self.nvme.capacity if noted is None else int(noted)

    def note_used(self) -> None:
        """Leave an estimate for the next daemon, where the catalog takes it."""
        if self.nvme is None or not self.census_done.is_set():
            return
        used = self.nvme.used + self.nvme.reserved
        if used == self._noted:
            return
        try:
            with self.catalog.batch() as batch:
                batch.set_fact(NVME_USED, str(used))
            self._noted = used
        except CatalogError as error:
            log.debug("what NVMe holds is not noted: %s", error)  # who changes names says it louder

    def end_census_step(self) -> None:
        """Some more is counted: who waits for room may look again."""
        step, self._census_step = self._census_step, trio.Event()
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
            tier.used += sign * tier.cost(inode.blocks)
            tier.objects += sign
        if len(holders) > 1:
            self.clean_bytes += sign * Tier.cost(inode.blocks)
            self.clean_objects += sign

    def _list_of(self, tier: Tier, holders: list[Tier]) -> LeastRecentlyUsed:
        if tier is self.nvme:
            return self.on_nvme
        return self.ram_clean if len(holders) > 1 else self.ram_only

    def admit(self, inode: Inode) -> None:
        """A sealed object without writers enters the accounts, as the youngest."""
        if not self._counted(inode.ino):
            self._counted_early.add(inode.ino)
        self._count(inode)
        self.touch(inode)
        self.wake()

    def touch(self, inode: Inode) -> None:
        holders = self.holders(inode)
        for tier in holders:
            self._list_of(tier, holders).touch(inode.ino)

    def dismiss(self, inode: Inode) -> None:
        """An object leaves the accounts: it is rewritten, unlinked or dropped."""
        for listed in (self.ram_only, self.ram_clean, self.on_nvme):
            listed.discard(inode.ino)
        if self._counted(inode.ino):
            self._count(inode, -1)
        else:
            self._counted_early.add(inode.ino)  # and the census will pass it by

    def throw_away(self, tier: Tier, ino: int, version: int, *, keep: bool = False) -> None:
        """Unlink a backing file: at once where a writer may need the room in this very moment.

        In RAM that costs 0.13 to 0.34 ms for 32 MiB; on a disk it may wait for its journal.
        keep: put it into quarantine instead.
        """
        trash = Trash(tier, ino, version, keep)
        if tier.slow:
            self.trash.append(trash)
            self.wake()
        else:
            trash.remove()

    async def retry(self) -> None:
        """Do what the catalog has refused; what it refuses again is there again."""
        late, self.late = self.late, []
        for again in late:
            await again()

    # Changes of a sealed object that no writer has

    def lose(self, inode: Inode, tier: Tier, *, quarantine: bool = False) -> None:
        """A copy is no more, or not what it should be. The last one takes the object along."""
        current = self.catalog.inode(inode.ino)
        if current is None or current.version != inode.version:
            return
        if len(self.holders(current)) > 1:
            self.drop_copy(current, tier, quarantine=quarantine)
        else:
            self.drop(current, "lost", quarantine=quarantine)

    def add_copy(self, inode: Inode, tier: Tier, blocks: int, digest: bytes) -> None:
        """A mover has made a copy. What the caller had reserved for it, the caller gives back."""
        before = inode.copy()
        self.set_holder(inode, tier, holds=True)
        inode.digest = digest
        inode.blocks = max(inode.blocks, blocks)
        with self.catalog.batch() as batch:
            batch.put(inode)
            batch.then(partial(self.dismiss, before))
            batch.then(partial(self.admit, inode))

    def drop_copy(self, inode: Inode, tier: Tier, *, quarantine: bool = False) -> None:
        """One copy goes, another one stays."""
        before = inode.copy()
        self.set_holder(inode, tier, holds=False)
        with self.catalog.batch() as batch:
            batch.put(inode)
            batch.then(partial(self.dismiss, before))
            batch.then(partial(self.throw_away, tier, inode.ino, inode.version, keep=quarantine))
            batch.then(partial(self.admit, inode))

    def drop(self, inode: Inode, reason: str, *, quarantine: bool = False) -> None:
        """The object goes with all its names; kernel entries are invalidated."""
        names: list[tuple[int, Dentry]] = []
        with self.catalog.batch() as batch:
            for parent, cookie in inode.links:
                entry = self.catalog.dentry(parent, cookie)
                if entry is not None:
                    batch.unlink(parent, entry)
                    names.append((parent, entry))
            self.forget(inode, batch, quarantine=quarantine)
        self.counters["dropped"] += 1
        self.counters[f"dropped_{reason}"] += 1
        for parent, entry in names:
            self.gone(parent, entry.name, inode.ino)

    def forget(
        self,
        inode: Inode,
        batch: Batch,
        *,
        accounted: bool | None = None,
        quarantine: bool = False,
    ) -> None:
        """Remove the record and all copies of an inode; its names are the caller's."""
        batch.delete(inode)
        batch.mark_finished(inode.ino)
        if inode.is_file:
            known = inode.sealed if accounted is None else accounted
            batch.then(partial(self._forgotten, inode, accounted=known, quarantine=quarantine))

    def _forgotten(self, inode: Inode, *, accounted: bool, quarantine: bool) -> None:
        if inode.ino in self.limbo:
            keep, cost = self.limbo.pop(inode.ino)
            keep.reserved -= cost
        elif accounted:
            self.dismiss(inode)
        for tier in self.holders(inode):
            self.throw_away(tier, inode.ino, inode.version, keep=quarantine)

    # Unlinked, but perhaps about to be opened

    def to_limbo(self, inode: Inode, batch: Batch) -> None:
        """The last name of a file that nobody has open is gone; keep its fastest copy a while."""
        before = inode.copy()
        _, *others = self.holders(inode)
        for tier in others:
            self.set_holder(inode, tier, holds=False)
        batch.put(inode)
        batch.mark_unfinished(inode.ino)
        batch.then(partial(self._in_limbo, before))

    def _in_limbo(self, inode: Inode) -> None:
        self.dismiss(inode)
        for tier in self.holders(inode)[1:]:
            self.throw_away(tier, inode.ino, inode.version)
        self.enter_limbo(inode)

    def enter_limbo(self, inode: Inode) -> None:
        """Reserve what its fastest copy takes, until the kernel has forgotten it."""
        keep = self.holders(inode)[0]
        cost = keep.cost(inode.blocks)
        keep.reserved += cost
        self.limbo[inode.ino] = keep, cost

    def from_limbo(self, ino: int) -> int:
        """It is opened after all: its room, in bytes, is the caller's to give back."""
        return self.limbo.pop(ino)[1] if ino in self.limbo else 0

    def purge(self, ino: int) -> None:
        """The kernel has forgotten it, or its room is needed."""
        inode = self.catalog.inode(ino) if ino in self.limbo and ino not in self.busy else None
        if inode is not None:
            with self.catalog.batch() as batch:
                self.forget(inode, batch)

    def _purge_one(self, tier: Tier) -> bool:
        for ino, (where, _) in self.limbo.items():
            if where is tier and ino not in self.busy:
                self.purge(ino)
                return True
        return False

    # Room

    async def choose(self, parent: int, name: bytes) -> tuple[Tier, int]:
        """The tier for a new file, with the bytes reserved there. Raises NoSpaceError, TierError.

        A file of unknown size begins on NVMe: one that outgrows the RAM tier would get ENOSPC from
        the kernel, where kvfs cannot help it any more.
        """
        expected = self.sizes.expect(parent, name)
        wanted = UNKNOWN_SIZE if expected is None else max(Tier.cost(0), expected)
        while True:
            order = self.tiers if expected is not None else self.tiers[::-1]
            order = [tier for tier in order if not tier.health.down]
            if not order:
                raise TierError(
                    "no tier takes a new file: " + ", ".join(t.health.why for t in self.tiers)
                )
            for tier in order:
                least = min(wanted, tier.capacity // 4) if expected is None else wanted
                if self.reserve(tier, least):
                    return tier, least
            if self.census_done.is_set():
                break
            await self._census_step.wait()  # the estimate leaves no room, but what is counted may
        if self.ram is not None and self._lose_for(wanted):
            return self.ram, wanted
        for tier in order:  # others may expect too much as well: begin, and see how it grows
            if self.reserve(tier, Tier.cost(0)):
                return tier, Tier.cost(0)
        if self.ram is not None and self._lose_for(Tier.cost(0)):
            return self.ram, Tier.cost(0)
        raise NoSpaceError(
            f"no tier has room for {wanted} bytes, and nothing more may be dropped: "
            + ", ".join(f"{t.name} {t.used} used + {t.reserved} reserved" for t in self.tiers)
        )

    def reserve(self, tier: Tier, wanted: int, twins: Twins = "uncopy") -> bool:
        """Set room aside, dropping what was used longest ago. Nothing of RAM alone is lost.

        `twins` says what may happen to objects on NVMe that RAM holds as well. A create throws
        their copy on NVMe away. A demotion spares them, or it would have to make that copy again
        for ever; one that empties RAM loses them, since what it brings is younger.
        """
        spare = self.headroom if tier is self.ram else 0
        if isinstance(tier, NvmeTier) and tier.shortage and not tier.health.down:
            self._measure(tier)
        while wanted + spare > tier.capacity - tier.reserved:
            if not self._purge_one(tier):
                return False
        while tier.free - spare < wanted:
            if not self._reclaim(tier, twins):
                return False
        tier.reserved += wanted
        return True

    @staticmethod
    def _measure(nvme: NvmeTier) -> None:
        """While the device is short of room, each reservation looks anew: others take it, too."""
        try:
            nvme.measure()
        except OSError as error:
            nvme.failed("statfs", 0, error)

    def _lose_for(self, wanted: int) -> bool:
        """No tier below takes what RAM holds: lose the oldest of it."""
        assert self.ram is not None
        if wanted + self.headroom > self.ram.capacity - self.ram.reserved:
            return False
        while not self.reserve(self.ram, wanted):
            if not self._drop_from_ram():
                return False
        return True

    @property
    def headroom(self) -> int:
        """Bytes of RAM that are kept free for files that outgrow their reservation."""
        if self.ram is None:
            return 0
        return self.ram.capacity // HEADROOM

    def make_room(self, tier: Tier) -> None:
        """Writers have outgrown their reservations, or the device has shrunk: drop until it fits.

        In RAM this loses objects that no other tier holds only when memory itself runs out: a
        writer that gets ENOSPC from the kernel is worse off. But not for a file that is on its way
        to be larger than RAM: it gets ENOSPC whatever is lost.
        """
        if tier.health.down:  # its accounts are no guide, and nothing would be won
            return
        least = self.headroom // 2 if tier is self.ram else 0
        while tier.free < least and self._reclaim(tier):
            pass
        if tier is self.ram:
            largest = max((held.reserved for held in self.staging.values()), default=0)
            hopeless = largest > self.ram.capacity  # it has half as much, and asks for it again
            while tier.left() < least and (
                self._reclaim(tier) or (not hopeless and self._drop_from_ram())
            ):
                pass

    def _reclaim(self, tier: Tier, twins: Twins = "uncopy") -> bool:
        """Make some room at once; False if that would lose something that fits elsewhere."""
        if self._purge_one(tier):
            return True
        if tier is self.ram:
            if self.nvme is None:
                return self._drop_from_ram()
            if self.nvme.health.down:  # its copies are no reason to give up the only good one
                return False
            return self._evict(self.ram_clean, tier, "uncopy")
        return self._evict(self.on_nvme, tier, twins)

    def _drop_from_ram(self) -> bool:
        """Lose the oldest that RAM alone can produce: all of it while NVMe is down.

        What NVMe has as well keeps its name then, and is back when NVMe is.
        """
        assert self.ram is not None
        if self.nvme is not None and self.nvme.health.down:
            twin, alone = (self._next(listed) for listed in (self.ram_clean, self.ram_only))
            if twin is not None and (alone is None or twin.atime_ns <= alone.atime_ns):
                return self._evict(self.ram_clean, self.ram, "uncopy")
        return self._evict(self.ram_only, self.ram, "lose")

    def _next(self, listed: LeastRecentlyUsed) -> Inode | None:
        """What a list of RAM's would give up next; it stays the next."""
        assert self.ram is not None
        inode = self.victim(listed, self.ram)
        if inode is not None:
            listed.put_back(inode.ino)
        return inode

    def _evict(self, listed: LeastRecentlyUsed, tier: Tier, twins: Twins) -> bool:
        """Drop the oldest object of a list, or only its copy; False if there is none."""
        inode = self.victim(listed, tier, alone=twins == "spare")
        if inode is None:
            return False
        try:
            if len(self.holders(inode)) > 1 and twins == "uncopy":
                self.drop_copy(inode, tier)
            else:
                self.drop(inode, "evicted")
        except CatalogError:
            listed.touch(inode.ino)  # it stays; who is tried next is another one
            raise
        return True

    def victim(self, listed: LeastRecentlyUsed, tier: Tier, *, alone: bool = False) -> Inode | None:
        """Take the oldest object of a list that is really there and not in use.

        alone: only one that no other tier holds.
        """
        in_use = []
        found = None
        while (ino := listed.take_oldest()) is not None:
            if ino in self.open or ino in self.busy:
                in_use.append(ino)
                continue
            inode = self.catalog.inode(ino)
            if inode is None or not inode.sealed or tier not in self.holders(inode):
                continue
            holders = self.holders(inode)
            if self._list_of(tier, holders) is not listed:
                continue
            if alone and len(holders) > 1:
                in_use.append(ino)
                continue
            found = inode
            break
        for ino in in_use:
            listed.touch(ino)
        return found

    @property
    def objects(self) -> int:
        """Files, each counted once."""
        return sum(tier.objects for tier in self.tiers) - self.clean_objects + len(self.staging)

    @property
    def reclaimable(self) -> int:
        """Bytes of RAM that a create can have at once: free, or on NVMe as well."""
        if self.ram is None:
            return 0
        clean = 0 if self.nvme is not None and self.nvme.health.down else self.clean_bytes
        return max(0, self.ram.free - self.headroom) + clean
