"""Names that a directory does not have: lookups of them are answered without the daemon's loop.

Contract: the gate knows all names of each *complete* directory, and answers ENOENT for any other
name in it. A directory is complete after its mkdir, or after a scan. The scan comes after MISSES
lookups of absent names. The catalog calls `changed` after each commit, in the same step of the
loop. If the catalog cannot say whether a name was given, its directory is complete no more. A name
too many in the gate is harmless: the daemon answers its lookup.

Names of virtual files are no names of the catalog. The gate never answers lookups of these. With a
bucket no directory is complete, because other nodes make names. Synchronous, except `run`. Not for
names that exist.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import trio

from kvfs.catalog import Catalog
from kvfs.errors import CatalogError

log = logging.getLogger(__name__)

MISSES = 32  # lookups of absent names after which a directory is scanned
SCANNED_MAX = 1 << 18  # names of a directory that is scanned: some 0.5 s
STEP = 256  # names that a scan takes without giving way: some 0.5 ms
COUNTED_MAX = 4096  # directories whose lookups are counted
EVERYWHERE = 0  # in place of a directory: the name may be in any


class AbsentLookup(NamedTuple):
    """A lookup of an absent name that the gate has answered."""

    directory: int
    name: bytes
    at: int  # monotonic ns
    thread: int  # that asked


class NameGate(Protocol):
    """Answers lookups of absent names, beside the daemon's loop."""

    def complete(self, directory: int, *, complete: bool) -> bool:
        """Set whether all names of a directory are known. False: there is no room."""
        ...

    def set_name(self, directory: int, name: bytes, *, given: bool) -> bool:
        """Add or remove a name, of one directory or EVERYWHERE. False: there is no room."""
        ...

    def forget_names(self) -> None:
        """Know no directory any more."""
        ...

    def take_lookups(self) -> list[AbsentLookup]:
        """The lookups answered since the last call, in their order."""
        ...


class AbsentNames:
    """The complete directories. Without a gate there are none."""

    def __init__(self, catalog: Catalog, counters: Counter[str]) -> None:
        self.catalog = catalog
        self.counters = counters
        self.gate: NameGate | None = None
        self._virtual: Collection[bytes] = ()
        self.complete: set[int] = set()
        self._misses = Counter[int]()  # by directory that is not complete
        self._large: set[int] = set()  # directories with more than SCANNED_MAX names
        self._scanning = 0  # the directory, or 0
        self._wanted: dict[int, None] = {}  # directories to scan, in order
        self._some_wanted = trio.Event()

    def start(self, gate: NameGate, virtual: Collection[bytes] = ()) -> None:
        """Let the gate answer from now on. virtual: names of virtual files."""
        self.gate, self._virtual = gate, virtual
        self._forget()
        self.catalog.names_changed = self.changed

    def stop(self) -> None:
        """Let the gate answer no more, for good."""
        if self.gate is not None:
            self._forget()
            self.catalog.names_changed = lambda _names, _committed: None
            self.gate = None

    def take_lookups(self) -> list[AbsentLookup]:
        """Take and count the lookups that the gate has answered, as `NameGate.take_lookups`."""
        if self.gate is None:
            return []
        found = self.gate.take_lookups()
        self.counters["lookups_fast"] += len(found)
        return found

    def made(self, directory: int) -> None:
        """A directory was made in this step of the loop: it has no names."""
        if self.gate is not None:
            self._set_complete(directory)

    def missed(self, directory: int) -> None:
        """The daemon has answered a lookup of an absent name."""
        if self.gate is None or directory in self.complete:
            return
        self._misses[directory] += 1
        if self._misses[directory] >= MISSES and directory not in self._large:
            del self._misses[directory]
            self._wanted[directory] = None
            self._some_wanted.set()
        elif len(self._misses) > COUNTED_MAX:
            self._misses.clear()

    def changed(self, names: Sequence[tuple[int, bytes, bool]], committed: bool) -> None:  # noqa: FBT001
        """Names were given or taken: (directory, name, given). committed: False if that failed."""
        assert self.gate is not None
        for directory, name, given in names:
            if directory not in self.complete and directory != self._scanning:
                continue
            if not committed:
                self._set_incomplete(directory)
            elif not self.gate.set_name(directory, name, given=given):
                self._forget()

    def _set_complete(self, directory: int) -> None:
        assert self.gate is not None
        if not self.gate.complete(directory, complete=True):
            self._forget()
            if not self.gate.complete(directory, complete=True):
                return  # no memory
        self.complete.add(directory)

    def _set_incomplete(self, directory: int) -> None:
        assert self.gate is not None
        self.gate.complete(directory, complete=False)
        self.complete.discard(directory)
        if directory == self._scanning:
            self._scanning = 0

    def _forget(self) -> None:
        assert self.gate is not None
        self.gate.forget_names()
        for name in self._virtual:
            there = self.gate.set_name(EVERYWHERE, name, given=True)
            assert there, "an empty gate has room for some names"
        self.complete.clear()
        self._scanning = 0

    async def run(self) -> None:
        """Scan the directories whose absent names programs look up."""
        while True:
            await self._some_wanted.wait()
            self._some_wanted = trio.Event()
            while self._wanted:
                directory = next(iter(self._wanted))
                del self._wanted[directory]
                try:
                    await self._scan(directory)
                except CatalogError as error:
                    log.debug("lookups of absent names in inode %d: %s", directory, error)
                self._scanning = 0

    async def _scan(self, directory: int) -> None:
        """Tell the gate all names of a directory. Names that come meanwhile come by `changed`."""
        self._scanning = directory
        for count, name in enumerate(self.catalog.names(directory, b"")):
            if self.gate is None:
                return
            if count == SCANNED_MAX:
                self._large.add(directory)
                return
            if not self.gate.set_name(directory, name, given=True):
                self._large.add(directory)
                self._forget()
                return
            if not count % STEP:
                await trio.lowlevel.checkpoint()
            if self._scanning != directory:
                return
        if self.gate is not None:
            self._set_complete(directory)
