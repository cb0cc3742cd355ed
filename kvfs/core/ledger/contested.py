"""Objects in conflict: another node has their names in the bucket, so they stay on this node.

Contract: an object is in conflict, or dirty, or neither, never both. The batch that makes it so
sets its mark (`k`). Each change that makes it dirty, clean or another object removes the mark. So
a restart knows these objects. Methods are synchronous; memory follows the commit. Before `load`
has ended, and where no bucket is mounted, `in` asks the catalog.
Not for asking the bucket whether a name is free: `core/bucket/listing/contests.py`.
"""

import time
from collections.abc import Iterator
from functools import partial

import trio

from kvfs.catalog import Batch, Catalog, keys

STEP = 128  # marks between two turns of the loop


class Contested:
    """Inodes, in the order in which the bucket is asked about them.

    entered: how many objects ever came. changed: an event, set when the next one comes, and then
    replaced by a new event.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.entered = 0
        self.changed = trio.Event()
        self._inos: dict[int, None] = {}
        self._loaded = False

    def __len__(self) -> int:
        return len(self._inos)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._inos))

    def __contains__(self, ino: int) -> bool:
        if ino in self._inos:
            return True
        return not self._loaded and self.catalog.mark(keys.CONTESTED, ino) is not None

    def enter(self, ino: int, batch: Batch) -> None:
        """Mark an object: another node has its name."""
        batch.mark(keys.CONTESTED, ino, keys.U64.pack(time.time_ns()))
        batch.then(partial(self._add, ino))

    def leave(self, ino: int, batch: Batch) -> None:
        """Remove the mark of an object that is dirty, clean or removed."""
        if ino in self:
            batch.unmark(keys.CONTESTED, ino)
            batch.then(partial(self._inos.pop, ino, None))

    def turn(self, most: int) -> list[int]:
        """The next inodes to ask the bucket about; they come again after all others."""
        found = [ino for ino, _ in zip(self._inos, range(most), strict=False)]
        for ino in found:
            del self._inos[ino]
            self._inos[ino] = None
        return found

    async def load(self) -> None:
        """Read the marks of earlier mounts. Raises CatalogError."""
        for count, (ino, _) in enumerate(self.catalog.marks(keys.CONTESTED)):
            if self.catalog.mark(keys.CONTESTED, ino) is not None:
                self._inos.setdefault(ino)
            if count % STEP == STEP - 1:
                await trio.lowlevel.checkpoint()
        self._loaded = True

    def wake(self) -> None:
        """Wake the tasks that wait for a change."""
        done, self.changed = self.changed, trio.Event()
        done.set()

    def _add(self, ino: int) -> None:
        self._inos[ino] = None
        self.entered += 1
        self.wake()
