"""Computes the digests of sealed objects, for their announcement.

Contract: `begin` never waits, and computes a version's digests once at a time, in a mover: that of
the whole if only RAM has the object, and those of the chunks of a large object. `announce` learns
of the end. While a writer has flushed the file and not closed it yet, the task tries again for some
4 s. An object that stays without a digest is not in the pool. A large one that stays without the
digests of its chunks comes to other nodes as a whole.
"""

import logging
from collections.abc import Callable
from functools import partial

import trio

from kvfs.catalog import Inode
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.pool.chunk_digests import ChunkDigests
from kvfs.core.shared_work import start_task
from kvfs.errors import KvfsError
from kvfs.movement.movers import Moved, MoverPool, SourceChangedError, patience_for
from kvfs.movement.weighing import Weighed, weigh
from kvfs.s3.errors import SourceError
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

AT_ONCE = 4  # digests
TRIES, WRITER_S = 20, 0.02  # of a digest while a writer has the object; some 4 s in all


class Digests:
    """The digests of one mount that are under way."""

    def __init__(
        self,
        transfers: TierTransfers,
        movers: MoverPool,
        chunks: ChunkDigests,
        announce: Callable[[int], None],
    ) -> None:
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.movers = movers
        self.chunks = chunks
        self._announce = announce
        self._under_way: set[tuple[int, int]] = set()  # inode and version
        self._limiter = trio.CapacityLimiter(AT_ONCE)

    def begin(self, inode: Inode, tier: Tier) -> None:
        """Compute the digests of an object from its copy in a tier, in the background."""
        if (inode.ino, inode.version) in self._under_way:
            return
        self._under_way.add((inode.ino, inode.version))
        start_task("a digest for the pool", partial(self._compute, inode.copy(), tier))

    async def _compute(self, inode: Inode, tier: Tier) -> None:
        """Compute and record the digests of a sealed object."""
        ino, version = inode.ino, inode.version
        problem = "it was written meanwhile"
        try:
            for attempt in range(TRIES):
                await trio.sleep(attempt * WRITER_S)
                current = self.transfers.still_current(ino, version)
                if current is None and not self._has_version(ino, version):
                    return
                if current is None:  # its writer has flushed it, and not closed it yet
                    continue
                if current.digest and not self.chunks.lack(current):
                    return
                try:
                    async with self._limiter:
                        found = await self._read(inode, tier)
                except (SourceChangedError, SourceError, OSError) as error:
                    problem = str(error)
                    continue
                current = self.transfers.still_current(ino, version)
                if current is None or found.mtime_ns != current.backing_mtime_ns:
                    continue
                if isinstance(found, Weighed):
                    same = current.digest in {b"", found.digest}
                    self.chunks.note(current, found.chunks if same else None)
                if current.digest:
                    self._announce(ino)
                    return
                with self.ledger.catalog.batch() as batch:
                    batch.change(current)
                    current.digest = found.digest
                    batch.put(current)
                return
            log.info("%s is not in the pool: %s", self.ledger.catalog.named(ino), problem)
        except KvfsError as error:
            log.warning("%s is not in the pool: %s", self.ledger.catalog.named(ino), error)
        finally:
            self._under_way.discard((ino, version))
            if self.chunks.lack(inode):
                self.chunks.note(inode, None)
                current = self.ledger.table.inode(ino)
                if current is not None and current.digest:
                    self._announce(ino)

    async def _read(self, inode: Inode, tier: Tier) -> Moved | Weighed:
        """Read an object through. Raises OSError, SourceChangedError, TierError."""
        path = tier.path(inode.ino, inode.version)
        if self.chunks.lack(inode):
            patience = patience_for(inode.size)
            return await self.movers.run(weigh, path, inode.size, patience=patience)
        return await self.movers.read_through(
            path, inode.size, sync=False, sparse=inode.sparse, data=inode.data
        )

    def _has_version(self, ino: int, version: int) -> bool:
        now = self.ledger.table.inode(ino)
        return now is not None and now.version == version and bool(now.links)
