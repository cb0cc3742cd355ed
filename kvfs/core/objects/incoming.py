"""Serve reads of objects that were opened while their bytes came from the bucket or a node.

Contract: such an object is *direct* until its last close: the daemon serves its reads, not the
kernel. The daemon reads from a stream while the bytes come, and later from a copy if there is one.
If a process scans objects, kvfs downloads only the header of each. kvfs downloads the rest when a
process reads behind the header, or when a process that does not scan opens the object. Even if a
download fails, each read returns the right bytes, or fails.

Invariants across awaits: `ensure_bytes` runs only under the inode's lock. While an object is open,
only `ensure_bytes` changes where it is read from. So two callers never download or open the same
object. `wait_for_bytes` returns a descriptor that is valid until the next await. An object is read
from one stream at a time, and leaves the stream at its last close, or earlier.
Not for downloads (`core/bucket/download/hydration.py`), nor for handles
(`core/objects/objects.py`).
"""

import logging

import trio

from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.ledger.stream import Stream
from kvfs.core.objects.copies import Copies
from kvfs.errors import NotFoundError, StaleError, TierError

log = logging.getLogger(__name__)

AGAIN_S = 0.25  # s until a read asks the nodes of a pool again


class Incoming:
    """Serves direct objects."""

    def __init__(self, ledger: Ledger, copies: Copies) -> None:
        self.ledger = ledger
        self.copies = copies

    @staticmethod
    def set_stream(held: OpenObject, stream: Stream | None) -> None:
        """Read the object from this stream from now on. None: read it from its descriptor, if any.

        The object leaves its former stream and its header.
        """
        before, held.stream = held.stream, stream
        header, held.header = held.header, None
        if stream is not None:
            held.tier = stream.tier
            stream.join()
        if before is not None:
            before.leave()
        if header is not None:
            header.leave()

    def count_open(self, held: OpenObject) -> None:
        """Count an open of an object whose bytes come from the bucket or from a node."""
        where = self.ledger.tiers.bucket if held.stream is None else held.stream.where
        where.hits += 1
        self.ledger.namespaces.read(held.inode, where)

    async def ensure_bytes(self, held: OpenObject, *, whole: bool) -> None:
        """Ensure that a local tier has the bytes, or that they come; restart a failed download.

        whole: wait until a local tier has all bytes, because a program will write. The caller holds
        the inode's lock. Raises NotFoundError, StaleError, and TierError if no tier has the bytes.
        """
        if held.readable and not (whole and held.stream is not None and not held.stream.complete):
            return
        scanned = held.header is not None
        await self._bring(held, whole=whole)
        if scanned:
            self.count_open(held)

    async def _bring(self, held: OpenObject, *, whole: bool) -> None:
        inode = held.inode
        if not self.ledger.tiers.holders(inode):
            fetcher = self.copies.fetcher_of(inode, scanned=held.header is not None)
            if fetcher is None:
                raise TierError("its bytes have not all come, and are gone")
            stream = await fetcher.fetch(inode, whole=whole)
            if stream is not None:
                if stream is not held.stream:
                    self.set_stream(held, stream)
                return
        if held.stream is not None and held.stream.complete:
            return
        found, _ = await self.copies.open_here(inode, writable=False)
        if found is None:
            raise TierError("no tier can produce its bytes")
        self.set_stream(held, None)
        held.tier, held.fd = found

    async def wait_for_bytes(self, held: OpenObject, start: int, length: int) -> int:
        """Wait until these bytes have come. Return the descriptor from which they can be read.

        The descriptor is valid until the next await. Raises TierError.
        """
        began = trio.current_time()
        while True:
            try:
                return await self._wait_once(held, start, length)
            except TierError as error:
                pool, waited = held.inode.in_pool, trio.current_time() - began
                if not pool or waited > self.ledger.tiers.nodes.wait - AGAIN_S:
                    what = self.ledger.catalog.named(held.inode.ino)
                    log.error("%s: a read gets EIO: %s", what, error)
                    raise
            await trio.sleep(AGAIN_S)  # its node may be back, or another one have it

    async def _wait_once(self, held: OpenObject, start: int, length: int) -> int:
        # Only its header came, its daemon died, or no node gave the rest at the last read.
        stopped = held.stream is None or (held.inode.in_pool and held.stream.problem is not None)
        if held.fd < 0 and stopped:
            await self._go_on(held)
        if held.stream is None:
            return held.fd
        await held.stream.bytes_here(start, length, held.stream.where.wait)
        return held.stream.fd

    async def _go_on(self, held: OpenObject) -> None:
        ino = held.inode.ino
        if held.header is not None and not held.header.read_on:  # count it once for several reads
            held.header.read_on = True
            self.copies.scans.read_on()
        async with self.ledger.table.locked(ino):
            try:
                await self.ensure_bytes(held, whole=False)
            except (NotFoundError, StaleError) as error:
                raise TierError(f"it cannot be read on: {error}") from error
