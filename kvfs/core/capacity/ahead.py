"""A look ahead: which objects would kvfs drop next, and how much room is free beyond that?

Contract: synchronous, and changes nothing. Each tier has a *margin*: a SHARE-th of it, MARGIN_MOST
at most. A tier with less free room than its margin has objects that go next: as many as fill the
rest of the margin. They are a guess. Each namespace has its part by its bytes that may be dropped
from the tier, though the one with the greatest rank gives first. An object that another tier has as
well is not dropped, so it is left out. At most LOOKED objects of a tier are looked at. Not for
choosing a victim (`Victims`), nor for what goes for a quota, a lifetime or a command.
"""

from collections.abc import Iterator
from itertools import chain

from kvfs.catalog import Inode
from kvfs.core.capacity.room import Room
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.order import Order
from kvfs.tiers import Tier

SHARE = 8
MARGIN_MOST = 1 << 30  # bytes
LOOKED = 256  # objects, some 3 ms


class Ahead:
    """Looks ahead in the local tiers of one mount."""

    def __init__(self, room: Room) -> None:
        self.ledger = room.ledger
        self._headroom = room

    @property
    def lowest(self) -> Tier:
        """The tier with the least rank."""
        return self.ledger.tiers.local[-1]

    @property
    def room(self) -> int:
        """Bytes that are free in the lowest tier, beyond its margin."""
        tier = self.lowest
        if not tier.works or not self.ledger.accounts.census_done.is_set():
            return 0
        return max(0, self._free(tier) - self._margin(tier))

    def takes(self, inode: Inode, cost: int) -> bool:
        """Whether a copy of an object fits the lowest tier's room and its namespace's quota."""
        space = self.ledger.namespaces.of(inode)
        bytes_most, objects_most = space.settings.quota_hard, space.settings.quota_objects
        return (
            cost <= self.room
            and space.takes(self.lowest)
            and (not bytes_most or space.counted + cost <= bytes_most)
            and (not objects_most or space.objects < objects_most)
        )

    def next_to_go(self) -> list[Inode]:
        """The objects that would be dropped next, to keep the margins free."""
        found: list[Inode] = []
        if not self.ledger.accounts.census_done.is_set():
            return found
        for tier in self.ledger.tiers.local:
            missing = self._margin(tier) - self._free(tier)
            if missing > 0 and tier.works:
                found += self._of_tier(tier, missing)
        return found

    @staticmethod
    def _margin(tier: Tier) -> int:
        return min(tier.capacity // SHARE, MARGIN_MOST)

    def _free(self, tier: Tier) -> int:
        """Bytes that a tier has, or gets without dropping an object."""
        if tier is not self.ledger.tiers.ram:
            return tier.free
        free = tier.free - self._headroom.headroom
        if not self.ledger.tiers.nvme.works:
            return free
        spaces = self.ledger.namespaces
        return free + sum(0 if one.settings.pin else one.doubled_bytes for one in spaces)

    def _of_tier(self, tier: Tier, missing: int) -> list[Inode]:
        able = {one: self._droppable(one, tier) for one in self.ledger.namespaces}
        all_bytes = sum(able.values())
        found: list[Inode] = []
        for space, size in able.items():
            if size > 0:
                most = max(1, LOOKED * size // all_bytes)
                found += self._of_space(space, tier, missing * size / all_bytes, most)
        return found

    def _droppable(self, space: Namespace, tier: Tier) -> int:
        """The bytes of a tier that an eviction may drop from a namespace."""
        if space.gives_nothing:
            return 0
        if space.ram_only in self._orders(space, tier) or tier is self.ledger.tiers.nvme:
            return space.held[tier.name]
        return sum(space.refused.values())

    def _of_space(self, space: Namespace, tier: Tier, share: float, most: int) -> Iterator[Inode]:
        """Yield the objects that fill `share` bytes, of the first `most` in their orders."""
        seen: set[int] = set()
        for ino in self._in_order(space, tier):
            if len(seen) == most or share <= 0:
                return
            if ino in seen:
                continue
            seen.add(ino)
            inode = self.ledger.table.inode(ino)
            if inode is None or not inode.sealed or ino in self.ledger.table.staging:
                continue
            holders = self.ledger.tiers.holders(inode)
            if tier not in holders or not space.order(inode, tier, holders).evictable:
                continue
            share -= self.ledger.tiers.cost(inode, tier)
            if len(holders) == 1:
                yield inode

    def _in_order(self, space: Namespace, tier: Tier) -> Iterator[int]:
        orders = self._orders(space, tier)
        if orders and space.guests is not None:
            yield from space.guests.of(tier.name)
        yield from chain.from_iterable(order for order in orders if order.evictable)

    def _orders(self, space: Namespace, tier: Tier) -> list[Order]:
        """The orders from which an eviction drops objects, as in `Room`."""
        nvme = self.ledger.tiers.nvme
        if tier is nvme:
            return [space.on_nvme]
        if not nvme.works or not space.takes(nvme):
            return [space.ram_spare, space.ram_only]
        return [space.ram_spare]
