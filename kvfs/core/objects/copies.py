"""Find the copy that serves an open, and prove that it has the bytes that were sealed.

Contract: `open` takes the fastest copy whose size and modification time are those that were sealed.
The digest settles any doubt: another program changed the file, or a crash came after the last
write. `open` also compares a copy on NVMe with its digest if that was not done lately (`verified`).
A damaged copy goes into quarantine. A copy whose file is missing is forgotten.
A disk that fails is no reason to lose a copy. The caller of `open` holds the inode's lock.

Invariant: `open` returns a copy that the catalog has at this moment, and updates the given inode
from the catalog. If the object changed during an await, `open` raises StaleError.
Not for the handles that share the file, nor for looking at copies that nobody opens (core/check).
"""

import errno
import logging
import os
from collections.abc import Container
from functools import partial
from typing import Protocol

import trio

from kvfs import mounts
from kvfs.catalog import Inode
from kvfs.core.ledger.header import Header
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.stream import Stream
from kvfs.core.objects.files import BackingFiles
from kvfs.core.objects.scans import Scans
from kvfs.errors import CatalogError, NotFoundError, StaleError, TierError
from kvfs.movement.copying import digest_of
from kvfs.movement.files import SourceChangedError
from kvfs.tiers import Bucket, Tier, TierCall, sync_patience

log = logging.getLogger(__name__)

HASHED_AT_ONCE = 4  # copies that opens wait for: each takes a CPU and 8 MiB
WRONG = "its bytes do not match their digest"


class Verifier(Protocol):
    """Compares a whole file with a digest, and gives up copies that were not synced."""

    async def matches(self, tier: Tier, inode: Inode) -> bool: ...
    async def lose(self, ino: int, version: int) -> None: ...


class Fetcher(Protocol):
    """Downloads an object that only the bucket has."""

    async def fetch(self, inode: Inode, *, whole: bool = True) -> Stream | None:
        """Return None once the object is here, or a stream while its bytes are on their way.

        whole: return no stream. Raises NotFoundError; StaleError if the object changed meanwhile.
        """

    async def header(self, inode: Inode) -> Header | None:
        """Return the first bytes only, or None if only `fetch` can help. Raises NotFoundError."""


class Unpacker(Protocol):
    """Makes a copy that can be opened from a packed copy."""

    async def unpack(self, inode: Inode) -> None:
        """Make the copy, or lose the packed one. Raises NotFoundError, StaleError."""


class Copies:
    """Finds and verifies the copies of one mount.

    `renaming`: inodes whose backing file may have another name, see `create`. `scans`: the
    processes that read first bytes only.
    """

    def __init__(
        self,
        ledger: Ledger,
        verifier: Verifier,
        files: BackingFiles,
        renaming: Container[int],
        fetcher: Fetcher | None = None,
        unpacker: Unpacker | None = None,
    ) -> None:
        self.ledger = ledger
        self.catalog = ledger.catalog
        self.verifier = verifier
        self.files = files
        self._renaming = renaming
        self._fetcher = fetcher
        self._unpacker = unpacker
        self.scans = Scans()
        self._hashing = trio.CapacityLimiter(HASHED_AT_ONCE)

    async def open(
        self, inode: Inode, *, writable: bool
    ) -> tuple[Tier, int, Tier | Bucket] | Stream | Header:
        """Open the best sound copy: tier, descriptor, and the place where its bytes were.

        An object that comes from the bucket is a stream that can be read already. A process that
        scans gets the header. Raises NotFoundError (a miss), StaleError, CatalogError.
        """
        found, lost = await self.open_here(inode, writable=writable)
        where: Tier | Bucket | None = None
        try:
            if found is None and self._packed(inode):
                await self._unpack(inode)
                where = self.ledger.tiers.nvme
                found, _ = await self.open_here(inode, writable=writable)
                lost = found is None
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
        """Count an open that nothing can serve."""
        self.ledger.counters["misses"] += 1
        self.ledger.namespaces.of(inode).counters["misses"] += 1

    def _current(self, inode: Inode) -> Inode | None:
        """Return the catalog's record of this version, or None."""
        current = self.catalog.inode(inode.ino)
        return None if current is None or current.version != inode.version else current

    def _packed(self, inode: Inode) -> bool:
        """Whether this version is on NVMe, and packed there."""
        current = self._current(inode)
        if current is None or current.packed is None:
            return False
        return self.ledger.tiers.nvme in self.ledger.tiers.holders(current)

    async def _unpack(self, inode: Inode) -> None:
        """Unpack the copy and update the record. Raises NotFoundError, StaleError."""
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
        """Get only the first bytes, if that is possible, and update the record.

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
        """Hydrate the object, or begin to: see `Fetcher.fetch`. Update the record.

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
        """Open the best local copy; also say if one was lost. Raises StaleError, CatalogError."""
        lost = False
        for tier in self.ledger.tiers.holders(inode):
            if self.ledger.tiers.is_packed_in(inode, tier):
                continue
            try:
                opening = partial(tier.open, inode.ino, inode.version, writable=writable)
                fd = await self.files.io(tier, TierCall("open", opening, os.close))
            except NotFoundError as error:
                lost |= await self._missing(inode, tier, str(error))
                continue
            except TierError:
                continue  # the tier has logged it; the copy may be readable again later
            try:
                untouched = self.files.untouched(inode, tier, fd)
                sound = self._verified if untouched else self._proven
                if await sound(inode, tier, fd):
                    if tier.slow or not untouched:
                        self._check_still(inode, tier)
                    return (tier, fd), lost
            except TierError as error:  # the disk's fault, not the copy's
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
        """Update the record after an await. Raises StaleError if the copy is not there any more."""
        current = self._current(inode)
        # It may have been promoted and unlinked while we waited.
        if current is None or tier not in self.ledger.tiers.holders(current):
            raise StaleError(f"{self.catalog.named(inode.ino)} went away while it was opened")
        inode.copy_from(current)

    async def _verified(self, inode: Inode, tier: Tier, fd: int) -> bool:
        """Verify a copy that looks as it was sealed: only the digest shows damage by the disk."""
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
            found = b""  # it has become shorter
        if found != inode.digest:
            self._lose(inode, tier, quarantine=True, why=WRONG)
            return False
        self.ledger.counters["verified"] += 1
        self.ledger.verified.note(inode.ino)
        return True

    async def _written(self, inode: Inode, tier: Tier, fd: int) -> bool:
        """Ask the kernel if it could write the copy to disk so far: there is no digest yet."""
        try:
            await self.files.io(tier, TierCall.on_file("writeback", fd, mounts.expect_written))
        except OSError as error:
            tier.failed("writeback", tier.path(inode.ino, inode.version), error)
            self._lose(inode, tier)
            return False
        return True

    async def _proven(self, inode: Inode, tier: Tier, fd: int) -> bool:
        """Verify a doubtful copy with its digest, and put a wrong one into quarantine.

        A program has changed it, a crash came after the last write, or a daemon has noted a doubt.
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

    async def _missing(self, inode: Inode, tier: Tier, reason: str) -> bool:
        """Handle a missing backing file. False if the object changed meanwhile."""
        try:
            present = await self.files.io(tier, TierCall("stat", tier.present))
        except TierError:
            return True  # a tier that does not answer cannot say that the file is gone
        if not present:
            error = FileNotFoundError(errno.ENOENT, "directory lost")
            tier.failed("open", tier.path(inode.ino, inode.version), error)
            return True
        if self._current(inode) is None:
            return False
        self._check_still(inode, tier)  # raises if it was given up meanwhile
        if inode.ino in self._renaming:  # late, and then it is taken back
            return True
        what = self.catalog.named(inode.ino)
        log.error("%s: a copy is missing, opens get another one or a miss: %s", what, reason)
        self.ledger.counters["missing"] += 1
        self._lose(inode, tier)
        return True

    def _lose(self, inode: Inode, tier: Tier, *, quarantine: bool = False, why: str = "") -> None:
        """Lose the copy. If the catalog refuses the change, the open is still a miss, no error."""
        try:
            self.ledger.removals.lose(inode, tier, quarantine=quarantine, why=why)
        except CatalogError as error:
            what = self.catalog.named(inode.ino)
            log.debug("%s is a miss all the same: %s", what, error)
