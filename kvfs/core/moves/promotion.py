"""Promotion: copies objects that are opened again and again from NVMe to RAM.

Contract: the caller tells `opened` of every open for reading. After enough of them, `opened` asks
for a promotion. If an object fits RAM only by the loss of another, it is skipped. Not for opens of
objects in RAM, nor for objects that their namespace keeps out of RAM.
"""

from collections import OrderedDict

from kvfs.catalog import Inode
from kvfs.core.capacity.room import Room
from kvfs.core.moves.movement import MovementQueue
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.moves.unpacking import Unpacking

OPENS_REMEMBERED = 65536  # inodes whose opens are counted


class Promotion:
    """Promotes an object after `after` opens; 0 means never. `after` may change at any time."""

    name = "promote"

    def __init__(
        self,
        transfers: TierTransfers,
        room: Room,
        requests: MovementQueue,
        unpacking: Unpacking,
    ) -> None:
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.room = room
        self.requests = requests
        self.unpacking = unpacking
        self.after = 0
        self._opens: OrderedDict[int, int] = OrderedDict()

    def opened(self, inode: Inode) -> None:
        """Count an open for reading. After enough of them, ask for a promotion."""
        ledger = self.ledger
        if not self.after or inode.ram_epoch == ledger.tiers.ram.epoch:
            return
        if not ledger.namespaces.of(inode).takes(ledger.tiers.ram):
            return
        count = self._opens.pop(inode.ino, 0) + 1
        if count < self.after:
            self._opens[inode.ino] = count
            if len(self._opens) > OPENS_REMEMBERED:
                self._opens.popitem(last=False)
        else:
            self.requests.add(self, inode.ino)

    def opens(self, ino: int) -> int:
        """The opens of an object on NVMe that count towards its promotion."""
        return self._opens.get(ino, 0)

    async def move(self, inodes: list[Inode]) -> None:
        """Copy one object, if only NVMe holds it and RAM has room."""
        ledger, ram, nvme = self.ledger, self.ledger.tiers.ram, self.ledger.tiers.nvme
        (inode,) = inodes
        if ledger.tiers.holders(inode) != [nvme]:
            return
        room = self.room.reserve(ram, ram.cost(inode.blocks))
        if room is None:
            ledger.counters["promotions_skipped"] += 1
            self.room.note_ram_lacks()
            return
        with room:
            if inode.packed is not None:
                await self.unpacking.carry(inode, ram)
            else:
                await self.transfers.copy(inodes, nvme, ram, "promoted")
