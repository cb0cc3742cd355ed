"""Inodes, names, extended attributes and the state of a mount, in one RocksDB.

Contract: every change of state is one `Batch`, atomic towards the death of the process. After a
power loss the newest batches may be missing, never parts of one. Inode numbers and directory
cookies come from one counter that never goes back, not even then. Calls take microseconds and
are made from the daemon's loop; none waits for a disk in the usual case (the write-ahead log goes
to the page cache). Not for policy, nor for backing files.

Keys (integers big endian, so that they sort):
  i ino              the inode's record
  d parent name      ino, cookie
  c parent cookie    ino, name: the directory in reading order
  x ino name         an extended attribute
  o ino              open for writing, or open without a name: unfinished if found at start
  n ino              a namespace's settings, by its top-level directory
  r ino              a tree that was dropped, everything below this directory: the name it had
  t ino              a tree that is to be accounted to the namespace of this directory
  p ino              a file without a name yet: the directory, and the name it gets when closed
  l model            engine and model, as names of files say them
  q index            a request that was carried out (answers.py)
  m name             facts about the whole: format, counter, session, ...
"""

import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from kvfs import failpoints
from kvfs.catalog.answers import Answers
from kvfs.catalog.inode import Inode
from kvfs.errors import CatalogError, ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

FORMAT = 2  # 1 had no places in inodes; it is read, and becomes 2 with the first of those
FIRST_ID = 16  # below: the root's inode, and the cookies of '.' and '..'
BALLAST = 8 << 20  # bytes; by the size of a record some 30,000 changes, not measured
RECOVERY_PERIOD = 1.0  # s
IDS_AT_ONCE = 1 << 20  # one synced write reserves so many numbers

_READ_ONLY = AccessType.read_only(error_if_log_file_exist=False)

_U64 = Struct(">Q")
_TWO = Struct(">QQ")


class Dentry(NamedTuple):
    """A name in a directory. The cookie is its place in the directory's reading order."""

    name: bytes
    ino: int
    cookie: int


def _inode_key(ino: int) -> bytes:
    return b"i" + _U64.pack(ino)


def _name_key(parent: int, name: bytes) -> bytes:
    return b"d" + _U64.pack(parent) + name


def _cookie_key(parent: int, cookie: int) -> bytes:
    return b"c" + _TWO.pack(parent, cookie)


def _xattr_key(ino: int, name: bytes) -> bytes:
    return b"x" + _U64.pack(ino) + name


Changes = list[tuple[bytes, bytes | None]]  # keys with their new values, None to delete


class Batch:
    """Changes that happen together or not at all: `with catalog.batch() as batch: ...`.

    Leaving the block commits, and then does what `then` was given. An exception discards all of
    it, and each inode that was put is again what the catalog has. Raises CatalogError.
    """

    __slots__ = ("_catalog", "_changes", "_put", "_then", "sync")

    def __init__(self, catalog: "Catalog") -> None:
        self._catalog = catalog
        self._changes: Changes = []
        self._put: list[Inode] = []
        self._then: list[Callable[[], None]] = []
        self.sync = False

    def then(self, consequence: Callable[[], None]) -> None:
        """What is to be done once this is committed, and only then. It may not fail."""
        self._then.append(consequence)

    def put(self, inode: Inode) -> None:
        if inode.placed:
            self._be_of_this_format()
        self._put.append(inode)
        self._changes.append((_inode_key(inode.ino), inode.pack()))

    def _be_of_this_format(self) -> None:
        """What is written now is nothing that the kvfs of an older format could read."""
        if self._catalog.format != FORMAT:
            self.set_fact("format", str(FORMAT))
            self.then(partial(setattr, self._catalog, "format", FORMAT))

    def delete(self, inode: Inode) -> None:
        """Forget an inode with its attributes; its names are unlinked apart."""
        self._changes.append((_inode_key(inode.ino), None))
        for name in self._catalog.xattr_names(inode.ino):
            self._changes.append((_xattr_key(inode.ino, name), None))

    def link(self, parent: int, entry: Dentry) -> None:
        self._changes.append((_name_key(parent, entry.name), _TWO.pack(entry.ino, entry.cookie)))
        self._changes.append((_cookie_key(parent, entry.cookie), _U64.pack(entry.ino) + entry.name))

    def unlink(self, parent: int, entry: Dentry) -> None:
        self._changes.append((_name_key(parent, entry.name), None))
        self._changes.append((_cookie_key(parent, entry.cookie), None))

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        self._changes.append((_xattr_key(ino, name), value))

    def remove_xattr(self, ino: int, name: bytes) -> None:
        self._changes.append((_xattr_key(ino, name), None))

    def mark_unfinished(self, ino: int) -> None:
        self._changes.append((b"o" + _U64.pack(ino), b""))

    def mark_finished(self, ino: int) -> None:
        self._changes.append((b"o" + _U64.pack(ino), None))

    def answers(self, ino: int = 0) -> None:
        """This is the change that the kernel's request asked for; it made the inode, if any."""
        entry = self._catalog.answers.entry(ino)
        if entry is not None:
            self._changes.append(entry)

    def forget_answers(self) -> None:
        self._changes.extend((key, None) for key, _ in self._catalog.answer_entries())

    def set_fact(self, name: str, value: str) -> None:
        self._changes.append((b"m" + name.encode(), value.encode()))

    def mark(self, kind: bytes, ino: int, value: bytes = b"") -> None:
        """One of the kinds that belong to a number: n, r, t, p, l."""
        self._be_of_this_format()
        self._changes.append((kind + _U64.pack(ino), value))

    def unmark(self, kind: bytes, ino: int) -> None:
        self._changes.append((kind + _U64.pack(ino), None))

    def erase(self, kind: bytes, key: bytes) -> None:
        """Remove one key of a kind, whatever it means: for what cannot be decoded."""
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
            self._catalog.commit(self._changes, sync=self.sync)
        except BaseException:
            self._undo()
            raise
        for consequence in self._then:
            consequence()

    def _undo(self) -> None:
        """The records in memory must not say what was never committed: some are of open files."""
        for inode in self._put:
            try:
                stored = self._catalog.inode(inode.ino)
            except CatalogError as error:  # the one that is raised tells more
                log.error("inode %d may differ from its record: %s", inode.ino, error)
                continue
            if stored is not None:
                inode.take(stored)


class Catalog:
    """An open catalog. Raises CatalogError when RocksDB fails, ConfigError at opening."""

    def __init__(self, path: Path, *, first_id: int = FIRST_ID, read_only: bool = False) -> None:
        """`first_id` is where a new catalog begins to count; one to be read must be there."""
        self.path = path
        self.answers = Answers()
        self.carried: dict[str, str] = {}  # facts that go along with the next change
        self._ballast = path.with_name(path.name + ".ballast")
        self._recovered = -RECOVERY_PERIOD
        self._read_only = False  # for want of room
        self._looked_at = read_only
        self._failed = False  # a write, and not for want of room
        self.unreadable: set[int] = set()  # inodes whose records make no sense, so far
        self._check_whole()
        try:
            if read_only:
                self._db = Rdict(str(path), _options(), access_type=_READ_ONLY)
            else:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._db = Rdict(str(path), _options())
                self.set_ballast()
        except Exception as error:  # rocksdict raises plain Exception
            raise ConfigError(f"catalog {path} cannot be opened: {error}") from error
        self._synced = WriteOptions()
        self._synced.sync = True
        self._unsynced = WriteOptions()
        try:
            self._check_format()
            self._next_id = self._reserved = self._first_free(first_id)
        except BaseException:
            self._db.close()
            raise

    def _check_whole(self) -> None:
        """RocksDB would begin anew beside tables whose CURRENT is lost, and delete them."""
        left = [*self.path.glob("*.sst"), *self.path.glob("[0-9]*.log")]
        if left and not (self.path / "CURRENT").exists():
            raise ConfigError(
                f"catalog {self.path} has lost its file CURRENT, but has {left[0].name}: nothing "
                "is changed; restore it, or remove the whole NVMe directory to begin anew"
            )

    def _check_format(self) -> None:
        found = self.fact("format")
        if found is None:
            with self.batch() as batch:
                batch.set_fact("format", str(FORMAT))
        elif not found.isdigit() or int(found) > FORMAT:
            raise ConfigError(
                f"catalog {self.path} has format {found}, this kvfs reads up to {FORMAT}: "
                "mount it with the kvfs that wrote it, or a newer one"
            )
        self.format = int(found or FORMAT)

    def _first_free(self, first_id: int) -> int:
        found = self.fact("next_id")
        if found is not None and not found.isdigit():
            raise ConfigError(f"catalog {self.path} counts from {found!r}, expected a number")
        return int(found or first_id)

    def close(self) -> None:
        """Sync and close. What was committed before survives a power loss after.

        Raises CatalogError.
        """
        try:
            if not self._looked_at:
                self._db.flush_wal(sync=True)
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: sync failed: {error}") from error
        try:
            self._db.close()
        except Exception as error:  # noqa: BLE001 (rocksdict raises no other)
            # On a full disk: nothing is lost, the next opening reads it from the log.
            log.warning("catalog %s: tables were not written at the end: %s", self.path, error)

    # Writing

    def batch(self) -> Batch:
        return Batch(self)

    def commit(self, changes: Changes, *, sync: bool) -> None:
        options = self._synced if sync else self._unsynced
        if self.carried:
            changes += [
                (b"m" + name.encode(), value.encode()) for name, value in self.carried.items()
            ]
        try:
            if failpoints.active:
                failpoints.reach("catalog.commit")
            self._db.write(_write_batch(changes), options)
        except Exception as error:  # noqa: BLE001 (rocksdict raises no other)
            self._recover(error)
            try:
                self._db.write(_write_batch(changes), options)
            except Exception as again:
                raise CatalogError(f"catalog {self.path}: write failed: {again}") from again
        self.carried.clear()
        if failpoints.active:
            failpoints.reach("catalog.committed")

    def set_ballast(self) -> None:
        """Keep some room for the day on which others have filled the disk. Raises OSError."""
        os.stat(self.path)  # whose file system may be gone: nothing is made in its place
        with self._ballast.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, BALLAST)

    def _recover(self, error: Exception) -> None:
        """RocksDB takes no write after one that failed: give it room, and open it anew.

        While the disk takes no write it stays as it is: what is in its memory can be read.
        Blocks for as long as its log takes to read, once in RECOVERY_PERIOD. Raises CatalogError.
        """
        now = time.monotonic()
        if now - self._recovered < RECOVERY_PERIOD:
            raise CatalogError(f"catalog {self.path}: write failed: {error}") from error
        self._recovered = now
        if not ("No space left" in str(error) or self._read_only):
            again, self._failed = self._failed, True
            if self._looked_at or not again:
                raise CatalogError(f"catalog {self.path}: write failed: {error}") from error
            self._try_disk(error)
        log.error("catalog %s: a write failed, it is opened anew: %s", self.path, error)
        try:
            self._ballast.unlink(missing_ok=True)
            self._close_broken()
            self._db = Rdict(str(self.path), _options())
            self._read_only = self._failed = False
        except Exception as again:
            self._open_for_reading()
            raise CatalogError(f"catalog {self.path}: cannot be opened anew: {again}") from again

    def _try_disk(self, error: Exception) -> None:
        """Raises CatalogError if a small write does not reach the disk."""
        path = self.path / "trial"
        try:
            with path.open("wb") as file:
                file.write(b"trial")
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
        except OSError as again:
            raise CatalogError(
                f"catalog {self.path}: write failed: {error}; its disk takes none: {again}"
            ) from error

    def _close_broken(self) -> None:
        try:
            self._db.close()
        except Exception as error:  # noqa: BLE001 (rocksdict raises no other)
            log.debug("catalog %s: closed, and says again: %s", self.path, error)

    def _open_for_reading(self) -> None:
        """There is not even room for a new log: what is there can still be looked up."""
        try:
            self._db = Rdict(str(self.path), _options(), access_type=_READ_ONLY)
            self._read_only = True
        except Exception as error:  # noqa: BLE001 (rocksdict raises no other)
            log.error("catalog %s cannot be read: %s", self.path, error)

    def next_id(self) -> int:
        """A number that was never given out before, for an inode or a cookie."""
        if self._next_id >= self._reserved:
            with self.batch() as batch:
                batch.set_fact("next_id", str(self._next_id + IDS_AT_ONCE))
                batch.sync = True  # once in a million: a crash must not hand a number out twice
            self._reserved = self._next_id + IDS_AT_ONCE
        self._next_id += 1
        return self._next_id - 1

    @property
    def counter(self) -> int:
        """Every number that was given out is smaller."""
        return self._next_id

    def count_from(self, number: int) -> None:
        """The counter is behind what was given out: go on from a greater number."""
        with self.batch() as batch:
            batch.set_fact("next_id", str(number))
            batch.sync = True
        self._next_id = self._reserved = number

    # Reading

    def _get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: read failed: {error}") from error
        return value

    def _scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Pairs whose key begins with `prefix`, from prefix + start on; keys without the prefix."""
        options = ReadOptions()
        options.set_iterate_upper_bound(_after(prefix))
        cut = len(prefix)
        found = self._iterator(options)
        # Rdict.items() would end at a block that cannot be read as it does behind the last key.
        valid, key, value, step = found.valid, found.key, found.value, found.next
        try:
            found.seek(prefix + start)
            while valid():
                yield key()[cut:], value()
                step()
            found.status()
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: scan failed: {error}") from error
        finally:
            del found, valid, key, value, step  # RocksDB stays open while an error's frame has them

    def _iterator(self, options: ReadOptions) -> RdictIter:
        try:
            return self._db.iter(options)
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: scan failed: {error}") from error

    def records(self, kind: bytes, under: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Every key of a kind, without it, and its value, as all are at the first of them.

        under: only those whose keys begin so.
        What changes meanwhile is not seen. Raises CatalogError, also if the catalog is opened anew
        meanwhile, which it cannot be while somebody reads the old one.
        """
        opened = self._db
        for key, value in self._scan(kind + under):
            yield under + key, value
            if self._db is not opened:
                raise CatalogError(f"catalog {self.path} was opened anew while it was read")

    def record(self, kind: bytes, key: bytes) -> bytes | None:
        """What is there now under one key."""
        return self._get(kind + key)

    def fact(self, name: str) -> str | None:
        value = self._get(b"m" + name.encode())
        return None if value is None else value.decode()

    def inode(self, ino: int) -> Inode | None:
        """Raises CatalogError also for a record that makes no sense."""
        record = self._get(_inode_key(ino))
        if record is None:
            return None
        found = self._readable(ino, record)
        if found is None:
            raise CatalogError(f"catalog {self.path}: the record of inode {ino} makes no sense")
        return found

    def _readable(self, ino: int, record: bytes) -> Inode | None:
        """The inode, or None for a record that makes no sense."""
        try:
            return Inode.unpack(ino, record)
        except struct.error as error:
            if ino not in self.unreadable:
                self.unreadable.add(ino)
                log.error(
                    "catalog %s: the record of inode %d makes no sense (%s): "
                    "kvfs fsck --repair removes it",
                    *(self.path, ino, error),
                )
            return None

    def inodes(self, inos: Sequence[int]) -> list[Inode | None]:
        """Many at once; None where there is none, or an unreadable one."""
        if not inos:
            return []
        try:
            records = self._db.get([_inode_key(ino) for ino in inos])
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: read failed: {error}") from error
        found = list(zip(inos, records, strict=True))  # type: ignore[arg-type]
        try:
            return [None if data is None else Inode.unpack(ino, data) for ino, data in found]
        except struct.error:
            return [None if data is None else self._readable(ino, data) for ino, data in found]

    def inodes_after(self, ino: int, limit: int) -> list[Inode]:
        """Up to `limit` inodes with greater numbers, in order; without the `unreadable` ones."""
        found: list[Inode] = []
        for key, record in self._scan(b"i", _U64.pack(ino + 1)):
            inode = self._readable(_U64.unpack(key)[0], record) if len(key) == _U64.size else None
            if inode is not None:
                found.append(inode)
            if len(found) == limit:
                break
        return found

    def lookup(self, parent: int, name: bytes) -> Dentry | None:
        value = self._get(_name_key(parent, name))
        return None if value is None else Dentry(name, *_TWO.unpack(value))

    def dentry(self, parent: int, cookie: int) -> Dentry | None:
        """The entry that one of an inode's links means."""
        value = self._get(_cookie_key(parent, cookie))
        return None if value is None else Dentry(value[8:], _U64.unpack_from(value)[0], cookie)

    def entries_after(self, parent: int, cookie: int, limit: int) -> list[Dentry]:
        """Up to `limit` entries of a directory with greater cookies, in order."""
        found = []
        for key, value in self._scan(b"c" + _U64.pack(parent), _U64.pack(cookie + 1)):
            found.append(Dentry(value[8:], _U64.unpack_from(value)[0], _U64.unpack(key)[0]))
            if len(found) == limit:
                break
        return found

    def xattr(self, ino: int, name: bytes) -> bytes | None:
        return self._get(_xattr_key(ino, name))

    def xattr_names(self, ino: int) -> list[bytes]:
        return [name for name, _ in self._scan(b"x" + _U64.pack(ino))]

    def answer_entries(self) -> list[tuple[bytes, bytes]]:
        return [(b"q" + key, value) for key, value in self._scan(b"q")]

    def marks(self, kind: bytes) -> list[tuple[int, bytes]]:
        """(inode, value) of all that is marked so, by number; not what has no number for a key."""
        return [
            (_U64.unpack(key)[0], value) for key, value in self._scan(kind) if len(key) == _U64.size
        ]

    def mark(self, kind: bytes, ino: int) -> bytes | None:
        """What an inode is marked with; None if it is not."""
        return self._get(kind + _U64.pack(ino))

    def unfinished(self) -> list[int]:
        return [ino for ino, _ in self.marks(b"o")]


def _write_batch(changes: Changes) -> WriteBatch:
    """RocksDB's form of it, which can be written once only."""
    batch = WriteBatch(raw_mode=True)
    for key, value in changes:
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)
    return batch


def _after(prefix: bytes) -> bytes:
    """The smallest key behind all keys that begin with `prefix` (which never ends in 0xff)."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1])


def _options() -> Options:
    """Memory that does not grow with the number of objects: 32 MiB of blocks, 2 x 16 of writes."""
    table = BlockBasedOptions()
    table.set_block_cache(Cache(32 << 20))
    # Indices and filters stay out of the block cache: 10^6 objects' do not fit, and a look-up that
    # has to read them again took 330 us instead of 5 (memory is the same, 50 MiB).
    table.set_cache_index_and_filter_blocks(v=False)
    table.set_bloom_filter(
        10, block_based=False
    )  # misses are the usual answer to an engine's lookup
    table.set_format_version(5)
    options = Options(raw_mode=True)
    options.create_if_missing(create_if_missing=True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_size(16 << 20)
    options.set_max_write_buffer_number(3)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_max_open_files(512)
    options.set_keep_log_file_num(2)
    options.set_max_background_jobs(2)
    # Without a bound a small, busy column keeps old logs alive and a restart replays them.
    options.set_max_total_wal_size(64 << 20)
    return options
