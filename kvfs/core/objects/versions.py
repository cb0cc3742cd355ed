"""A sealed object is written again: its next version, in the same file or in a new one.

Contract: `make_writable` prepares an open object for a writer; readers keep what they have. It is
the one exception to *the record first*: the file gets the new version's name before the record
does, or a crash might leave a record that no file has. So that a crash between the two loses
nothing the inode is marked unfinished before either; `recovery` finds it sealed, and gives the file
its name back. `restage` is its record's part, and all there is to do for a version in a new file.
The caller holds the inode's lock.

Invariant: `renaming` has the inodes whose backing file may have another name than the record says,
because a rename was given up and may come yet. When it comes it is taken back, and the mark goes.
Not for choosing where a new file begins, nor for sealing.
"""

import logging
import os
import stat
from collections.abc import Callable
from functools import partial

from kvfs.catalog import Batch, Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.objects.files import BackingFiles
from kvfs.errors import CatalogError, InUseError, KvfsError
from kvfs.tiers import Job, OverdueError, Tier

log = logging.getLogger(__name__)


class Versions:
    """`files` runs what may wait for a disk."""

    def __init__(self, ledger: Ledger, files: BackingFiles) -> None:
        self.ledger = ledger
        self.catalog = ledger.catalog
        self.renaming: set[int] = set()
        self._io = files.io

    def restage(self, inode: Inode, version: int, tier: Tier, batch: Batch, *, keep: bool) -> None:
        """A sealed inode becomes staging in `tier`: out of the accounts, its copies thrown away.

        keep: but the one in `tier`, which has become the new version.
        """
        ledger = self.ledger
        before = inode.copy()
        batch.then(partial(ledger.accounts.dismiss, before))
        for holder in ledger.tiers.holders(inode):
            ledger.tiers.set_holder(inode, holder, holds=False)
            if not (keep and holder is tier):
                space = ledger.namespaces.of(before)
                away = partial(ledger.trash.throw_away, space=space)
                batch.then(partial(away, holder, inode.ino, before.version))
        ledger.tiers.set_holder(inode, tier, holds=True)
        if not keep:
            inode.size = inode.blocks = 0
        ledger.dirty.rewritten(inode, batch)
        inode.version = version
        inode.sealed = False
        inode.digest = b""
        inode.mode &= ~stat.S_ISUID  # who writes a file must not inherit its owner's rights
        if inode.mode & stat.S_IXGRP:
            inode.mode &= ~stat.S_ISGID
        batch.put(inode)
        batch.mark_unfinished(inode.ino)

    async def make_writable(self, held: OpenObject) -> None:
        """A writer comes. Readers keep what they have: all share one backing file.

        Raises InUseError if its copy was given up meanwhile: what is wrong must not become new.
        """
        ledger, inode, tier = self.ledger, held.inode, held.tier
        if not held.writable:
            opening = partial(tier.open, inode.ino, inode.version, writable=True)
            fd = await self._io(tier, Job("open", opening, os.close))
            if held.fd >= 0:
                os.close(held.fd)
            held.fd, held.writable, held.reopened = fd, True, True
            self._expect_kept(held)
        if held.writers:
            return
        if not held.accounted:  # unlinked, and written to before
            ledger.table.stage(held)
            return
        if inode.links:
            await self._rename_and_restage(held)
        else:  # nobody will look for the version of an unlinked file
            with self.catalog.batch() as batch:
                self.restage(inode, inode.version, tier, batch, keep=True)
        held.accounted = False
        held.reserve(tier.cost(inode.blocks))
        ledger.table.stage(held)

    async def _rename_and_restage(self, held: OpenObject) -> None:
        inode, tier = held.inode, held.tier
        ino, old, new = inode.ino, inode.version, inode.version + 1
        with self.catalog.batch() as batch:
            batch.mark_unfinished(ino)
        renaming = partial(tier.rename, ino, old, new)
        back = partial(tier.rename, ino, new, old)
        self.renaming.add(ino)
        try:
            await self._io(tier, Job("rename", renaming, lambda _: self._renamed_late(ino, back)))
        except OverdueError:
            raise  # it may come yet: the mark stays until it is taken back
        except KvfsError:
            await self._unmark(ino)
            raise
        try:
            self._expect_kept(held)
            with self.catalog.batch() as batch:
                self.restage(inode, new, tier, batch, keep=True)
        except KvfsError:
            await self._io(tier, Job("rename", back))  # if it fails, the mark stays
            if held.lost:  # it may have been looked for in vain
                why = "it was damaged when somebody was about to write to it"
                self.ledger.trash.throw_away(tier, ino, old, keep=True, why=why)
            await self._unmark(ino)
            raise
        self.renaming.discard(ino)

    @staticmethod
    def _expect_kept(held: OpenObject) -> None:
        if held.lost:
            raise InUseError(f"inode {held.inode.ino}: its damaged copy is open")

    def _renamed_late(self, ino: int, back: Callable[[], None]) -> None:
        """Nobody waits for it any more. Called in any thread."""
        back()
        self.ledger.retries.add(partial(self._unmark_late, ino))

    async def _unmark(self, ino: int) -> None:
        """It was marked unfinished, and then not written: it is what it was. Holds the lock."""
        try:
            inode = self.ledger.table.inode(ino)
            written = ino in self.ledger.table.staging
            if inode is not None and inode.links and inode.sealed and not written:
                with self.catalog.batch() as batch:
                    batch.mark_finished(ino)
            self.renaming.discard(ino)
        except CatalogError as error:
            log.error("inode %d is called unfinished a while longer: %s", ino, error)
            self.ledger.retries.add(partial(self._unmark_late, ino))

    async def _unmark_late(self, ino: int) -> None:
        async with self.ledger.table.locked(ino):
            await self._unmark(ino)
