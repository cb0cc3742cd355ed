"""Which objects go first when room is needed, and their going.

Contract: a search of an order ends with a group all of which may go, or with none; what it passed
by keeps its place. What is taken goes by `Ledger`, record first, with its names told to the
kernel; what the catalog refuses to let go is put back.

Invariants, none of which an await can break, since all of it is synchronous:
- What is open, being written, or behind an inode's lock is no victim, nor is the rest of its group.
  What comes before it in its prompt is none either, but for very long prompts.
- What the bucket lacks, and is to have, is no victim, but when nothing else is left and the bucket
  is down (`losing_dirty`). What the bucket has leaves its tiers only, and keeps its names.
- In a namespace of prefixes nothing is dropped that others follow: it is held back until they are
  gone, or it has another copy.
- For what nobody waits for (`gently`) only that goes which is in the bucket or another tier, and
  was not used lately, nor fetched ahead.
- Who gives is the namespace that has most beyond its share (`Namespace.urgency`), and what it
  gives is said by its policy. What is kept, pinned or never evicted is never given.
- On behalf of a namespace only those give that have as much beyond their shares, itself among them.
Not for how much is to go, nor from where: `Room`, `Quota`.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Literal

import trio

from kvfs.catalog import Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.order import Order, Victim, key_of
from kvfs.errors import CatalogError
from kvfs.tiers import Tier

Twins = Literal["uncopy", "spare", "lose"]
Which = Callable[[Namespace], Order]

PASSED_MAX = 32  # groups in use that keep their places in a search; a policy knows its last 64
# Seconds that room is not taken for what nobody waits for: noted times of use may be a minute old
# (`Attributes`), and what was used within the last minute is likely to be used again.
LATELY = 120
BROUGHT_MAX = 65536  # objects fetched ahead of which that is known

whole: Which = attrgetter("whole")
ram_only: Which = attrgetter("ram_only")
ram_spare: Which = attrgetter("ram_spare")
ram_clean: Which = attrgetter("ram_clean")
on_nvme: Which = attrgetter("on_nvme")


class Victims:
    """Of all namespaces. `twins`, everywhere, is as `Room.reserve` says."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._lose_dirty = False
        self._gentle = False
        self._keep_names = False
        self._behalf: Namespace | None = None
        self._brought: OrderedDict[int, float] = OrderedDict()  # inode -> when, if fetched ahead

    @contextmanager
    def losing_dirty(self) -> Iterator[None]:
        """Nothing else is left, and the bucket is down: what it lacks may go, too. No await."""
        self._lose_dirty = True
        try:
            yield
        finally:
            self._lose_dirty = False

    @contextmanager
    def gently(self) -> Iterator[None]:
        """Nobody waits for the room; of each namespace only what goes first is asked. No await."""
        self._gentle = True
        try:
            yield
        finally:
            self._gentle = False

    @contextmanager
    def keeping_names(self) -> Iterator[None]:
        """Only that goes which can be had again, from another tier or a bucket. No await."""
        self._keep_names = True
        try:
            yield
        finally:
            self._keep_names = False

    @contextmanager
    def on_behalf(self, space: Namespace) -> Iterator[None]:
        """Its file needs the room: nothing goes of who has less beyond its share. No await."""
        before, self._behalf = self._behalf, space
        try:
            yield
        finally:
            self._behalf = before

    def brought(self, ino: int) -> None:
        """It is fetched ahead: its time of use says nothing of how it is wanted."""
        self._brought.pop(ino, None)
        self._brought[ino] = trio.current_time()
        if len(self._brought) > BROUGHT_MAX:
            self._brought.popitem(last=False)

    def by_urgency(self, among: Iterable[Namespace] | None = None) -> list[Namespace]:
        """All namespaces, or these, in the order in which they give."""
        if among is None:  # what was dropped goes anyway
            dropped = self.ledger.namespaces.dropped
            among = chain(dropped.values(), self.ledger.namespaces)
        if self._behalf is not None:
            least = self.urgency(self._behalf)
            among = (one for one in among if self.urgency(one) >= least)
        return sorted(among, key=self.urgency, reverse=True)

    def urgency(self, space: Namespace) -> tuple[bool, bool, float]:
        """By which namespaces give, the greatest first."""
        return space.ino in self.ledger.namespaces.dropped, *space.urgency

    @property
    def least_urgency(self) -> tuple[bool, bool, float]:
        """Of those who give at the moment."""
        return (False, False, 0.0) if self._behalf is None else self.urgency(self._behalf)

    def any_of(
        self,
        which: Which,
        tier: Tier | None,
        twins: Twins,
        among: Iterable[Namespace] | None = None,
    ) -> bool:
        """Whether anything would go: it stays."""
        return any(self.may_go(which(space), tier, twins) for space in self.by_urgency(among))

    def may_go(self, order: Order, tier: Tier | None, twins: Twins) -> bool:
        """Whether an order would give up anything: it stays the next."""
        return len(order) > 0 and self.next_of(order, tier, twins, leaves=True) is not None

    def next_of(
        self, order: Order, tier: Tier | None, twins: Twins = "lose", *, leaves: bool = False
    ) -> Inode | None:
        """The first of what an order would give up next; it stays the next."""
        found = self._victim(order, tier, twins, leaves=leaves)
        if found is None:
            return None
        order.put_back(found[0])
        return found[1][0]

    def evict(
        self, which: Which, tier: Tier, twins: Twins, among: Iterable[Namespace] | None = None
    ) -> bool:
        """Drop what goes first, or only its copies; False if nothing may go. CatalogError."""
        return any(
            self.evict_of(space, which, tier, twins)
            for space in self.by_urgency(among)
            if len(which(space))
        )

    def evict_of(self, namespace: Namespace, which: Which, tier: Tier | None, twins: Twins) -> bool:
        """The same of one namespace; tier None: whole objects, wherever they are."""
        order = which(namespace)
        found = self._victim(order, tier, twins)
        if found is None:
            return False
        for at, inode in enumerate(found[1]):
            try:
                if tier and len(self.ledger.tiers.holders(inode)) > 1 and twins == "uncopy":
                    self.ledger.records.drop_copy(inode, tier)
                elif self.ledger.catalog.inode(inode.ino) is not None:  # not with its group
                    self.ledger.removals.evict(inode)
            except CatalogError:
                for left in found[1][at:]:
                    order.touch(left)  # it stays; who is tried next is another one
                raise
        return True

    def _victim(
        self, order: Order, tier: Tier | None, twins: Twins, *, leaves: bool = True
    ) -> tuple[Victim, list[Inode]] | None:
        """Take the group that goes first, if all of it is really there and not in use.

        leaves: it is to be dropped, and nothing may follow it then.

        What comes before a block that is in use is of use as well: it goes after that.
        """
        passed: list[tuple[Victim, list[Inode]]] = []
        before: set[int] = set()  # keys of blocks without which one that is in use is of no use
        found = None
        while (victim := order.take()) is not None:
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
                if not self._gentle or self._cool(inodes, tier, twins):
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
        """Whether nothing goes that has to stay: what another tier holds, what the bucket lacks."""
        ledger = self.ledger
        twin = any(len(ledger.tiers.holders(inode)) > 1 for inode in inodes)
        if twin and twins == "spare":
            return False
        if self._keep_names and any(self._goes(inode, tier, twins) for inode in inodes):
            return False
        if self._lose_dirty or (tier and twin and twins == "uncopy"):
            return True
        return not any(inode.ino in ledger.dirty and not inode.in_bucket for inode in inodes)

    def _goes(self, inode: Inode, tier: Tier | None, twins: Twins) -> bool:
        """Whether it would be dropped with its names."""
        if inode.in_bucket:
            return False
        return not (tier and twins == "uncopy" and len(self.ledger.tiers.holders(inode)) > 1)

    def _is_followed(self, inodes: list[Inode], tier: Tier | None, twins: Twins) -> bool:
        """Whether a block would go that others follow, which are sealed."""
        blocks = self.ledger.namespaces.of(inodes[0]).blocks
        if blocks is None or not any(self._goes(inode, tier, twins) for inode in inodes):
            return False
        return blocks.children(key_of(inodes[0])) > 0

    def _has_entries(self, inodes: list[Inode], tier: Tier | None, twins: Twins) -> bool:
        """Whether there is anything else in the directory of a block that would go."""
        inode, ledger = inodes[0], self.ledger
        if ledger.namespaces.of(inode).blocks is None:
            return False
        if not any(self._goes(one, tier, twins) for one in inodes):
            return False
        return ledger.prefixes.has_entries(inode)

    @staticmethod
    def _put_back(order: Order, passed: list[tuple[Victim, list[Inode]]]) -> None:
        """To where they were; many to the young end, or each search would pass them by again."""
        for victim, inodes in reversed(passed):
            if len(passed) <= PASSED_MAX:
                order.put_back(Victim(victim.key, tuple(inode.ino for inode in inodes)))
                continue
            for inode in inodes:
                order.touch(inode)

    def _resident(self, ino: int, order: Order, tier: Tier | None) -> Inode | None:
        """An object if it is still in this order, of copies in one tier or of what is in any."""
        ledger = self.ledger
        inode = ledger.table.inode(ino)
        if inode is None or not inode.sealed or ino in ledger.table.staging:
            return None
        holders, namespace = ledger.tiers.holders(inode), ledger.namespaces.of(inode)
        if tier is None:
            return inode if holders and namespace.whole is order and not inode.kept else None
        if tier not in holders:
            return None
        return inode if namespace.order(inode, tier, holders) is order else None

    def _in_use(self, inode: Inode) -> bool:
        return inode.ino in self.ledger.table.open or inode.ino in self.ledger.table.busy

    def _cool(self, inodes: list[Inode], tier: Tier | None, twins: Twins) -> bool:
        """Whether they may go for what nobody waits for."""
        since, moment = time.time_ns() - LATELY * 10**9, trio.current_time() - LATELY
        return all(
            max(inode.atime_ns, inode.ctime_ns) < since
            and self._brought.get(inode.ino, -math.inf) < moment
            and (
                inode.in_bucket
                or (tier is self.ledger.tiers.ram and twins == "uncopy" and inode.on_nvme)
            )
            for inode in inodes
        )
