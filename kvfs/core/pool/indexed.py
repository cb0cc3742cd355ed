"""The objects of this node as the index has them, as far as the node knows.

Contract: synchronous. The announcer notes here what the index has answered. An object is *fresh* if
a program has written or renamed it since the daemon's start, and the index does not have it. One
that came from another node or from a bucket is not. Only a fresh object, or a later one, may take a
name that was unlinked. The index may also have objects from before the daemon's start. An object in
conflict stays fresh until the index loses its data. The catalog has the conflict, so that the next
daemon knows it. Keys are those that the index was told: a directory above may have another name
since then. Not for asking the index (`pool/recheck`).
"""

import logging
import time
from collections.abc import Iterable
from functools import partial
from struct import Struct
from typing import NamedTuple

from kvfs.catalog import Batch, Inode, keys
from kvfs.core.pool.entries import PoolEntries
from kvfs.pool.records import Announcement, Unlinked
from kvfs.s3.keys import escape

log = logging.getLogger(__name__)

_OTHER = Struct(">16sQ16s")  # the digest, the time of modification, and the epoch; then the key
CLOCK_STEP_NS = 10**7  # the clock of files may be a tick behind


class Indexed(NamedTuple):
    """An object of this node, as the index has it."""

    version: int
    size: int
    folder: str  # of its key there; the whole key if it is a hash of a long name


class IndexedObjects:
    """Objects as the index has them, by inode."""

    def __init__(self, entries: PoolEntries, fetched: dict[int, int]) -> None:
        """fetched: the versions of inodes that came from other nodes in this session."""
        self.entries = entries
        self.fetched = fetched
        self.announced: dict[int, Indexed] = {}
        self.bytes = 0  # of the announced objects
        self.others: dict[int, Unlinked] = {}  # what has the names of objects in conflict
        self.epoch = ""  # of the index
        self._epochs: dict[int, str] = {}  # in which objects in conflict were refused
        self._unsaved: set[int] = set()  # in conflict or not, and the catalog says otherwise
        # Objects whose state the index is being told, and the keys that it gets of them, or "".
        self.in_turn: dict[int, str] = {}
        # The same of turns that failed: the index may learn of them yet, once it reads again.
        self._tried: dict[int, str] = {}
        # Announced before the present change, or loss of the index
        self._earlier: dict[int, Indexed] = {}
        self._written: set[int] = set()  # by programs here, and the index does not have it
        self._taken: set[int] = set()  # lost a name here, and the index does not have the next one
        self._folders: dict[str, str] = {}  # each folder of `Indexed` once
        self._began_ns = time.time_ns() - CLOCK_STEP_NS
        self._load()

    def _load(self) -> None:
        """Read the conflicts that the daemon before this one knew."""
        catalog = self.entries.catalog
        for ino, value in catalog.marks(keys.IN_CONFLICT):
            if len(value) <= _OTHER.size:
                path, named = catalog.path, catalog.named(ino)
                log.error("catalog %s: the record of the name %s is invalid", path, named)
                continue
            digest, mtime_ns, epoch = _OTHER.unpack_from(value)
            key = value[_OTHER.size :].decode("utf-8", "replace")
            self.others[ino] = Unlinked(key, digest, mtime_ns)
            self._epochs[ino] = epoch.rstrip(b"\0").decode("utf-8", "replace")
            self._taken.add(ino)

    # Questions

    def may_have(self, inode: Inode) -> bool:
        """Whether the index may have an object, perhaps since before the daemon's start."""
        ino = inode.ino
        return (
            inode.in_pool
            or inode.in_bucket  # other nodes may have copies
            or not self.is_new(inode)
            or any(ino in one for one in (self.announced, self.in_turn, self._tried, self._earlier))
            or ino in self.others
            or ino in self.fetched
        )

    def is_told(self, ino: int) -> bool:
        """Whether the index has an object of this node, or is being told of it."""
        return any(ino in one for one in (self.announced, self.in_turn, self._tried))

    def may_be_there(self, ino: int) -> bool:
        """Whether an announcement of an object has reached the index, or may have."""
        return ino in self.announced or ino in self._tried

    def key(self, inode: Inode) -> str | None:
        """The key by which the index has an object, or gets it in this turn; else its key now."""
        if (other := self.others.get(inode.ino)) is not None:
            return other.key
        if key := self.in_turn.get(inode.ino) or self._tried.get(inode.ino):
            return key
        indexed = self.announced.get(inode.ino) or self._earlier.get(inode.ino)
        if indexed is None:
            return self.entries.key(inode)
        found = self.entries.catalog.first_name(inode)
        if found is None or not indexed.folder.endswith("/"):
            return indexed.folder if found else None
        return indexed.folder + escape(found[1].name)

    def settled(self, ino: int, key: str) -> Indexed | None:
        """An announced object as the index has it by this key; None while the index is told."""
        indexed = self.announced.get(ino)
        if indexed is None or ino in self.in_turn or ino in self._taken:
            return None
        return indexed if indexed.folder == self._folder(key) else None

    def came(self, ino: int) -> bool:
        """Whether an object came from another node in this session, and was not rewritten since."""
        inode = self.entries.ledger.table.inode(ino)
        return inode is not None and self.fetched.get(ino) == inode.version

    def is_new(self, inode: Inode) -> bool:
        """Whether an object was written since the daemon's start."""
        return inode.backing_mtime_ns >= self._began_ns

    def is_fresh(self, inode: Inode) -> bool:
        """Whether a program has written or renamed the object, and the index does not have it.

        An object is announced again after each change of its record, as after its copy to NVMe.
        Another node may have unlinked it meanwhile. This daemon does not know what the index has
        of objects from before its start.
        """
        ino = inode.ino
        if ino in self._taken or ino not in self._written:
            return ino in self._taken
        known = [one.version for one in (self.announced.get(ino), self._earlier.get(ino)) if one]
        known.append(self.fetched.get(ino, -1))
        return inode.version not in known

    def _folder(self, key: str) -> str:
        return (self.entries.folder_of(key) or (key, ""))[0]

    # Notes

    def writes(self, ino: int) -> None:
        """Note that a program writes an object here."""
        self._written.add(ino)

    def begin_conflict(self, ino: int, other: Unlinked) -> None:
        """Note that another object has the name of an object."""
        self.others[ino], self._epochs[ino] = other, self.epoch
        self._unsaved.add(ino)

    def end_conflict(self, ino: int) -> Unlinked | None:
        """Note that an object is in conflict no more. Returns what had its name."""
        if ino in self.others:
            self._unsaved.add(ino)
        self._epochs.pop(ino, None)
        return self.others.pop(ino, None)

    def leaves(self, ino: int, batch: Batch) -> None:
        """Note that a batch takes the name of an object: the next daemon knows no conflict."""
        if ino in self.others:
            batch.unmark(keys.IN_CONFLICT, ino)
            batch.then(partial(self._unsaved.discard, ino))

    def save(self) -> None:
        """Write what the catalog lacks. Raises CatalogError."""
        if not self._unsaved:
            return
        with self.entries.catalog.batch() as batch:
            for ino in self._unsaved:
                if (other := self.others.get(ino)) is None:
                    batch.unmark(keys.IN_CONFLICT, ino)
                else:
                    batch.mark(keys.IN_CONFLICT, ino, _value(other, self._epochs[ino]))
            batch.then(self._unsaved.clear)

    def end_turn(self, inos: Iterable[int], *, failed: bool) -> None:
        """Note that the turn of these objects has ended."""
        for ino in inos:
            key = self.in_turn.pop(ino)
            if failed and key:
                self._tried[ino] = key

    def takes_back(self, ino: int) -> None:
        """Note that the name of an object is being taken back."""
        self._taken.add(ino)

    def is_here(self, ino: int, wanted: Announcement) -> None:
        """Note that the index has an object as it was announced."""
        self._taken.discard(ino)
        self._written.discard(ino)
        self._tried.pop(ino, None)
        self._earlier.pop(ino, None)
        if ino in self.others:
            self.end_conflict(ino)
        before = self.announced.get(ino)
        self.bytes += wanted.facts.size - (0 if before is None else before.size)
        version = int(wanted.owner.file.partition(".")[2], 16)
        folder = self._folder(wanted.key)
        folder = self._folders.setdefault(folder, folder)
        self.announced[ino] = Indexed(version, wanted.facts.size, folder)

    def is_no_more(self, ino: int) -> None:
        """Note that the index has lost an object that is here, or will have it anew."""
        if (known := self.announced.pop(ino, None)) is not None:
            self.bytes -= known.size
            self._earlier[ino] = known

    def forget(self, ino: int) -> None:
        """Forget an object that is not here any more, of which the index knows."""
        self.is_no_more(ino)
        self.end_conflict(ino)
        for known in (self.fetched, self._tried, self._earlier):
            known.pop(ino, None)
        self._taken.discard(ino)
        self._written.discard(ino)

    def lost(self, epoch: str) -> None:
        """Note that the index has lost its data, or that this daemon has begun.

        Objects in conflict from another epoch of the index are no later than others.
        """
        self.epoch = epoch
        past = [ino for ino, refused in self._epochs.items() if refused != epoch]
        self._written.difference_update(past)
        self._taken.difference_update(past)
        self._earlier |= self.announced
        self.announced.clear()
        self._folders.clear()
        self.bytes = 0


def _value(other: Unlinked, epoch: str) -> bytes:
    head = _OTHER.pack(other.digest, max(0, other.mtime_ns), epoch.encode())
    return head + other.key.encode()
