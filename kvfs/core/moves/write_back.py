"""Write back: copies everything that only RAM holds to NVMe, before an unmount.

Contract: `start` asks for a write back and returns what is left to copy. The write back ends when
`start` returns that nothing is left, or PATIENCE seconds after the last call. It makes demotions
urgent (`Demotion`). `drain` asks until all is copied, or NVMe takes no more. It does not wait for a
file that is too large for NVMe's file system. Not for copying.
"""

import logging
from collections.abc import Iterator
from itertools import chain

import trio

from kvfs.core.ledger.ledger import Ledger
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.namespaces.namespace import Namespace

log = logging.getLogger(__name__)

FEW = 1000  # objects that can be looked at one by one in a step of the loop
PATIENCE = 5.0  # s that a write-back goes on after it was last asked for
GIVE_UP = 8  # failures in a row that end a write-back


class WriteBack:
    """While it is `wanted`, everything that only RAM holds is demoted."""

    def __init__(self, transfers: TierTransfers) -> None:
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.breaker = transfers.breaker
        self._until = 0.0
        self._dropped_before: int | None = None  # objects, when it began

    @property
    def wanted(self) -> bool:
        """Whether a caller has asked for a write back within the last PATIENCE seconds."""
        return trio.current_time() < self._until

    @property
    def stuck(self) -> str:
        """The reason why NVMe takes no more of RAM's objects; "" as long as it may."""
        nvme, breaker = self.ledger.tiers.nvme, self.breaker
        if nvme.health.down:
            return nvme.health.why
        return breaker.reason if breaker.failures >= GIVE_UP else ""

    def start(self) -> tuple[int, int]:
        """Start copying everything that only RAM holds. (bytes, objects) still to be copied."""
        ledger = self.ledger
        ram = ledger.tiers.ram
        spaces = demotable(ledger)
        size = sum(space.held[ram.name] - space.doubled_bytes for space in spaces)
        count = sum(space.held_objects[ram.name] - space.doubled_objects for space in spaces)
        count -= self.too_large
        if count <= FEW:  # few: count each, without orphans, which are not worth copying
            inos = chain.from_iterable(map(_only_in_ram, spaces))
            written = self.transfers.copy_is_useless
            inodes = [ledger.table.inode(ino) for ino in inos if not written(ino)]
            size, count = sum(ram.cost(inode.blocks) for inode in inodes if inode), len(inodes)
        if count and not self.wanted:
            self._dropped_before = ledger.counters["dropped_evicted"]
        if count:
            self._until = trio.current_time() + PATIENCE
            ledger.wakeup.wake()
        elif self.wanted:
            self._end()
        return size, count

    def _end(self) -> None:
        self._until = 0.0
        if lost := self.displaced:
            log.info("%d objects were dropped to save what RAM held: NVMe is full", lost)

    @property
    def too_large(self) -> int:
        """The number of objects that are lost with RAM: NVMe has no files of their size."""
        return sum(len(space.too_large) for space in demotable(self.ledger))

    @property
    def displaced(self) -> int:
        """The number of objects dropped since the last write back began: NVMe is full."""
        if self._dropped_before is None:
            return 0
        return self.ledger.counters["dropped_evicted"] - self._dropped_before

    async def drain(self) -> None:
        """Write back until all is on NVMe, or NVMe takes no more."""
        self.breaker.failures = 0
        counted = self.ledger.accounts.census_done.is_set
        while (left := self.start())[1] or not counted():
            if stuck := self.stuck:
                log.error(
                    "%d objects (%d bytes) could not be written back, and are lost with RAM: %s",
                    *(left[1], left[0], stuck),
                )
                self._end()
                break
            await trio.sleep(0.02)


def _only_in_ram(space: Namespace) -> Iterator[int]:
    """The inodes of a namespace that can be written back."""
    orders = chain(space.ram_only, space.ram_kept, space.ram_spare)
    return (ino for ino in orders if ino not in space.too_large)


def demotable(ledger: Ledger) -> list[Namespace]:
    """The namespaces whose objects may be on NVMe."""
    nvme = ledger.tiers.nvme
    return [space for space in ledger.namespaces if space.takes(nvme)]
