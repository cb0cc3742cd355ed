"""The accounts of tiers and namespaces, and the census that fills them after a mount.

Contract: synchronous. Invariants, between any two awaits of the daemon:
- A sealed object without a writer is accounted. Its cost is in `used` of each tier that holds it.
  For each of these tiers it is in one order of its namespace: the one of `Namespace.order`.
- An object with a writer is in no order; its room is reserved (`OpenTable`).
- An object that the census has not yet reached is neither accounted nor a victim.
Not for changing records (`records`, `removals`), nor for choosing victims (`Victims`).
"""

import trio

from kvfs.catalog import Catalog, Inode
from kvfs.core.ledger.followers import Followers
from kvfs.core.ledger.open_table import OpenTable
from kvfs.core.ledger.tiers import Tiers
from kvfs.core.ledger.work import Work
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.core.namespaces.order import key_of
from kvfs.tiers import Tier

NVME_USED = "nvme_used"  # a fact of the catalog: bytes, a second before the last change or later
NVME_WRITTEN = "nvme_written"  # a day, and the bytes written on it
HOUR = 3600 * 10**9  # ns


class Accounts:
    """Bytes and objects of each tier and namespace."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        namespaces: Namespaces,
        table: OpenTable,
        work: Work,
    ) -> None:
        self.catalog = catalog
        self.tiers = tiers
        self.namespaces = namespaces
        self.table = table
        self.work = work
        self.spilled = 0  # objects that only the bucket has
        self.followers = Followers()  # of those, which block comes after which
        self.clean_bytes = self.clean_objects = 0  # in RAM, but on NVMe as well
        self.census_done = trio.Event()
        self.census_step = trio.Event()
        self.counted_to = 0  # inode number that the census has reached
        self.first_new = 0  # inode numbers from here on were made in this session
        self._counted_early: set[int] = set()

    @property
    def objects(self) -> int:
        """Files, each counted once."""
        local = sum(tier.objects for tier in self.tiers.local) - self.clean_objects
        return local + self.spilled + len(self.table.staging)

    def accounted(self, inode: Inode) -> bool:
        """Whether an object is in the accounts of its tiers and its namespace."""
        held = self.table.open.get(inode.ino)
        if held is not None:
            return held.accounted
        if not inode.is_file or not inode.sealed or not inode.links:
            return False
        return inode.in_bucket or bool(self.tiers.holders(inode))

    def admit(self, inode: Inode) -> None:
        """Enter a sealed object without writers into the accounts, as the youngest."""
        if not self._counted(inode.ino):
            self._counted_early.add(inode.ino)
        self._count(inode)
        self.touch(inode)
        self.work.wake()

    def touch(self, inode: Inode) -> None:
        """Note a use, in the orders that `Namespace.order` gives. Every open pays for this."""
        namespace, ram = self.namespaces.of(inode), self.tiers.ram
        if namespace.spare:
            namespace.take_back(inode)
        in_ram = inode.ram_epoch == ram.epoch
        if namespace.whole is not None and not inode.unevictable and (in_ram or inode.on_nvme):
            namespace.whole.touch(inode)
        if inode.on_nvme and self.tiers.nvme.mounted:
            (namespace.nvme_kept if inode.unevictable else namespace.on_nvme).touch(inode)
            if in_ram:
                namespace.ram_clean.touch(inode)
        elif in_ram:
            (namespace.ram_kept if inode.unevictable else namespace.ram_only).touch(inode)

    def dismiss(self, inode: Inode) -> None:
        """Take an object out of the accounts: it is rewritten, unlinked or dropped."""
        namespace = self.namespaces.of(inode)
        namespace.take_back(inode)
        for order in namespace.orders:
            order.discard(inode)
        if self._counted(inode.ino):
            self._count(inode, -1)
        else:
            self._counted_early.add(inode.ino)  # and the census will pass it by

    def held_otherwise(self, before: Inode, inode: Inode) -> None:
        """Account a sealed object whose copies changed.

        It keeps its place in each order that it was in and still is.
        """
        if not self._counted(inode.ino):
            self._counted_early.add(inode.ino)
        else:
            self._count(before, -1)
        self._count(inode)
        namespace = self.namespaces.of(inode)
        held, holds = self.tiers.holders(before), self.tiers.holders(inode)
        left = [namespace.order(before, tier, held) for tier in held]
        namespace.take_back(before)
        if namespace.whole is not None and bool(held) != bool(holds):
            if not holds:
                namespace.whole.discard(before)
            elif not inode.unevictable:
                namespace.whole.touch(inode)
        orders = [namespace.order(inode, tier, holds) for tier in holds]
        for order in left:
            if order not in orders:
                order.discard(before)
        for order in orders:
            if order not in left:
                order.touch(inode)
        if namespace.blocks is not None:  # a held back block may go now
            namespace.release(key_of(inode))
        self.work.wake()

    def _count(self, inode: Inode, sign: int = 1) -> None:
        holders = self.tiers.holders(inode)
        for tier in holders:
            tier.used += sign * self.tiers.cost(inode, tier)
            tier.objects += sign
        if len(holders) > 1:
            self.clean_bytes += sign * Tier.cost(inode.blocks)
            self.clean_objects += sign
        bucket = self.tiers.bucket
        if inode.in_bucket:
            bucket.used += sign * inode.size
            bucket.objects += sign
        if inode.in_bucket and not holders:
            self.spilled += sign
            self.followers.count(inode, sign)
        costs = {tier.name: self.tiers.cost(inode, tier) for tier in holders}
        self.namespaces.count(inode, costs, bucket, sign)

    # The census

    def _counted(self, ino: int) -> bool:
        return (
            self.census_done.is_set()
            or ino <= self.counted_to
            or ino >= self.first_new
            or ino in self._counted_early
        )

    def count_past(self, inode: Inode) -> None:
        """Account an inode of an earlier session that the census has reached."""
        if inode.ino in self._counted_early:
            self._counted_early.remove(inode.ino)
        elif inode.is_file and inode.sealed and inode.links and inode.ino not in self.table.staging:
            self._add_past(inode)
            for tier in self.tiers.holders(inode):
                tier.uncounted = max(0, tier.uncounted - self.tiers.cost(inode, tier))
        self.counted_to = inode.ino

    def _add_past(self, inode: Inode) -> None:
        """Enter a sealed object into the accounts, with the age that its record has."""
        self._count(inode)
        namespace, holders = self.namespaces.of(inode), self.tiers.holders(inode)
        for tier in holders:
            order = namespace.order(inode, tier, holders)
            if tier.slow and namespace.blocks is None:
                order.add_past(inode.ino, inode.atime_ns // HOUR)
            else:  # a prefix namespace must know the blocks of a prompt, for leaves go first
                order.touch(inode)
        self.enter_whole(inode)

    def enter_whole(self, inode: Inode) -> None:
        """Enter an object, with its age, into the order that the hard quota evicts from."""
        namespace, holders = self.namespaces.of(inode), self.tiers.holders(inode)
        whole = namespace.whole
        if whole is None or inode.unevictable or inode in whole or not holders:
            return
        if holders[0].slow and namespace.blocks is None:
            whole.add_past(inode.ino, inode.atime_ns // HOUR)
        else:
            whole.touch(inode)

    def count_anew(self, inode: Inode) -> None:
        """Account a dismissed object again, to another namespace."""
        if not self._counted(inode.ino):
            self._counted_early.add(inode.ino)
        self._add_past(inode)

    def end_census_step(self) -> None:
        """Wake the tasks that wait for room: the census has counted more objects."""
        step, self.census_step = self.census_step, trio.Event()
        step.set()

    def end_census(self) -> None:
        for tier in self.tiers.local:
            tier.uncounted = 0
        self.census_done.set()
        self.end_census_step()
        self._counted_early.clear()

    # Estimates for the next daemon

    def estimate(self) -> None:
        """Estimate the bytes in the tiers before the census. Call it once reservations are made."""
        if self.tiers.ram.mounted:
            self.tiers.ram.estimate()
        if self.tiers.nvme.mounted:
            noted = self.catalog.fact(NVME_USED)
            self.tiers.nvme.uncounted = self.tiers.nvme.capacity if noted is None else int(noted)

    def nvme_written(self) -> tuple[int, int]:
        """The day (since 1970) of the last estimate, and the bytes written to NVMe on it."""
        day, _, used = (self.catalog.fact(NVME_WRITTEN) or "0 0").partition(" ")
        return int(day), int(used)

    def note_used(self, spent: tuple[int, int] = (0, 0)) -> None:
        """Leave an estimate for the next daemon, with the next change of the catalog.

        A commit of its own would block the daemon if the disk takes no writes.
        """
        if not self.tiers.nvme.mounted or not self.census_done.is_set():
            return
        self.catalog.carried[NVME_USED] = str(self.tiers.nvme.used + self.tiers.nvme.reserved)
        self.catalog.carried[NVME_WRITTEN] = f"{spent[0]} {spent[1]}"
