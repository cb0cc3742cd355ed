"""Names of incomplete files: a file gets its name when its writer closes it (`publish=close`).

Contract: until then the name is a mark in the catalog. If another file has the name by then, that
file was complete before, and keeps the name. Synchronous.
"""

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
    """Publishes files at their close."""

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

    def doom_of(self, ino: int) -> KvfsError | None:
        """Return why the previous daemon cut off a nameless inode, or None."""
        value = self.catalog.mark(keys.UNPUBLISHED, ino) or b""
        if not value.startswith(NOWHERE):
            return None
        kind = QuotaError if value[len(NOWHERE) :] == b"QuotaError" else NoSpaceError
        return kind(f"{self.catalog.named(ino)} was cut off before the daemon was another one")

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
