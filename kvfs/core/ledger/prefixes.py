"""The directories of prefixes: each exists as long as the block that it is named for.

In a namespace with prefix=on a block's file has the name NAMESPACE/PARENT/KEY[.SHARD]. Each batch
that gives such a name also makes the directory NAMESPACE/KEY. The batch that removes the last file
of the block also removes the directory. So a program that continues a prefix makes no directory,
and it cannot make a child without its parent.

Contract: the catalog calls `complete_batch`, which adds to a batch the changes of directories that
its names need. An empty directory goes in that batch. A directory with entries gets a mark there
(`going`). `Walks` clears marked directories, also after a daemon's death. The mark goes if the
block comes back before that. A block's directory has the keys of the block in its record
(`Inode.key`, `parent_key`). A directory of mkdir or of a bucket's listing has no keys. It stays
until rmdir, unless its block comes: a root has no block. Synchronous. Not for clearing (`Walks`),
nor for the cached files of a block (`Blocks`).
"""

import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from kvfs.catalog import Batch, Catalog, Dentry, Inode
from kvfs.catalog.keys import GOING
from kvfs.core.ledger.open_table import OpenTable
from kvfs.core.ledger.orphans import Orphans
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.layouts import prefix

_BLOCK = re.compile(rb"([0-9a-f]{32})(?:\.[0-9A-Za-z_-]{1,32})?")
_KEY = re.compile(rb"[0-9a-f]{32}")


def numbers(key: bytes, parent: bytes) -> tuple[int, int]:
    """The two keys as numbers of a directory's record. Each key is 32 hexadecimal digits."""
    own, above = (prefix.number(bytes.fromhex(one.decode("ascii"))) for one in (key, parent))
    return own, above


class Prefixes:
    """The directories of blocks in all namespaces."""

    def __init__(
        self,
        catalog: Catalog,
        namespaces: Namespaces,
        table: OpenTable,
        orphans: Orphans,
        invalidate_name: Callable[[int, bytes, int], None],
    ) -> None:
        self.catalog = catalog
        self.namespaces = namespaces
        self.table = table
        self.orphans = orphans
        self.invalidate_name = invalidate_name
        self.going: set[int] = {ino for ino, _ in self.catalog.marks(GOING)}
        self.catalog.complete_batch = self.complete_batch
        self._entered: Counter[int] = Counter()  # directories

    def complete_batch(self, batch: Batch) -> None:
        """Make the directories of blocks that this batch adds; remove those of blocks that go."""
        if not self.namespaces.prefixes:
            return
        done = set()
        for parent, name, _ in batch.named:  # the names that `_make` adds are no blocks
            if len(name) < 32 or (found := _BLOCK.fullmatch(name)) is None:  # noqa: PLR2004
                continue
            block = parent, found[1]
            if block not in done:
                done.add(block)
                self._update_directory(*block, batch)

    def parent_of(self, directory: Inode | None) -> bytes | None:
        """The key that a directory is named for, if the names in it are those of blocks."""
        if directory is None or not directory.is_dir or not directory.links:
            return None
        space = self.namespaces.own(directory.namespace)
        if space is None or not space.settings.prefix or directory.links[0][0] != space.ino:
            return None
        entry = self.catalog.dentry(*directory.links[0])
        return entry.name if entry is not None and _KEY.fullmatch(entry.name) else None

    def _update_directory(self, parent: int, key: bytes, batch: Batch) -> None:
        above = batch.inode(parent)
        named_for = self.parent_of(above)
        if above is None or named_for is None or named_for == key:
            return
        top = above.links[0][0]
        entry = batch.lookup(top, key)
        directory = None if entry is None else batch.inode(entry.ino)
        there = any(map(_BLOCK.fullmatch, batch.names(parent, key)))
        if there and entry is None:
            self._make(top, above, key, numbers(key, named_for), batch)
        elif entry is None or directory is None or not directory.is_dir:
            return
        elif there and not directory.key:
            directory.key, directory.parent_key = numbers(key, named_for)
            batch.put(directory)
        elif there:
            self.end(directory.ino, batch)
        elif (directory.key, directory.parent_key) == numbers(key, named_for):
            self._leave(top, entry, directory, batch)

    def _make(
        self, top: int, above: Inode, name: bytes, keys: tuple[int, int], batch: Batch
    ) -> None:
        """Make a block's directory, with the owner and mode of its parent's directory.

        So a user who may continue the parent may continue the block.
        """
        now = time.time_ns()
        ino = self.catalog.next_id()
        made = Inode(
            ino=ino,
            mode=stat.S_IFDIR | stat.S_IMODE(above.mode),
            uid=above.uid,
            gid=above.gid,
            atime_ns=now,
            mtime_ns=now,
            ctime_ns=now,
            links=((top, ino),),
            namespace=above.namespace,
            key=keys[0],
            parent_key=keys[1],
        )
        batch.put(made)
        batch.link(top, Dentry(name, ino, ino))
        self._count(top, 1, now, batch)

    def _count(self, top: int, more: int, now: int, batch: Batch) -> None:
        directory = batch.inode(top)
        if directory is not None:
            directory.subdirs += more
            directory.mtime_ns = directory.ctime_ns = now
            batch.put(directory)

    def _leave(self, top: int, entry: Dentry, directory: Inode, batch: Batch) -> None:
        if next(batch.names(directory.ino), None) is None:
            self._remove(top, entry, directory, batch)
        elif directory.ino not in self.going:
            batch.mark(GOING, directory.ino)
            batch.then(partial(self.going.add, directory.ino))
            batch.then(self.namespaces.wake)

    def _remove(self, top: int, entry: Dentry, directory: Inode, batch: Batch) -> None:
        batch.unlink(top, entry)
        self._count(top, -1, time.time_ns(), batch)
        self.end(directory.ino, batch)
        directory.links = ()
        self.orphans.keep(directory, batch)  # a process that has it open may ask for its attributes
        batch.then(partial(self.invalidate_name, top, entry.name, directory.ino))

    def entering(self, directory: int) -> AbstractContextManager[None]:
        """Protect a directory's block from eviction while a file is made in the directory."""
        return self._entering(directory) if self.namespaces.prefixes else nullcontext()

    @contextmanager
    def _entering(self, directory: int) -> Iterator[None]:
        self._entered[directory] += 1
        try:
            yield
        finally:
            self._entered[directory] -= 1
            if not self._entered[directory]:
                del self._entered[directory]

    def _is_awaited(self, directory: int) -> bool:
        """Whether a file that has no name yet is to be in a directory."""
        return directory in self._entered or any(
            held.publish is not None and held.publish[0] == directory
            for held in self.table.staging.values()
        )

    def has_entries(self, inode: Inode) -> bool:
        """Whether the directory of a file's block has an entry, or is about to get one."""
        name = self.catalog.first_name(inode)
        if name is None or self.parent_of(name[0]) is None:
            return False
        found = self.catalog.lookup(name[0].links[0][0], name[1].name[:32])
        if found is None:
            return False
        return self._is_awaited(found.ino) or any(self.catalog.entries_after(found.ino, 0, 1))

    # For checks

    def is_of_block(self, directory: Inode) -> bool:
        """Whether a directory has the place, the name and the key of a block's directory."""
        if not directory.key or not directory.links:
            return False
        space = self.namespaces.own(directory.namespace)
        if space is None or not space.settings.prefix or directory.links[0][0] != space.ino:
            return False
        entry = self.catalog.dentry(*directory.links[0])
        return entry is not None and _KEY.fullmatch(entry.name) is not None

    def is_there(self, directory: Inode) -> bool:
        """Whether the block of a directory has a file, in the directory of any possible parent.

        The record has only a number of the parent block, so kvfs looks into all directories of
        that number.
        """
        top, cookie = directory.links[0]
        entry = self.catalog.dentry(top, cookie)
        if entry is None:
            return False
        return any(
            any(map(_BLOCK.fullmatch, self.catalog.names(above, entry.name)))
            for above in self._named_by(top, directory.parent_key)
        )

    def _named_by(self, top: int, number: int) -> Iterator[int]:
        """Directories with a key of this number. The number lacks the first bit of the key."""
        for first in (number, number | 1 << 63):
            for name in self.catalog.names(top, b"%016x" % first):
                entry = self.catalog.lookup(top, name)
                if entry is not None:
                    yield entry.ino

    def mark(self, directory: Inode) -> None:
        """Mark a directory that is to go."""
        with self.catalog.batch() as batch:
            batch.mark(GOING, directory.ino)
            batch.then(partial(self.going.add, directory.ino))
            batch.then(self.namespaces.wake)

    def end(self, ino: int, batch: Batch) -> None:
        """Remove the mark of a directory that is gone, or need not go any more."""
        if ino in self.going:
            batch.unmark(GOING, ino)
            batch.then(partial(self.going.discard, ino))

    def remove(self, directory: Inode, batch: Batch) -> None:
        """Remove a directory that was to go and is empty by now."""
        top, cookie = directory.links[0] if directory.links else (0, 0)
        entry = self.catalog.dentry(top, cookie)
        if entry is None:
            self.end(directory.ino, batch)
        else:
            self._remove(top, entry, directory, batch)
