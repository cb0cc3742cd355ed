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
  m name             facts about the whole: format, counter, session, ...
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from kvfs.catalog.inode import Inode
from kvfs.errors import CatalogError, ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

FORMAT = 1
FIRST_ID = 16  # below: the root's inode, and the cookies of '.' and '..'
IDS_AT_ONCE = 1 << 20  # one synced write reserves so many numbers

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


class Batch:
    """Changes that happen together or not at all: `with catalog.batch() as batch: ...`.

    Leaving the block commits; an exception discards everything. Raises CatalogError.
    """

    __slots__ = ("_catalog", "_write", "sync")

    def __init__(self, catalog: "Catalog") -> None:
        self._catalog = catalog
        self._write = WriteBatch(raw_mode=True)
        self.sync = False

    def put(self, inode: Inode) -> None:
        self._write.put(_inode_key(inode.ino), inode.pack())

    def delete(self, inode: Inode) -> None:
        """Forget an inode with its attributes; its names are unlinked apart."""
        self._write.delete(_inode_key(inode.ino))
        for name in self._catalog.xattr_names(inode.ino):
            self._write.delete(_xattr_key(inode.ino, name))

    def link(self, parent: int, entry: Dentry) -> None:
        self._write.put(_name_key(parent, entry.name), _TWO.pack(entry.ino, entry.cookie))
        self._write.put(_cookie_key(parent, entry.cookie), _U64.pack(entry.ino) + entry.name)

    def unlink(self, parent: int, entry: Dentry) -> None:
        self._write.delete(_name_key(parent, entry.name))
        self._write.delete(_cookie_key(parent, entry.cookie))

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        self._write.put(_xattr_key(ino, name), value)

    def remove_xattr(self, ino: int, name: bytes) -> None:
        self._write.delete(_xattr_key(ino, name))

    def mark_unfinished(self, ino: int) -> None:
        self._write.put(b"o" + _U64.pack(ino), b"")

    def mark_finished(self, ino: int) -> None:
        self._write.delete(b"o" + _U64.pack(ino))

    def set_fact(self, name: str, value: str) -> None:
        self._write.put(b"m" + name.encode(), value.encode())

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self._catalog.commit(self._write, sync=self.sync)


class Catalog:
    """An open catalog. Raises CatalogError when RocksDB fails, ConfigError at opening."""

    def __init__(self, path: Path, *, first_id: int = FIRST_ID) -> None:
        """`first_id` is where a new catalog begins to count."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = Rdict(str(path), _options())
        except Exception as error:  # rocksdict raises plain Exception
            raise ConfigError(f"catalog {path} cannot be opened: {error}") from error
        self._synced = WriteOptions()
        self._synced.sync = True
        self._unsynced = WriteOptions()
        try:
            self._check_format()
            self._next_id = self._reserved = int(self.fact("next_id") or first_id)
        except BaseException:
            self._db.close()
            raise

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

    def close(self) -> None:
        """Sync and close. What was committed before survives a power loss after.

        Raises CatalogError.
        """
        try:
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

    def commit(self, write: WriteBatch, *, sync: bool) -> None:
        try:
            self._db.write(write, self._synced if sync else self._unsynced)
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: write failed: {error}") from error

    def next_id(self) -> int:
        """A number that was never given out before, for an inode or a cookie."""
        if self._next_id >= self._reserved:
            with self.batch() as batch:
                batch.set_fact("next_id", str(self._next_id + IDS_AT_ONCE))
                batch.sync = True  # once in a million: a crash must not hand a number out twice
            self._reserved = self._next_id + IDS_AT_ONCE
        self._next_id += 1
        return self._next_id - 1

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
        try:
            for key, value in self._db.items(from_key=prefix + start, read_opt=options):
                yield key[cut:], value  # type: ignore[index, misc]  # raw mode: always bytes
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: scan failed: {error}") from error

    def fact(self, name: str) -> str | None:
        value = self._get(b"m" + name.encode())
        return None if value is None else value.decode()

    def inode(self, ino: int) -> Inode | None:
        record = self._get(_inode_key(ino))
        return None if record is None else Inode.unpack(ino, record)

    def inodes(self, inos: Sequence[int]) -> list[Inode | None]:
        """Many at once; None where there is none."""
        if not inos:
            return []
        try:
            records = self._db.get([_inode_key(ino) for ino in inos])
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: read failed: {error}") from error
        return [
            None if record is None else Inode.unpack(ino, record)
            for ino, record in zip(inos, records, strict=True)  # type: ignore[arg-type]
        ]

    def inodes_after(self, ino: int, limit: int) -> list[Inode]:
        """Up to `limit` inodes with greater numbers, in order."""
        found = []
        for key, record in self._scan(b"i", _U64.pack(ino + 1)):
            found.append(Inode.unpack(_U64.unpack(key)[0], record))
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

    def unfinished(self) -> list[int]:
        return [_U64.unpack(key)[0] for key, _ in self._scan(b"o")]


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
