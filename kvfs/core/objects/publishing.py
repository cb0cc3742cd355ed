"""Give a file its name when its writer closes it, for namespaces with `publish=close`.

Contract: until the close, a mark in the catalog has the name. If another file has the name at the
close, that file was complete earlier, and keeps the name. Synchronous.
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
    """Gives files their names at the close."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.catalog = ledger.catalog

    def note_name(self, ino: int, parent: int, name: bytes, batch: Batch) -> None:
        """Mark a new inode with the name that it gets at its close."""
        batch.mark(keys.UNPUBLISHED, ino, _PARENT.pack(parent) + name)

    @staticmethod
    def give_name(inode: Inode, directory: Inode, name: bytes, batch: Batch) -> None:
        """Give an inode its first name. The caller puts the inode's record."""
        inode.links = ((directory.ino, inode.ino),)
        directory.mtime_ns = directory.ctime_ns = inode.ctime_ns
        batch.link(directory.ino, Dentry(name, inode.ino, inode.ino))
        batch.put(directory)

    def doom_of(self, ino: int) -> KvfsError | None:
        """Return the error of a writer whose file an earlier daemon cut off, or None.

        The inode has no name. Its mark says whether room or quota was the reason.
        """
        value = self.catalog.mark(keys.UNPUBLISHED, ino) or b""
        if not value.startswith(NOWHERE):
            return None
        kind = QuotaError if value[len(NOWHERE) :] == b"QuotaError" else NoSpaceError
        return kind(f"{self.catalog.named(ino)} was cut off before the daemon was another one")

    def publish(self, held: OpenObject) -> None:
        """Give a complete file its name, unless another file has the name or the directory is gone.

        Otherwise the file stays without a name.
        """
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
                self.give_name(inode, directory, name, batch)
                # The directory may have moved to another namespace since the create.
                self.ledger.namespaces.places.place(inode, directory, name, batch)
                batch.put(inode)
            else:
                batch.then(partial(self.ledger.counters.update, outrun=1))
        if failpoints.active:
            failpoints.reach("objects.published")
        held.publish = None
