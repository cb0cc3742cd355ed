"""Uploader: uploads sealed objects in the order in which they are due.

Contract: `Dirty` says which object is due; `Uploader` begins its upload on the movers, several at
once. With any result, the object is given back to `Dirty`, which forgets it only by the batch that
settles it. A store that fails gets no request for a while (`Backoff`). Interrupted uploads are
aborted before the first one.

Invariants across awaits: an object under work is in `jobs`, so that no other job moves it. A key is
locked while a request about it is under way, so that there is one at a time. A key that another
object has yet to leave (`Superseded.claims`) is not written. Objects may wait for each other in a
circle, for example after an exchange of names. Then one of them first goes to a key aside. Not for
the time when an object is due (`Dirty`), nor for the meaning of an answer (`upload`), nor for the
deletion of keys (`deletion`).
"""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Container

import trio

from kvfs.catalog import Inode
from kvfs.core.bucket.upload.backoff import Backoff
from kvfs.core.bucket.upload.deletion import Deletion
from kvfs.core.bucket.upload.upload import AGAIN, BUSY, Later, Uploads
from kvfs.core.capacity.quota import Quota
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.moves.transfers import TierTransfers
from kvfs.errors import KvfsError, TierError
from kvfs.movement import uploading
from kvfs.movement.files import SourceChangedError
from kvfs.movement.remote import Remote
from kvfs.s3.errors import StoreError

log = logging.getLogger(__name__)

SECOND = 10**9
LOOK = 1.0  # s between two checks of a state that signals no change
PATIENCE = 60.0  # s without progress that end a drain


class Uploader:
    """Begins uploads. `jobs` are inodes that movers work on; `notes` is for ids of uploads."""

    def __init__(
        self,
        transfers: TierTransfers,
        quota: Quota,
        remote: Remote,
        jobs: set[int],
        *,
        notes: str,
        complete: Callable[[int], Awaitable[Inode | None]],
        reading: Container[str],
    ) -> None:
        """complete, reading: see `Uploads` and `Deletion`."""
        self.ledger: Ledger = transfers.ledger
        self.transfers = transfers
        self.remote = remote
        self.bucket = remote.bucket
        self.dirty = self.ledger.dirty
        self.running = 0
        self._jobs = jobs
        self._notes = notes
        self._locked: set[str] = set()  # keys about which a request is under way
        self._swept = False
        self.backoff = backoff = Backoff(remote.bucket, transfers.breaker)
        self.deletion = Deletion(self.dirty, remote, backoff, self._locked, reading)
        self.uploads = Uploads(transfers, quota, remote, backoff, notes=notes, complete=complete)

    async def run(self) -> None:
        """Upload and delete, for ever. Raises CatalogError before anything is begun."""
        await self.dirty.load()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.deletion.run)
            while True:
                changed = self.dirty.changed
                if self.backoff.ready:
                    await self._sweep()
                    self._begin(nursery)
                idle = self.running < self.remote.uploads and self.backoff.ready
                with trio.move_on_after(min(LOOK, self.dirty.next_due() if idle else LOOK)):
                    await changed.wait()

    async def _sweep(self) -> None:
        """Abort uploads that an earlier daemon or a failure of the store has cut short."""
        if self._swept or self.running:
            return
        try:
            found = await self.remote.call("ask", 0, (), uploading.abort_interrupted, self._notes)
        except (StoreError, TierError, OSError) as error:
            self.backoff.failed("sweep", error)
            return
        self._swept = True
        if found:
            log.info("%s: %d uploads that were cut short are aborted", self.bucket.place, found)

    # Uploads

    def _begin(self, nursery: trio.Nursery) -> None:
        while self.running < self.remote.uploads and (ino := self.dirty.take()) is not None:
            if ino in self._jobs or self.transfers.copy_is_useless(ino):
                self.dirty.set_due(ino, _in(BUSY))
                continue
            self._jobs.add(ino)
            self.running += 1
            nursery.start_soon(self.job, ino)

    async def job(self, ino: int) -> None:
        """Upload one object, which is in `jobs` and counted as running."""
        later = Later(AGAIN)
        self.transfers.uploading.add(ino)
        try:
            later = await self._upload(ino) or Later(0.0)
        except (StoreError, TierError) as error:
            self.backoff.failed("upload", error, f" of {self.ledger.catalog.named(ino)}")
            self.backoff.refused = True
            self._swept = False  # perhaps the store could not abort it
            later = Later(0.0)  # the backoff delays all uploads
        except (KvfsError, OSError, SourceChangedError) as error:
            if self.transfers.still_current(ino) is not None:
                self.transfers.breaker.failed("upload", self.ledger.catalog.named(ino), error)
        finally:
            self.running -= 1
            self.transfers.uploading.discard(ino)
            if ino not in self.transfers.unpacking:
                self._jobs.discard(ino)
            self.dirty.give_back(ino, _in(later.seconds))
            self.dirty.wake()
            self.ledger.wakeup.wake()

    async def _upload(self, ino: int) -> Later | None:
        """Upload one object. Returns None when it is done.

        Raises StoreError, TierError, OSError, CatalogError.
        """
        ledger, dirty = self.ledger, self.dirty
        inode = self.transfers.still_current(ino)
        if inode is None:
            self.transfers.give_up_distrusted(ino)
            return Later(BUSY)
        key, stored = dirty.key(inode), dirty.stored(ino)
        if key is None or dirty.is_current_in_bucket(inode, stored, key):
            self.uploads.skip_upload(inode, wanted=key is not None or dirty.wanted(inode))
            return None
        if key in self._locked:
            return Later(BUSY)
        name = ledger.namespaces.bucket_name(inode)
        assert name is not None  # it has a key
        if dirty.superseded.claims.get(key, ino) != ino:
            return await self._make_way(dirty.superseded.claims[key])
        self._locked.add(key)
        try:
            target = self.uploads.target(key, self.bucket.keys.record(name), stored)
            return await self.uploads.send(inode.copy(), stored, target)
        finally:
            self._locked.discard(key)

    async def _make_way(self, ino: int) -> Later:
        """Make way at a key: the object there is yet to get its new name in the bucket.

        That object has its turn, unless it waits for a third one, which may be this one after an
        exchange of names. Then it goes to a key aside.
        """
        ledger, dirty = self.ledger, self.dirty
        other, stored = self.transfers.still_current(ino), dirty.stored(ino)
        if stored is None:
            dirty.superseded.disclaim(ino)
            return Later(0.0)
        if other is None or ino in self._jobs:
            return Later(BUSY)
        wanted = dirty.key(other)
        if ino in dirty and wanted is not None and dirty.superseded.claims.get(wanted, ino) == ino:
            return Later(BUSY)
        if ledger.tiers.holders(other) or not other.in_bucket:  # it can be uploaded again
            ledger.records.record_not_in_bucket(other, dirty=ino in dirty)
            return Later(0.0)
        aside = self.uploads.target(f"{self.bucket.keys.aside}{uuid.uuid4().hex}", None, None)
        self._jobs.add(ino)
        try:
            await self.uploads.send(other.copy(), stored, aside)
        finally:
            self._jobs.discard(ino)
        return Later(0.0)

    @property
    def failing(self) -> bool:
        """Whether the store has refused the last upload, and something waits for one."""
        return self.backoff.refused and len(self.dirty) > 0

    # Unmount

    def stranded(self) -> tuple[int, int]:
        """The bytes and the number of objects that leave RAM only for the bucket.

        Only RAM has them, and their namespaces do not use NVMe.
        """
        ledger, nvme = self.ledger, self.ledger.tiers.nvme
        size = count = 0
        for ino in self.dirty:
            inode = ledger.table.inode(ino)
            if inode is None or inode.on_nvme or inode.in_bucket or not ledger.tiers.holders(inode):
                continue
            if not ledger.namespaces.of(inode).takes(nvme):
                size, count = size + inode.size, count + 1
        return size, count

    async def drain(self) -> None:
        """Upload the objects that would be lost with RAM.

        It gives up if the bucket is down, or takes nothing for a minute.
        """
        least, since = self.stranded(), trio.current_time()
        while (left := self.stranded())[1]:
            self.dirty.hurry(LOOK)
            if left < least:
                least, since = left, trio.current_time()
            if self.bucket.health.down or trio.current_time() > since + PATIENCE:
                log.error(
                    "%d objects (%d bytes) are lost: they were in RAM, and not yet in %s: %s",
                    *(left[1], left[0], self.bucket.place, self.bucket.health.why or "no answer"),
                )
                return
            await trio.sleep(BUSY)


def _in(seconds: float) -> int:
    return time.time_ns() + int(seconds * SECOND)
