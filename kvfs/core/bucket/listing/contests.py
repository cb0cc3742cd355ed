"""Conflicts: asks the bucket whether another node still has the name of an object.

Contract: `run` asks the bucket about at most AT_ONCE objects in `Bucket.recheck` seconds, in turn,
for ever. If a whole round changes nothing, it waits longer, up to LONGEST times as long. So any
number of conflicts costs a few requests a second, and each conflict ends. When a caller waits for
all uploads (`hurry`), some objects are asked about at once. kvfs does not ask an unreachable
bucket. `remote_entries` decides what an answer means. If no other object has the name, the object
goes up as at the first time, and only one node succeeds in that. A lookup of the name, or a listing
of its directory, finds the same earlier (`bucket_lookup`, `bucket_listing`).
"""

import trio

from kvfs.core.bucket.listing.bucket_lookup import AT_ONCE, BucketLookup

LEAST = 1.0  # s between two steps
LONGEST = 10  # times `Bucket.recheck`, between two rounds
HURRIED = 1000  # objects that are asked about at once after `hurry`
HURRY = 5.0  # s between two such steps
GLANCE = 1.0  # s between two checks whether an unreachable bucket may be asked


class Contests:
    """The conflicts of one bucket. `hurrying`: a step is to be made at once, or under way."""

    def __init__(self, bucket_lookup: BucketLookup) -> None:
        self.bucket_lookup = bucket_lookup
        self.bucket = bucket_lookup.bucket
        self.dirty = bucket_lookup.dirty
        self.contested = bucket_lookup.dirty.contested
        self.hurrying = False
        self._hurried = -HURRY

    def hurry(self) -> None:
        """Ask about some conflicts at once: a caller waits until all objects are uploaded."""
        now = trio.current_time()
        if len(self.contested) and self.bucket_lookup.may_ask() and now >= self._hurried + HURRY:
            self._hurried, self.hurrying = now, True
            self.contested.wake()

    async def run(self) -> None:
        """Ask about conflicts, for ever. Raises CatalogError."""
        while not self.dirty.loaded:
            await self.dirty.changed.wait()
        left, times, changed = len(self.contested), 1, self._changes()
        while True:
            await self._wait_for_some()
            hurried = self.hurrying  # a later `hurry` gets its own step
            inos = self.contested.turn(HURRIED if hurried else AT_ONCE)
            try:
                await self._ask(inos)
            finally:
                self.hurrying &= not hurried
            left -= len(inos)
            if left > 0:
                await self._pause(1)
                continue
            times = 1 if self._changes() != changed else min(2 * times, LONGEST)
            left, changed = len(self.contested), self._changes()
            await self._pause(times)

    def _changes(self) -> tuple[int, int]:
        return self.contested.entered, self.bucket.counters["conflicts_ended"]

    async def _wait_for_some(self) -> None:
        while not len(self.contested):
            self.hurrying = False
            await self.contested.changed.wait()
        while not self.bucket_lookup.may_ask():  # noqa: ASYNC110 (no event tells of it)
            await trio.sleep(GLANCE)

    async def _ask(self, inos: list[int]) -> None:
        """Ask about objects, and end conflicts of objects that the bucket is not to have."""
        ledger = self.bucket_lookup.ledger
        for ino in inos:
            inode = ledger.table.inode(ino)
            if ino in self.contested and (inode is None or self.dirty.key(inode) is None):
                with ledger.catalog.batch() as batch:
                    self.dirty.unmark(ino, batch)
        await self.bucket_lookup.ask_of([ino for ino in inos if ino in self.contested])

    async def _pause(self, times: int) -> None:
        """Wait `times` times `Bucket.recheck`; less if there are new conflicts."""
        began, entered = trio.current_time(), self.contested.entered
        while not self.hurrying:
            more = self.contested.entered != entered
            until = began + max(LEAST, self.bucket.recheck) * (1 if more else times)
            if trio.current_time() >= until:
                return
            changed = self.contested.changed
            with trio.move_on_at(until):
                await changed.wait()
