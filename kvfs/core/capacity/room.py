"""Room in the local tiers: kvfs reserves bytes there, and evicts objects if too few are free.

Contract: `reserve` and `reserve_for_file` return a `Reservation`, which the caller owns. Methods
are synchronous: between the look at the accounts and the reservation no other task runs.

Invariants:
- An object that only RAM holds is lost only if no tier below takes it, or if memory runs out.
- While NVMe is down, kvfs does not prefer to evict the RAM copies that NVMe also has.
- A copy in RAM of what NVMe has too goes before RAM loses a name, and before a writer gets ENOSPC.
  Before that, the writer's own namespace and those before it give what they have.
- Before kvfs evicts an object with a name, it removes the orphans that no program has open.
Not for the order of victims (`Victims`), the tier of a new file (`Placement`), the quotas of a
namespace (`Quota`), or the accounts. Not for copies that make room later (`Dispatcher`).
"""

import logging
import math
import time
from contextlib import nullcontext
from typing import Literal

import trio

from kvfs.core.capacity.demoting import Demoting
from kvfs.core.capacity.victims import (
    OrderOf,
    Twins,
    Victims,
    on_nvme,
    ram_clean,
    ram_only,
    ram_spare,
)
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.namespaces.drops import Drops
from kvfs.core.namespaces.namespace import Namespace
from kvfs.tiers import NvmeTier, RamTier, Reservation, Tier
from kvfs.units import human

log = logging.getLogger(__name__)

MEASURED_FOR = 0.1  # s for which a measured number of free bytes on the NVMe device is valid
# Seconds after RAM had no room for a promotion, or for a file that no other tier takes. So long,
# copies of objects that kvfs must keep may take room on NVMe from objects that were used later.
RAM_LACKS = 10.0
HEADROOM = 16  # a sixteenth of RAM is kept free for files that outgrow their reservation


class Room:
    """The room of the local tiers."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.ram = ledger.tiers.ram
        self.nvme = ledger.tiers.nvme
        self.victims = Victims(ledger)
        self.demoting = Demoting(self.ram, self.nvme)
        # The last new file had to begin in RAM, and kvfs may lose objects of RAM for it.
        self._nvme_is_full = False
        self._shrunk = 0  # objects that smaller tiers had dropped at the last look
        self._stays: set[Tier] = set()  # those that are known to stay larger than their size
        self._ram_lacks_until = -math.inf  # trio's time

    def note_ram_lacks(self) -> None:
        """Note that a program lacks room in RAM, and that NVMe cannot replace it."""
        self._ram_lacks_until = trio.current_time() + RAM_LACKS
        self.ledger.wakeup.wake()

    @property
    def ram_lacks(self) -> bool:
        """Whether a program has lacked room in RAM within the last RAM_LACKS seconds."""
        return trio.current_time() < self._ram_lacks_until

    def reserve(self, tier: Tier, wanted: int, twins: Twins = "evict_copy") -> Reservation | None:
        """Set room aside and evict the victims for it. No object that RAM alone holds is lost.

        Returns None if there is no room; kvfs may have evicted objects before it returns None.
        A twin is an object that has a copy in RAM and a copy on NVMe. `twins` says what to do with
        a twin that is a victim:
        - "evict_copy": evict only its copy in `tier`. A create does this.
        - "spare": evict nothing of it. A demotion does this, or it would make that copy again.
        - "lose": drop the object. A demotion that empties RAM does this: its objects are younger.
        """
        spare = self.headroom if tier is self.ram else 0
        self._measure_if_stale(tier)
        while wanted + spare > tier.capacity - tier.reserved:
            if not self._purge_orphan(tier):
                return None
        while tier.free - spare < wanted:
            if not self._reclaim(tier, twins):
                return None
        if tier is not self.ram:
            self._nvme_is_full = False
        return Reservation(tier, wanted)

    def reserve_free(self, ram: RamTier, wanted: int) -> Reservation | None:
        """Reserve bytes for a new file that are free in RAM now, beside the headroom; else None."""
        return Reservation(ram, wanted) if ram.free - self.headroom >= wanted else None

    def evict_copies(self, least: int) -> bool:
        """Evict copies in RAM of what NVMe has too, until RAM has `least` bytes free.

        No name is lost, so each namespace gives, whatever its rank. Returns whether any copy went.
        """
        gone = False
        while self.nvme.works and self.ram.free < least:
            if not self.victims.evict(ram_clean, self.ram, "evict_copy"):
                break
            gone = True
        return gone

    def ram_goes_first(self, space: Namespace, wanted: int) -> bool:
        """Whether a new file of a namespace takes the place of an object that only RAM has.

        This is so if NVMe is full of objects that were used later. Then NVMe has less room than RAM
        has, perhaps since others fill its file system.
        """
        self._measure_if_stale(self.nvme)
        return self.nvme.works and self.nvme.free < wanted and self.victims.nvme_is_newer(space)

    def reserve_for_file(
        self, tier: Tier, wanted: int, space: Namespace, *, lose: bool = False
    ) -> Reservation | None:
        """Reserve up to `wanted` bytes for a namespace's new file; None: not in this tier.

        The reservation has the bytes that are free now. kvfs loses no object before the file's
        bytes come: it suffices that some object may go at that time (`make_room`). At once, kvfs
        frees only the room of an empty file. It also evicts copies whose objects keep their names:
        copies in RAM of objects on NVMe, and objects in a bucket.

        lose: no tier below takes the objects of RAM, so kvfs may lose them for the file.
        """
        spare = self.headroom if tier is self.ram else 0
        self._measure_if_stale(tier)
        if tier.free - spare < wanted:
            with self.victims.on_behalf(space):
                if not self._will_have_room(tier, wanted, spare, lose=lose):
                    return None
        found = max(Tier.cost(0), min(wanted, tier.free - spare))
        if tier is not self.ram or lose:
            self._nvme_is_full = lose
        return Reservation(tier, found)

    def _will_have_room(self, tier: Tier, wanted: int, spare: int, *, lose: bool) -> bool:
        """Whether the tier will have the missing room when a new file needs it.

        An empty file always finds room, unless other files have really filled the tier. Bytes that
        are only set aside for other files do not count here.
        """
        crowded, least = self._will_cut_off(tier), wanted == Tier.cost(0)

        def unused() -> int:
            return self._unused(tier) if least else 0

        while (
            wanted + spare > tier.capacity - tier.reserved - self._expected_growth(tier) + unused()
        ):
            if not self._purge_orphan(tier):
                return crowded and least
        while tier.free + unused() - spare < wanted:
            if not self._purge_orphan(tier) and not self._evict_keeping_names(tier):
                break
        else:
            return True
        if not any(
            self.victims.any_has_victim(which, tier, twins, among)
            for which, twins, among in self._orders_that_give(tier, lose=lose)
        ):
            return crowded
        idle = self._unused(tier)
        while tier.free + idle - spare < Tier.cost(0) and not crowded:
            if not self._reclaim(tier) and not (lose and self._drop_from_ram()):
                return False
        return True

    def _evict_keeping_names(self, tier: Tier) -> bool:
        """Evict copies of one group whose objects keep their names; False if there is none."""
        copies = self.nvme.works
        if tier is self.ram and copies and self.victims.evict(ram_clean, tier, "evict_copy"):
            return True
        bucket = self.ledger.tiers.bucket
        if not bucket.mounted:
            return False
        among = [space for space in self.ledger.namespaces if space.takes(bucket)]
        with self.victims.keeping_names():
            if tier is not self.ram:
                return self.victims.evict(on_nvme, tier, "spare", among)
            return self.victims.evict(ram_spare, tier, "lose", among) or (
                not copies and self.victims.evict(ram_only, tier, "lose", among)
            )

    def _orders_that_give(
        self, tier: Tier, *, lose: bool
    ) -> list[tuple[OrderOf, Twins, list[Namespace] | None]]:
        """The orders from which `_reclaim` evicts, and with `lose` those of `_drop_from_ram`."""
        if tier is not self.ram:
            return [(on_nvme, "evict_copy", None)]
        if not self.nvme.mounted:
            return [(ram_only, "lose", None)]
        lost: list[tuple[OrderOf, Twins, list[Namespace] | None]] = []
        if lose:
            lost = [(ram_only, "lose", None)]
        if self.nvme.health.down:
            return [*lost, (ram_clean, "lose", None)] if lose else []
        return [(ram_spare, "lose", None), (ram_only, "lose", self._not_for_nvme()), *lost]

    def _will_cut_off(self, tier: Tier) -> bool:
        """Whether a tier has open files that kvfs would cut off for the present namespace.

        These are files of namespaces that have more beyond their shares (`Victims.on_behalf`).
        """
        least = self.victims.least_urgency
        return any(
            held.tier is tier
            and held.space is not None
            and held.staged > Tier.cost(0)
            and self.victims.urgency(held.space) > least
            for held in self.ledger.table.staging.values()
        )

    def _expected_growth(self, tier: Tier) -> int:
        """Bytes that open files are expected to take beyond their reservations."""
        return sum(
            max(0, max(held.expected, held.guess) - held.reserved)
            for held in self.ledger.table.staging.values()
            if held.tier is tier and held.doom is None
        )

    def _unused(self, tier: Tier) -> int:
        """Bytes set aside for open files that will not need them soon: no object goes for them."""
        return sum(
            max(0, held.reserved - max(Tier.cost(0), held.staged + held.ahead))
            for held in self.ledger.table.staging.values()
            if held.tier is tier
        )

    def _measure_if_stale(self, tier: Tier) -> None:
        if isinstance(tier, NvmeTier) and tier.works:
            stale = time.monotonic() - tier.measured > MEASURED_FOR
            if tier.shortage or stale:
                self._measure(tier)

    def reserve_gently(self, tier: Tier, wanted: int, ino: int) -> Reservation | None:
        """Reserve room for an object that kvfs fetches ahead: see `Victims.gently`."""
        with self.victims.gently():
            found = self.reserve(tier, wanted)
        if found is not None:
            self.victims.note_fetched_ahead(ino)
        return found

    def _measure(self, nvme: NvmeTier) -> None:
        """Measure the free bytes of the NVMe device, which other programs fill, too."""
        try:
            nvme.measure(self.written_of_reserved(nvme))
        except OSError as error:
            nvme.failed("statfs", str(nvme.root), error)

    def written_of_reserved(self, tier: Tier) -> int:
        """Reserved bytes that are on the device already: of open files, and of orphans."""
        ledger = self.ledger
        return ledger.orphans.bytes_in(tier) + sum(
            held.taken if held.doom is not None else min(held.reserved, held.taken)
            for held in ledger.table.staging.values()
            if held.tier is tier
        )

    @property
    def headroom(self) -> int:
        """Bytes of RAM that are kept free for files that outgrow their reservation."""
        return self.ram.capacity // HEADROOM

    def make_room(self, tier: Tier) -> OpenObject | None:
        """Evict until a tier is within its capacity. Return a file to cut off, or None.

        The cause is a writer that outgrew its reservation, or a device that has less room. kvfs
        evicts from the namespace with most beyond its share. If none of its objects may go, and the
        tier really has too many bytes, `make_room` returns one of its open files to cut off. So no
        namespace gives for a growing one that has more beyond its share.

        In RAM, objects that no other tier holds are lost only if memory runs out, or NVMe takes
        nothing: the alternative is a writer that gets ENOSPC from the kernel. If one file grows
        beyond RAM, `make_room` returns this file instead.
        """
        if tier.health.down:  # its accounts may be wrong, and an eviction would free nothing
            return None
        if tier is self.ram and self.nvme.works and not self._nvme_is_full:
            return self._make_room_above(self.ram)
        least = (self.headroom // 2 if tier is self.ram else 0) - self._unused(tier)
        if tier is self.ram:
            self.evict_copies(least)
        while tier.free < least:
            found = self._evict_or_choose_file(tier)
            if found is not True:
                return found if self._has_too_much(tier) else None
        return None

    def shrink(self) -> None:
        """Bring tiers that became smaller within their sizes. Log what they have lost for that.

        Raises CatalogError.
        """
        accounts = self.ledger.accounts
        drops, before = accounts.shrunk, self._shrunk
        for tier in accounts.shrinking:
            self.make_room(tier)
        beyond = [tier for tier in accounts.shrinking if tier.used > tier.configured_capacity]
        self._shrunk = drops.objects
        if beyond and drops.objects > before:
            return  # one line tells all
        if drops.objects:
            sizes = [human(tier.configured_capacity) for tier in accounts.shrinking]
            log.info(
                "%s began with more than %s %s, and kvfs dropped %s for that",
                " and ".join(tier.name for tier in accounts.shrinking),
                *("its size of" if len(sizes) == 1 else "their sizes of", " and ".join(sizes)),
                drops,
            )
        accounts.shrunk, self._shrunk = Drops(drops.reason), 0
        accounts.shrinking = beyond
        for tier in beyond:
            if tier not in self._stays and (why := self.excess(tier)):
                self._stays.add(tier)
                log.warning("the %s tier stays larger than its size: %s", tier.name, why)

    def excess(self, tier: Tier) -> str:
        """Why a tier stays larger than its size; "" if it does not."""
        kept = self.ledger.accounts.kept_in(tier)
        if kept <= tier.configured_capacity or not self.ledger.accounts.census_done.is_set():
            return ""
        return (
            f"{human(kept)} stay, more than its size of {human(tier.configured_capacity)}: kvfs "
            "evicts none of these objects"
        )

    def _make_room_above(self, ram: RamTier) -> OpenObject | None:
        """As `make_room` in RAM, while NVMe below takes the objects that only RAM holds."""
        least, growing = self.headroom // 2, self._least_urgent_growing(ram)
        idle = self._unused(ram)
        with self.victims.on_behalf(growing) if growing else nullcontext():
            while ram.free + idle < least and self._reclaim(ram):
                pass
        held = [held for held in self.ledger.table.staging.values() if held.tier is ram]
        largest = max(held, key=lambda one: one.reserved, default=None)
        while self._left(ram) < least:
            if self.victims.evict(ram_clean, ram, "evict_copy"):
                continue
            if largest and largest.reserved > ram.capacity and not largest.just_closed:
                return largest
            found = self._evict_or_choose_file(ram)
            if found is not True:
                return found
        return None

    def _left(self, ram: RamTier) -> int:
        """Bytes that are free in the tmpfs of RAM, and those that cut off files will free."""
        staging = self.ledger.table.staging.values()
        return ram.left() + sum(held.leaving for held in staging if held.tier is ram)

    def _has_too_much(self, tier: Tier) -> bool:
        """Whether a tier has more bytes than it may. Bytes only set aside do not count."""
        staged = sum(
            held.staged for held in self.ledger.table.staging.values() if held.tier is tier
        )
        return tier.used + self.ledger.orphans.bytes_in(tier) + staged > tier.capacity

    def _least_urgent_growing(self, tier: Tier) -> Namespace | None:
        """The namespace with least beyond its share, of those whose files grow in a tier."""
        growing = [
            held.space
            for held in self.ledger.table.staging.values()
            if held.tier is tier and held.grows and held.doom is None and held.space is not None
        ]
        return min(growing, key=self.victims.urgency, default=None)

    def _evict_or_choose_file(self, tier: Tier) -> Literal[True] | OpenObject | None:
        """Evict from the namespace with most beyond its share, or return its file to cut off.

        Returns True after an eviction, and None if nothing may go. kvfs passes over a namespace if
        its open files do not grow, and most of its bytes are sealed. Processes may have mapped most
        bytes of a namespace that has no victim. Then no other namespace gives for it, unless
        another one grows.
        """
        if self._purge_orphan(tier):
            return True
        writers: dict[Namespace, list[OpenObject]] = {}
        for held in self.ledger.table.staging.values():
            if held.tier is tier and held.staged and held.doom is None and held.space is not None:
                writers.setdefault(held.space, []).append(held)
        growing = {space for space, files in writers.items() if any(held.grows for held in files)}
        spaces = self.victims.by_urgency()
        spaces += [space for space in writers if space not in spaces]  # those were removed
        lost = self.ledger.tiers.bucket.health.down
        for space in spaces:
            if self._evict_from(space, tier):
                return True
            if lost:
                with self.victims.losing_dirty():
                    if self._evict_from(space, tier):
                        return True
            written = writers.get(space, [])
            if written and (space.staged > space.bytes or any(held.grows for held in written)):
                open_yet = [held for held in written if not held.just_closed]
                if not open_yet:  # kvfs may evict these files after their release, so wait for it
                    return None
                return max(open_yet, key=lambda held: (held.grows, held.staged))
            if space.unlinked > space.bytes and not growing - {space}:
                break
        return None

    def _evict_from(self, space: Namespace, tier: Tier) -> bool:
        """Evict one group of a namespace: from the lowest tier, or from RAM, which loses it."""
        if tier is not self.ram:
            return self.victims.evict_of(space, on_nvme, tier, "evict_copy")
        if self.nvme.health.down:
            return self._drop_from_ram([space])
        return self.victims.evict_of(space, ram_spare, tier, "lose") or self.victims.evict_of(
            space, ram_only, tier, "lose"
        )

    def _reclaim(self, tier: Tier, twins: Twins = "evict_copy") -> bool:
        """Evict a group at once; False if that would lose an object that fits another tier."""
        if self._purge_orphan(tier):
            return True
        if tier is not self.ram:
            return self.victims.evict(on_nvme, tier, twins)
        if not self.nvme.mounted:
            return self._drop_from_ram()
        if self.nvme.health.down:  # the copy in RAM is the only one that can be read
            return False
        return (
            self.victims.evict(ram_clean, tier, "evict_copy")
            or self.victims.evict(ram_spare, tier, "lose")
            or self.victims.evict(ram_only, tier, "lose", self._not_for_nvme())
        )

    def _not_for_nvme(self) -> list[Namespace]:
        """The namespaces whose objects NVMe does not take."""
        spaces = self.ledger.namespaces
        homeless = (one for one in spaces if not one.takes(self.nvme))
        return [*spaces.dropped.values(), *homeless]

    def _purge_orphan(self, tier: Tier) -> bool:
        """Remove one orphan of a tier, though the kernel has not forgotten it; False if none."""
        ledger = self.ledger
        for ino, room in ledger.orphans.rooms.items():
            if room is not None and room.tier is tier and ledger.removals.purge(ino):
                return True
        return False

    def _drop_from_ram(self, among: list[Namespace] | None = None) -> bool:
        """Evict the oldest object that only RAM can serve; return whether there was one.

        While NVMe is down, these are all objects of RAM. An object that NVMe has as well keeps its
        name, and programs can open it once NVMe is up again.
        """
        if not self.nvme.health.down:
            return self.victims.evict(ram_only, self.ram, "lose", among)
        for space in self.victims.by_urgency(among):
            twin = self.victims.next_of(space.ram_clean, self.ram)
            alone = self.victims.next_of(space.ram_only, self.ram)
            if twin is not None and (alone is None or twin.atime_ns <= alone.atime_ns):
                return self.victims.evict_of(space, ram_clean, self.ram, "evict_copy")
            if alone is not None:
                return self.victims.evict_of(space, ram_only, self.ram, "lose")
        return False

    @property
    def reclaimable(self) -> int:
        """Bytes of RAM that a create can get at once: free bytes, and copies that NVMe has, too."""
        free = max(0, self.ram.free + self._unused(self.ram) - self.headroom)
        if not self.nvme.works:
            return free
        return free + sum(
            0
            if space.settings.pin
            else space.doubled_bytes + sum(space.refused.values())
            if space.takes(self.nvme)
            else space.held[self.ram.name]
            for space in self.ledger.namespaces
        )
