"""Computes the digests of sealed objects that only RAM has, for their announcement.

Contract: `begin` never waits, and computes a version's digest once at a time, in a mover. The
change of the record announces the object. While a writer has flushed the file and not closed it
yet, the task tries again for some 4 s. An object that stays without a digest is not in the pool.
"""

import logging
from functools import partial

import trio

from kvfs.catalog import Inode
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.shared_work import start_task
from kvfs.errors import KvfsError
from kvfs.movement.movers import MoverPool, SourceChangedError
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

AT_ONCE = 4  # digests
TRIES, WRITER_S = 20, 0.02  # of a digest while a writer has the object; some 4 s in all


class Digests:
    """The digests of one mount that are under way."""

    def __init__(self, transfers: TierTransfers, movers: MoverPool) -> None:
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.movers = movers
        self._under_way: set[tuple[int, int]] = set()  # inode and version
        self._limiter = trio.CapacityLimiter(AT_ONCE)

    def begin(self, inode: Inode, tier: Tier) -> None:
        """Compute the digest of an object from its copy in a tier, in the background."""
        if (inode.ino, inode.version) in self._under_way:
            return
        self._under_way.add((inode.ino, inode.version))
        start_task("a digest for the pool", partial(self._compute, inode.copy(), tier))

    async def _compute(self, inode: Inode, tier: Tier) -> None:
        """Compute and record the digest of a sealed object. Its change announces it."""
        ino, version = inode.ino, inode.version
        path, problem = tier.path(ino, version), "it was written meanwhile"
        try:
            for attempt in range(TRIES):
                await trio.sleep(attempt * WRITER_S)
                current = self.transfers.still_current(ino, version)
                if current is None and not self._has_version(ino, version):
                    return
                if current is None:  # its writer has flushed it, and not closed it yet
                    continue
                if current.digest:
                    return
                try:
                    async with self._limiter:
                        found = await self.movers.read_through(
                            path, inode.size, sync=False, sparse=inode.sparse, data=inode.data
                        )
                except (SourceChangedError, OSError) as error:
                    problem = str(error)
                    continue
                current = self.transfers.still_current(ino, version)
                if current is None or found.mtime_ns != current.backing_mtime_ns:
                    continue
                with self.ledger.catalog.batch() as batch:
                    batch.change(current)
                    current.digest = current.digest or found.digest
                    batch.put(current)
                return
            log.info("%s is not in the pool: %s", self.ledger.catalog.named(ino), problem)
        except KvfsError as error:
            log.warning("%s is not in the pool: %s", self.ledger.catalog.named(ino), error)
        finally:
            self._under_way.discard((ino, version))

    def _has_version(self, ino: int, version: int) -> bool:
        now = self.ledger.table.inode(ino)
        return now is not None and now.version == version and bool(now.links)
