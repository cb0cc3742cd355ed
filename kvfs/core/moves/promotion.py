"""From NVMe to RAM: what is opened again and again.

Contract: `opened` is told of every open to read, and asks for a promotion when there were enough.
One that does not fit RAM without losing something there is skipped. Not for opens of what is in RAM
already, nor for what its namespace keeps out of RAM.
"""

from collections import OrderedDict

from kvfs.catalog import Inode
from kvfs.core.capacity.room import Room
from kvfs.core.moves.movement import Requests
from kvfs.core.moves.transfers import Transfers
from kvfs.core.moves.unpacking import Unpacking

OPENS_REMEMBERED = 65536  # inodes whose opens are counted


class Promotion:
    """`after` so many opens, 0 for never; it may change at any time."""

    name = "promote"

    def __init__(
        self,
        transfers: Transfers,
        room: Room,
        requests: Requests,
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
        """An object was opened for reading: promote it when it is read again and again."""
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
        """Opens of it on NVMe that count towards its promotion."""
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
            return
        with room:
            if inode.packed is not None:
                await self.unpacking.carry(inode, ram)
            else:
                await self.transfers.copy(inodes, nvme, ram, "promoted")
