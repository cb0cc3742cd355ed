"""Where a new file begins, and what goes when room is needed.

Contract: `reserve` sets bytes of a tier aside or changes nothing but what had to be dropped for
them; they are the caller's to give back. All but `choose` is synchronous: between its look at the
accounts and the reservation nothing else happens. What is dropped goes by `Residency`, record
first, with its names told to the kernel.

Invariants:
- What is open, being written, or behind an inode's lock is no victim.
- What RAM alone holds is lost only where no tier below takes it, or where memory itself runs out.
- While NVMe is down its copies are no reason to give up those in RAM.
Not for the accounts, nor for making copies so that there will be room (`Flow`).
"""

from typing import Literal

from kvfs.catalog import Inode
from kvfs.core.residency import Residency
from kvfs.core.sizes import ExpectedSizes
from kvfs.errors import CatalogError, NoSpaceError, TierError
from kvfs.eviction import LeastRecentlyUsed
from kvfs.tiers import NvmeTier, Tier

Twins = Literal["uncopy", "spare", "lose"]

UNKNOWN_SIZE = 64 << 20  # reserved for a file of which nothing is known; no measurement behind it
HEADROOM = 16  # a sixteenth of RAM is kept free for files that outgrow their reservation


class Room:
    """`sizes` is to be told how large files have become."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.ram = residency.ram
        self.nvme = residency.nvme
        self.sizes = ExpectedSizes()

    async def choose(self, parent: int, name: bytes) -> tuple[Tier, int]:
        """The tier for a new file, with the bytes reserved there. Raises NoSpaceError, TierError.

        A file of unknown size begins on NVMe: one that outgrows the RAM tier would get ENOSPC from
        the kernel, where kvfs cannot help it any more.
        """
        residency = self.residency
        expected = self.sizes.expect(parent, name)
        wanted = UNKNOWN_SIZE if expected is None else max(Tier.cost(0), expected)
        while True:
            order = residency.tiers if expected is not None else residency.tiers[::-1]
            order = [tier for tier in order if not tier.health.down]
            if not order:
                raise TierError(
                    "no tier takes a new file: " + ", ".join(t.health.why for t in residency.tiers)
                )
            for tier in order:
                least = min(wanted, tier.capacity // 4) if expected is None else wanted
                if self.reserve(tier, least):
                    return tier, least
            if residency.census_done.is_set():
                break
            await residency.census_step.wait()  # the estimate leaves no room, what is counted may
        if self.ram is not None and self._lose_for(wanted):
            return self.ram, wanted
        for tier in order:  # others may expect too much as well: begin, and see how it grows
            if self.reserve(tier, Tier.cost(0)):
                return tier, Tier.cost(0)
        if self.ram is not None and self._lose_for(Tier.cost(0)):
            return self.ram, Tier.cost(0)
        raise NoSpaceError(
            f"no tier has room for {wanted} bytes, and nothing more may be dropped: "
            + ", ".join(f"{t.name} {t.used} used + {t.reserved} reserved" for t in residency.tiers)
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
            largest = max((held.reserved for held in self.residency.staging.values()), default=0)
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
            return self._evict(self.residency.ram_clean, tier, "uncopy")
        return self._evict(self.residency.on_nvme, tier, twins)

    def _purge_one(self, tier: Tier) -> bool:
        """Give up what is unlinked, though the kernel has not forgotten it."""
        residency = self.residency
        for ino, (where, _) in residency.limbo.items():
            if where is tier and ino not in residency.busy:
                residency.purge(ino)
                return True
        return False

    def _drop_from_ram(self) -> bool:
        """Lose the oldest that RAM alone can produce: all of it while NVMe is down.

        What NVMe has as well keeps its name then, and is back when NVMe is.
        """
        assert self.ram is not None
        clean, only = self.residency.ram_clean, self.residency.ram_only
        if self.nvme is not None and self.nvme.health.down:
            twin, alone = self._next(clean), self._next(only)
            if twin is not None and (alone is None or twin.atime_ns <= alone.atime_ns):
                return self._evict(clean, self.ram, "uncopy")
        return self._evict(only, self.ram, "lose")

    def _next(self, listed: LeastRecentlyUsed) -> Inode | None:
        """What a list of RAM's would give up next; it stays the next."""
        assert self.ram is not None
        inode = self._victim(listed, self.ram)
        if inode is not None:
            listed.put_back(inode.ino)
        return inode

    def _evict(self, listed: LeastRecentlyUsed, tier: Tier, twins: Twins) -> bool:
        """Drop the oldest object of a list, or only its copy; False if there is none."""
        inode = self._victim(listed, tier, alone=twins == "spare")
        if inode is None:
            return False
        try:
            if len(self.residency.holders(inode)) > 1 and twins == "uncopy":
                self.residency.drop_copy(inode, tier)
            else:
                self.residency.drop(inode, "evicted")
        except CatalogError:
            listed.touch(inode.ino)  # it stays; who is tried next is another one
            raise
        return True

    def _victim(
        self, listed: LeastRecentlyUsed, tier: Tier, *, alone: bool = False
    ) -> Inode | None:
        """Take the oldest object of a list that is really there and not in use.

        alone: only one that no other tier holds.
        """
        residency = self.residency
        in_use = []
        found = None
        while (ino := listed.take_oldest()) is not None:
            if ino in residency.open or ino in residency.busy:
                in_use.append(ino)
                continue
            inode = residency.catalog.inode(ino)
            if inode is None or not inode.sealed or tier not in residency.holders(inode):
                continue
            holders = residency.holders(inode)
            if residency.list_of(tier, holders) is not listed:
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
    def reclaimable(self) -> int:
        """Bytes of RAM that a create can have at once: free, or on NVMe as well."""
        if self.ram is None:
            return 0
        clean = 0 if self.nvme is not None and self.nvme.health.down else self.residency.clean_bytes
        return max(0, self.ram.free - self.headroom) + clean
