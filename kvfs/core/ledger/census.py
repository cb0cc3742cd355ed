"""What earlier sessions left: counted once at the start, beside the first operations.

Contract: until `run` has counted, `Accounts.census_done` is not set, and creates that depend on
the accounts wait for it. Names whose bytes went away with RAM are dropped. The sweep then unlinks
backing files that no inode means, which a crash left half done; none while the catalog is in doubt.
What cannot be read of the catalog
is said, counted (`inodes_unreadable`) and passed by: `fsck` is for that.
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
from kvfs.core.ledger.dirty import FACT
from kvfs.core.ledger.ledger import Ledger
from kvfs.errors import CatalogError
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

CENSUS_STEP = 128  # inodes between two turns of the loop, about 0.5 ms


class Census:
    """`jobs` are the inodes that movers work on: their files are not swept. `met`: told of each."""

    def __init__(self, ledger: Ledger, jobs: Container[int], met: Callable[[Inode], None]) -> None:
        self.ledger = ledger
        self._jobs = jobs
        self._met = met
        self._started = time.time()
        self._failed = False

    async def run(self) -> None:
        """Count, then sweep. Raises CatalogError once; called again it goes on where it was."""
        await self._count()
        if self.ledger.catalog.doubt:
            return  # a file that nothing names may be an object whose name is missing
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
                if current is not None and ledger.records.is_lost(current):
                    ledger.removals.drop(current, "lost")
                    await trio.lowlevel.checkpoint()
                elif current is not None:
                    ledger.accounts.count_past(current)
                    self._met(current)
            if not inodes:
                break
            at = inodes[-1].ino
            ledger.accounts.end_census_step()
            await trio.lowlevel.checkpoint()
        ledger.counters["inodes_unreadable"] = len(ledger.catalog.unreadable)
        if ledger.tiers.nvme.grows:
            ledger.tiers.nvme.configured += ledger.tiers.nvme.used
        ledger.accounts.end_census()
        if not ledger.tiers.bucket.mounted and ledger.accounts.spilled:
            log.warning(
                "%d objects are in %s only, which this mount is without: they are ENOENT when they "
                "are opened; mount with s3=",
                *(ledger.accounts.spilled, ledger.catalog.fact(FACT)),
            )
        ledger.work.wake()

    def _read(self, at: int) -> list[Inode] | None:
        """The next inodes; None if they cannot be read, and could not be a moment ago."""
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
                log.error("inodes from %d on are not counted: %s", at + 1, error)
                return None

    async def _sweep(self, tier: Tier) -> None:
        """Unlink backing files that no inode means: what a crash left half done."""
        try:
            await self._unlink_unknown(tier)
        except OSError as error:  # not again: the next mount has its own census
            tier.failed("sweep", 0, error)

    async def _unlink_unknown(self, tier: Tier) -> None:
        ledger, files, wait = self.ledger, tier.files(), tier.calls.wait
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
                except CatalogError:  # it may be the one that means this file
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
    """The inode of a copy that a mover left half made; 0 for what is not ours."""
    try:
        return int(os.path.basename(path).partition(".")[0], 16)
    except ValueError:
        return 0


def _set_aside(path: str) -> str:
    """Its name may be made anew, and recorded, while a thread is about to unlink it."""
    aside = f"{path}.swept"
    with suppress(FileNotFoundError):
        os.rename(path, aside)
    return aside


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _older(path: str, moment: float) -> bool:
    """Whether a half-made file is from before this daemon: by ctime, which nobody can set."""
    try:
        return os.stat(path).st_ctime < moment
    except FileNotFoundError:
        return False
