"""Find the copy that serves an open, and verify that it has the bytes of the seal.

Contract: `open` tries the fastest copy first. A copy is in doubt if its file does not have the size
and modification time of the seal, or if a crash came after the last write. `open` compares a copy
in doubt with its digest. `open` also compares a copy on NVMe if the last comparison is too old
(`verified`). kvfs moves a damaged copy into quarantine. If a copy has no file, kvfs removes it from
the record. If a disk fails, the record keeps the copy. The caller of `open` holds the inode's lock.

Invariant: `open` returns a copy that the catalog has at this moment, and updates the given inode
from the catalog. If the object changed during an await, `open` raises StaleError.
Not for the handles that share the file. `core/check` looks at copies that no program opens.
"""

import errno
import logging
import os
from functools import partial
from typing import Protocol

import trio

from kvfs import mounts
from kvfs.catalog import Inode
from kvfs.core.ledger.header import Header
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.stream import Stream
from kvfs.core.namespaces.order import key_of
from kvfs.core.objects.files import BackingFiles
from kvfs.core.objects.scans import Scans
from kvfs.errors import CatalogError, NotFoundError, StaleError, TierError
from kvfs.movement.copying import digest_of
from kvfs.movement.files import SourceChangedError
from kvfs.tiers import Bucket, OtherNodes, Tier, TierCall, sync_patience

log = logging.getLogger(__name__)

HASHED_AT_ONCE = 4  # copies that are hashed at the same time for opens: each takes a CPU and 8 MiB
WRONG = "its bytes do not match their digest"


class Verifier(Protocol):
    """Compares copies with their digests. `lose` removes a copy that the kernel could not write."""

    async def matches(self, tier: Tier, inode: Inode) -> bool: ...
    async def lose(self, ino: int, version: int) -> None: ...


class Fetcher(Protocol):
    """Fetches an object that only the bucket has, or only other nodes of the pool have."""

    async def fetch(self, inode: Inode, *, whole: bool = True) -> Stream | None:
        """Return a stream while the bytes come, or None once a local tier has the object.

        whole: wait for all bytes, and return None. Raises NotFoundError, and StaleError if the
        object changed meanwhile.
        """


class BucketFetcher(Fetcher, Protocol):
    """Downloads an object from the bucket, or only its header."""

    async def header(self, inode: Inode) -> Header | None:
        """Download only the first bytes. Return None if the caller must `fetch` the whole object.

        Raises NotFoundError.
        """


class Unpacker(Protocol):
    """Decompresses a packed copy, so that kvfs can open it."""

    async def unpack(self, inode: Inode) -> None:
        """Decompress the copy. If it is damaged, remove it. Raises NotFoundError, StaleError."""


class Copies:
    """Finds and verifies the copies of one mount.

    scans: the processes that read only the first bytes of objects.
    """

    def __init__(
        self,
        ledger: Ledger,
        verifier: Verifier,
        files: BackingFiles,
        fetcher: BucketFetcher | None = None,
        unpacker: Unpacker | None = None,
        peers: Fetcher | None = None,
    ) -> None:
        self.ledger = ledger
        self.catalog = ledger.catalog
        self.verifier = verifier
        self._peers = peers
        self.files = files
        self._fetcher = fetcher
        self._unpacker = unpacker
        self.scans = Scans()
        self._hashing = trio.CapacityLimiter(HASHED_AT_ONCE)

    async def open(
        self, inode: Inode, *, writable: bool
    ) -> tuple[Tier, int, Tier | Bucket | OtherNodes] | Stream | Header:
        """Open the fastest sound copy. Return its tier, its descriptor, and where its bytes were.

        If the bytes still come, return a stream, which can be read already. If the process scans,
        return the header. Raises NotFoundError (a miss), StaleError, CatalogError.
        """
        found, lost = await self.open_here(inode, writable=writable)
        where: Tier | Bucket | OtherNodes | None = None
        try:
            if found is None and self._packed(inode):
                await self._unpack(inode)
                where = self.ledger.tiers.nvme
                found, _ = await self.open_here(inode, writable=writable)
                lost = found is None
            if found is None and self._peers is not None and self._remote(inode):
                stream = await self._peers.fetch(inode, whole=writable)
                if stream is not None:
                    return stream
                where = self.ledger.tiers.nodes
                found, lost = await self._open_fetched(inode, writable=writable)
            if found is None and (spilled := self._spilled(inode)) is not None:
                if not writable and self.scans.opens(spilled):
                    header = await self._header(spilled)
                    inode.copy_from(spilled)
                    if header is not None:
                        return header
                stream = await self._fetch(spilled, whole=writable)
                inode.copy_from(spilled)
                if stream is not None:
                    return stream
                where = self.ledger.tiers.bucket
                found, lost = await self.open_here(inode, writable=writable)
        except NotFoundError:
            self.missed(inode)
            raise
        if found is not None:
            return *found, where or found[0]
        if not lost and self.catalog.inode(inode.ino) is None:  # its name may mean another file
            raise StaleError(f"{self.catalog.named(inode.ino)} went away while it was opened")
        self.missed(inode)
        current = self.catalog.inode(inode.ino)
        if current is not None and self.ledger.records.is_lost(current):
            self.ledger.removals.drop(current, "lost")
        raise NotFoundError(f"{self.catalog.named(inode.ino)}: no tier can produce its bytes")

    def missed(self, inode: Inode) -> None:
        """Count an open of an object whose bytes no tier can produce: a miss."""
        space = self.ledger.namespaces.of(inode)
        self.ledger.counters["opens_unreadable"] += 1
        space.counters["opens_unreadable"] += 1
        self.ledger.misses.counted(space, key_of(inode))

    def fetcher_of(self, inode: Inode, *, scanned: bool) -> Fetcher | None:
        """Return the fetcher of an object that no local tier has; None if nothing has its bytes.

        scanned: its header came from the bucket.
        """
        if inode.in_pool:
            return self._peers
        return self._fetcher if inode.in_bucket or scanned else None

    def _current(self, inode: Inode) -> Inode | None:
        """Return the catalog's record of the inode; None if it is gone or has another version."""
        current = self.catalog.inode(inode.ino)
        return None if current is None or current.version != inode.version else current

    def _remote(self, inode: Inode) -> bool:
        """Whether only other nodes of the pool have this version."""
        current = self._current(inode)
        return current is not None and current.in_pool

    async def _open_fetched(
        self, inode: Inode, *, writable: bool
    ) -> tuple[tuple[Tier, int] | None, bool]:
        """Open the copy that came from another node; see `open_here`. Raises StaleError."""
        fetched = self._current(inode)
        if fetched is None:
            raise StaleError(f"{self.catalog.named(inode.ino)} went away while it was opened")
        inode.copy_from(fetched)
        return await self.open_here(inode, writable=writable)

    def _packed(self, inode: Inode) -> bool:
        """Whether NVMe has a packed (compressed) copy of this version."""
        current = self._current(inode)
        if current is None or current.packed is None:
            return False
        return self.ledger.tiers.nvme in self.ledger.tiers.holders(current)

    async def _unpack(self, inode: Inode) -> None:
        """Decompress the copy, and update `inode`. Raises NotFoundError, StaleError."""
        if self._unpacker is None:
            what = self.catalog.named(inode.ino)
            raise NotFoundError(f"{what} is compressed, and nobody decompresses it")
        await self._unpacker.unpack(inode)
        if (current := self._current(inode)) is not None:
            inode.copy_from(current)

    def _spilled(self, inode: Inode) -> Inode | None:
        """Return the catalog's record if the bucket has this version, else None."""
        current = self._current(inode)
        return None if current is None or not current.in_bucket else current

    async def _header(self, inode: Inode) -> Header | None:
        """Download only the first bytes if that is possible, and update `inode`.

        Raises NotFoundError, StaleError.
        """
        if self._fetcher is None:
            return None
        header = await self._fetcher.header(inode)
        current = self._spilled(inode)
        if current is None or self.ledger.tiers.holders(current):
            if header is not None:
                header.leave()
            raise StaleError(f"{self.catalog.named(inode.ino)} has changed while it was opened")
        inode.copy_from(current)
        return header

    async def _fetch(self, inode: Inode, *, whole: bool) -> Stream | None:
        """Hydrate the object, or begin to hydrate it (see `Fetcher.fetch`). Update `inode`.

        Raises NotFoundError, StaleError.
        """
        if self._fetcher is None:
            what = self.catalog.named(inode.ino)
            raise NotFoundError(f"{what} is in a bucket that is not mounted")
        stream = await self._fetcher.fetch(inode, whole=whole)
        fetched = self._current(inode)
        if fetched is None:
            raise StaleError(f"{self.catalog.named(inode.ino)} went away while it was opened")
        inode.copy_from(fetched)
        return stream

    async def open_here(
        self, inode: Inode, *, writable: bool
    ) -> tuple[tuple[Tier, int] | None, bool]:
        """Open the fastest sound local copy. Return its tier and descriptor, or None.

        The second result says whether kvfs found a copy missing or damaged. Raises StaleError,
        CatalogError.
        """
        lost = False
        for tier in self.ledger.tiers.holders(inode):
            if self.ledger.tiers.is_packed_in(inode, tier):
                continue
            try:
                opening = partial(tier.open, inode.ino, inode.version, writable=writable)
                fd = await self.files.io(tier, TierCall("open", opening, os.close))
            except NotFoundError as error:
                lost |= await self._on_missing_file(inode, tier, str(error))
                continue
            except TierError:
                continue  # the tier has logged it; the copy may be readable again later
            try:
                untouched = self.files.untouched(inode, tier, fd)
                sound = self._verify_untouched if untouched else self._verify_doubted
                if await sound(inode, tier, fd):
                    if tier.slow or not untouched:
                        self._check_still(inode, tier)
                    return (tier, fd), lost
            except TierError as error:  # the disk failed: this says nothing about the copy
                what = self.catalog.named(inode.ino)
                log.debug("%s is not opened from here, verifying it failed: %s", what, error)
                os.close(fd)
                continue
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            lost = True
        return None, lost

    def _check_still(self, inode: Inode, tier: Tier) -> None:
        """Update `inode` after an await. Raises StaleError if the tier has the copy no more."""
        current = self._current(inode)
        # It may have been promoted and unlinked while we waited.
        if current is None or tier not in self.ledger.tiers.holders(current):
            raise StaleError(f"{self.catalog.named(inode.ino)} went away while it was opened")
        inode.copy_from(current)

    async def _verify_untouched(self, inode: Inode, tier: Tier, fd: int) -> bool:
        """Verify a copy with the size and time of its seal; return whether it is sound.

        Compare the digest if the tier is slow and a comparison is due: only the digest shows damage
        by the disk. Move a wrong copy into quarantine.
        """
        if not tier.slow:
            return True
        if not inode.digest:
            return await self._written(inode, tier, fd)
        if not self.ledger.verified.due(inode.ino):
            return True
        hashing = partial(digest_of, size=inode.size, sparse=inode.sparse)
        job = TierCall.on_file("verification", fd, hashing, sync_patience(inode.data))
        try:
            async with self._hashing:
                found = await self.files.io(tier, job)
        except OSError as error:
            path = tier.path(inode.ino, inode.version)
            raise tier.failed("verify", path, error) from error
        except SourceChangedError:
            found = b""  # the file has become shorter
        if found != inode.digest:
            self._lose(inode, tier, quarantine=True, why=WRONG)
            return False
        self.ledger.counters["verified"] += 1
        self.ledger.verified.note(inode.ino)
        return True

    async def _written(self, inode: Inode, tier: Tier, fd: int) -> bool:
        """Whether the kernel could write the copy to its disk so far. There is no digest yet.

        If the kernel could not, lose the copy.
        """
        try:
            await self.files.io(tier, TierCall.on_file("writeback", fd, mounts.expect_written))
        except OSError as error:
            tier.failed("writeback", tier.path(inode.ino, inode.version), error)
            self._lose(inode, tier)
            return False
        return True

    async def _verify_doubted(self, inode: Inode, tier: Tier, fd: int) -> bool:
        """Verify a copy in doubt with its digest; return whether it is sound.

        The reason for the doubt is another size or time of the file, a crash after the last write,
        or a doubt that a daemon noted. Move a wrong copy into quarantine.
        """
        found = os.fstat(fd)
        if found.st_size == inode.size and inode.digest:
            if await self.verifier.matches(tier, inode):
                if (current := self._current(inode)) is not None:
                    with self.catalog.batch() as batch:
                        batch.change(current)
                        current.session = self.ledger.session
                        current.backing_mtime_ns = found.st_mtime_ns
                        batch.put(current)
                self.ledger.verified.end_doubt(inode.ino, inode.version, tier.name)
                if tier.slow:
                    self.ledger.verified.note(inode.ino)
                return True
            why = WRONG
        elif found.st_size != inode.size:
            why = f"it has {found.st_size} bytes, expected {inode.size}"
        else:
            why = "it was written to, or not synced before a crash, and has no digest"
        self._lose(inode, tier, quarantine=True, why=why)
        return False

    async def _on_missing_file(self, inode: Inode, tier: Tier, reason: str) -> bool:
        """Lose a copy without a backing file, unless the tier or a late rename is the reason.

        Return False if the object changed meanwhile, else True.
        """
        try:
            present = await self.files.io(tier, TierCall("stat", tier.present))
        except TierError:
            return True  # the tier does not answer, so the file may be there
        if not present:
            error = FileNotFoundError(errno.ENOENT, "directory lost")
            tier.failed("open", tier.path(inode.ino, inode.version), error)
            return True
        if self._current(inode) is None:
            return False
        self._check_still(inode, tier)  # raises if the record lost the copy meanwhile
        if inode.ino in self.ledger.table.renaming:  # a late rename, until kvfs undoes it
            return True
        what = self.catalog.named(inode.ino)
        log.error("%s: a copy is missing, opens get another one or a miss: %s", what, reason)
        self.ledger.counters["missing"] += 1
        self._lose(inode, tier)
        return True

    def _lose(self, inode: Inode, tier: Tier, *, quarantine: bool = False, why: str = "") -> None:
        """Lose the copy. If the catalog refuses the change, only log this: the open is a miss."""
        try:
            self.ledger.removals.lose(inode, tier, quarantine=quarantine, why=why)
        except CatalogError as error:
            what = self.catalog.named(inode.ino)
            log.debug("%s is a miss all the same: %s", what, error)
