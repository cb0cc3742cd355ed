"""Demotion: copies objects from RAM to NVMe, if they are worth the write.

Contract: `reclaimable` percent of RAM are free, or have a copy on NVMe, or get one now. During a
write back this is true for all of RAM. Demotion copies objects of namespaces with `write=through`
at once. Otherwise it begins with the namespace that is furthest beyond its share, and there with
the objects that would be evicted first. RAM keeps its copy until its room is needed. Demotion
copies small objects together, since each sync costs as much as such an object.

For an object of one namespace, a demotion takes no room on NVMe from a namespace of a lower rank
(`Victims.urgency`). A write back may take such room, since all objects of RAM must go to NVMe. Not
for making room on NVMe (`Room`), nor for the wear of NVMe (`Admission`).
"""

import time
from collections.abc import Container
from contextlib import ExitStack, nullcontext
from itertools import chain

import trio

from kvfs.catalog import Inode
from kvfs.core.capacity.refusals import held_room
from kvfs.core.capacity.room import Room
from kvfs.core.capacity.victims import Twins
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.moves.write_back import WriteBack, demotable
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.order import key_of
from kvfs.fairness.admission import Admission
from kvfs.tiers import Tier

FULL_FOR = 1.0  # s for which demotion passes over a namespace after NVMe had no room for it
BATCH_OBJECTS, BATCH_BYTES = 128, 16 << 20  # of small objects that are demoted and synced together


class Demotion:
    """The movement from RAM to NVMe.

    `reclaimable` is in percent of RAM, and may change at any time. jobs: the inodes on which movers
    work.
    """

    name = "demote"

    def __init__(
        self,
        transfers: TierTransfers,
        room: Room,
        admission: Admission,
        write_back: WriteBack,
        jobs: Container[int],
    ) -> None:
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.breaker = transfers.breaker
        self.room = room
        self.admission = admission
        self.write_back = write_back
        self.reclaimable = 0
        self._jobs = jobs
        self._full_until: dict[int, float] = {}  # trio's time, by namespace

    # Choose objects

    def next(self) -> list[int]:
        """The next objects to copy to NVMe, of the namespace that is furthest beyond its share."""
        if self.breaker.pausing:
            return []
        able = demotable(self.ledger)
        if not self._must_demote():
            able = [space for space in able if space.settings.write == "through"]
        spaces = self.room.victims.by_urgency(able)
        # The namespace with the fewest copies for its weight comes first, so all share the movers.
        in_flight = self.transfers.in_flight
        spaces.sort(key=lambda space: in_flight[space.ino] / space.settings.weight)
        if not self.write_back.wanted:
            spaces = [space for space in spaces if not self._is_full_for(space)]
        return next(filter(None, map(self._oldest_in_ram, spaces)), [])

    def _is_full_for(self, space: Namespace) -> bool:
        """Whether NVMe had no room for this namespace in the last FULL_FOR seconds."""
        return trio.current_time() < self._full_until.get(space.ino, 0.0)

    def _oldest_in_ram(self, space: Namespace) -> list[int]:
        """The namespace's next object, or several small ones to sync together.

        An object that is to be compressed comes alone.
        """
        inos: list[int] = []
        size = 0
        spare = space.ram_spare if self.write_back.wanted else ()
        for ino in chain(space.ram_only, space.ram_kept, spare):
            if ino in self._jobs or ino in space.too_large or self.transfers.copy_is_useless(ino):
                continue
            inode = self.ledger.table.inode(ino)
            alone = inode is not None and self.transfers.should_pack(inode)
            if inos and alone:
                break
            size += 0 if inode is None else inode.blocks * 512
            if inos and size > BATCH_BYTES:
                break
            inos.append(ino)
            if alone or len(inos) == BATCH_OBJECTS:
                break
        return inos

    def _must_demote(self) -> bool:
        """Whether less than `reclaimable` percent of RAM is free, on NVMe, or on its way there."""
        ledger = self.ledger
        wanted = ledger.tiers.ram.capacity * self.reclaimable // 100
        return self.write_back.wanted or self.room.reclaimable + self.room.demoting.bytes < wanted

    # Copy them

    async def move(self, inodes: list[Inode]) -> None:
        """Copy those objects that are worth a write to NVMe, as far as NVMe has room."""
        ram, nvme = self.ledger.tiers.ram, self.ledger.tiers.nvme
        inodes = [inode for inode in inodes if self._admitted(inode)]
        if not inodes:
            return
        space, all_goes = self.ledger.namespaces.of(inodes[0]), self.write_back.wanted
        victims = self.room.victims
        with ExitStack() as rooms:
            total, taken = 0, 0
            for inode in inodes:
                cost = nvme.cost(inode.blocks)
                twins: Twins = "lose" if all_goes else "spare"
                with nullcontext() if all_goes else victims.on_behalf(space):
                    room = self.room.reserve(nvme, cost, twins)
                if room is None:
                    break
                rooms.enter_context(room)
                total, taken = total + cost, taken + 1
            if not taken:  # NVMe is full of other objects, or too small
                self._full_until = {space.ino: trio.current_time() + FULL_FOR} | {
                    ino: until
                    for ino, until in self._full_until.items()
                    if until > trio.current_time() and ino != space.ino
                }
                if all_goes or not self.next():
                    writer = None if all_goes else space
                    why = held_room(self.room, writer, [nvme], demotes=not all_goes)
                    self.breaker.pause(
                        f"nothing is demoted: the NVMe tier has no room for {cost} bytes; "
                        f"{why.text}",
                        "no room on nvme",
                        counts=all_goes,
                    )
                return
            with self.room.demoting.under_way(space, total):
                await self.transfers.copy(inodes[:taken], ram, nvme, "demoted")

    def _admitted(self, inode: Inode) -> bool:
        """Whether the object is worth a write to NVMe.

        If not, kvfs drops it when it needs the room in RAM.
        """
        space = self.ledger.namespaces.of(inode)
        settings = space.settings
        obliged = inode.unevictable or settings.pin or settings.eviction == "never"
        if self.admission.decide(
            key_of(inode),
            Tier.cost(inode.blocks),
            time.time(),
            touched=inode.atime_ns > inode.mtime_ns,
            obliged=obliged or self.write_back.wanted,
        ):
            return True
        space.refuse(inode)
        return False
