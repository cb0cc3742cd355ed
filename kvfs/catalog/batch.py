"""Changes of the catalog that happen together or not at all.

Contract: every change of state is one `Batch`. A batch only collects changes until its block ends.
Then the catalog writes the changes, and the consequences given to `then` follow. Not for reading:
that is `Catalog`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from struct import Struct
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from kvfs.catalog import keys
from kvfs.catalog.inode import Inode
from kvfs.catalog.journal import Changes
from kvfs.catalog.keys import Dentry
from kvfs.errors import CatalogError

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

_ANSWER_KEY = Struct(">cI")
_ANSWER = Struct("<QQ")
_current: ContextVar[tuple[int, int] | None] = ContextVar("_current", default=None)


class Answers:
    """The kernel's requests that were carried out: they make each change happen only once.

    A change of names writes the number of its request into its own batch (`Batch.answers`). If the
    daemon dies before it has replied, the kernel sends the request again to the next daemon. That
    daemon finds the request here and only replies. Entries are few: one for each change under way
    at the same time; later entries overwrite them. Request numbers rise for as long as a mount
    lives and are never reused. `known` has the inode of each request that the previous daemon
    carried out, until `forget`.
    """

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self._free: list[int] = []
        self._end = 0
        self._reserved = 0  # entries of the predecessor must not be overwritten yet

    def load(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Take over the entries, (key, value), of a daemon that died."""
        for key, value in entries:
            request, ino = _ANSWER.unpack(value)
            self.known[request] = ino
            self._end = max(self._end, _ANSWER_KEY.unpack(key)[1] + 1)
        self._reserved = self._end

    def forget(self) -> None:
        """The kernel has sent all requests again; drop the previous daemon's entries."""
        self.known.clear()
        self._free.extend(range(self._reserved))
        self._reserved = 0

    def carrying_out(self, request: int) -> "CarryingOut":
        """Let the task's batch that calls `answers()` carry out this request.

        The block ends before the reply. The reply must follow without an await.
        """
        return CarryingOut(self, request)

    def take_entry(self) -> int:
        """An entry for a request, until `free_entry`."""
        if self._free:
            return self._free.pop()
        self._end += 1
        return self._end - 1

    def free_entry(self, index: int) -> None:
        self._free.append(index)

    @staticmethod
    def entry(ino: int) -> tuple[bytes, bytes] | None:
        """Key and value for the request that this task carries out, None if it is for none."""
        current = _current.get()
        if current is None:
            return None
        index, request = current
        return _ANSWER_KEY.pack(keys.ANSWERS, index), _ANSWER.pack(request, ino)


class CarryingOut:
    """The block of `Answers.carrying_out`. `contextmanager` would cost 2 us more."""

    __slots__ = ("_answers", "_index", "_request")

    def __init__(self, answers: Answers, request: int) -> None:
        self._answers = answers
        self._request = request
        self._index = -1

    def __enter__(self) -> None:
        self._index = self._answers.take_entry()
        _current.set((self._index, self._request))

    def __exit__(self, *_: object) -> None:
        _current.set(None)
        self._answers.free_entry(self._index)


class BatchCatalog(Protocol):
    """The part of the catalog that a batch needs. `Catalog` explains the methods."""

    format: int
    answers: Answers
    complete_batch: "Callable[[Batch], None]"
    committing: "Callable[[Batch], None]"
    names_changed: Callable[[Sequence[tuple[int, bytes, bool]], bool], None]

    def changing(self, inode: Inode) -> None: ...
    def inode(self, ino: int) -> Inode | None: ...
    def named(self, ino: int) -> object: ...
    def lookup(self, parent: int, name: bytes) -> Dentry | None: ...
    def dentry(self, parent: int, cookie: int) -> Dentry | None: ...
    def names(self, parent: int, start: bytes) -> Iterator[bytes]: ...
    def xattr_names(self, ino: int) -> list[bytes]: ...
    def mark(self, kind: bytes, ino: int) -> bytes | None: ...
    def answer_entries(self) -> list[tuple[bytes, bytes]]: ...
    def commit(self, changes: Changes, *, sync: bool) -> None: ...
    def remember(self, directory: Inode) -> None: ...


class Batch:
    """Changes that happen together or not at all: `with catalog.batch() as batch: ...`.

    Leaving the block commits the changes, and then runs the functions given to `then`. An exception
    discards all of them. Then each inode that was put takes the catalog's values again, and each
    inode given to `change` takes its values before the change. Raises CatalogError. Before the
    batch commits, `Catalog.complete_batch` may add changes that follow from the names in `named`.
    """

    __slots__ = (
        *("_before", "_catalog", "_changes", "_directories", "_put", "_then"),
        *("dropped", "named", "sync"),
    )

    def __init__(self, catalog: BatchCatalog) -> None:
        self._catalog = catalog
        self._changes: Changes = []
        self._before: list[tuple[Inode, Inode]] = []
        self._put: list[Inode] = []
        self._directories: list[Inode] = []  # copies of records, as they were put
        self._then: list[Callable[[], None]] = []
        # Names in their order: directory, name, whether it was given (else taken).
        self.named: list[tuple[int, bytes, bool]] = []
        self.dropped: set[int] = set()  # inodes that kvfs itself drops: other nodes keep theirs
        self.sync = False

    def then(self, consequence: Callable[[], None]) -> None:
        """Run `consequence` once this batch is committed, and only then. It reads no disk."""
        self._then.append(consequence)

    def change(self, inode: Inode) -> Inode:
        """A record is about to change, and is not put yet: what it is now, to which it returns."""
        self._catalog.changing(inode)
        before = inode.copy()
        self._before.append((inode, before))
        return before

    def put(self, inode: Inode, *, accessed: bool = False) -> None:
        """Write an inode's record. accessed: nothing but its time of access has changed."""
        if not accessed:
            self._catalog.changing(inode)
        if inode.digest and inode.sparse:
            self._be_of_format(keys.HOLED)
        elif inode.packed is not None:
            self._be_of_format(keys.PACKED)
        elif inode.in_bucket:
            self._be_of_format(keys.BUCKETED)
        elif inode.placed:
            self._be_of_format(keys.PLACED)
        self._put.append(inode)
        if inode.is_dir:
            self._directories.append(inode.copy())
        self._changes.append((keys.INODES + keys.number_key(inode.ino), inode.pack()))

    def _be_of_format(self, number: int) -> None:
        """Raise the catalog's format: kvfs of an older format could not read this batch."""
        if self._catalog.format < number:
            self.set_fact("format", str(number))
            self.then(partial(setattr, self._catalog, "format", number))

    def delete(self, inode: Inode) -> None:
        """Delete an inode and its extended attributes. `unlink` removes its names."""
        self._catalog.changing(inode)
        self._changes.append((keys.INODES + keys.number_key(inode.ino), None))
        self._directories = [one for one in self._directories if one.ino != inode.ino]
        for name in self._catalog.xattr_names(inode.ino):
            self._changes.append((keys.XATTRS + keys.name_key(inode.ino, name), None))

    def link(self, parent: int, entry: Dentry) -> None:
        self._changes += [
            (keys.NAMES + keys.name_key(parent, entry.name), keys.name_value(entry)),
            (keys.COOKIES + keys.cookie_key(parent, entry.cookie), keys.cookie_value(entry)),
        ]
        self.named.append((parent, entry.name, True))

    def unlink(self, parent: int, entry: Dentry) -> None:
        self._changes += [
            (keys.NAMES + keys.name_key(parent, entry.name), None),
            (keys.COOKIES + keys.cookie_key(parent, entry.cookie), None),
        ]
        self.named.append((parent, entry.name, False))

    # The state after this batch

    def _change_of(self, key: bytes) -> tuple[bool, bytes | None]:
        """Whether a key changes, and its new value; None: the key is deleted."""
        found = (value for changed, value in reversed(self._changes) if changed == key)
        return next(((True, value) for value in found), (False, None))

    def inos(self) -> set[int]:
        """The inodes whose records change, or that lose a name."""
        found = {
            int.from_bytes(key[1:], "big") for key, _ in self._changes if key[:1] == keys.INODES
        }
        for parent, name, given in self.named:
            if not given and (entry := self._catalog.lookup(parent, name)) is not None:
                found.add(entry.ino)
        return found

    def inode(self, ino: int) -> Inode | None:
        """The record that was put last, else the catalog's; None if the inode was deleted."""
        changed, record = self._change_of(keys.INODES + keys.number_key(ino))
        if changed and record is None:
            return None
        found = next((one for one in reversed(self._put) if one.ino == ino), None)
        return self._catalog.inode(ino) if found is None else found

    def marked(self, kind: bytes, ino: int) -> bytes | None:
        """The value of a mark after this batch; None if there will be none."""
        changed, value = self._change_of(kind + keys.number_key(ino))
        return value if changed else self._catalog.mark(kind, ino)

    def lookup(self, parent: int, name: bytes) -> Dentry | None:
        changed, value = self._change_of(keys.NAMES + keys.name_key(parent, name))
        if not changed:
            return self._catalog.lookup(parent, name)
        return None if value is None else keys.by_name(name, value)

    def renames(self, parent: int, cookie: int) -> bool:
        """Whether the entry of one link of an inode gets another name, or goes."""
        changed, value = self._change_of(keys.COOKIES + keys.cookie_key(parent, cookie))
        before = self._catalog.dentry(parent, cookie) if changed else None
        return before is not None and value != keys.cookie_value(before)

    def names(self, parent: int, start: bytes = b"") -> Iterator[bytes]:
        """Names in a directory that begin with `start`, in no order."""
        prefix = keys.NAMES + keys.name_key(parent, start)
        changed = {key: value for key, value in self._changes if key.startswith(prefix)}
        at = len(keys.NAMES) + keys.U64.size
        yield from (key[at:] for key, value in changed.items() if value is not None)
        for name in self._catalog.names(parent, start):
            if keys.NAMES + keys.name_key(parent, name) not in changed:
                yield name

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        self._changes.append((keys.XATTRS + keys.name_key(ino, name), value))

    def remove_xattr(self, ino: int, name: bytes) -> None:
        self._changes.append((keys.XATTRS + keys.name_key(ino, name), None))

    def mark_unfinished(self, ino: int) -> None:
        self._changes.append((keys.MARKS + keys.number_key(ino), b""))

    def mark_finished(self, ino: int) -> None:
        self._changes.append((keys.MARKS + keys.number_key(ino), None))

    def answers(self, ino: int = 0) -> None:
        """Note that this batch carries out the kernel's request, and made inode `ino`, if any."""
        entry = self._catalog.answers.entry(ino)
        if entry is not None:
            self._changes.append(entry)

    def forget_answers(self) -> None:
        self._changes.extend((key, None) for key, _ in self._catalog.answer_entries())

    def set_fact(self, name: str, value: str) -> None:
        self._changes.append((keys.FACTS + name.encode(), value.encode()))

    def mark(self, kind: bytes, ino: int, value: bytes = b"") -> None:
        """Set a mark of a kind keyed by number: n, r, t, p, l, e, y; for the bucket s, u, z, k."""
        self._be_of_format(keys.BUCKETED if kind in keys.BUCKET_KINDS else keys.PLACED)
        self._changes.append((kind + keys.number_key(ino), value))

    def unmark(self, kind: bytes, ino: int) -> None:
        self._changes.append((kind + keys.number_key(ino), None))

    def set_left(self, key: bytes, value: bytes) -> None:
        """Note that an object has lost a name of the pool: `core/pool/leaving`."""
        self._changes.append((keys.LEFT + key, value))

    def erase(self, kind: bytes, key: bytes) -> None:
        """Remove one key of a kind, whatever its meaning: for keys that cannot be decoded."""
        self._changes.append((kind + key, None))

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self._undo()
            return
        try:
            if self.named:
                self._catalog.complete_batch(self)
            self._catalog.committing(self)
            self._catalog.commit(self._changes, sync=self.sync)
        except BaseException:
            self._catalog.names_changed(self.named, False)  # noqa: FBT003
            self._undo()
            raise
        if self.named:
            self._catalog.names_changed(self.named, True)  # noqa: FBT003
        for directory in self._directories:
            self._catalog.remember(directory)
        self._follow()

    def _follow(self) -> None:
        """Run all consequences: the change has happened. Raises the first exception of them."""
        met: Exception | None = None
        for consequence in self._then:
            try:
                consequence()
            except Exception as error:
                log.exception("a step after a change of the catalog failed: a defect of kvfs")
                met = met or error
        if met is not None:
            raise met

    def _undo(self) -> None:
        """Restore records in memory to committed values: some of the records are of open files."""
        for inode, before in reversed(self._before):
            inode.copy_from(before)
        for inode in self._put:
            try:
                stored = self._catalog.inode(inode.ino)
            except CatalogError as error:  # the exception that is raised tells more
                named = self._catalog.named(inode.ino)
                log.error("%s may differ from its record until the next mount: %s", named, error)
                continue
            if stored is not None:
                inode.copy_from(stored)
