"""Lists a directory in the index when a program reads it, and enters the names that are new.

Contract: `show` returns within WAIT and raises nothing; the rest follows in the background. One
listing of a directory runs at a time, and none begins within AGAIN seconds of the last. A listed
name is entered only if a live node has the object: the listings of the index may be old. STEP names
are asked for at once, with a turn of the loop after each. Objects here that the index does not list
are compared with it (`Recheck.doubt`). A listing asks about no other object that is here: a
question costs 0.3 ms, so 100,000 would take half a minute.
"""

import logging
from collections.abc import Collection, Sequence
from functools import partial

import trio

from kvfs.catalog import ROOT_INO
from kvfs.core.bucket.listing.bucket_listing import some
from kvfs.core.bucket.listing.bucket_lookup import LastSeen
from kvfs.core.pool.lookup import PoolLookup
from kvfs.core.pool.recheck import Recheck
from kvfs.core.shared_work import SharedWork, WorkByKey
from kvfs.errors import KvfsError
from kvfs.pool.errors import IndexDownError
from kvfs.pool.records import GoneEntry, PoolEntry, Switch
from kvfs.s3.keys import escape

log = logging.getLogger(__name__)

WAIT = 2.0  # s that an opendir waits
AGAIN = 5.0  # s after which a directory is listed once more
STEP = 64  # names in one question: some 6 ms of the loop to enter them


class PoolListing:
    """Lists the directories of one pool."""

    def __init__(self, lookup: PoolLookup, recheck: Recheck) -> None:
        self.lookup = lookup
        self.recheck = recheck
        self.entries = lookup.entries
        self._listed: LastSeen[int] = LastSeen()
        self._running: WorkByKey[int, SharedWork] = WorkByKey(
            lambda ino, error: log.error(
                "%s is not listed in the pool: a defect of kvfs",
                self.entries.catalog.named(ino),
                exc_info=error,
            )
        )

    async def show(self, ino: int) -> None:
        """List a directory that a program is about to read or remove."""
        if not self.lookup.may_ask() or self._listed.age(ino) < AGAIN:
            return
        running = self._running.get(ino)
        if running is None:
            folder = self.entries.folder(ino)
            if folder is None:
                return
            work = partial(self._list, ino, folder)
            running = self._running.begin(ino, SharedWork(), work)
        with trio.move_on_after(WAIT):
            await running.ended.wait()

    async def _list(self, ino: int, folder: str) -> None:
        try:
            listed = await self.lookup.index.names(folder)
            await self._enter(ino, folder, listed)
            self._listed.note(ino)
            await self._doubt_others(ino, listed)
        except IndexDownError as error:
            self.lookup.failed(error)
        except KvfsError as error:
            named = self.entries.catalog.named(ino)
            log.error("%s is not listed in the pool, names may be missing: %s", named, error)

    async def _enter(self, ino: int, folder: str, listed: list[str]) -> None:
        """Enter names of a directory. Raises IndexDownError, CatalogError."""
        for page in some(listed, STEP):
            new = {
                f"{folder}{text}": name
                for text in page
                if (name := self.entries.name_of(ino, text)) is not None
                and self.entries.catalog.lookup(ino, name) is None
            }
            objects = [key for key in new if not key.endswith("/")]
            await self._make(ino, folder, [new[key] for key in new if key.endswith("/")])
            found = await self.lookup.index.find(objects, patience=WAIT)
            old = [key for key, entry in zip(objects, found, strict=True) if entry is None]
            await self.lookup.index.unlist_names((folder, key[len(folder) :]) for key in old)
            for key, entry in zip(objects, found, strict=True):
                self.lookup.marks.note(key, entry)
                if not isinstance(entry, PoolEntry) or self.lookup.marks.brings_back(key, entry):
                    continue
                if await self._is_usable(entry):
                    self.lookup.remember(key, entry)
                    self.entries.enter(ino, new[key], key, entry)
            await trio.lowlevel.checkpoint()

    async def _doubt_others(self, ino: int, listed: list[str]) -> None:
        """Compare the objects here that the index does not list. Raises CatalogError."""
        names, cookie = set(listed), 0
        catalog, table = self.entries.catalog, self.entries.ledger.table
        while entries := catalog.entries_after(ino, cookie, STEP):
            cookie = entries[-1].cookie
            for entry in entries:
                if escape(entry.name) not in names:
                    inode = table.inode(entry.ino)
                    if inode is not None and inode.is_file:
                        self.recheck.doubt(inode)
            await trio.lowlevel.checkpoint()

    async def _make(self, ino: int, folder: str, names: list[bytes]) -> None:
        """Make the listed directories that have names, and take the others out of the listing."""
        below = [f"{folder}{escape(name)}/" for name in names]
        told: list[Switch | None] = [None] * len(names)
        if ino == ROOT_INO:
            switches = await self.lookup.index.switches([escape(name) for name in names])
            told = list(switches)
            versions = [max(1, switch.version) for switch in switches]
            below = list(map(self.entries.top_folder, names, versions))
        have = await self.lookup.index.have_names(below)
        for name, switch, has in zip(names, told, have, strict=True):
            if has:
                self.entries.make_directory(ino, name, switch)
        old = [name for name, has in zip(names, have, strict=True) if not has]
        await self.lookup.index.unlist_names((folder, f"{escape(name)}/") for name in old)

    async def doubted(self, ino: int, names: Sequence[bytes]) -> Collection[bytes]:
        """The names, of some in a listing of the bucket, that had an object which is gone."""
        asked = {name: self.entries.key_of_name(ino, name) for name in names}
        keys = {name: found[0] for name, found in asked.items() if found is not None}
        doubted = {name for name, key in keys.items() if self.entries.leaving.knows(key)}
        try:
            for page in some(list(keys), STEP):
                if not self.lookup.may_ask():
                    break
                found = await self.lookup.index.find([keys[one] for one in page], patience=WAIT)
                for name, entry in zip(page, found, strict=True):
                    self.lookup.note_gone(keys[name], entry)
                    if isinstance(entry, GoneEntry):
                        doubted.add(name)
        except IndexDownError as error:
            self.lookup.failed(error)
        return doubted

    async def _is_usable(self, entry: PoolEntry) -> bool:
        return bool(await self.lookup.peers.usable(entry, patience=WAIT))
