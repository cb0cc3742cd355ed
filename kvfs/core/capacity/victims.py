"""Victims: kvfs chooses the objects that go first when room is needed, and evicts them.

Contract: a search of an order of eviction finds a group that may go completely, or none. Groups
that the search passes keep their places. The `Ledger` removes the victims, record first, and tells
the kernel their names. If the catalog refuses a removal, the victim stays in its order.

Invariants. No await can break them, since all methods are synchronous:
- An object that is open, being written, or has a locked inode is no victim. The rest of its group
  is no victim either, nor are the blocks before it in its prompt, except for very long prompts.
- An object that the bucket should have, and lacks, is no victim. The exception (`losing_dirty`) is
  a bucket that is down while no other victim is left.
- A copy of another node's object (`core/namespaces/guests`) goes before the others of its
  namespace.
- An object that the bucket has leaves only the local tiers, and keeps its names.
- In a prefix namespace kvfs drops no block that other blocks follow. kvfs holds the block back
  until they are gone, or until it has another copy.
- For room that no program waits for (`gently`), an object goes only if the bucket or another tier
  has it, and if it was neither used nor fetched ahead lately.
- kvfs takes room from the namespace with the greatest rank (`urgency`): dropped namespaces first,
  then those beyond their soft quota, then by bytes divided by `weight`. The policy of this
  namespace says which objects go. Unevictable and pinned objects do not go, nor do those of
  `eviction=never`.
- For the room of one namespace (`on_behalf`), kvfs takes room only from namespaces whose rank is at
  least that of this namespace. The namespace itself is one of them.
Not for the bytes and the tier to free: `Room`, `Quota`.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from operator import attrgetter
from typing import Literal

import trio

from kvfs.catalog import Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.namespaces.drops import Reason
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.order import Order, Victim, key_of, last_use
from kvfs.errors import CatalogError
from kvfs.tiers import Tier

Twins = Literal["evict_copy", "spare", "lose"]
OrderOf = Callable[[Namespace], Order]

# Groups that keep their places if a search passes them. A policy knows the places of its last 64.
PASSED_MAX = 32
# Seconds after a use in which an object does not go for room that no program waits for. A noted
# time of use may be a minute old (`Attributes`). An object used within the last minute is likely to
# be used again.
LATELY = 120
FETCHED_AHEAD_MAX = 65536  # objects; kvfs forgets older ones

quota_order: OrderOf = attrgetter("quota_order")
ram_only: OrderOf = attrgetter("ram_only")
ram_spare: OrderOf = attrgetter("ram_spare")
ram_clean: OrderOf = attrgetter("ram_clean")
on_nvme: OrderOf = attrgetter("on_nvme")


class Victims:
    """The victims of all namespaces. `Room.reserve` explains `twins`."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._lose_dirty = False
        self._gentle = False
        self._keep_names = False
        self._behalf: Namespace | None = None
        self._fetched_ahead: OrderedDict[int, float] = (
            OrderedDict()
        )  # inode -> when, if fetched ahead

    @contextmanager
    def losing_dirty(self) -> Iterator[None]:
        """Let dirty objects go, too: the bucket is down, and no other victim is left.

        The block of this and the following context managers must not await.
        """
        self._lose_dirty = True
        try:
            yield
        finally:
            self._lose_dirty = False

    @contextmanager
    def gently(self) -> Iterator[None]:
        """Search only the first groups of each namespace, for room that no program waits for."""
        self._gentle = True
        try:
            yield
        finally:
            self._gentle = False

    @contextmanager
    def keeping_names(self) -> Iterator[None]:
        """Let only objects go that another tier or the bucket has as well."""
        self._keep_names = True
        try:
            yield
        finally:
            self._keep_names = False

    @contextmanager
    def on_behalf(self, space: Namespace) -> Iterator[None]:
        """Evict for a namespace: spare the namespaces that have less beyond their shares."""
        before, self._behalf = self._behalf, space
        try:
            yield
        finally:
            self._behalf = before

    def note_fetched_ahead(self, ino: int) -> None:
        """Note that kvfs fetches an object ahead: no program may have used it yet."""
        self._fetched_ahead.pop(ino, None)
        self._fetched_ahead[ino] = trio.current_time()
        if len(self._fetched_ahead) > FETCHED_AHEAD_MAX:
            self._fetched_ahead.popitem(last=False)

    def by_urgency(self, among: Iterable[Namespace] | None = None) -> list[Namespace]:
        """The namespaces of `among`, or all, in the order in which they give."""
        if among is None:  # dropped namespaces go anyway
            dropped = self.ledger.namespaces.dropped
            among = chain(dropped.values(), self.ledger.namespaces)
        if self._behalf is not None:
            least = self.urgency(self._behalf)
            among = (one for one in among if self.urgency(one) >= least)
        return sorted(among, key=self.urgency, reverse=True)

    def urgency(self, space: Namespace) -> tuple[bool, bool, float]:
        """The rank of a namespace. The namespace with the greatest rank gives first."""
        return space.ino in self.ledger.namespaces.dropped, *space.urgency

    @property
    def least_urgency(self) -> tuple[bool, bool, float]:
        """The rank from which on namespaces give at the moment."""
        return (False, False, 0.0) if self._behalf is None else self.urgency(self._behalf)

    def any_has_victim(
        self,
        which: OrderOf,
        tier: Tier | None,
        twins: Twins,
        among: Iterable[Namespace] | None = None,
    ) -> bool:
        """Whether one of these namespaces has a victim in the order `which`. It stays there."""
        return any(self.has_victim(which(space), tier, twins) for space in self.by_urgency(among))

    def first_on_nvme(self, space: Namespace) -> Inode | None:
        """The object that NVMe would lose first for a copy of a namespace's object; or None."""
        nvme = self.ledger.tiers.nvme
        with self.on_behalf(space):
            found = (self.next_of(one.on_nvme, nvme, "spare") for one in self.by_urgency())
            return next(filter(None, found), None)

    def nvme_is_newer(self, space: Namespace) -> bool:
        """Whether NVMe would lose an object for this namespace that RAM's oldest is older than.

        Both objects are of one namespace, and only RAM has the older one.
        """
        newer = self.first_on_nvme(space)
        if newer is None:
            return False
        loser = self.ledger.namespaces.of(newer)
        older = self.next_of(loser.ram_only, self.ledger.tiers.ram)
        return older is not None and last_use(older) < last_use(newer)

    def has_victim(self, order: Order, tier: Tier | None, twins: Twins) -> bool:
        """Whether an order has a victim. The victim stays in its place."""
        return len(order) > 0 and self.next_of(order, tier, twins, leaves=True) is not None

    def next_of(
        self, order: Order, tier: Tier | None, twins: Twins = "lose", *, leaves: bool = False
    ) -> Inode | None:
        """The first object of an order's next victim, or None. The victim stays in its place."""
        found = self._victim(order, tier, twins, leaves=leaves)
        if found is None:
            return None
        order.put_back(found[0])
        return found[1][0]

    def evict(
        self, which: OrderOf, tier: Tier, twins: Twins, among: Iterable[Namespace] | None = None
    ) -> bool:
        """Evict the first victim, or only its copies; False if there is none.

        which: the order of each namespace. twins: see `Room.reserve`. Raises CatalogError.
        """
        return any(
            self.evict_of(space, which, tier, twins)
            for space in self.by_urgency(among)
            if len(which(space))
        )

    def evict_of(
        self,
        namespace: Namespace,
        which: OrderOf,
        tier: Tier | None,
        twins: Twins,
        reason: Reason = "evicted",
    ) -> bool:
        """Evict a victim of one namespace, as `evict`. tier: None drops all copies of an object.

        reason: counted for what is dropped. While the tier shrinks, it is "shrunk" for "evicted".
        """
        accounts, shrunk = self.ledger.accounts, None
        if tier is not None and reason == "evicted" and accounts.shrinks_for(tier):
            shrunk = accounts.shrunk
        order = which(namespace)
        found = self._guest(namespace, order, tier, twins) or self._victim(order, tier, twins)
        if found is None:
            return False
        for at, inode in enumerate(found[1]):
            try:
                if tier and len(self.ledger.tiers.holders(inode)) > 1 and twins == "evict_copy":
                    self.ledger.records.remove_copy(inode, tier)
                elif self.ledger.catalog.inode(inode.ino) is not None:  # not with its group
                    dropped = self.ledger.removals.evict(inode, shrunk.reason if shrunk else reason)
                    if shrunk:
                        for one in dropped:
                            shrunk.add(one)
            except CatalogError:
                for left in found[1][at:]:
                    order.touch(left)  # it stays; the next try takes another victim
                raise
        return True

    def _guest(
        self, space: Namespace, order: Order, tier: Tier | None, twins: Twins
    ) -> tuple[Victim, list[Inode]] | None:
        """The oldest guest in an order that may go; None if there is none among the oldest ones."""
        if space.guests is None:
            return None
        holders = self.ledger.tiers.holders
        where = None if tier is None else tier.name
        for ino in list(islice(space.guests.of(where), PASSED_MAX)):
            inode = self._resident(ino, order, tier)
            if inode is None:
                there = self.ledger.table.inode(ino)
                if tier and there and tier not in holders(there) and holders(there):
                    space.guests.moved(ino, holders(there)[0].name)
                elif there is None:
                    space.guests.gone(ino)
                continue
            if self._in_use(inode) or not self._may_go([inode], tier, twins):
                continue
            if self._is_followed([inode], tier, twins) or self._has_entries([inode], tier, twins):
                continue
            if not self._gentle or self._is_long_unused([inode], tier, twins):
                order.discard(inode)
                return Victim(0, (ino,)), [inode]
        return None

    def _victim(
        self, order: Order, tier: Tier | None, twins: Twins, *, leaves: bool = True
    ) -> tuple[Victim, list[Inode]] | None:
        """Take the first group whose objects all exist and may go; None if there is none.

        A block that a block in use builds on counts as in use, too. leaves: take no group whose
        drop would leave blocks that follow it.
        """
        passed: list[tuple[Victim, list[Inode]]] = []
        before: set[int] = set()  # keys of blocks that a block in use needs
        found = None
        while (victim := order.take(self._last_use)) is not None:
            inodes = [inode for ino in victim.inos if (inode := self._resident(ino, order, tier))]
            if not inodes or (not victim.key and inodes[0] in order):
                continue  # gone since, or touched since
            useful = len(passed) < PASSED_MAX and key_of(inodes[0]) in before
            if useful or any(map(self._in_use, inodes)):
                before.update(inode.parent_key for inode in inodes)
            elif self._may_go(inodes, tier, twins):
                if leaves and self._is_followed(inodes, tier, twins):
                    order.hold(victim, key_of(inodes[0]))
                    continue
                if leaves and self._has_entries(inodes, tier, twins):
                    passed.append((victim, inodes))
                    continue
                if not self._gentle or self._is_long_unused(inodes, tier, twins):
                    found = victim, inodes
                else:
                    passed.append((victim, inodes))
                break
            passed.append((victim, inodes))
            if self._gentle and len(passed) == PASSED_MAX:
                break
        self._put_back(order, passed)
        return found

    def _may_go(self, inodes: list[Inode], tier: Tier | None, twins: Twins) -> bool:
        """Whether the group's copies in other tiers and the bucket allow that it goes."""
        ledger = self.ledger
        twin = any(len(ledger.tiers.holders(inode)) > 1 for inode in inodes)
        if twin and twins == "spare":
            return False
        if self._keep_names and any(self._would_drop(inode, tier, twins) for inode in inodes):
            return False
        if self._lose_dirty or (tier and twin and twins == "evict_copy"):
            return True
        return not any(inode.ino in ledger.dirty and not inode.in_bucket for inode in inodes)

    def _would_drop(self, inode: Inode, tier: Tier | None, twins: Twins) -> bool:
        """Whether an eviction would drop an object with its names."""
        if inode.in_bucket:
            return False
        return not (tier and twins == "evict_copy" and len(self.ledger.tiers.holders(inode)) > 1)

    def _is_followed(self, inodes: list[Inode], tier: Tier | None, twins: Twins) -> bool:
        """Whether an eviction would drop a block that other, sealed blocks follow."""
        blocks = self.ledger.namespaces.of(inodes[0]).blocks
        if blocks is None or not any(self._would_drop(inode, tier, twins) for inode in inodes):
            return False
        return blocks.children(key_of(inodes[0])) > 0

    def _has_entries(self, inodes: list[Inode], tier: Tier | None, twins: Twins) -> bool:
        """Whether an eviction would drop a block whose directory has entries."""
        inode, ledger = inodes[0], self.ledger
        if ledger.namespaces.of(inode).blocks is None:
            return False
        if not any(self._would_drop(one, tier, twins) for one in inodes):
            return False
        return ledger.prefixes.has_entries(inode)

    @staticmethod
    def _put_back(order: Order, passed: list[tuple[Victim, list[Inode]]]) -> None:
        """Put passed groups back in place, or if they are many, at the young end.

        So the next search does not pass them again.
        """
        for victim, inodes in reversed(passed):
            if len(passed) <= PASSED_MAX:
                order.put_back(Victim(victim.key, tuple(inode.ino for inode in inodes)))
                continue
            for inode in inodes:
                order.touch(inode)

    def _resident(self, ino: int, order: Order, tier: Tier | None) -> Inode | None:
        """The object if it is still in this order, else None. tier: None for `quota_order`."""
        ledger = self.ledger
        inode = ledger.table.inode(ino)
        if inode is None or not inode.sealed or ino in ledger.table.staging:
            return None
        holders, namespace = ledger.tiers.holders(inode), ledger.namespaces.of(inode)
        if tier is None:
            return (
                inode
                if holders and namespace.quota_order is order and not inode.unevictable
                else None
            )
        if tier not in holders:
            return None
        return inode if namespace.order(inode, tier, holders) is order else None

    def _last_use(self, ino: int) -> int:
        inode = self.ledger.table.inode(ino)
        return 0 if inode is None else last_use(inode)

    def _in_use(self, inode: Inode) -> bool:
        return inode.ino in self.ledger.table.open or inode.ino in self.ledger.table.busy

    def _is_long_unused(self, inodes: list[Inode], tier: Tier | None, twins: Twins) -> bool:
        """Whether a group may go for room that no program waits for."""
        since, moment = time.time_ns() - LATELY * 10**9, trio.current_time() - LATELY
        return all(
            max(inode.atime_ns, inode.ctime_ns) < since
            and self._fetched_ahead.get(inode.ino, -math.inf) < moment
            and (
                inode.in_bucket
                or (tier is self.ledger.tiers.ram and twins == "evict_copy" and inode.on_nvme)
            )
            for inode in inodes
        )
