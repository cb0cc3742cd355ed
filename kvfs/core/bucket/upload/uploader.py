"""Uploader: uploads sealed objects in the order in which they are due.

Contract: `Dirty` says which object is due; `Uploader` begins its upload on the movers, several at
once. After any result, `Uploader` gives the object back to `Dirty`. `Dirty` forgets an object only
with the batch that records the result. A store that fails gets no request for a while (`Backoff`).
`Uploader` aborts interrupted uploads before its first upload.

Invariants across awaits: an object under work is in `jobs`, so that no other job moves it. A key is
locked while a request about it is under way, so that each key has one request at a time. Nothing is
written to a key that another object has yet to leave (`Superseded.claims`). Objects may wait for
each other in a circle, for example after an exchange of names. Then kvfs first copies one of them
to a temporary key. Not for the time when an object is due (`Dirty`), nor for the meaning of an
answer (`upload`), nor for the deletion of keys (`deletion`).
"""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Container

import trio

from kvfs.catalog import Inode
from kvfs.core.bucket.upload.backoff import Backoff
from kvfs.core.bucket.upload.deletion import Deletion
from kvfs.core.bucket.upload.upload import BUSY_DELAY, FAILURE_DELAY, Later, UploadSender
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
PATIENCE = 60.0  # s without progress after which a drain gives up


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
        fetch_metadata: Callable[[int], Awaitable[Inode | None]],
        reading: Container[str],
    ) -> None:
        """fetch_metadata, reading: see `UploadSender` and `Deletion`."""
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
        # Whether the name still means an object: another node of a pool may have unlinked it.
        self.stands: Callable[[Inode], Awaitable[bool]] | None = None
        self.backoff = backoff = Backoff(remote.bucket, transfers.breaker)
        self.deletion = Deletion(self.dirty, remote, backoff, self._locked, reading)
        self.sender = UploadSender(
            transfers, quota, remote, backoff, notes=notes, fetch_metadata=fetch_metadata
        )

    async def run(self) -> None:
        """Upload and delete, for ever. Raises CatalogError before it begins any work."""
        await self.dirty.load()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.deletion.run)
            while True:
                changed = self.dirty.changed
                if self.backoff.ready:
                    await self._sweep()
                    self._begin(nursery)
                idle = self.running < self.remote.most_uploads and self.backoff.ready
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
        while self.running < self.remote.most_uploads and (ino := self.dirty.take()) is not None:
            if ino in self._jobs or self.transfers.copy_is_useless(ino):
                self.dirty.set_due(ino, _ns_after(BUSY_DELAY))
                continue
            self._jobs.add(ino)
            self.running += 1
            nursery.start_soon(self.job, ino)

    async def job(self, ino: int) -> None:
        """Upload one object. The caller has put it in `jobs` and counted it as running."""
        later = Later(FAILURE_DELAY)
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
            self.dirty.give_back(ino, _ns_after(later.seconds))
            self.dirty.wake()
            self.ledger.wakeup.wake()

    async def _upload(self, ino: int) -> Later | None:
        """Upload one object. Returns None when it is done.

        Raises StoreError, TierError, OSError, CatalogError.
        """
        ledger, dirty = self.ledger, self.dirty
        inode = self.transfers.still_current(ino)
        if inode is not None and self.stands is not None:
            stands = await self.stands(inode)
            inode = self.transfers.still_current(ino) if stands else None
        if inode is None:
            self.transfers.give_up_distrusted(ino)
            return Later(BUSY_DELAY)
        key, stored = dirty.key(inode), dirty.stored(ino)
        if key is None or dirty.is_current_in_bucket(inode, stored, key):
            self.sender.skip_upload(inode, wanted=key is not None or dirty.wanted(inode))
            return None
        if key in self._locked:
            return Later(BUSY_DELAY)
        name = ledger.namespaces.bucket_name(inode)
        assert name is not None  # it has a key
        if dirty.superseded.claims.get(key, ino) != ino:
            return await self._make_way(dirty.superseded.claims[key])
        self._locked.add(key)
        try:
            target = self.sender.target(key, self.bucket.keys.record(name), stored)
            return await self.sender.send(inode.copy(), stored, target)
        finally:
            self._locked.discard(key)

    async def _make_way(self, ino: int) -> Later:
        """Free a key that object `ino` has in the bucket until it gets its new key.

        kvfs waits for the upload of `ino`. But after an exchange of names, `ino` may wait for the
        key of a third object, or of this one. Then the bucket's copy goes if this node has a copy.
        Otherwise `ino` goes to a temporary key.
        """
        ledger, dirty = self.ledger, self.dirty
        other, stored = self.transfers.still_current(ino), dirty.stored(ino)
        if stored is None:
            dirty.superseded.disclaim(ino)
            return Later(0.0)
        if other is None or ino in self._jobs:
            return Later(BUSY_DELAY)
        wanted = dirty.key(other)
        if ino in dirty and wanted is not None and dirty.superseded.claims.get(wanted, ino) == ino:
            return Later(BUSY_DELAY)
        if ledger.tiers.holders(other) or not other.in_bucket:  # it can be uploaded again
            ledger.records.record_not_in_bucket(other, dirty=ino in dirty)
            return Later(0.0)
        aside = self.sender.target(f"{self.bucket.keys.aside}{uuid.uuid4().hex}", None, None)
        self._jobs.add(ino)
        try:
            await self.sender.send(other.copy(), stored, aside)
        finally:
            self._jobs.discard(ino)
        return Later(0.0)

    @property
    def failing(self) -> bool:
        """Whether the store has refused the last upload, and something waits for one."""
        return self.backoff.refused and len(self.dirty) > 0

    # Unmount

    def stranded(self) -> tuple[int, int]:
        """The bytes and the number of objects that would be lost with RAM.

        Only RAM has them, and their namespaces do not use NVMe: only an upload can save them.
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

        The drain gives up if the bucket is down, or no upload succeeds for PATIENCE seconds.
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
            await trio.sleep(BUSY_DELAY)


def _ns_after(seconds: float) -> int:
    return time.time_ns() + int(seconds * SECOND)
