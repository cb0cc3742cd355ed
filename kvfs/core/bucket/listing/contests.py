"""What stays here since another node has its name in the bucket: whether it has that still.

Contract: `run` asks the bucket about AT_ONCE objects at most in `Bucket.recheck` seconds, in turn,
for ever; where all were asked about and nothing has changed it waits for longer, up to LONGEST
times as long. So any number of conflicts is a few requests a second, and each of them ends. Some
are asked about at once when somebody is to have all uploaded (`hurry`). A bucket that is away is
not asked. What an answer means is for `remote_entries`: what has its name for itself goes up as
at the first time, which only one node succeeds in. Beside it who looks a name up, or lists its
directory, finds the same out earlier (`bucket_lookup`, `bucket_listing`).
"""

import trio

from kvfs.core.bucket.listing.bucket_lookup import AT_ONCE, BucketLookup

LEAST = 1.0  # s between two steps
LONGEST = 10  # times `Bucket.recheck`, between two rounds
HURRIED = 1000  # objects that are asked about at once for who is in a hurry
HURRY = 5.0  # s between two such steps
GLANCE = 1.0  # s between two looks whether a bucket that is away may be asked


class Contests:
    """Of one bucket. `hurrying`: a step is to be made at once, or under way."""

    def __init__(self, bucket_lookup: BucketLookup) -> None:
        self.bucket_lookup = bucket_lookup
        self.bucket = bucket_lookup.bucket
        self.dirty = bucket_lookup.dirty
        self.contested = bucket_lookup.dirty.contested
        self.hurrying = False
        self._hurried = -HURRY

    def hurry(self) -> None:
        """Somebody waits until all is in the bucket."""
        now = trio.current_time()
        if len(self.contested) and self.bucket_lookup.may_ask() and now >= self._hurried + HURRY:
            self._hurried, self.hurrying = now, True
            self.contested.wake()

    async def run(self) -> None:
        """For ever. Raises CatalogError."""
        while not self.dirty.loaded:
            await self.dirty.changed.wait()
        left, times, changed = len(self.contested), 1, self._changes()
        while True:
            await self._wait_for_some()
            hurried = self.hurrying  # what comes while others are asked about has a step of its own
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
        while not self.bucket_lookup.may_ask():  # noqa: ASYNC110 (time passes: nothing tells of it)
            await trio.sleep(GLANCE)

    async def _ask(self, inos: list[int]) -> None:
        """What is not to be in the bucket any more is in conflict with nobody."""
        ledger = self.bucket_lookup.ledger
        for ino in inos:
            inode = ledger.table.inode(ino)
            if ino in self.contested and (inode is None or self.dirty.key(inode) is None):
                with ledger.catalog.batch() as batch:
                    self.dirty.settled(ino, batch)
        await self.bucket_lookup.ask_of([ino for ino in inos if ino in self.contested])

    async def _pause(self, times: int) -> None:
        """So many times as long as a copy is believed; less if there is more to be asked about."""
        began, entered = trio.current_time(), self.contested.entered
        while not self.hurrying:
            more = self.contested.entered != entered
            until = began + max(LEAST, self.bucket.recheck) * (1 if more else times)
            if trio.current_time() >= until:
                return
            changed = self.contested.changed
            with trio.move_on_at(until):
                await changed.wait()
