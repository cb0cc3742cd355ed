"""Open objects that are read while they come from the bucket, and that stay open afterwards.

Contract: the daemon serves the reads of a *direct* object: from a stream while the bytes come,
later from a copy if there is one. Of an object that a process scans, only the header comes. The
rest comes when a process reads on, or when one that does not scan opens the object. Even if a
download fails, each read returns the stored bytes, or fails.

Invariants across awaits: `have` runs only under the inode's lock, and only there changes the place
that an object is read from. So two callers never bring or open the same object. `bytes_here`
returns a descriptor of the file that the object is read from at that moment. The descriptor is
valid until the next await. An object is read from one stream at a time, and leaves it at the latest
when it is closed.
Not for fetching (`core/bucket/download/hydration.py`), nor for handles (`core/objects/objects.py`).
"""

import logging

from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.ledger.stream import Stream
from kvfs.core.objects.copies import Copies, Fetcher
from kvfs.errors import NotFoundError, StaleError, TierError

log = logging.getLogger(__name__)


class Incoming:
    """Serves direct objects. `fetcher` downloads from the bucket; None without a bucket."""

    def __init__(self, ledger: Ledger, copies: Copies, fetcher: Fetcher | None) -> None:
        self.ledger = ledger
        self.copies = copies
        self.fetcher = fetcher

    @staticmethod
    def read_from(held: OpenObject, stream: Stream | None) -> None:
        """Read the object from this stream from now on; None: from its descriptor, if any."""
        before, held.stream = held.stream, stream
        header, held.header = held.header, None
        if stream is not None:
            held.tier = stream.tier
            stream.join()
        if before is not None:
            before.leave()
        if header is not None:
            header.leave()

    def opened(self, held: OpenObject) -> None:
        """Count an open that makes the bytes come from the bucket."""
        where = self.ledger.tiers.bucket
        where.hits += 1
        self.ledger.namespaces.read(held.inode, where)

    async def have(self, held: OpenObject, *, whole: bool) -> None:
        """Make the bytes be here or come; after a failed download, start another one.

        whole: all bytes must be here, because a program will write. Raises NotFoundError,
        StaleError, and TierError if no tier has them. Holds the lock.
        """
        if held.readable and not (whole and held.stream is not None and not held.stream.complete):
            return
        scanned = held.header is not None
        await self._bring(held, whole=whole)
        if scanned:
            self.opened(held)

    async def _bring(self, held: OpenObject, *, whole: bool) -> None:
        inode = held.inode
        if not self.ledger.tiers.holders(inode):
            if self.fetcher is None or not (inode.in_bucket or held.header is not None):
                raise TierError("its bytes have not all come, and are gone")
            stream = await self.fetcher.fetch(inode, whole=whole)
            if stream is not None:
                if stream is not held.stream:
                    self.read_from(held, stream)
                return
        if held.stream is not None and held.stream.complete:
            return
        found, _ = await self.copies.open_here(inode, writable=False)
        if found is None:
            raise TierError("no tier can produce its bytes")
        self.read_from(held, None)
        held.tier, held.fd = found

    async def bytes_here(self, held: OpenObject, start: int, length: int) -> int:
        """Wait until these bytes can be read from the descriptor that is returned.

        It is valid until the next await. Raises TierError.
        """
        try:
            if held.fd < 0 and held.stream is None:  # its header was enough, or its daemon is dead
                await self._go_on(held)
            if held.stream is None:
                return held.fd
            await held.stream.bytes_here(start, length, self.ledger.tiers.bucket.wait)
        except TierError as error:
            what = self.ledger.catalog.named(held.inode.ino)
            log.error("%s: a read gets EIO: %s", what, error)
            raise
        return held.stream.fd

    async def _go_on(self, held: OpenObject) -> None:
        ino = held.inode.ino
        if held.header is not None and not held.header.read_on:  # one read may come as several
            held.header.read_on = True
            self.copies.scans.read_on()
        async with self.ledger.table.locked(ino):
            try:
                await self.have(held, whole=False)
            except (NotFoundError, StaleError) as error:
                raise TierError(f"it cannot be read on: {error}") from error
