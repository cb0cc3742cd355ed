"""Free space: the figures of statfs(2) for one namespace.

Contract: pure, without I/O and without evictions. *Used* is what is stored: sealed objects, files
that are being written, and files without a name. *Available* is what writers of the namespace can
get now. Objects that kvfs may evict for them count as available. These do not:

- objects of namespaces with `eviction=never` or `pin=on`, and unevictable files;
- objects that the bucket should have, and lacks;
- reserved bytes, and the headroom of RAM;
- bytes that other namespaces need not give (`Victims`), if the namespace can give none itself;
- bytes beyond its hard quota. A namespace with a hard quota has the size of that quota.

The figures are estimates where objects have copies in two tiers. A namespace that can give nothing
may get more than its share: a demotion makes room on NVMe without regard to shares. Not for
deciding about a write (`Placement`, `Quota`).
"""

from typing import NamedTuple

from kvfs.core.capacity.room import Room
from kvfs.core.namespaces.namespace import Namespace
from kvfs.tiers import Tier

FILES_MAX = 1 << 40
STEPS = 24  # of a bisection: the result is exact to a part in 2**24


class FreeSpace(NamedTuple):
    """Bytes and files of one namespace."""

    size: int
    used: int
    available: int
    files: int
    files_available: int


class Holder(NamedTuple):
    """A namespace that holds room which writers cannot get, in bytes."""

    space: Namespace
    kept: int


def of_namespace(room: Room, space: Namespace) -> FreeSpace:
    """The free space for writers of a namespace."""
    ledger, settings = room.ledger, space.settings
    local = ledger.tiers.local
    tiers = [tier for tier in local if tier.works and space.takes(tier)]
    # With pin=on an object that NVMe has stays in RAM as well: the larger tier decides.
    apart = [[tier] for tier in tiers] if settings.pin else [tiers]
    available = max([0, *(_available(room, space, some) for some in apart)])
    files, files_left = FILES_MAX, FILES_MAX
    if settings.quota_objects:
        files = settings.quota_objects
        files_left = max(0, files - (space.objects if space.gives_nothing else space.kept_objects))
    if not settings.quota_hard:
        size = sum(tier.configured_capacity for tier in local)
        used = sum(tier.used + ledger.orphans.bytes_in(tier) for tier in local)
        used += sum(max(held.staged, held.leaving) for held in ledger.table.staging.values())
        return FreeSpace(size, min(size, used), min(size, available), files, files_left)
    held = space.kept(local) + space.staged + space.unlinked
    left = max(0, settings.quota_hard - held)
    used = min(settings.quota_hard, space.counted)
    return FreeSpace(settings.quota_hard, used, min(available, left), files, files_left)


def holders(room: Room, tiers: list[Tier]) -> list[Holder]:
    """The namespaces that keep bytes in these tiers, those with most first."""
    found = [Holder(space, space.kept(tiers)) for space in room.ledger.namespaces.everything()]
    return sorted((one for one in found if one.kept), key=lambda one: one.kept, reverse=True)


def _available(room: Room, space: Namespace, tiers: list[Tier]) -> int:
    ledger = room.ledger
    capacity = sum(tier.capacity - tier.reserved for tier in tiers)
    if room.ram in tiers:
        capacity -= room.headroom
    kept = sum(one.kept(tiers) for one in ledger.namespaces.everything())
    most = capacity - kept - ledger.dirty.bytes
    if not space.gives_nothing:
        return most
    twins = space.doubled_bytes if len(tiers) > 1 else 0
    free = capacity - sum(tier.used + tier.uncounted for tier in tiers)
    return min(most, _taken_from_others(room, space, tiers, free + twins))


def _taken_from_others(room: Room, space: Namespace, tiers: list[Tier], free: int) -> int:
    """The bytes that a namespace without victims of its own gets, `free` ones among them.

    It gets room from others until their ranks are less than its own: see `Namespace.urgency`.
    """
    others = [
        (one, one.held_in(tiers) - one.kept(tiers) + (one.doubled_bytes if len(tiers) > 1 else 0))
        for one in room.ledger.namespaces
        if one is not space
    ]
    least, most = 0, max(0, free) + sum(evictable for _, evictable in others)
    for _ in range(STEPS):
        middle = (least + most + 1) // 2
        given = sum(
            min(evictable, _given(one, space, middle)) for one, evictable in others if evictable > 0
        )
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
