"""Walks over trees in the background: they drop, account anew or expire objects.

Contract: a step of a walk is synchronous, one batch and less than 1 ms long. Other tasks run after
each step. A walk that a death cuts short begins again, from the marks in the catalog; its finished
steps leave nothing to do again. An open object goes when it is closed.
Not for choosing the victims of a quota (`Quota`).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import trio

from kvfs import failpoints
from kvfs.catalog import Batch, Dentry, Inode
from kvfs.core.capacity.quota import Quota
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.names.tree import Tree
from kvfs.errors import CatalogError

log = logging.getLogger(__name__)

STEP = 8  # objects; each costs 30 to 100 us
TRASH_MAX = 4096  # files that wait for their unlink before a walk goes on
BUSY_PERIOD = 0.01  # s between two looks at inodes that are locked
SHORTEST, LONGEST = 1.0, 60.0  # s between two looks for expired objects


@dataclass(slots=True)
class _Place:
    """A directory that is being cleared.

    Each step reads on behind the last entry. Deleted entries stay in RocksDB for a while, and to
    skip all of them at each step would take the square of the number of entries.
    """

    ino: int
    parent: int
    cookie: int = 0
    busy: bool = False  # an entry had to be skipped


class Walks:
    """The walks of a mount. Call `run` once."""

    def __init__(self, tree: Tree, quota: Quota) -> None:
        self.tree = tree
        self.quota = quota
        self.ledger: Ledger = tree.ledger
        self.namespaces = tree.namespaces
        self.catalog = tree.catalog

    async def run(self) -> None:
        """Clear and account the marked directories, for ever."""
        await self.ledger.accounts.census_done.wait()
        while True:
            changed = self.namespaces.changed
            for ino in list(self.namespaces.dropped):
                await self._clear(ino)
            for ino in list(self.namespaces.unaccounted):
                await self._account_anew(ino)
            await changed.wait()

    # Dropped

    async def _clear(self, top: int) -> None:
        """Remove a dropped directory and all below it, deepest first.

        Before that, files that were moved away are accounted to their present place: they stay.
        """
        for ino in list(self.namespaces.unaccounted):
            await self._account_anew(ino)
        await self._empty(top, prefix=False)

    def _log_cleared(self, top: int) -> None:
        name, drops = self.namespaces.name(top), self.namespaces.drops_of(top)
        what = "namespace %s was dropped: kvfs removed its %s, and nothing of it is left"
        if drops.reason == "version":
            what = "namespace %s has a new version: kvfs removed %s of the earlier version"
        log.info(what, name or top, drops)

    async def _empty(self, top: int, *, prefix: bool) -> None:
        """Remove a directory and all below, deepest first.

        prefix: the directory is of a block that is gone, and that may come back. The kernel may
        still know its path, so kvfs tells the kernel each name that goes.
        """
        way = [_Place(top, 0)]
        while way and (not prefix or top in self.ledger.prefixes.going):
            place = way[-1]
            entries = self.catalog.entries_after(place.ino, place.cookie, STEP)
            if entries:
                place.cookie = entries[-1].cookie
                way += self._clear_files(entries, place, tell_kernel=prefix)
            elif place.busy:
                place.cookie, place.busy = 0, False
                await trio.sleep(BUSY_PERIOD)
            else:
                way.pop()
                if prefix and place.ino == top:
                    self._remove_prefix(top)
                else:
                    self._remove(place.ino, top=place.ino == top, parent=place.parent)
            if failpoints.active and prefix:
                failpoints.reach("walks.closed")
            elif failpoints.active:
                failpoints.reach("walks.cleared")
            await self._pause()

    def _clear_files(
        self, entries: list[Dentry], place: "_Place", *, tell_kernel: bool
    ) -> list["_Place"]:
        """Unlink the files among some entries; return the directories, which are to be cleared.

        tell_kernel: tell the kernel of each name that goes.
        """
        deeper = []
        with self.catalog.batch() as batch:
            for entry, inode in self._inodes(entries):
                if inode is None:
                    batch.unlink(place.ino, entry)
                elif inode.is_dir:
                    deeper.append(_Place(inode.ino, place.ino))
                elif inode.ino in self.ledger.table.busy:
                    place.busy = True
                else:
                    self._unlink(place.ino, entry, inode, batch)
                    if tell_kernel:
                        batch.then(
                            partial(self.ledger.invalidate_name, place.ino, entry.name, entry.ino)
                        )
        return deeper

    def _unlink(self, parent: int, entry: Dentry, inode: Inode, batch: Batch) -> None:
        batch.unlink(parent, entry)
        batch.change(inode)
        inode.links = tuple(link for link in inode.links if link != (parent, entry.cookie))
        if inode.links:
            self._account_to_other(inode, batch)
            return
        if inode.is_file:  # it goes with the block before it, or with its namespace
            batch.dropped.add(inode.ino)
            batch.then(partial(self.ledger.removals.count, inode, "incomplete"))
        if inode.ino in self.ledger.table.open:
            # It stays accounted to the dropped namespace until closed.
            self.ledger.orphans.unlinked_open(inode, batch)
        else:
            self.ledger.removals.forget(inode, batch)

    def _account_to_other(self, inode: Inode, batch: Batch) -> None:
        """Account an inode to its other name, from before the directory was a namespace."""
        batch.put(inode)
        if (found := self.catalog.first_name(inode)) is not None:
            self._place(inode, found[0], found[1].name, batch)

    def _remove(self, ino: int, *, top: bool, parent: int) -> None:
        """Remove an empty directory."""
        inode, above = self.catalog.inode(ino), self.catalog.inode(parent)
        with self.catalog.batch() as batch:
            if inode is not None:
                for link in inode.links:
                    entry = self.catalog.dentry(*link)
                    if entry is not None and link[0] == parent and above is not None:
                        batch.unlink(parent, entry)
                        above.subdirs -= 1
                        batch.put(above)
                self.ledger.removals.forget(inode, batch)
            if top:
                batch.then(partial(self._log_cleared, ino))
                self.namespaces.end_drop(ino, batch)

    def _inodes(self, entries: list[Dentry]) -> Iterator[tuple[Dentry, Inode | None]]:
        """Yield entries with their inodes; names of one file share one inode.

        The inode is None if there is none, or if its record makes no sense: a walk goes on then.
        Raises CatalogError if a record cannot be read.
        """
        found: dict[int, Inode | None] = {}
        for entry in entries:
            if entry.ino not in found:
                try:
                    found[entry.ino] = self.ledger.table.inode(entry.ino)
                except CatalogError:
                    if entry.ino not in self.catalog.unreadable:
                        raise
                    found[entry.ino] = None
            yield entry, found[entry.ino]

    async def _pause(self) -> None:
        await trio.lowlevel.checkpoint()
        while len(self.ledger.trash.files) > TRASH_MAX:  # noqa: ASYNC110 (it shrinks in steps)
            await trio.sleep(0.01)

    # Prefixes that are not cached any more

    async def close_prefixes(self) -> None:
        """Clear the directories of blocks that are gone, with all that follows them, for ever."""
        await self.ledger.accounts.census_done.wait()
        while True:
            changed = self.namespaces.changed
            going = self.ledger.prefixes.going
            while going:
                # Each block in it takes its own directory along.
                await self._empty(min(going), prefix=True)
            await changed.wait()

    def _remove_prefix(self, top: int) -> None:
        directory = self.catalog.inode(top)
        with self.catalog.batch() as batch:
            if directory is None:
                self.ledger.prefixes.end(top, batch)
            else:
                self.ledger.prefixes.remove(directory, batch)

    # Accounted anew

    async def _account_anew(self, top: int) -> None:
        """Account all inodes below a directory to its namespace, within the quotas."""
        way = [(top, 0)]
        asked = self.namespaces.unaccounted[top]
        while way:
            ino, cookie = way.pop()
            directory = self.catalog.inode(ino)
            if directory is None:
                continue
            entries = self.catalog.entries_after(ino, cookie, STEP)
            if entries:
                way.append((ino, entries[-1].cookie))
            with self.catalog.batch() as batch:
                for entry, inode in self._inodes(entries):
                    if inode is None or self.namespaces.own(inode.ino):
                        continue
                    if inode.is_dir:
                        way.append((inode.ino, 0))
                    self._place(inode, directory, entry.name, batch)
            if failpoints.active:
                failpoints.reach("walks.accounted")
            if space := self.namespaces.own(directory.namespace):
                await self.quota.bring_within(space)
            await self._pause()
        if self.namespaces.unaccounted[top] == asked:  # else it moved again meanwhile
            with self.catalog.batch() as batch:
                self.namespaces.end_account_anew(top, batch)

    def _place(self, inode: Inode, directory: Inode, name: bytes, batch: Batch) -> None:
        before = batch.change(inode)
        self.namespaces.places.place(inode, directory, name, batch)
        self.ledger.dirty.on_new_path(inode, batch)
        if inode == before:
            return
        batch.put(inode)
        self.tree.account_anew(before, inode, directory, name, batch, old=True)

    # Expired

    async def expire(self) -> None:
        """Drop expired objects, for ever. Programs do not find these before their drop either."""
        await self.ledger.accounts.census_done.wait()
        while True:
            lives = [space.settings.ttl for space in self.namespaces if space.settings.ttl]
            if lives:
                await self._expire()
            with trio.move_on_after(max(SHORTEST, min(LONGEST, min(lives, default=0) / 10))):
                await self.namespaces.changed.wait()

    async def _expire(self) -> None:
        at, end = 0, self.catalog.counter
        while inodes := self.catalog.inodes_after(at, 4 * STEP):
            for inode in inodes:
                if inode.is_file and inode.links:
                    try:
                        self.ledger.removals.expire(inode)
                    except CatalogError as error:
                        named = self.ledger.catalog.named(inode.ino)
                        log.debug("%s expires later: %s", named, error)
            at = inodes[-1].ino
            if at >= end:
                break
            await trio.lowlevel.checkpoint()
