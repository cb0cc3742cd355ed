"""Room in the tiers: set aside, and made where it is needed.

Contract: `reserve` sets bytes of a tier aside or changes nothing but what had to be dropped for
them; they are the caller's to give back. All of it is synchronous: between its look at the accounts
and the reservation nothing else happens.

Invariants:
- What RAM alone holds is lost only where no tier below takes it, or where memory itself runs out.
- While NVMe is down its copies are no reason to give up those in RAM.
- What was unlinked, and is kept for the kernel only, goes before anything that has a name.
Not for which object goes first (`Victims`), where a new file begins (`Placement`), what a namespace
may have (`Quota`), the accounts, nor for making copies so that there will be room (`Flow`).
"""

import time

from kvfs.core.residency import Residency
from kvfs.core.victims import Twins, Victims, on_nvme, ram_clean, ram_only, ram_spare
from kvfs.tiers import NvmeTier, Tier

MEASURED_FOR = 0.1  # s that a look at what the NVMe device has left is good for
HEADROOM = 16  # a sixteenth of RAM is kept free for files that outgrow their reservation


class Room:
    """Of the local tiers."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.ram = residency.ram
        self.nvme = residency.nvme
        self.victims = Victims(residency)

    def reserve(self, tier: Tier, wanted: int, twins: Twins = "uncopy") -> bool:
        """Set room aside, dropping what was used longest ago. Nothing of RAM alone is lost.

        `twins` says what may happen to objects on NVMe that RAM holds as well. A create throws
        their copy on NVMe away. A demotion spares them, or it would have to make that copy again
        for ever; one that empties RAM loses them, since what it brings is younger.
        """
        spare = self.headroom if tier is self.ram else 0
        if isinstance(tier, NvmeTier) and not tier.health.down:
            stale = time.monotonic() - tier.measured > MEASURED_FOR
            if tier.shortage or stale:
                self._measure(tier)
        while wanted + spare > tier.capacity - tier.reserved:
            if not self._purge_one(tier):
                return False
        while tier.free - spare < wanted:
            if not self._reclaim(tier, twins):
                return False
        tier.reserved += wanted
        return True

    def reserve_gently(self, tier: Tier, wanted: int, ino: int) -> bool:
        """As `reserve`, for an object that nobody waits for: see `Victims.gently`."""
        with self.victims.gently():
            if not self.reserve(tier, wanted):
                return False
        self.victims.brought(ino)
        return True

    def _measure(self, nvme: NvmeTier) -> None:
        """Others take room on the device, too; while it is short, each reservation looks anew."""
        try:
            nvme.measure(self.written(nvme))
        except OSError as error:
            nvme.failed("statfs", 0, error)

    def written(self, tier: Tier) -> int:
        """Bytes of what is reserved that its files have: staged, or unlinked and not forgotten."""
        residency = self.residency
        limbo = sum(cost for where, cost in residency.limbo.values() if where is tier)
        return limbo + sum(
            min(held.reserved, held.taken)
            for held in residency.staging.values()
            if held.tier is tier
        )

    def lose_for(self, wanted: int) -> bool:
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
        if tier is not self.ram and any(
            held.tier is tier and held.taken > tier.configured
            for held in self.residency.staging.values()
        ):
            return  # it will not stay
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
        if tier is not self.ram:
            return self.victims.evict(on_nvme, tier, twins)
        if self.nvme is None:
            return self._drop_from_ram()
        if self.nvme.health.down:  # its copies are no reason to give up the only good one
            return False
        nvme = self.nvme
        spaces = self.residency.namespaces
        stuck = [*spaces.dropped.values(), *(one for one in spaces if not one.takes(nvme))]
        return (
            self.victims.evict(ram_clean, tier, "uncopy")
            or self.victims.evict(ram_spare, tier, "lose")
            or self.victims.evict(ram_only, tier, "lose", stuck)
        )

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
        if self.nvme is None or not self.nvme.health.down:
            return self.victims.evict(ram_only, self.ram, "lose")
        for space in self.victims.by_urgency():
            twin = self.victims.next_of(space.ram_clean, self.ram)
            alone = self.victims.next_of(space.ram_only, self.ram)
            if twin is not None and (alone is None or twin.atime_ns <= alone.atime_ns):
                return self.victims.evict_of(space, ram_clean, self.ram, "uncopy")
            if alone is not None:
                return self.victims.evict_of(space, ram_only, self.ram, "lose")
        return False

    @property
    def reclaimable(self) -> int:
        """Bytes of RAM that a create can have at once: free, or on NVMe as well."""
        if self.ram is None:
            return 0
        free = max(0, self.ram.free - self.headroom)
        if self.nvme is None or self.nvme.health.down:
            return free
        return free + sum(
            0
            if space.settings.pin
            else space.clean_bytes + sum(space.spare.values())
            if space.takes(self.nvme)
            else space.held[self.ram.name]
            for space in self.residency.namespaces
        )
