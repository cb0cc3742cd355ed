"""The steps of each movement: copy an object, check that it is unchanged, and record the copy.

Contract: a copy belongs to one version of a sealed object. When a mover has made the copy,
`still_current` checks that the object still has this version and no writer. Otherwise kvfs removes
the copy. Namespaces take turns at the movers by weight. Not for deciding whether a copy is worth
its write, nor for room: the caller reserves the bytes of a copy, and releases them.
"""

import errno
import logging
from collections import Counter
from collections.abc import Sequence

import trio

from kvfs import failpoints
from kvfs.catalog import Inode, PackedCopy
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.moves.breaker import CircuitBreaker
from kvfs.errors import CatalogError
from kvfs.fairness.fair_queue import FairQueue
from kvfs.movement.movers import (
    LostError,
    Moved,
    MoverFailedError,
    MoverOverdueError,
    MoverPool,
    Repacked,
    SourceChangedError,
)
from kvfs.movement.packing import PackingResult
from kvfs.tiers import Bucket, NvmeTier, Tier

log = logging.getLogger(__name__)

PERIOD = 0.002  # s between two checks of a state that has no event
PACKED_LEAST = 1 << 20  # bytes: a smaller file opens sooner than a mover could decompress it


class TierTransfers:
    """The copies between local tiers. `in_flight` counts the running ones by namespace.

    `uploading` and `unpacking` have the inodes that movers upload or decompress. Of all jobs, only
    an upload and a decompression may work on the same object at the same time: an open that waits
    for the decompression must not wait for a bucket.
    """

    def __init__(self, ledger: Ledger, movers: MoverPool, breaker: CircuitBreaker) -> None:
        self.ledger = ledger
        self.movers = movers
        self.breaker = breaker
        self.in_flight: Counter[int] = Counter()
        self.uploading: set[int] = set()
        self.unpacking: set[int] = set()
        self._fair = FairQueue(movers.workers)
        self._logged_too_large = False
        self._logged_packing: set[str] = set()  # names of tiers

    def copy_is_useless(self, ino: int) -> bool:
        """Whether a new copy of the object would be useless.

        It is useless while a writer has the object open, and while kvfs renames the file for one.
        It is useless for an orphan, which goes at its last close. It is also useless while handles
        read a distrusted copy: the record must tell the next daemon which copy is invalid.
        """
        table = self.ledger.table
        held, renaming = table.open.get(ino), ino in table.renaming
        return renaming or (
            held is not None and (held.writers > 0 or held.lost or not held.inode.links)
        )

    def still_current(self, ino: int, version: int | None = None) -> Inode | None:
        """Return the object's record if a copy of this version is of use; else None.

        version: the version that a job has copied; None: any.
        """
        if self.copy_is_useless(ino):  # asked first: a fast open has no record here until then
            return None
        current = self.ledger.table.inode(ino)
        if current is None or not current.links or not current.sealed:
            return None
        if version not in {None, current.version} or self.ledger.records.is_distrusted(current):
            return None
        return current

    def still_wanted(self, ino: int, version: int) -> Inode | None:
        """As `still_current`, but also an unlinked object that a program reads while it comes."""
        held = self.ledger.table.open.get(ino)
        if held is not None and held.coming and held.inode.version == version:
            return None if held.writers or held.lost else held.inode
        return self.still_current(ino, version)

    async def copy(self, inodes: list[Inode], source: Tier, target: Tier, counter: str) -> None:
        """Copy sealed objects of one namespace, and record the copies of the unchanged ones.

        counter: the counter of the ledger that counts these copies.
        """
        jobs = [(inode.ino, inode.version, inode.digest) for inode in inodes]
        paths = [
            (
                *(source.path(inode.ino, inode.version), target.path(inode.ino, inode.version)),
                *(inode.size, inode.sparse),
            )
            for inode in inodes
        ]
        data = [inode.data for inode in inodes]
        results: Sequence[Repacked | Moved | OSError | SourceChangedError]
        space = self.ledger.namespaces.of(inodes[0])
        settings = space.settings
        self.in_flight[space.ino] += 1
        try:
            async with self._fair.turn(
                space.ino,
                sum(data),
                weight=settings.weight,
                bulk=settings.priority == "bulk",
            ):
                if len(paths) == 1:
                    results = [await self._copy_one(inodes[0], target, paths[0])]
                else:
                    results = await self.movers.copy_all(paths, data)
        except (MoverFailedError, MoverOverdueError):
            for ino, version, _ in jobs:  # a mover may have renamed it before it failed
                self.ledger.trash.throw_away(target, ino, version)
            raise
        finally:
            self.in_flight[space.ino] -= 1
        for (ino, version, digest), result in zip(jobs, results, strict=True):
            current = self.still_current(ino, version)
            moved, packed = result[:2] if isinstance(result, Repacked) else (result, None)
            if isinstance(moved, Exception):
                if current is not None and _is_too_large(moved, target):
                    self._too_large(current, target, moved)
                elif current is not None:
                    self.breaker.failed("copy", self.ledger.catalog.named(ino), moved)
                    if isinstance(moved, LostError):
                        self.ledger.removals.lose(current, source)
            elif current is not None and {digest, current.digest} <= {b"", moved.digest}:
                try:
                    self._record_copy(current, target, moved, packed)
                except CatalogError as error:
                    self.ledger.trash.throw_away(target, ino, version)
                    self.breaker.failed("copy", self.ledger.catalog.named(ino), error)
                else:
                    self.ledger.counters[counter] += 1
                    self.ledger.verified.note(ino)  # the copy read or wrote NVMe
                    self.breaker.over()
            else:
                self.ledger.trash.throw_away(target, ino, version)
                if current is not None:
                    self.lose_rotten(current, source)

    def should_pack(self, inode: Inode) -> bool:
        """Whether to compress (pack) the object's copy on NVMe. Its opens then need room in RAM."""
        ram, space = self.ledger.tiers.ram, self.ledger.namespaces.of(inode)
        if space.settings.compression != "nvme" or not space.takes(ram):
            return False
        if inode.size < PACKED_LEAST or inode.sparse or inode.mostly_holes:
            return False
        return ram.cost(inode.blocks) <= ram.capacity // 2

    async def _copy_one(
        self, inode: Inode, target: Tier, path: tuple[str, str, int, bool]
    ) -> Repacked | OSError:
        """Return the result of a copy, or an error: the file is too large, or bytes are lost."""
        try:
            return await self._copy_or_pack(inode, target, path)
        except OSError as error:
            if not isinstance(error, LostError) and not _is_too_large(error, target):
                raise
            return error

    def _too_large(self, inode: Inode, target: Tier, error: Exception) -> None:
        """Exclude the object from demotion: its file is too large for the file system of NVMe."""
        self.ledger.namespaces.of(inode).refuse_too_large(inode)
        log.log(
            logging.DEBUG if self._logged_too_large else logging.WARNING,
            "%s is not copied to the %s tier, whose files cannot have its %d bytes; it is "
            "lost when it leaves RAM (said once): %s",
            *(self.ledger.catalog.named(inode.ino), target.name, inode.size, error),
        )
        self._logged_too_large = True

    async def _copy_or_pack(
        self, inode: Inode, target: Tier, path: tuple[str, str, int, bool]
    ) -> Repacked:
        source, destination, size, sparse = path
        nvme = self.ledger.tiers.nvme
        if target is not nvme or not self.should_pack(inode):
            moved = await self.movers.copy(
                *(source, destination, size),
                sync=target.slow,
                cold=True,
                sparse=sparse,
                data=inode.data,
            )
            return Repacked(moved)
        element_size = self.ledger.namespaces.places.element_size(inode)
        found = await self.movers.pack(source, destination, size, element_size)
        assert found.packing is not None
        self.count_packing(inode, nvme, found.packing, found.packed.size if found.packed else 0)
        return found

    async def wait_for_trash(self, tier: Tier, ino: int, version: int) -> None:
        """Wait until kvfs has unlinked an evicted copy that has the same file name."""
        while any(trash[:3] == (tier, ino, version) for trash in self.ledger.trash.files):
            self.ledger.wakeup.wake()
            await trio.sleep(PERIOD)

    def count_packing(
        self, inode: Inode, tier: NvmeTier | Bucket, packing: PackingResult, size: int
    ) -> None:
        """Count a compression in the counters of `tier`. size: bytes of a smaller result."""
        counters = tier.counters
        counters["compress_cpu_us"] += round(packing.cpu_seconds * 1e6)
        if packing.smaller:
            counters["compressed"] += 1
            counters["compressed_bytes"] += inode.size
            counters["compressed_to_bytes"] += size
            return
        counters["not_compressed"] += 1
        if packing.failure:
            log.log(
                logging.DEBUG if tier.name in self._logged_packing else logging.WARNING,
                "%s is stored without compression (said once): %s",
                *(self.ledger.catalog.named(inode.ino), packing.failure),
            )
            self._logged_packing.add(tier.name)

    def _record_copy(
        self, inode: Inode, target: Tier, moved: Moved, packed: PackedCopy | None
    ) -> None:
        """Record the new copy in the catalog. Raises CatalogError."""
        if failpoints.active:
            failpoints.reach("dispatcher.copied")
        self.ledger.records.add_copy(inode, target, moved.blocks, moved.digest, packed)

    def lose_rotten(self, inode: Inode, tier: Tier) -> None:
        """Lose a damaged copy: its file seems unchanged, but its bytes do not match the digest.

        kvfs serves no new open from the copy, even if a program has the object open: see
        `Removals.lose`.
        """
        why = "its bytes do not match their digest"
        self.ledger.removals.lose(inode, tier, quarantine=True, why=why)

    def give_up_distrusted(self, ino: int) -> None:
        """Lose the distrusted copies of an object that has no digest: no job can use them."""
        inode = self.ledger.table.inode(ino)
        if inode is None or not inode.links or not inode.sealed or self.copy_is_useless(ino):
            return
        if self.ledger.records.is_distrusted(inode):
            for tier in self.ledger.tiers.holders(inode):
                why = "its bytes may be wrong, and it has no digest"
                self.ledger.removals.lose(inode, tier, quarantine=True, why=why)


def _is_too_large(error: Exception, target: Tier) -> bool:
    """Whether the copy failed because the file system of NVMe allows no file of that size."""
    return target.slow and isinstance(error, OSError) and error.errno == errno.EFBIG
