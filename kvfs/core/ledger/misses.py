"""Misses: lookups of blocks that are not there, by namespace.

Contract: a lookup of an absent name is a miss of its directory's namespace. These lookups are none:

- The kernel looks a name up before each CREATE, RENAME and so on to that name. Such an operation
  calls `named` at its beginning, which takes one lookup back.
- After ESTALE the kernel looks a name up twice, if it still has it: whether it is right, and once
  more. If the thread's first two lookups in vain are of one name, the second is none. If an
  operation makes the name next, the second was the one for it. Nothing tells whether the kernel
  still had the name: then a thread that opens it again within LATE loses that one miss.
- Lookups of a process that `disregard` names: the commands of kvfs only look.
- Names that a connector renames later, and names with a dot at the beginning that no connector
  makes.

So a lookup waits: until its name is made, until an object of its key is complete (`written`), or
for LATE. Then it is a miss: of the counters, of the policies' ghosts, and of the access log. A
mkdir takes all lookups of its name back: os.makedirs looks twice. The gate of `AbsentNames` hands
its lookups over in bulk, so they are taken before each of these decisions. `counted` is for misses
that were no lookup.

To note a lookup takes 1 us, to count a miss 13 us, so `settle` counts AT_ONCE at most. Synchronous.
Not for answering lookups.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass
from itertools import islice

from kvfs import layouts
from kvfs.catalog import Catalog, Inode
from kvfs.core.ledger.absent_names import AbsentLookup, AbsentNames
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.core.namespaces.order import key_of
from kvfs.errors import CatalogError

log = logging.getLogger(__name__)

LATE = 100_000_000  # ns from the kernel's lookup to its CREATE, at most: usually some 50 us
AT_ONCE = 256  # misses in one step of the loop: some 3 ms
LATELY = 16  # names, looked up last, among which `written` looks for its object's
MANY = 1 << 15  # names that wait, some 10 MB


@dataclass(slots=True)
class _Lookups:
    """Lookups of one name that wait."""

    count: int
    last: int  # monotonic ns
    key: int | None = None  # of the block, once it was asked for
    again: bool = False  # the kernel has looked once more since: `_is_again`


class Misses:
    """The lookups that wait, by directory and name, in the order of their last one."""

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
        self._waiting: dict[tuple[int, bytes], _Lookups] = {}
        # By thread: the lookup in vain that came first after its ESTALE; directory 0: none came.
        self._refused: dict[int, AbsentLookup] = {}
        self._disregarded: dict[int, int] = {}  # by process: monotonic ns until which it only looks

    def looked_up(self, directory: int, name: bytes, thread: int = 0) -> None:
        """Note that the daemon has answered a lookup of an absent name."""
        self._take_lookups()
        self._note(AbsentLookup(directory, name, time.monotonic_ns(), thread))

    def disregard(self, process: int, seconds: float) -> None:
        """Count no lookup that the main thread of a process makes within this time."""
        self._take_lookups()
        self._disregarded[process] = time.monotonic_ns() + int(seconds * 1e9)

    def refused(self, thread: int) -> None:
        """Note that a request of a thread gets ESTALE: it will look the name up again."""
        self._take_lookups()
        self._refused[thread] = AbsentLookup(0, b"", time.monotonic_ns(), thread)

    def named(self, directory: int, name: bytes, *, as_directory: bool = False) -> None:
        """Take the kernel's own lookup of a name back, which an operation is about to make."""
        self._take_lookups()
        lookups = self._waiting.pop((directory, name), None)
        if lookups is None or as_directory:
            return
        if times := lookups.count - (not lookups.again):
            self._count(directory, name, times)

    def written(self, inode: Inode) -> None:
        """Count the last lookups of an object's key. Call it before policies see the object.

        The object may have a temporary name yet, and wait for the rename to the name looked up.
        """
        self._take_lookups()
        key = key_of(inode)
        for (directory, name), lookups in list(islice(reversed(self._waiting.items()), LATELY)):
            if lookups.key is None:
                above = self._directory(directory)
                lookups.key = 0 if above is None else self._key(above, name)
            if lookups.key == key:
                del self._waiting[directory, name]
                self._count(directory, name, lookups.count)

    def counted(self, space: Namespace, key: int) -> None:
        """Count a miss of a namespace that was no lookup of a name."""
        self.namespaces.show_opens()
        self._see(space, key, 1)

    def settle(self, late: int = LATE) -> bool:
        """Count lookups that are older than `late`. Return whether there may be more of them."""
        self._take_lookups()
        before = time.monotonic_ns() - late
        for process in [one for one, until in self._disregarded.items() if until <= before]:
            del self._disregarded[process]
        for thread in [one.thread for one in self._refused.values() if one.at <= before]:
            del self._refused[thread]
        for (directory, name), lookups in list(islice(self._waiting.items(), AT_ONCE)):
            if lookups.last > before:
                if lookups.count > 1:
                    self._count(directory, name, lookups.count - 1)
                    lookups.count = 1
                continue
            del self._waiting[directory, name]
            self._count(directory, name, lookups.count)
        first = next(iter(self._waiting.values()), None)
        return first is not None and first.last <= before

    def _take_lookups(self) -> None:
        for lookup in self.absent_names.take_lookups():
            self._note(lookup)

    def _is_again(self, lookup: AbsentLookup) -> bool:
        """Whether the kernel looks a name up for the second time after one ESTALE."""
        before = self._refused.pop(lookup.thread, None)
        if before is None or lookup.at - before.at > LATE:
            return False
        if before.directory:
            return before[:2] == lookup[:2] and lookup[:2] in self._waiting
        self._refused[lookup.thread] = lookup
        return False

    def _note(self, lookup: AbsentLookup) -> None:
        directory, name, at, thread = lookup
        if self._disregarded.get(thread, 0) > at:
            return
        if self._refused and self._is_again(lookup):
            self._waiting[directory, name].again = True
            return
        lookups = self._waiting.pop((directory, name), None)
        if lookups is None:
            lookups = _Lookups(1, at)
            if len(self._waiting) >= MANY:
                (above, oldest), old = next(iter(self._waiting.items()))
                del self._waiting[above, oldest]
                self._count(above, oldest, old.count)
        else:
            lookups.count += 1
            lookups.last, lookups.again = at, False
        self._waiting[directory, name] = lookups

    def _directory(self, ino: int) -> Inode | None:
        """A directory; None if it is gone or unreadable: a count must fail no operation."""
        try:
            return self.catalog.inode(ino)
        except CatalogError as error:
            log.debug("misses in inode %d are not counted: %s", ino, error)
            return None

    def _key(self, directory: Inode, name: bytes) -> int:
        """The key of the block that a name stands for; 0: its lookups are no misses."""
        block = self.namespaces.places.block_of(directory, name)
        if block is None:
            return 0 if name.startswith(b".") else layouts.key_of(directory.ino, name)
        return 0 if block.temporary else block.key

    def _count(self, directory: int, name: bytes, times: int) -> None:
        above = self._directory(directory)
        key = 0 if above is None else self._key(above, name)
        if above is None or not key:
            return
        self.namespaces.show_opens()
        self._see(self.namespaces.of(above), key, times)
        log = self.namespaces.access_log
        if log.on:
            for _ in range(times):
                log.absent(above, name)

    def _see(self, space: Namespace, key: int, times: int) -> None:
        self.counters["misses"] += times
        space.counters["misses"] += times
        for _ in range(times):
            space.accesses.looked_up(key)
