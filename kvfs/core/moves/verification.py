"""Verification: reads files that were written directly to NVMe, hashes them and syncs them.

Contract: a verified object has its digest in its record, and its bytes were synced before. A digest
that the record already has is compared, never replaced. A file that was written to behind kvfs's
back gets none. A file that the kernel could not write is lost, whatever job finds that (`lose`).
`matches` reads a copy for a caller that doubts it. Nothing is copied here, so nothing is reserved.
"""

import logging
import time
from functools import partial

from kvfs import failpoints
from kvfs.catalog import Inode
from kvfs.core.moves.movement import MovementQueue
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.namespaces.order import key_of
from kvfs.fairness.admission import Admission
from kvfs.movement.movers import LostError, SourceChangedError
from kvfs.tiers import Tier

log = logging.getLogger(__name__)


class Verification:
    """The `Verifier` of `core/objects/copies.py`."""

    name = "settle"

    def __init__(
        self, transfers: TierTransfers, admission: Admission, requests: MovementQueue
    ) -> None:
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.movers = transfers.movers
        self.admission = admission
        self.requests = requests

    def written(self, inode: Inode) -> None:
        """An object was written directly to NVMe: hash and sync it."""
        cost, now = Tier.cost(inode.blocks), time.time()
        self.admission.decide(key_of(inode), cost, now, touched=False, obliged=True)
        self.requests.add(self, inode.ino)

    def met(self, inode: Inode) -> None:
        """Ask for the digest of an object of an earlier session, if that session died before it."""
        if not inode.sealed or not inode.on_nvme or inode.digest or inode.packed is not None:
            return
        if inode.session not in self.ledger.suspect:  # else nothing proves its bytes
            self.requests.add(self, inode.ino)

    async def move(self, inodes: list[Inode]) -> None:
        """Read one object through, and record its digest."""
        (inode,) = inodes
        ino, version, nvme = inode.ino, inode.version, self.ledger.tiers.nvme
        if not inode.on_nvme or inode.packed is not None:
            return
        try:
            found = await self.movers.read_through(
                *(nvme.path(ino, version), inode.size),
                sync=True,
                sparse=inode.sparse,
                data=inode.data,
            )
        except FileNotFoundError:
            current = self.transfers.still_current(ino, version)
            if current is None or not current.on_nvme:
                return  # RAM has it, and NVMe evicted it for room
            raise
        except LostError:
            await self.lose(ino, version)
            raise
        current = self.transfers.still_current(ino, version)
        if current is not None and current.digest not in {b"", found.digest}:
            self.transfers.lose_rotten(current, nvme)
        elif current is not None and (current.digest or found.mtime_ns == current.backing_mtime_ns):
            if failpoints.active:
                failpoints.reach("dispatcher.settled")
            with self.ledger.catalog.batch() as batch:
                batch.change(current)
                current.digest = found.digest
                batch.put(current)
            self.ledger.counters["settled"] += 1
            self.ledger.verified.note(ino)

    async def lose(self, ino: int, version: int) -> None:
        """Lose a file that the kernel could not write: the kernel says so once.

        Its page cache is not to be trusted. Programs that have the file open read the page cache.
        After that, no program can open it.
        """
        ledger, nvme = self.ledger, self.ledger.tiers.nvme
        current = ledger.table.inode(ino)
        if current is None or not current.on_nvme:
            return
        held = ledger.table.open.get(ino)
        if held is not None:  # if it is being written, the file gets its next version's name
            ledger.records.distrust(current, nvme)
            ledger.retries.add(partial(self.lose, ino, current.version))
        elif current.version == version and ino in ledger.table.busy:
            ledger.records.distrust(current, nvme)
            ledger.retries.add(partial(self.lose, ino, version))
        elif current.version == version:
            ledger.removals.lose(current, nvme)

    async def matches(self, tier: Tier, inode: Inode) -> bool:
        """Whether a backing file has the digest of its inode.

        Raises TierError if that cannot be known: a disk that fails is no reason to lose a file.
        """
        path = tier.path(inode.ino, inode.version)
        try:
            found = await self.movers.read_through(
                path, inode.size, sync=False, sparse=inode.sparse, data=inode.data
            )
        except (FileNotFoundError, SourceChangedError) as error:
            what = self.ledger.catalog.named(inode.ino)
            log.error("%s cannot be verified, kvfs gives up its copy %s: %s", what, path, error)
            return False
        except OSError as error:
            raise tier.failed("verify", path, error) from error
        return found.digest == inode.digest
