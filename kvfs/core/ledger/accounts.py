"""The accounts of tiers and namespaces. The census fills them after a mount.

Contract: synchronous. Invariants, between any two awaits of the daemon:
- A sealed object without a writer is accounted. `used` of each tier that holds it has its cost. For
  each of these tiers the object is in one order of eviction of its namespace: `Namespace.order`.
- An object with a writer is in no order of eviction; its room is reserved (`OpenTable`).
- An object that the census has not yet reached is neither accounted nor a victim.
Not for changing records (`records`, `removals`), nor for choosing victims (`Victims`).
"""

import trio

from kvfs.catalog import Catalog, Inode
from kvfs.core.ledger.followers import Followers
from kvfs.core.ledger.open_table import OpenTable
from kvfs.core.ledger.tiers import Tiers
from kvfs.core.ledger.wakeup import Wakeup
from kvfs.core.namespaces.drops import Drops
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.core.namespaces.order import key_of
from kvfs.tiers import Tier

# A fact of the catalog: used bytes of NVMe, at most a second older than the last change.
NVME_USED = "nvme_used"
NVME_KEPT = "nvme_kept"  # a fact: objects on NVMe, and the bytes of those that kvfs never evicts
NVME_WRITTEN = "nvme_written"  # a fact of the catalog: a day, and the bytes written to NVMe on it
HOUR = 3600 * 10**9  # ns


class Accounts:
    """Bytes and objects of each tier and namespace."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        namespaces: Namespaces,
        table: OpenTable,
        wakeup: Wakeup,
    ) -> None:
        self.catalog = catalog
        self.tiers = tiers
        self.namespaces = namespaces
        self.table = table
        self.wakeup = wakeup
        self.spilled = 0  # objects that only the bucket has
        self.remote = 0  # objects that only other nodes of the pool have
        self.followers = Followers()  # among `spilled` and `remote`: which block comes after which
        self.doubled_bytes = self.doubled_objects = 0  # in RAM, and on NVMe as well
        self.only_ram_bytes = self.only_ram_objects = 0  # neither on NVMe nor in the bucket
        self.census_done = trio.Event()
        self.census_step = trio.Event()  # set at the next step of the census, and then replaced
        self.counted_to = 0  # inode number that the census has reached
        self.first_new = 0  # the first inode number that this session made
        # Tiers that began with more than their size, until they are within it: `Room.shrink`.
        self.shrinking: list[Tier] = []
        self.shrunk = Drops("shrunk")  # what goes for that
        # By tier that began with more than its size: what it had, as the last mount noted it.
        self.began: dict[Tier, dict[str, int]] = {}
        self._counted_early: set[int] = set()  # inodes accounted before the census reached them

    @property
    def objects(self) -> int:
        """The number of files. A file with several copies counts once."""
        local = sum(tier.objects for tier in self.tiers.local) - self.doubled_objects
        return local + self.spilled + len(self.table.staging)

    def accounted(self, inode: Inode) -> bool:
        """Whether an object is in the accounts of its tiers and its namespace."""
        held = self.table.peek(inode.ino)
        if held is not None:
            return held.accounted
        if not inode.is_file or not inode.sealed or not inode.links:
            return False
        return inode.in_bucket or inode.in_pool or bool(self.tiers.holders(inode))

    def enter(self, inode: Inode) -> None:
        """Enter a sealed object without writers into the accounts, as the youngest."""
        if not self._counted(inode.ino):
            self._counted_early.add(inode.ino)
        self._count(inode)
        self.touch(inode)
        if inode.on_nvme and not inode.unevictable:
            self.namespaces.of(inode).on_nvme.note_stored(inode)
        self.wakeup.wake()

    def touch(self, inode: Inode) -> None:
        """Make an object the youngest in each of its orders of eviction. Each open calls this."""
        namespace, ram = self.namespaces.of(inode), self.tiers.ram
        if namespace.refused:
            namespace.take_back(inode)
        in_ram = inode.ram_epoch == ram.epoch
        if (
            namespace.quota_order is not None
            and not inode.unevictable
            and (in_ram or inode.on_nvme)
        ):
            namespace.quota_order.touch(inode)
        if inode.on_nvme and self.tiers.nvme.mounted:
            (namespace.nvme_kept if inode.unevictable else namespace.on_nvme).touch(inode)
            if in_ram:
                namespace.ram_clean.touch(inode)
        elif in_ram:
            (namespace.ram_kept if inode.unevictable else namespace.ram_only).touch(inode)

    def dismiss(self, inode: Inode) -> None:
        """Take an object out of the accounts, because it is rewritten, unlinked or dropped."""
        namespace = self.namespaces.of(inode)
        namespace.take_back(inode)
        if namespace.guests is not None:
            namespace.guests.gone(inode.ino)
        for order in namespace.orders:
            order.discard(inode)
        if self._counted(inode.ino):
            self._count(inode, -1)
        else:
            self._counted_early.add(inode.ino)  # so the census does not account it

    def account_changed_copies(self, before: Inode, inode: Inode) -> None:
        """Account a sealed object whose copies changed. before: its record before the change.

        The object keeps its place in each order of eviction that it does not leave.
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
        if namespace.quota_order is not None and bool(held) != bool(holds):
            if not holds:
                namespace.quota_order.discard(before)
            elif not inode.unevictable:
                namespace.quota_order.touch(inode)
        orders = [namespace.order(inode, tier, holds) for tier in holds]
        for order in left:
            if order not in orders:
                order.discard(before)
        for order in orders:
            if order not in left:
                # A demotion is no use. A copy that came from the bucket is for one.
                (order.copy if held and order is namespace.on_nvme else order.touch)(inode)
        if namespace.blocks is not None:  # kvfs may evict this block now, if it was held back
            namespace.release(key_of(inode))
        self.wakeup.wake()

    def _count(self, inode: Inode, sign: int = 1) -> None:
        holders = self.tiers.holders(inode)
        costs: dict[str, int] = {}
        for tier in holders:
            cost = costs[tier.name] = self.tiers.cost(inode, tier)
            tier.used += sign * cost
            tier.objects += sign
        if len(holders) > 1:
            self.doubled_bytes += sign * Tier.cost(inode.blocks)
            self.doubled_objects += sign
        elif holders and not holders[0].slow and not inode.in_bucket:
            self.only_ram_bytes += sign * inode.size
            self.only_ram_objects += sign
        bucket = self.tiers.bucket
        if inode.in_bucket:
            bucket.used += sign * inode.size
            bucket.objects += sign
        if not holders and (inode.in_bucket or inode.in_pool):
            self.spilled += sign if inode.in_bucket else 0
            self.remote += sign if inode.in_pool else 0
            self.followers.count(inode, sign)
        self.namespaces.count(inode, costs, bucket, sign)

    # The census

    def _counted(self, ino: int) -> bool:
        return (
            self.census_done.is_set()
            or ino <= self.counted_to
            or ino >= self.first_new
            or ino in self._counted_early
        )

    def count_earlier(self, inode: Inode) -> None:
        """Account an inode of an earlier session, as the census reaches it."""
        if inode.ino in self._counted_early:
            self._counted_early.remove(inode.ino)
        elif inode.is_file and inode.sealed and inode.links and inode.ino not in self.table.staging:
            self._add_earlier(inode)
            for tier in self.tiers.holders(inode):
                tier.uncounted = max(0, tier.uncounted - self.tiers.cost(inode, tier))
        self.counted_to = inode.ino

    def _add_earlier(self, inode: Inode) -> None:
        """Enter a sealed object into the accounts. Its place in the orders follows its atime."""
        self._count(inode)
        namespace, holders = self.namespaces.of(inode), self.tiers.holders(inode)
        if holders and not self.census_done.is_set():
            namespace.met(inode)
        for tier in holders:
            order = namespace.order(inode, tier, holders)
            if tier.slow and namespace.blocks is None:
                order.add_past(inode.ino, inode.atime_ns // HOUR)
            else:  # a prefix namespace must know the blocks of a prompt: it evicts leaves first
                order.touch(inode)
        self.enter_quota_order(inode)

    def enter_quota_order(self, inode: Inode) -> None:
        """Enter an object, by its atime, into the order from which a hard quota evicts."""
        namespace, holders = self.namespaces.of(inode), self.tiers.holders(inode)
        order = namespace.quota_order
        if order is None or inode.unevictable or inode in order or not holders:
            return
        if holders[0].slow and namespace.blocks is None:
            order.add_past(inode.ino, inode.atime_ns // HOUR)
        else:
            order.touch(inode)

    def count_anew(self, inode: Inode) -> None:
        """Account an object again after `dismiss`: it is in another namespace now."""
        if not self._counted(inode.ino):
            self._counted_early.add(inode.ino)
        self._add_earlier(inode)

    def end_census_step(self) -> None:
        """Wake the tasks that wait for room: the census has counted more objects."""
        step, self.census_step = self.census_step, trio.Event()
        step.set()

    def end_census(self) -> None:
        """Record that the census has counted all objects: no estimate is needed any more."""
        for tier in self.tiers.local:
            tier.uncounted = 0
            if tier.used > tier.configured_capacity and tier not in self.shrinking:
                self.shrinking.append(tier)
        self.census_done.set()
        self.end_census_step()
        self._counted_early.clear()

    def shrinks_for(self, tier: Tier) -> bool:
        """Whether an object that is dropped from a tier goes because a tier became smaller.

        NVMe also drops objects for those that leave a smaller RAM.
        """
        return tier in self.shrinking or (tier.slow and self.tiers.ram in self.shrinking)

    # Estimates for the next daemon

    def estimate(self) -> None:
        """Estimate the used bytes of the tiers before the census. Call it after reservations."""
        if self.tiers.ram.mounted:
            ram = self.tiers.ram
            ram.estimate()
            if ram.uncounted > ram.configured_capacity + ram.slack:  # in a tmpfs of its size: less
                self.shrinking.append(ram)
        if self.tiers.nvme.mounted:
            nvme, noted = self.tiers.nvme, self.catalog.fact(NVME_USED)
            nvme.uncounted = nvme.capacity if noted is None else int(noted)
            # Else its size is known at the end of the census.
            if not nvme.capacity_excludes_objects and nvme.uncounted > nvme.configured_capacity:
                self.shrinking.append(nvme)
                objects, kept = self._noted_on_nvme()
                self.began[nvme] = {
                    "used_bytes": nvme.uncounted,
                    "objects": objects,
                    "kept_bytes": kept,
                }

    def _noted_on_nvme(self) -> tuple[int, int]:
        """The objects on NVMe, and the bytes that kvfs never evicts, as the last mount noted."""
        objects, _, kept = (self.catalog.fact(NVME_KEPT) or "0 0").partition(" ")
        return int(objects), int(kept)

    def kept_in(self, tier: Tier) -> int:
        """Bytes of a tier that its objects keep, because kvfs evicts none of them."""
        return sum(space.kept([tier]) for space in self.namespaces.everything())

    def nvme_written(self) -> tuple[int, int]:
        """The day (since 1970) of the last estimate, and the bytes written to NVMe on it."""
        day, _, used = (self.catalog.fact(NVME_WRITTEN) or "0 0").partition(" ")
        return int(day), int(used)

    def leave_estimate(self, written: tuple[int, int] = (0, 0)) -> None:
        """Store an estimate for the next daemon, with the next change of the catalog.

        written: as `nvme_written` returns it. A separate commit would block the daemon while the
        disk takes no writes.
        """
        if not self.tiers.nvme.mounted or not self.census_done.is_set():
            return
        nvme = self.tiers.nvme
        self.catalog.carried[NVME_USED] = str(nvme.used + nvme.reserved)
        self.catalog.carried[NVME_KEPT] = f"{nvme.objects} {self.kept_in(nvme)}"
        self.catalog.carried[NVME_WRITTEN] = f"{written[0]} {written[1]}"
