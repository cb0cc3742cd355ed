"""The catalog: inodes, names, extended attributes and the state of a mount.

Contract: every change of state is one `Batch`. A batch is atomic if the process dies. Inode numbers
and directory cookies come from one counter. The counter never goes back, not even after a power
loss, nor where the catalog lost its newest changes (`doubt`). A read usually takes microseconds;
`database` says when it waits. The format: `keys`, `inode`.
"""

import logging
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from kvfs import failpoints
from kvfs.catalog import keys
from kvfs.catalog.batch import Answers, Batch
from kvfs.catalog.database import CURE, Database, Recovered
from kvfs.catalog.inode import ROOT_INO, Inode
from kvfs.catalog.journal import Changes
from kvfs.catalog.keys import Dentry
from kvfs.errors import CatalogError, ConfigError

log = logging.getLogger(__name__)

FIRST_ID = 16  # below: the root's inode, and the cookies of '.' and '..'
_NUMBER = re.compile(r"[0-9]{1,19}")
IDS_AT_ONCE = 1 << 20  # one synced write reserves this many numbers
DIRECTORIES = 1024  # records that are kept decoded, some 1 MiB
DEEPEST = 4096  # names of a path: a damaged catalog may have a directory below itself
DOUBT = "doubt"  # a fact: the change after which changes are missing, which kvfs could not restore


class Catalog:
    """An open catalog. Raises CatalogError when RocksDB fails, ConfigError at opening."""

    def __init__(self, path: Path, *, first_id: int = FIRST_ID, read_only: bool = False) -> None:
        """Open or create it.

        A new catalog counts from `first_id`; `read_only` needs an existing one.
        """
        self.database = Database(path, read_only=read_only)
        self.path = path
        self.answers = Answers()
        self.carried: dict[str, str] = {}  # facts that the next change writes too
        self.unreadable: set[int] = set()  # inodes with undecodable records, so far
        # Records of directories, as they are stored. A create, the GETATTR of its directory that
        # the kernel sends after it, and an unlink ask for one; a copy costs 1 us instead of 6.
        self._directories: dict[int, Inode] = {}
        self._opened = self.database.openings  # the opening of which they are
        # Adds to a batch the changes that follow from its names, before the batch commits. It may
        # raise.
        self.complete_batch: Callable[[Batch], None] = lambda _: None
        # Called with each batch before it commits, after `complete_batch`: core/pool/changes.py.
        self.committing: Callable[[Batch], None] = lambda _: None
        # Called before a record changes: core/ledger/fast_opens.py, core/pool/changes.py.
        self.watchers: list[Callable[[Inode], None]] = []
        # Called after a batch gave or took names, or failed to: core/ledger/absent_names.py.
        self.names_changed: Callable[[Sequence[tuple[int, bytes, bool]], bool], None]
        self.names_changed = lambda _names, _committed: None
        try:
            self._check_format(read_only=read_only)
            self._next_id = self._reserved = self._first_free(first_id)
            self.doubt = self.fact(DOUBT) or ""  # changes that may be missing; "": none
            self._doubt(read_only=read_only)
        except BaseException:
            self.database.discard()
            raise

    def _check_format(self, *, read_only: bool = False) -> None:
        found = self.fact("format")
        self._had_format = found is not None
        if found is None and not read_only:
            with self.batch() as batch:
                batch.set_fact("format", str(keys.FORMAT))
        elif found is None:
            log.debug("catalog %s: nothing but its journal has its format", self.path)
        elif not _NUMBER.fullmatch(found) or int(found) > keys.FORMAT:
            raise ConfigError(
                f"catalog {self.path} has format {found}, this kvfs reads up to {keys.FORMAT}: "
                "mount it with the kvfs that wrote it, or a newer one"
            )
        self.format = int(found or keys.FORMAT)

    def _first_free(self, first_id: int) -> int:
        found = self.fact("next_id")
        if found is not None and not _NUMBER.fullmatch(found):
            raise ConfigError(
                f"catalog {self.path} counts from {found!r}, expected a number: {CURE}"
            )
        return int(found or first_id)

    def _doubt(self, *, read_only: bool) -> None:
        """Record and log that changes are missing which the journal lacks as well."""
        found = self.database.recovered
        emptied = not (self._had_format or self.database.fresh)
        # Also where the last session ended: if the whole log is lost, changes after that may be
        # lost too.
        gone = found.no_journal and (emptied or found.number > 0)
        if found.unreached:
            log.warning(
                "catalog %s: %d changes or more did not reach the disk before the machine went "
                "down: their objects are misses",
                *(self.path, found.unreached),
            )
        if gone:
            self.doubt = f"its journal is gone: changes after change {found.number} may be missing"
        elif found.short:
            self.doubt = (
                f"its journal ends too early: changes after change {found.number} may be missing"
            )
        elif found.lost:
            self.doubt = (
                f"its log ends too early, and its journal, too: {found.lost} changes or more are "
                f"missing after change {found.number + found.taken}"
            )
        if self.doubt:
            log.error(
                "catalog %s: %s: names may be missing; files without a name stay where they are "
                "until kvfs fsck --repair",
                *(self.path, self.doubt),
            )
        if not read_only and (gone or found.short or found.lost):
            self.set_fact(DOUBT, self.doubt)
            # No catalog gives out more than one number in each microsecond of its life.
            self.count_from(max(self._next_id, time.time_ns() // 1000))

    def believe(self) -> None:
        """Clear `doubt`, when fsck repairs: nothing can restore the missing changes."""
        self.set_fact(DOUBT, "")
        self.doubt = ""

    @property
    def recovered(self) -> Recovered:
        """The changes that the last opening found missing in the log."""
        return self.database.recovered

    def close(self) -> None:
        """Sync and close. Changes committed before this call survive a later power loss.

        Raises CatalogError.
        """
        self.database.close()

    # Writing

    def batch(self) -> Batch:
        return Batch(self)

    def commit(self, changes: Changes, *, sync: bool) -> None:
        if self.carried:
            changes += [
                (keys.FACTS + name.encode(), value.encode()) for name, value in self.carried.items()
            ]
        self.database.write(changes, sync=sync)
        self.carried.clear()
        for key, _ in changes:
            if key.startswith(keys.INODES):
                self._directories.pop(int.from_bytes(key[1:], "big"), None)
        if failpoints.active:
            failpoints.reach("catalog.committed")

    def set_fact(self, name: str, value: str) -> None:
        """Write one fact in a synced write of its own."""
        with self.batch() as batch:
            batch.set_fact(name, value)
            batch.sync = True

    def next_id(self) -> int:
        """A number that was never given out before, for an inode or a cookie."""
        if self._next_id >= self._reserved:
            # Once in a million: a crash must not hand a number out twice.
            self.set_fact("next_id", str(self._next_id + IDS_AT_ONCE))
            self._reserved = self._next_id + IDS_AT_ONCE
        self._next_id += 1
        return self._next_id - 1

    @property
    def counter(self) -> int:
        """The counter: every number given out so far is smaller."""
        return self._next_id

    def count_from(self, number: int) -> None:
        """Go on from this greater number, because the counter is behind numbers given out."""
        self.set_fact("next_id", str(number))
        self._next_id = self._reserved = number

    # Reading

    def records(self, kind: bytes, under: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield every (key, value) of a kind, the key without its kind, as of the first of them.

        under: only keys that begin with these bytes. The iterator does not see later changes.
        Raises CatalogError, also if the catalog is opened again meanwhile; that cannot happen while
        a reader uses the old one.
        """
        opened = self.database.openings
        for key, value in self.database.scan(kind + under):
            yield under + key, value
            if self.database.openings != opened:
                raise CatalogError(f"catalog {self.path} was opened anew while it was read")

    def record(self, kind: bytes, key: bytes) -> bytes | None:
        """The present value of one key; None if there is none."""
        return self.database.get(kind + key)

    def fact(self, name: str) -> str | None:
        value = self.database.get(keys.FACTS + name.encode())
        return None if value is None else value.decode("utf-8", "backslashreplace")

    def inode(self, ino: int) -> Inode | None:
        """The inode, or None if there is none.

        Raises CatalogError also for an undecodable record.
        """
        kept = self._directories.get(ino)
        if kept is not None and self._opened == self.database.openings:
            return kept.copy()
        record = self.database.get(keys.INODES + keys.number_key(ino))
        if record is None:
            return None
        found = self._readable(ino, record)
        if found is None:
            raise CatalogError(f"catalog {self.path}: the record of inode {ino} is invalid")
        if found.is_dir:
            self.remember(found.copy())
        return found

    def remember(self, directory: Inode) -> None:
        """Keep a directory's record, which is stored so. The caller never changes it."""
        if self._opened != self.database.openings:
            self._opened = self.database.openings
            self._directories.clear()
        self._directories[directory.ino] = directory
        if len(self._directories) > DIRECTORIES:
            del self._directories[next(iter(self._directories))]

    def _readable(self, ino: int, record: bytes) -> Inode | None:
        """The inode, or None for an undecodable record."""
        try:
            return Inode.unpack(ino, record)
        except struct.error as error:
            if ino not in self.unreadable:
                self.unreadable.add(ino)
                log.error(
                    "catalog %s: the record of inode %d is invalid (%s): "
                    "kvfs fsck --repair removes it",
                    *(self.path, ino, error),
                )
            return None

    def inodes(self, inos: Sequence[int]) -> list[Inode | None]:
        """Many inodes at once; None for each that is missing or unreadable."""
        if not inos:
            return []
        records = self.database.get_all([keys.INODES + keys.number_key(ino) for ino in inos])
        found = list(zip(inos, records, strict=True))
        try:
            return [None if data is None else Inode.unpack(ino, data) for ino, data in found]
        except struct.error:
            return [None if data is None else self._readable(ino, data) for ino, data in found]

    def changing(self, inode: Inode) -> None:
        """Tell the watchers that a record is about to change."""
        for watcher in self.watchers:
            watcher(inode)

    def inodes_after(self, ino: int, limit: int) -> list[Inode]:
        """Up to `limit` inodes with greater numbers, in order, without the `unreadable` ones."""
        found = (
            self._readable(number, record)
            for key, record in self.database.scan(keys.INODES, keys.number_key(ino + 1))
            if (number := keys.number(key)) is not None
        )
        return list(islice((inode for inode in found if inode is not None), limit))

    def numbers_before(self, ino: int, limit: int) -> list[int]:
        """The numbers of up to `limit` inodes below `ino`, the greatest first."""
        found = self.database.keys_before(keys.INODES, keys.number_key(ino - 1))
        numbers = map(keys.number, found)
        return list(islice((one for one in numbers if one is not None), limit))

    def lookup(self, parent: int, name: bytes) -> Dentry | None:
        value = self.database.get(keys.NAMES + keys.name_key(parent, name))
        return None if value is None else keys.by_name(name, value)

    def lookups(self, names: Sequence[tuple[int, bytes]]) -> list[int | None]:
        """Many (parent, name) at once: the inode of each, or None."""
        if not names:
            return []
        found = self.database.get_all([keys.NAMES + keys.name_key(*name) for name in names])
        return [None if value is None else keys.by_name(b"", value).ino for value in found]

    def dentry(self, parent: int, cookie: int) -> Dentry | None:
        """The entry of one link of an inode, by directory and cookie."""
        value = self.database.get(keys.COOKIES + keys.cookie_key(parent, cookie))
        return None if value is None else keys.by_cookie(cookie, value)

    def dentries(self, links: Sequence[tuple[int, int]]) -> list[Dentry | None]:
        """Many entries at once, each by directory and cookie."""
        if not links:
            return []
        found = self.database.get_all([keys.COOKIES + keys.cookie_key(*link) for link in links])
        return [
            None if value is None else keys.by_cookie(cookie, value)
            for (_, cookie), value in zip(links, found, strict=True)
        ]

    def first_name(self, inode: Inode) -> tuple[Inode, Dentry] | None:
        """The directory and the entry of an inode's first name; None if either is not there."""
        entry = self.dentry(*inode.links[0]) if inode.links else None
        directory = None if entry is None else self.inode(inode.links[0][0])
        return None if entry is None or directory is None else (directory, entry)

    def some_name(self, inode: Inode) -> tuple[int, bytes]:
        """The directory and the first name of an inode; (0, b"") if it has no name."""
        for parent, cookie in inode.links:
            entry = self.dentry(parent, cookie)
            if entry is not None:
                return parent, entry.name
        return 0, b""

    def to_publish(self, ino: int) -> tuple[int, bytes] | None:
        """The directory and the name that a nameless file gets at its close; None: no such file."""
        value = self.mark(keys.UNPUBLISHED, ino) or b""
        parent, name = int.from_bytes(value[: keys.U64.size], "big"), value[keys.U64.size :]
        return (parent, name) if parent and name else None

    def path_of(self, ino: int) -> str:
        """The path of an inode below the mount point; "" if it has none or a read fails."""
        try:
            return os.fsdecode(b"/".join(self.names_to(ino)))
        except (CatalogError, struct.error):
            return ""

    def names_to(self, ino: int, *, publishing: bool = False) -> list[bytes]:
        """The names of a path to an inode, from the top; [] if it has no path.

        publishing: a file that has no name yet has the name that it gets. Raises CatalogError.
        """
        names: list[bytes] = []
        while ino != ROOT_INO:
            inode = self.inode(ino)
            parent, name = (0, b"") if inode is None else self.some_name(inode)
            if not name and publishing and not names:
                parent, name = self.to_publish(ino) or (0, b"")
            if not name:
                return []
            names.append(name)
            if len(names) > DEEPEST:
                raise CatalogError(f"catalog {self.path}: directory {ino} is too deep")
            ino = parent
        return names[::-1]

    def named(self, ino: int) -> "Named":
        return Named(self, ino)

    def entries_after(self, parent: int, cookie: int, limit: int) -> list[Dentry]:
        """Up to `limit` entries of a directory with greater cookies, in order."""
        all_of_it = keys.COOKIES + keys.number_key(parent)
        found = islice(self.database.scan(all_of_it, keys.number_key(cookie + 1)), limit)
        return [keys.by_cookie(keys.U64.unpack(key)[0], value) for key, value in found]

    def names(self, parent: int, start: bytes) -> Iterator[bytes]:
        """Names in a directory that begin with `start`, in order."""
        prefix = keys.NAMES + keys.name_key(parent, start)
        return (start + key for key, _ in self.database.scan(prefix))

    def xattr(self, ino: int, name: bytes) -> bytes | None:
        return self.database.get(keys.XATTRS + keys.name_key(ino, name))

    def xattr_sizes(self, ino: int) -> dict[bytes, int]:
        """The size in bytes of each extended attribute's value, by name."""
        found = self.database.scan(keys.XATTRS + keys.number_key(ino))
        return {name: len(value) for name, value in found}

    def xattr_names(self, ino: int) -> list[bytes]:
        return list(self.xattr_sizes(ino))

    def answer_entries(self) -> list[tuple[bytes, bytes]]:
        return [(keys.ANSWERS + key, value) for key, value in self.database.scan(keys.ANSWERS)]

    def marks(
        self, kind: bytes, *, after: int = -1, limit: int | None = None
    ) -> list[tuple[int, bytes]]:
        """(inode, value) of every mark of this kind, in order of the numbers.

        after, limit: return at most `limit` marks, with numbers greater than `after`. Keys that are
        not numbers are left out.
        """
        found = (
            (ino, value)
            for key, value in self.database.scan(kind, keys.number_key(after + 1))
            if (ino := keys.number(key)) is not None
        )
        return list(islice(found, limit))

    def any_mark(self, kind: bytes) -> bool:
        """Whether any inode has a mark of this kind."""
        return next(iter(self.database.scan(kind)), None) is not None

    def mark(self, kind: bytes, ino: int) -> bytes | None:
        """The value of an inode's mark; None if the inode has no such mark."""
        return self.database.get(kind + keys.number_key(ino))

    def unfinished(self) -> list[int]:
        return [ino for ino, _ in self.marks(keys.MARKS)]


class Named:
    """An inode for a message: its quoted path, which is read when the message is made.

    A catalog that cannot be read hides no message: then the inode has its number.
    """

    __slots__ = ("_catalog", "_ino")

    def __init__(self, catalog: Catalog, ino: int) -> None:
        self._catalog = catalog
        self._ino = ino

    def __str__(self) -> str:
        if self._ino == ROOT_INO:
            return "the mount point"
        try:
            names = self._catalog.names_to(self._ino, publishing=True)
        except Exception:  # noqa: BLE001 (the message matters more)
            return f"inode {self._ino}"
        unlinked = f"an unlinked object (inode {self._ino})"
        return repr(os.fsdecode(b"/".join(names))) if names else unlinked

    __repr__ = __str__
