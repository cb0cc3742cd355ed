"""The names of this node's objects in the listings of the index.

Contract: `way` tells which names a new object adds to the listings. `unlist` removes names that no
object has. Nodes also remove directories without names, so a directory is believed to be listed for
LISTED_S only, and not after a removal here. Not for reading listings (`pool/listing`).
"""

import math
from collections.abc import Iterable

import trio

from kvfs.core.pool.entries import PoolEntries
from kvfs.pool.index import Index

LISTED_S = 60.0  # s for which directories are believed to be in the listings


class ListedNames:
    """The names of one node in the listings."""

    def __init__(self, index: Index, entries: PoolEntries) -> None:
        self.index = index
        self.entries = entries
        self._folders: set[str] = set()  # those whose way from the top is listed
        self._since = -math.inf  # trio's time of the first of them

    def way(self, key: str) -> list[tuple[str, str]]:
        """The listings of a key: its own name, and the directories above it that are new."""
        found = self.entries.folder_of(key)
        if found is None:
            return []
        if trio.current_time() - self._since > LISTED_S:
            self._folders.clear()
            self._since = trio.current_time()
        names, (folder, _) = [found], found
        while folder not in self._folders:
            self._folders.add(folder)
            above = self.entries.above(folder)
            if above is None:
                break
            names.append(above)
            folder = above[0]
        return names

    async def unlist(self, keys: Iterable[str], gone: Iterable[bool]) -> None:
        """Remove the names of those keys that no object has. Raises IndexDownError."""
        found = (self.entries.folder_of(key) for key, last in zip(keys, gone, strict=True) if last)
        names = [one for one in found if one is not None]
        if names:
            self._folders.clear()
        await self.index.unlist_names(names)

    def lost(self) -> None:
        """Note that the index has lost its data."""
        self._folders.clear()
