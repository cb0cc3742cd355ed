"""Demotion: copies objects from RAM to NVMe, if they are worth the write.

Contract: `reclaimable` percent of RAM are free, or have a copy on NVMe, or get one now. During a
write back this is true for all of RAM. Demotion copies objects of namespaces with `write=through`
at once. Otherwise it begins with the namespace that is furthest beyond its share, and there with
the objects that would be evicted first. RAM keeps its copy until its room is needed. Demotion
copies small objects together, since each sync costs as much as such an object.

A demotion makes a second copy of an object. For this copy it takes no room on NVMe from a namespace
of a lower rank (`Victims.urgency`), nor from an object that was used later. So if NVMe has only
later objects, the object of RAM is the oldest of all: it gets no copy, and goes when RAM needs
room. It gets a copy if NVMe has free room again. A write back may take all room, since all objects
of RAM must go to NVMe. Not for making room on NVMe (`Room`), nor for the wear of NVMe
(`Admission`).
"""

import math
import time
from collections.abc import Container, Iterator
from contextlib import ExitStack
from itertools import chain

import trio

from kvfs.catalog import Inode
from kvfs.core.capacity.refusals import held_room
from kvfs.core.capacity.room import Room
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.moves.write_back import WriteBack, demotable
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.order import key_of, last_use
from kvfs.fairness.admission import Admission
from kvfs.tiers import Reservation, Tier

FULL_FOR = 1.0  # s for which demotion passes over a namespace after NVMe had no room for it
BATCH_OBJECTS, BATCH_BYTES = 128, 16 << 20  # of small objects that are demoted and synced together
OVERSHOOT = 8  # demotion may copy so large a part of `reclaimable` beyond it: 1/8, a guess


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
        self._begun: dict[int, int] = {}  # inode -> bytes, of the objects that jobs copy now
        self._full_until: dict[int, float] = {}  # trio's time, by namespace

    # Choose objects

    def next(self) -> list[int]:
        """The next objects to copy to NVMe, of the namespace that is furthest beyond its share."""
        if self.breaker.pausing:
            return []
        self._begun = {ino: size for ino, size in self._begun.items() if ino in self._jobs}
        able, missing = demotable(self.ledger), self._missing()
        if missing <= 0:
            able = [one for one in able if one.settings.write == "through" or self._returns(one)]
        spaces = self.room.victims.by_urgency(able)
        # The namespace with the fewest copies for its weight comes first, so all share the movers.
        in_flight = self.transfers.in_flight
        spaces.sort(key=lambda space: in_flight[space.ino] / space.settings.weight)
        if not self.write_back.wanted:
            spaces = [space for space in spaces if not self._is_full_for(space)]
        # Small objects come several at a time, also if few bytes are missing.
        most = min(BATCH_BYTES, max(missing, self._wanted // OVERSHOOT)) if missing > 0 else 0
        found = (self._oldest_in_ram(space, most) for space in spaces)
        return next(filter(None, found), [])

    def _is_full_for(self, space: Namespace) -> bool:
        """Whether NVMe had no room for this namespace in the last FULL_FOR seconds."""
        return trio.current_time() < self._full_until.get(space.ino, 0.0)

    def _returns(self, space: Namespace) -> bool:
        """Whether NVMe has free room by now for an object that later objects crowded out."""
        first = next((ino for ino in space.ram_spare if ino in space.crowded_out), None)
        return first is not None and space.refused[first] <= self.ledger.tiers.nvme.free

    def _candidates(self, space: Namespace, *, wanted: bool) -> Iterator[int]:
        """The inodes to copy of a namespace, the first to go first."""
        if self._returns(space):
            yield from (ino for ino in space.ram_spare if ino in space.crowded_out)
        if wanted or space.settings.write == "through":
            yield from chain(space.ram_only, space.ram_kept)
        if self.write_back.wanted:
            yield from space.ram_spare

    def _oldest_in_ram(self, space: Namespace, wanted: float) -> list[int]:
        """The namespace's next object, or several small ones to sync together.

        An object that is to be compressed comes alone. wanted: the bytes of them, at most; 0 if
        only objects come that need not leave RAM.
        """
        inos: dict[int, int] = {}
        size = 0
        for ino in self._candidates(space, wanted=wanted > 0):
            if ino in self._jobs or ino in space.too_large or self.transfers.copy_is_useless(ino):
                continue
            inode = self.ledger.table.inode(ino)
            alone = inode is not None and self.transfers.should_pack(inode)
            if inos and alone:
                break
            cost = 0 if inode is None else Tier.cost(inode.blocks)
            size += cost
            if inos and size > (wanted or BATCH_BYTES):
                break
            inos[ino] = cost
            if alone or len(inos) == BATCH_OBJECTS:
                break
        self._begun |= inos
        return list(inos)

    def _missing(self) -> float:
        """The bytes to copy until `reclaimable` percent of RAM are free or on NVMe.

        Objects that jobs copy now count as copied. During a write back there is no limit.
        """
        if self.write_back.wanted:
            return math.inf
        return self._wanted - self.room.reclaimable - sum(self._begun.values())

    @property
    def _wanted(self) -> int:
        return self.ledger.tiers.ram.capacity * self.reclaimable // 100

    # Copy them

    async def move(self, inodes: list[Inode]) -> None:
        """Copy those objects that are worth a write to NVMe, as far as NVMe has room."""
        ram, nvme = self.ledger.tiers.ram, self.ledger.tiers.nvme
        space = self.ledger.namespaces.of(inodes[0])
        with ExitStack() as rooms:
            taken: list[Inode] = []
            total, lacks = 0, 0
            for inode in inodes:
                if self._is_crowded_out(space, inode) or not self._admitted(inode):
                    continue
                cost = nvme.cost(inode.blocks)
                room = self._reserve(space, cost)
                if room is None:  # NVMe is full of other objects, or too small
                    lacks = cost
                    break
                rooms.enter_context(room)
                total += cost
                taken.append(inode)
            if taken:
                with self.room.demoting.under_way(space, total):
                    await self.transfers.copy(taken, ram, nvme, "demoted")
            elif lacks:
                self._pass_over(space)
                self._tell_full(space, lacks)

    def _reserve(self, space: Namespace, cost: int) -> Reservation | None:
        if self.write_back.wanted:
            return self.room.reserve(self.ledger.tiers.nvme, cost, "lose")
        with self.room.victims.on_behalf(space):
            return self.room.reserve(self.ledger.tiers.nvme, cost, "spare")

    def _is_crowded_out(self, space: Namespace, inode: Inode) -> bool:
        """Whether a copy would take the room of an object that was used later than this one.

        Such an object stays in RAM, without a copy. If its namespace is the one that gives room, it
        is the next to go there. Otherwise kvfs passes over the namespace for a moment. A program
        that lacks room in RAM matters more (`Room.ram_lacks`).
        """
        nvme = self.ledger.tiers.nvme
        cost = nvme.cost(inode.blocks)
        if self.write_back.wanted or nvme.free >= cost:
            return False
        victims = self.room.victims
        first = victims.first_on_nvme(space)
        if first is None:
            return False
        loser = self.ledger.namespaces.of(first)
        if last_use(first) < last_use(inode):
            # A namespace of a higher rank, which gives nothing, would get the room in RAM.
            ranks = map(victims.urgency, self.ledger.namespaces)
            if self.room.ram_lacks or max(ranks) <= victims.urgency(loser):
                return False
            self._pass_over(space)
            return True
        # Files being written may hold the room of NVMe, and seal less: they crowd out no object.
        if loser is space and nvme.capacity - nvme.used < cost and space.crowd_out(inode):
            return True
        if self.room.ram_lacks:
            return False
        self._pass_over(space)
        return True

    def _pass_over(self, space: Namespace) -> None:
        """Demote nothing of a namespace for FULL_FOR seconds."""
        now = trio.current_time()
        self._full_until = {ino: until for ino, until in self._full_until.items() if until > now}
        self._full_until[space.ino] = now + FULL_FOR

    def _tell_full(self, space: Namespace, cost: int) -> None:
        """Log that NVMe had no room for an object, if no other namespace has one to demote."""
        all_goes = self.write_back.wanted
        if not all_goes and self.next():
            return
        writer = None if all_goes else space
        nvme = self.ledger.tiers.nvme
        why = held_room(self.room, writer, [nvme], demotes=not all_goes)
        self.breaker.pause(
            f"nothing is demoted: the NVMe tier has no room for {cost} bytes; {why.text}",
            "no room on nvme",
            counts=all_goes,
        )

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
