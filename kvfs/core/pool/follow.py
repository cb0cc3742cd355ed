"""Looks up names ahead: the files that follow in a prompt that a program has matched.

Contract: `matched` learns of the files of a prompt that other nodes have. `opened` is called for
each open for reading, and never waits: if the file is one of these, a task looks up the next AHEAD
ones. They become remote objects, which `core/fetching/prefetch` then fetches ahead. The kernel does
not know such names, so it never forgets them: the oldest go when there are more than KEPT.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kvfs.catalog import Inode
from kvfs.core.pool.lookup import PoolLookup
from kvfs.core.shared_work import start_task

AHEAD = 16  # files: as many as prefetch brings at most
REMEMBERED = 1 << 14  # files of matched prompts
KEPT = 1024  # names that were looked up ahead, 0.5 KiB each


class _File(NamedTuple):
    """A file below the directory `top`: its path and its key."""

    top: int
    path: bytes
    key: str


class Follow:
    """Follows the matched prompts of one mount."""

    def __init__(self, lookup: PoolLookup) -> None:
        self.lookup = lookup
        self.entries = lookup.entries
        self.ledger = lookup.entries.ledger
        self._next: OrderedDict[str, _File] = OrderedDict()  # by the key of the file before
        self._asked: OrderedDict[str, None] = OrderedDict()  # keys that were looked up
        self._kept: OrderedDict[int, None] = OrderedDict()

    def matched(self, top: int, paths: Sequence[bytes], keys: Sequence[str]) -> None:
        """Learn of the files of a prompt, in their order."""
        for before, path, key in zip(keys, paths[1:], keys[1:], strict=False):
            self._asked.pop(key, None)
            self._next[before] = _File(top, path, key)
            self._next.move_to_end(before)
        while len(self._next) > REMEMBERED:
            self._next.popitem(last=False)

    def opened(self, inode: Inode) -> None:
        """Look up the files that follow this one, in the background."""
        if not self._next or (key := self.entries.key(inode)) is None:
            return
        wanted = []
        for _ in range(AHEAD):
            file = self._next.get(key)
            if file is None:
                break
            key = file.key
            if key not in self._asked:
                self._asked[key] = None
                wanted.append(file)
        while len(self._asked) > REMEMBERED:
            self._asked.popitem(last=False)
        if wanted:
            start_task("names of a matched prompt", partial(self._look_up, wanted))

    async def _look_up(self, files: Sequence[_File]) -> None:
        for file in files:
            folder, _, name = file.path.rpartition(b"/")
            directory = await self._found(file.top, folder) if folder else file.top
            ino = 0 if not directory else await self._found(directory, name)
            inode = self.ledger.table.inode(ino) if ino else None
            if inode is None:
                return  # the next ones are of no use
            if inode.in_pool:
                self.keep(ino)

    async def _found(self, parent: int, name: bytes) -> int:
        """The inode number of a name, which is looked up if it is not known; 0 for none."""
        if self.ledger.catalog.lookup(parent, name) is None:
            await self.lookup.find(parent, name)
        found = self.ledger.catalog.lookup(parent, name)
        return 0 if found is None else found.ino

    def keep(self, ino: int) -> None:
        """Keep a name that the kernel does not know, until KEPT others have come."""
        self._kept[ino] = None
        self._kept.move_to_end(ino)
        if len(self._kept) > KEPT:
            oldest, _ = self._kept.popitem(last=False)
            if oldest not in self.ledger.table.busy:
                self.entries.forget(oldest)
