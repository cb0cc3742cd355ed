"""Misses: lookups of blocks that are not there, by namespace.

Contract: a lookup of an absent name is a miss of its directory's namespace. These lookups are none:

- The kernel looks a name up before each CREATE, RENAME and so on to that name. Such an operation
  calls `named` at its beginning, which takes one lookup back.
- Names that a connector renames later, and names with a dot at the beginning that no connector
  makes.

So a lookup waits: until its name is made, until an object of its key is complete (`written`), or
for LATE. Then it is a miss: of the counters, of the policies' ghosts, and of the access log. Files
of one block have one key, and their lookups wait together. A mkdir takes all lookups of its name
back: os.makedirs looks twice. The gate of `AbsentNames` hands its lookups over in bulk, so they are
taken before each of these decisions. `counted` is for misses that were no lookup.

Synchronous. Not for answering lookups.
"""

import time
from collections import Counter
from dataclasses import dataclass

from kvfs import layouts
from kvfs.catalog import Catalog, Inode
from kvfs.core.ledger.absent_names import AbsentNames
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.core.namespaces.order import key_of

LATE = 100_000_000  # ns from the kernel's lookup to its CREATE, at most: usually some 50 us
MANY = 4096  # keys that wait


@dataclass(slots=True)
class _Lookups:
    """Lookups of one key that wait. `directory` and `name` are those of the last one."""

    space: Namespace
    directory: Inode
    name: bytes
    count: int
    last: int  # monotonic ns


class Misses:
    """The lookups that wait, by namespace and key."""

    def __init__(
        self,
        catalog: Catalog,
        namespaces: Namespaces,
        absent_names: AbsentNames,
        counters: Counter[str],
    ) -> None:
        self.catalog = catalog
        self.namespaces = namespaces
        self.absent_names = absent_names
        self.counters = counters
        self._waiting: dict[tuple[int, int], _Lookups] = {}

    def looked_up(self, directory: int, name: bytes) -> None:
        """Note that the daemon has answered a lookup of an absent name."""
        self._take_lookups()
        self._note(directory, name, time.monotonic_ns())

    def named(self, directory: int, name: bytes, *, as_directory: bool = False) -> None:
        """Take the kernel's own lookup of a name back, which an operation is about to make."""
        self._take_lookups()
        if not self._waiting:
            return
        inode = self.catalog.inode(directory)
        key = 0 if inode is None else self._key(inode, name)
        if inode is None or not key:
            return
        lookups = self._waiting.pop((self.namespaces.of(inode).ino, key), None)
        if lookups is not None and not as_directory:
            self._count(key, lookups, lookups.count - 1)

    def written(self, inode: Inode) -> None:
        """Count the lookups of an object's key. Call it before policies see the object."""
        self._take_lookups()
        key = key_of(inode)
        lookups = self._waiting.pop((self.namespaces.of(inode).ino, key), None)
        if lookups is not None:
            self._count(key, lookups, lookups.count)

    def counted(self, space: Namespace, key: int) -> None:
        """Count a miss of a namespace that was no lookup of a name."""
        self.namespaces.show_opens()
        self._see(space, key, 1)

    def settle(self) -> None:
        """Count the lookups that are older than LATE, or more than one of a name."""
        self._take_lookups()
        late = time.monotonic_ns() - LATE
        for at, lookups in list(self._waiting.items()):
            if lookups.last < late:
                del self._waiting[at]
                self._count(at[1], lookups, lookups.count)
            elif lookups.count > 1:
                self._count(at[1], lookups, lookups.count - 1)
                lookups.count = 1

    def settle_all(self) -> None:
        """Count all lookups that wait, because the access log begins or ends now."""
        self._take_lookups()
        while self._waiting:
            self._count_oldest()

    def _take_lookups(self) -> None:
        for directory, name, at in self.absent_names.take_lookups():
            self._note(directory, name, at)

    def _note(self, parent: int, name: bytes, at: int) -> None:
        directory = self.catalog.inode(parent)
        key = 0 if directory is None else self._key(directory, name)
        if directory is None or not key:
            return
        space = self.namespaces.of(directory)
        lookups = self._waiting.get((space.ino, key))
        if lookups is not None:
            lookups.count += 1
            lookups.directory, lookups.name, lookups.last = directory, name, at
            return
        if len(self._waiting) >= MANY:
            self._count_oldest()
        self._waiting[space.ino, key] = _Lookups(space, directory, name, 1, at)

    def _count_oldest(self) -> None:
        at = next(iter(self._waiting))
        lookups = self._waiting.pop(at)
        self._count(at[1], lookups, lookups.count)

    def _key(self, directory: Inode, name: bytes) -> int:
        """The key of the block that a name stands for; 0: its lookups are no misses."""
        block = self.namespaces.places.block_of(directory, name)
        if block is None:
            return 0 if name.startswith(b".") else layouts.key_of(directory.ino, name)
        return 0 if block.temporary else block.key

    def _count(self, key: int, lookups: _Lookups, times: int) -> None:
        if not times:
            return
        self.namespaces.show_opens()
        self._see(lookups.space, key, times)
        log = self.namespaces.access_log
        if log.on:
            for _ in range(times):
                log.absent(lookups.directory, lookups.name)

    def _see(self, space: Namespace, key: int, times: int) -> None:
        self.counters["misses"] += times
        space.counters["misses"] += times
        for _ in range(times):
            space.accesses.looked_up(key)
