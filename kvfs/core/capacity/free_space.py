"""Free space: the figures of statfs(2) for one namespace.

Contract: pure, without I/O and without evictions. *Used* is what is stored: sealed objects, files
that are being written, and files without a name. *Available* is what writers of the namespace can
get now. Objects that kvfs may evict for them count as available. These do not:

- objects of namespaces with `eviction=never` or `pin=on`, and unevictable files;
- objects that programs have open, with and without a name;
- objects that the bucket should have, and lacks;
- reserved bytes, and the headroom of RAM;
- bytes that other namespaces need not give to one file of the namespace (`Victims`);
- bytes beyond its hard quota. A namespace with a hard quota has the size of that quota.

Files have a size and used ones only: FUSE has no field for the files that a writer can get.
The figures are estimates where objects have copies in two tiers. A namespace may get more than its
share: a demotion makes room on NVMe without regard to shares. Not for deciding about a write
(`Placement`, `Quota`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from kvfs.catalog import Inode
from kvfs.core.capacity.room import Room
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.namespaces.namespace import Namespace
from kvfs.tiers import Tier

FILES_MAX = 1 << 40  # the size of a namespace without a quota of objects
STEPS = 24  # of a bisection: the result is exact to a part in 2**24


class FreeSpace(NamedTuple):
    """Bytes and files of one namespace."""

    size: int
    used: int
    available: int
    files: int
    files_used: int


class Holder(NamedTuple):
    """Bytes of a namespace that a writer cannot get.

    why: "pin", "never" or "kept" (see `why_kept`), "open", "written" (by open writers), "gone"
    (unlinked files that processes have mapped), "spared" (the namespace gives room only after the
    writer's) or "twins" (copies that a demotion does not evict, because RAM has the objects too).
    """

    space: Namespace
    bytes: int
    why: str


class Opened:
    """Objects that kvfs would evict if no program had them open."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._copies: dict[Namespace, Counter[str]] = defaultdict(Counter)  # bytes by tier
        self.bytes: Counter[Namespace] = Counter()  # of these objects, each counted once
        for held in ledger.table.open.values():
            if held.accounted:
                self._count(held.inode)
        for inode in ledger.fast_opens.open_inodes():
            self._count(inode)

    def _count(self, inode: Inode) -> None:
        space, tiers = self.ledger.namespaces.of(inode), self.ledger.tiers
        holders = tiers.holders(inode)
        if space.settings.pin or not holders:
            return
        evictable = not space.gives_nothing and not inode.unevictable
        if evictable:
            self.bytes[space] += Tier.cost(inode.blocks)
        if not evictable or inode.ino in self.ledger.dirty:
            holders = holders[:-1]  # the copy in the lowest tier stays anyway: `Namespace.kept`
        for tier in holders:
            self._copies[space][tier.name] += tiers.cost(inode, tier)

    def copies(self, space: Namespace, tiers: Iterable[Tier]) -> int:
        """Bytes of a namespace's copies in some tiers."""
        return sum(self._copies[space][tier.name] for tier in tiers) if self._copies else 0


def of_namespace(room: Room, space: Namespace) -> FreeSpace:
    """The free space for writers of a namespace."""
    ledger, settings = room.ledger, space.settings
    local, opened = ledger.tiers.local, Opened(ledger)
    tiers = [tier for tier in local if tier.works and space.takes(tier)]
    # With pin=on an object that NVMe has stays in RAM as well: the larger tier decides.
    apart = [[tier] for tier in tiers] if settings.pin else [tiers]
    available = max([0, *(_available(room, space, some, opened) for some in apart)])
    files, files_used = FILES_MAX, ledger.accounts.objects
    if settings.quota_objects:
        writing = sum(held.space is space for held in ledger.table.staging.values())
        files = settings.quota_objects
        files_used = min(files, space.objects + writing)
    if not settings.quota_hard:
        size = sum(tier.configured_capacity for tier in local)
        used = sum(tier.used + ledger.orphans.bytes_in(tier) for tier in local)
        used += sum(max(held.staged, held.leaving) for held in ledger.table.staging.values())
        return FreeSpace(size, min(size, used), min(size, available), files, files_used)
    held = space.kept(local) + opened.bytes[space] + space.staged + space.unlinked
    left = max(0, settings.quota_hard - held)
    used = min(settings.quota_hard, space.counted)
    return FreeSpace(settings.quota_hard, used, min(available, left), files, files_used)


def why_kept(space: Namespace) -> str:
    """Why kvfs evicts no object of a namespace ("pin", "never"), or not all ("kept"); else ""."""
    if space.settings.pin:
        return "pin"
    if space.settings.eviction == "never":
        return "never"
    return "kept" if space.kept_objects else ""


def holders(
    room: Room,
    writer: Namespace | None,
    tiers: list[Tier],
    growing: OpenObject | None = None,
    *,
    demotes: bool = False,
) -> list[Holder]:
    """Return the bytes of these tiers that a writer cannot get, the most first.

    writer: its namespace; None for a write back, to which all namespaces give. growing: a file of
    the writer's namespace that does not count. demotes: the writer is a demotion to NVMe.
    """
    ledger, opened, urgency = room.ledger, Opened(room.ledger), room.victims.urgency
    written: Counter[Namespace] = Counter()
    for held in ledger.table.staging.values():
        if held.space is not None and held.tier in tiers and held is not growing:
            written[held.space] += held.staged
    found: list[Holder] = []
    for space in ledger.namespaces.everything():
        kept, in_use = space.kept(tiers), opened.copies(space, tiers)
        found += (
            Holder(space, kept, why_kept(space)),
            Holder(space, in_use, "open"),
            Holder(space, written[space], "written"),
            Holder(space, space.unlinked, "gone"),
        )
        rest = space.held_in(tiers) - kept - in_use
        if writer is not None and urgency(space) < urgency(writer):
            found.append(Holder(space, rest, "spared"))
        elif demotes:
            found.append(Holder(space, min(rest, space.doubled_bytes), "twins"))
    return sorted((one for one in found if one.bytes > 0), key=lambda one: one.bytes, reverse=True)


def _available(room: Room, space: Namespace, tiers: list[Tier], opened: Opened) -> int:
    ledger = room.ledger
    capacity = sum(tier.capacity - tier.reserved for tier in tiers)
    if room.ram in tiers:
        capacity -= room.headroom
    stays = sum(
        one.kept(tiers) + opened.copies(one, tiers) for one in ledger.namespaces.everything()
    )
    free = capacity - sum(tier.used for tier in tiers)
    if space.gives_nothing:  # else the estimate counts for what its namespaces give
        free -= sum(tier.uncounted for tier in tiers)
    most = capacity - stays - ledger.dirty.bytes
    return min(most, _for_one_file(room, space, tiers, opened, free))


def _for_one_file(
    room: Room, space: Namespace, tiers: list[Tier], opened: Opened, free: int
) -> int:
    """The bytes that one file of a namespace gets, `free` ones among them.

    The namespace gives all that it may. Others give until their ranks are less than its own: see
    `Namespace.urgency`. Copies in RAM of what NVMe has too go whatever the rank: see
    `Room.evict_copies`.
    """

    def evictable(one: Namespace) -> int:
        return max(0, one.held_in(tiers) - one.kept(tiers) - opened.copies(one, tiers))

    def in_both(one: Namespace) -> int:
        return one.doubled_bytes if len(tiers) > 1 and not one.settings.pin else 0

    own, spaces = evictable(space), room.ledger.namespaces
    free += own + sum(map(evictable, spaces.dropped.values())) + sum(map(in_both, spaces))
    free = max(0, free)
    others = [(one, evictable(one)) for one in spaces if one is not space]
    least, most = free, free + sum(bytes_ for _, bytes_ in others)
    for _ in range(STEPS):
        middle = (least + most + 1) // 2
        given = sum(min(bytes_, _given(one, space, middle - own)) for one, bytes_ in others)
        if middle <= free + given:
            least = middle
        else:
            most = middle
    return least


def _given(giver: Namespace, taker: Namespace, more: int) -> int:
    """The bytes that `giver` gives before `taker` has `more` bytes than now."""
    has = taker.counted + more
    equal = has * giver.settings.weight / taker.settings.weight
    soft, own_soft = giver.settings.quota_soft, taker.settings.quota_soft
    if 0 < own_soft < has:  # only those beyond their own soft quotas give
        down_to = max(soft, equal) if soft else giver.counted
    else:
        down_to = min(soft, equal) if soft else equal
    return max(0, int(giver.counted - down_to))
