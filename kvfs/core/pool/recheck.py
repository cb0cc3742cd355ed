"""Compares objects that are here with the index: another node may have unlinked or replaced them.

Contract: `look` and `doubt` never wait: they ask in the background, about an object at most once in
RECHECK seconds. `look` asks about at most BEHIND at a time, `doubt` about one after the other. An
object that the index does not have stays, and is announced again: an index may be lost. So is an
object that another node has written as well, with the same bytes, after it had replaced the name.
An object goes if the index says that it, or a later one, was unlinked, or that a later one has its
name. If an earlier one has it, the object is announced again, and the index decides: it may be
lost, or a clock behind. But an object stays if it changes between question and answer. Of an object
in conflict, `pool/conflicts` compares the other one. The name of an object that is only elsewhere
goes as soon as no live node has it, and gets the mode and owner that the index has.
"""

import logging
from functools import partial

from kvfs.catalog import Inode
from kvfs.core.bucket.listing.bucket_lookup import LastSeen
from kvfs.core.pool.announcer import Announcer
from kvfs.core.shared_work import start_task
from kvfs.errors import CatalogError
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import LONG
from kvfs.pool.records import GoneEntry, PoolEntry

log = logging.getLogger(__name__)

RECHECK = 1.0  # s for which the index is believed about an object that is here
BEHIND = 64  # questions under way


class Recheck:
    """Compares the announced objects of one mount with the index."""

    def __init__(self, announcer: Announcer) -> None:
        self.announcer = announcer
        self.ledger = announcer.ledger
        self.changes = announcer.changes
        self._asked: LastSeen[int] = LastSeen()
        self._running = 0
        self._doubted: dict[int, bytes] = {}  # inodes that a listing lacks, with their digests
        self._doubting = False

    def look(self, inode: Inode) -> None:
        """Compare an object that a program has looked up or opened.

        After a listing, opens come without a lookup: it gives the kernel all names for a second.
        """
        ino = inode.ino
        if not self._is_known(inode) or self._asked.age(ino) < RECHECK:
            return
        if self._running < BEHIND and self.announcer.lookup.may_ask():
            self._asked.note(ino)
            start_task("a comparison with the pool", partial(self._ask, ino, inode.digest))

    def doubt(self, inode: Inode) -> None:
        """Compare an object that the index does not list, after those before it."""
        if self._is_known(inode) and self._asked.age(inode.ino) >= RECHECK:
            self._doubted[inode.ino] = inode.digest
            if not self._doubting:
                self._doubting = True
                start_task("comparisons with a listing of the pool", self._ask_doubted)

    async def _ask_doubted(self) -> None:
        try:
            while self._doubted:
                ino, digest = self._doubted.popitem()
                if self.announcer.lookup.may_ask():  # else a later listing lacks it, too
                    self._asked.note(ino)
                    await self._ask(ino, digest)
        finally:
            self._doubting = False

    def _is_known(self, inode: Inode) -> bool:
        objects = self.announcer.objects
        return inode.in_pool or inode.ino in objects.announced or inode.ino in objects.others

    async def stands(self, inode: Inode) -> bool:
        """Whether the name still means an announced object, which goes if not.

        True if the index does not answer.
        """
        ino, key = inode.ino, self.announcer.entries.key(inode)
        lookup = self.announcer.lookup
        if key is None or ino not in self.announcer.objects.announced or not lookup.may_ask():
            return True
        settled = self.changes.settled(ino, key)
        try:
            (entry,) = await self.announcer.index.find([key])
        except IndexDownError as error:
            lookup.failed(error)
            return True
        if isinstance(entry, GoneEntry):
            stands = not entry.covers(inode.digest, inode.backing_mtime_ns)
        else:
            stands = entry is None or not _replaces(entry, inode)
        if stands or settled is None or self.changes.settled(ino, key) is not settled:
            return True
        self.announcer.conflicts.let_go(ino, inode.digest)
        return False

    async def _ask(self, ino: int, digest: bytes) -> None:
        self._running += 1
        try:
            inode = self.ledger.table.inode(ino)
            key = None if inode is None else self.announcer.entries.key(inode)
            if key is None:
                return
            settled = self.changes.settled(ino, key)
            (entry,) = await self.announcer.index.find([key], patience=LONG)
            self.announcer.lookup.marks.note(key, entry)
            if inode is not None and inode.in_pool:
                await self._expect_there(inode, entry)
            elif ino in self.announcer.objects.others:
                await self.announcer.conflicts.compare(ino, entry)
            elif settled is None or self.changes.settled(ino, key) is not settled:
                return
            elif entry is None:
                self.changes.announce(ino)
            elif isinstance(entry, GoneEntry):
                if inode is not None and entry.covers(digest, inode.backing_mtime_ns):
                    self.announcer.conflicts.let_go(ino, digest)
                else:
                    self.changes.announce(ino)
            elif inode is not None and _replaces(entry, inode):
                self.announcer.conflicts.let_go(ino, digest)
            elif entry.facts.digest != digest or all(
                owner.node != self.announcer.peers.me().node for owner in entry.owners
            ):
                self.changes.announce(ino)
        except IndexDownError as error:
            self.announcer.lookup.failed(error)
        except CatalogError as error:
            log.error("%s keeps its name: %s", self.ledger.catalog.named(ino), error)
        finally:
            self._running -= 1

    async def _expect_there(self, inode: Inode, entry: PoolEntry | GoneEntry | None) -> None:
        """Forget a remote object that no live node has any more. Raises IndexDownError."""
        lookup = self.announcer.lookup
        if (
            isinstance(entry, PoolEntry)
            and entry.facts.digest == inode.digest
            and await lookup.peers.usable(entry, patience=LONG)
        ):
            async with self.ledger.table.locked(inode.ino):
                if not self.changes.has_new_attributes(inode.ino):
                    lookup.entries.follow(inode.ino, entry)
                    self.changes.keep_attributes(inode.ino)
            return
        async with self.ledger.table.locked(inode.ino):
            lookup.entries.forget(inode.ino)


def _replaces(entry: PoolEntry, inode: Inode) -> bool:
    """Whether the index has another object by the name, which is not an earlier one."""
    there = entry.facts.mtime_ns, entry.facts.digest
    return there > (inode.backing_mtime_ns, inode.digest) and there[1] != inode.digest
