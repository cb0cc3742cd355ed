"""Backlog: marks objects dirty that were sealed before the bucket was to have them.

Contract: `run` looks through the whole catalog once in each of four cases: the mount has `s3=` for
the first time; the last mount had no `s3=`; a namespace begins to use the bucket; the catalog does
not yet mark conflicts with other nodes. A step is synchronous, one batch, and looks at STEP inodes,
in the order in which they were made. The backlog keeps the uploads busy, and marks no more objects
than that, so that no writer has to wait. kvfs may still drop an object that no step has reached.
After a death the next daemon begins anew, and skips objects that are dirty or uploaded already. Not
for uploading (`Uploader`).
"""

import logging

import trio

from kvfs.core.ledger.dirty import CAUGHT_UP, CONTESTED_MARKED
from kvfs.core.moves.transfers import TierTransfers

log = logging.getLogger(__name__)

STEP = 16  # inodes, 0.3 ms
SHARE = 4  # the backlog pauses while more than 1/SHARE of `max_dirty_bytes` is dirty
PAUSE = 1.0  # s between two checks of the dirty bytes, if no event comes before


class Backlog:
    """The backlog of all namespaces."""

    def __init__(self, transfers: TierTransfers) -> None:
        self.transfers = transfers
        self.ledger = transfers.ledger
        self.dirty = self.ledger.dirty
        self.catalog = self.ledger.catalog

    async def run(self) -> None:
        """Look through the catalog whenever that is needed. Raises CatalogError."""
        await self.ledger.accounts.census_done.wait()
        while True:
            self.dirty.look_back_wanted = trio.Event()
            if not self.catalog.fact(CAUGHT_UP) or not self.catalog.fact(CONTESTED_MARKED):
                await self.look()
            await self.dirty.look_back_wanted.wait()

    async def look(self) -> None:
        """Look through the whole catalog."""
        wanted_again, found = self.dirty.look_back_wanted, 0
        at, end = 0, self.catalog.counter
        while at < end and (inodes := self.catalog.inodes_after(at, STEP)):
            lacking = [inode for inode in inodes if self._lacks(inode.ino)]
            if lacking:
                with self.catalog.batch() as batch:
                    for inode in lacking:
                        self.dirty.mark(inode, batch, inode.backing_mtime_ns)
            found += len(lacking)
            at = inodes[-1].ino
            await trio.lowlevel.checkpoint()
            await self._wait_for_room()
        if not wanted_again.is_set():  # else a namespace began to use the bucket meanwhile
            with self.catalog.batch() as batch:
                batch.set_fact(CAUGHT_UP, "1")
                batch.set_fact(CONTESTED_MARKED, "1")
        if found:
            log.info("%d objects were sealed before they were to be in the bucket", found)

    async def _wait_for_room(self) -> None:
        bucket = self.ledger.tiers.bucket
        while self.dirty.bytes > bucket.max_dirty_bytes // SHARE:
            with trio.move_on_after(PAUSE):
                await self.dirty.changed.wait()

    def _lacks(self, ino: int) -> bool:
        inode = self.transfers.still_current(ino)
        if inode is None or not inode.is_file or inode.in_bucket or ino in self.dirty:
            return False
        if ino in self.dirty.contested:
            return False
        return self.dirty.wanted(inode) and bool(self.ledger.tiers.holders(inode))
