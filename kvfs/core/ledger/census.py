"""The census: it counts the objects of earlier sessions once, beside the first operations.

Contract: until `run` has counted, `Accounts.census_done` is not set, and creates that depend on
the accounts wait for it. The census drops objects whose only copy went away with RAM. The sweep
then unlinks backing files that no inode refers to: a crash left them. While the catalog is in
doubt, there is no sweep. The census logs, counts (`inodes_unreadable`) and skips the parts of the
catalog that it cannot read: `fsck` is for those.
"""

import logging
import os
import time
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import trio

from kvfs.catalog import Inode
from kvfs.core.ledger.dirty import BUCKET_FACT
from kvfs.core.ledger.ledger import Ledger
from kvfs.errors import CatalogError
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

CENSUS_STEP = 128  # inodes between two turns of the loop, about 0.5 ms


class Census:
    """Counts, then sweeps, but not the files of `jobs`: the inodes that movers work on.

    met: called for each inode that is counted.
    """

    def __init__(self, ledger: Ledger, jobs: Container[int], met: Callable[[Inode], None]) -> None:
        self.ledger = ledger
        self._jobs = jobs
        self._met = met
        self._started = time.time()
        self._failed = False

    async def run(self) -> None:
        """Count, then sweep. Raises CatalogError once; another call continues from there."""
        await self._count()
        if self.ledger.catalog.doubt:
            return  # an unknown file may be an object whose name is missing
        for tier in self.ledger.tiers.local:
            await self._sweep(tier)

    async def _count(self) -> None:
        ledger = self.ledger
        at = ledger.accounts.counted_to
        while at < ledger.accounts.first_new:
            inodes = self._read(at)
            if inodes is None:
                at += CENSUS_STEP
                continue
            for inode in inodes:
                if inode.ino >= ledger.accounts.first_new:
                    break
                current = ledger.table.inode(inode.ino)
                if current and current.in_pool and current.session != ledger.session:
                    if current.ino not in ledger.table.open:  # a program reads it while it comes
                        ledger.removals.forget_remote(current)  # the index tells of it again
                elif current is not None and ledger.records.is_lost(current):
                    ledger.removals.drop(current, "lost")
                    await trio.lowlevel.checkpoint()
                elif current is not None:
                    ledger.accounts.count_earlier(current)
                    self._met(current)
            if not inodes:
                break
            at = inodes[-1].ino
            ledger.accounts.end_census_step()
            await trio.lowlevel.checkpoint()
        ledger.counters["inodes_unreadable"] = len(ledger.catalog.unreadable)
        if ledger.tiers.nvme.capacity_excludes_objects:
            ledger.tiers.nvme.configured_capacity += ledger.tiers.nvme.used
        for namespace in list(ledger.namespaces):
            for _ in namespace.all_met(ledger.tiers.local):
                await trio.lowlevel.checkpoint()
        ledger.accounts.end_census()
        if not ledger.tiers.bucket.mounted and ledger.accounts.spilled:
            log.warning(
                "%d objects are in %s only, and this mount has no bucket: an open of them is "
                "ENOENT; mount with s3=",
                *(ledger.accounts.spilled, ledger.catalog.fact(BUCKET_FACT)),
            )
        ledger.wakeup.wake()

    def _read(self, at: int) -> list[Inode] | None:
        """Read the next inodes; None if the catalog could not read them twice."""
        catalog = self.ledger.catalog
        try:
            return catalog.inodes_after(at, CENSUS_STEP)
        except CatalogError as error:
            if not self._failed:
                self._failed = True
                raise
            try:
                return catalog.inodes_after(at, 1)
            except CatalogError:
                log.error("inodes from %d on are not counted: %s; run kvfs fsck", at + 1, error)
                return None

    async def _sweep(self, tier: Tier) -> None:
        """Unlink backing files that no inode refers to: a crash left them."""
        try:
            await self._unlink_unknown(tier)
        except OSError as error:  # not again: the next mount has its own census
            tier.failed("sweep", str(tier.root), error)

    async def _unlink_unknown(self, tier: Tier) -> None:
        ledger, files, wait = self.ledger, tier.files(), tier.calls.run_unlimited
        while True:
            found = await wait(lambda: list(islice(files, 512)))
            if not found:
                return
            for ino, version, path in found:
                owner = ino or _owner(path)
                if (
                    owner >= ledger.accounts.first_new
                    or owner in self._jobs
                    or ino in ledger.table.busy
                ):
                    continue
                try:
                    inode = ledger.table.inode(ino) if ino else None
                except CatalogError:  # its inode may refer to this file
                    continue
                if inode and inode.version == version and tier in ledger.tiers.holders(inode):
                    continue
                if ino or await wait(partial(_older, path, self._started)):
                    if owner in self._jobs:
                        continue  # a mover is about to use the name
                    await wait(partial(_unlink, _set_aside(path)))
                    ledger.counters["swept"] += 1
            await trio.lowlevel.checkpoint()


def _owner(path: str) -> int:
    """The inode of a copy that a mover left unfinished; 0 for a file that is not of kvfs."""
    try:
        return int(os.path.basename(path).partition(".")[0], 16)
    except ValueError:
        return 0


def _set_aside(path: str) -> str:
    """Rename a file before its unlink: another file may get and keep its name meanwhile."""
    aside = f"{path}.swept"
    with suppress(FileNotFoundError):
        os.rename(path, aside)
    return aside


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _older(path: str, moment: float) -> bool:
    """Whether an unfinished file is older than this daemon, by ctime: no program can set that."""
    try:
        return os.stat(path).st_ctime < moment
    except FileNotFoundError:
        return False
