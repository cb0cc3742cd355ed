"""Names of incomplete files: a file gets its name when its writer closes it (`publish=close`).

Contract: until then the name is a mark in the catalog. If another file has the name by then, that
file was complete before, and keeps the name. Synchronous.
"""

import os
from functools import partial
from struct import Struct

from kvfs import failpoints
from kvfs.catalog import Batch, Dentry, Inode, keys
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.ledger.removals import NOWHERE
from kvfs.errors import KvfsError, NoSpaceError, QuotaError

_PARENT = Struct(">Q")


class Publishing:
    """Publishes files at their close. It also gives the names of open objects for log lines."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.catalog = ledger.catalog

    def is_to_get(self, ino: int, parent: int, name: bytes, batch: Batch) -> None:
        """Note the name that a new file gets at its close."""
        batch.mark(keys.UNPUBLISHED, ino, _PARENT.pack(parent) + name)

    @staticmethod
    def name(inode: Inode, directory: Inode, name: bytes, batch: Batch) -> None:
        """Give an inode its first name."""
        inode.links = ((directory.ino, inode.ino),)
        directory.mtime_ns = directory.ctime_ns = inode.ctime_ns
        batch.link(directory.ino, Dentry(name, inode.ino, inode.ino))
        batch.put(directory)

    def to_publish(self, ino: int) -> tuple[int, bytes] | None:
        """Return the name that a nameless inode is to get; None if it has lost its last name."""
        value = self.catalog.mark(keys.UNPUBLISHED, ino)
        if value is None or len(value) <= _PARENT.size or value.startswith(NOWHERE):
            return None
        return _PARENT.unpack_from(value)[0], value[_PARENT.size :]

    def doom_of(self, ino: int) -> KvfsError | None:
        """Return why the previous daemon cut off a nameless inode, or None."""
        value = self.catalog.mark(keys.UNPUBLISHED, ino) or b""
        if not value.startswith(NOWHERE):
            return None
        kind = QuotaError if value[len(NOWHERE) :] == b"QuotaError" else NoSpaceError
        return kind(f"inode {ino} was cut off before the daemon was another one")

    def publish(self, held: OpenObject) -> None:
        """Give a complete file its name. Another file that has it was complete before."""
        assert held.publish is not None
        parent, name = held.publish
        inode, directory = held.inode, self.ledger.table.inode(parent)
        with self.catalog.batch() as batch:
            batch.unmark(keys.UNPUBLISHED, inode.ino)
            if (
                directory is not None
                and directory.links
                and not self.ledger.removals.expire(directory)
                and self.catalog.lookup(parent, name) is None
            ):
                self.name(inode, directory, name, batch)
                self.ledger.namespaces.places.place(
                    inode, directory, name, batch
                )  # it may have moved
                batch.put(inode)
            else:
                batch.then(partial(self.ledger.counters.update, outrun=1))
        if failpoints.active:
            failpoints.reach("objects.published")
        held.publish = None

    def some_name(self, inode: Inode) -> tuple[int, bytes]:
        for parent, cookie in inode.links:
            entry = self.catalog.dentry(parent, cookie)
            if entry is not None:
                return parent, entry.name
        return 0, b""

    def called(self, held: OpenObject) -> str:
        parent, name = held.publish or self.some_name(held.inode)
        return f"inode {held.inode.ino}, {os.fsdecode(name)!r} in directory {parent},"
