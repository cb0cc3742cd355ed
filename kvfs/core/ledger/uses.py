"""Times of access. Records of open objects have them at once, the catalog after the answer.

Contract: callers call `note` while an object is open, and `commit` before its last handle closes.
So the record in memory is right for each request, and no request waits for the commit. A crash
between the two loses a time of access. Not for the order of eviction, which `Order` has.
"""

import logging
from collections.abc import Iterable, Sequence

import trio

from kvfs.catalog import Catalog, Inode
from kvfs.core.ledger.open_table import OpenTable
from kvfs.errors import CatalogError

log = logging.getLogger(__name__)


class Uses:
    """The noted times of access. The event `appeared` is set while some wait for `commit`."""

    def __init__(self, catalog: Catalog, table: OpenTable) -> None:
        self.catalog = catalog
        self.table = table
        self.appeared = trio.Event()
        self._noted: list[Inode] = []

    def note(self, inodes: Iterable[Inode], now: int) -> None:
        """Note that open objects are read now. now: ns since 1970.

        A restart rebuilds the order of eviction from atime. Other programs that evict use it, too.
        """
        for inode in inodes:
            inode.atime_ns = now
            self._noted.append(inode)
        self.appeared.set()

    def commit(self) -> None:
        """Commit the noted times in one batch. A commit for each open would double its cost."""
        if not self._noted:
            return
        noted, self._noted, self.appeared = self._noted, [], trio.Event()
        held = [self.table.peek(one.ino) for one in noted]
        found = [
            one.inode for one, inode in zip(held, noted, strict=True) if one and one.inode is inode
        ]
        self._put(found)

    def note_closed(self, inodes: Sequence[Inode], now: int) -> None:
        """Note that other nodes have read these objects, and commit it. now: ns since 1970."""
        for inode in inodes:
            inode.atime_ns = now
        self._put(inodes, accessed=True)

    def _put(self, inodes: Sequence[Inode], *, accessed: bool = False) -> None:
        """Commit the times of access of these records. accessed: see `Batch.put`."""
        if not inodes:
            return
        try:
            with self.catalog.batch() as batch:
                for inode in inodes:
                    batch.put(inode, accessed=accessed)
        except CatalogError as error:  # a lost time of access is no reason to fail a request
            named = self.catalog.named(inodes[0].ino)
            log.debug("times of access of %s and others stay: %s", named, error)
