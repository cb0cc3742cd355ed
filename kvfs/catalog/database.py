"""RocksDB, with recovery when its disk is full or fails.

Contract: keys and values are bytes. A write is one batch, atomic if the process dies. After a power
loss the newest writes may be missing, never a part of one. If a write fails, the database is opened
again, with disk room that was kept for this case, and the write is tried once more. If even that
fails, the database can still be read as long as RocksDB allows it. Calls take microseconds, and the
daemon's loop makes them. No call waits for a disk in the usual case: the write-ahead log goes to
the page cache. RocksDB reads its log up to the first damage and silently skips the rest. Therefore
each opening compares the log with the journal, and takes the missing changes from the journal
(`Recovered`).
"""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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

from kvfs import failpoints, mounts, own_files, runtime
from kvfs.catalog import journal
from kvfs.catalog.journal import Changes, Journal
from kvfs.catalog.keys import BOOT, CHANGES, UNJOURNALED
from kvfs.errors import CatalogError, ConfigError

log = logging.getLogger(__name__)

BALLAST = 8 << 20  # bytes; by the size of a record some 30,000 changes, not measured
RECOVERY_PERIOD = 1.0  # s between two recoveries

_READ_ONLY = AccessType.read_only(error_if_log_file_exist=False)

RESTORED_AT_ONCE = 1000  # changes from the journal in one write
LOOKED_AT = 0.2  # s that a mount spends reading its tables, some 200,000 objects
_DAMAGE = ("Corruption", "No such file", "Is a directory", "File exists")
CURE = "nothing is changed; restore it, or remove the whole NVMe directory to begin anew"


class Recovered(NamedTuple):
    """The result of an opening: the log's last change is `number`; the journal had `taken` more."""

    number: int = 0
    taken: int = 0
    lost: int = 0  # changes that are lost as well, at least, on this mount of the file system
    unreached: int = 0  # the same on another one: they did not reach the disk
    no_journal: bool = False
    short: bool = False  # the journal ends before the log does: both may lack their ends


class Database:
    """An open database. Raises CatalogError when RocksDB fails, ConfigError at opening.

    `openings` counts how often it was opened. An iterator is valid only within one opening.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open or create it. With `read_only` the database must exist."""
        self.path = path
        self.openings = 0
        self._ballast = path.with_name(path.name + ".ballast")
        self._recovered = -RECOVERY_PERIOD
        self._read_only = False  # for lack of room
        self._looked_at = read_only
        self._failed = False  # a write failed, and not for lack of room
        self._number = 0  # number of the last change
        self.recovered = Recovered()
        self._check_whole()
        self.fresh = not (path / "CURRENT").exists()  # RocksDB has never written here
        try:
            if not read_only:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            where = f"{runtime.boot_id()} {mounts.number(path)}" if path.exists() else ""
            self.journal = Journal(path.with_name(path.name + ".journal"), path, where)
            self._open(read_only=read_only)
            if not read_only:
                self.set_ballast()
        except Exception as error:  # rocksdict raises plain Exception
            damaged = any(told in str(error) for told in _DAMAGE)
            cure = f": {CURE}" if damaged else ""
            raise ConfigError(f"catalog {path} cannot be opened: {_line(error)}{cure}") from error
        self._synced = WriteOptions()
        self._synced.sync = True
        self._unsynced = WriteOptions()

    def _open(self, *, read_only: bool = False) -> None:
        access = _READ_ONLY if read_only else AccessType.read_write()
        self._db = Rdict(str(self.path), _options(), access_type=access)
        self.openings += 1
        if not read_only:
            self._join()
        elif self._looked_at:
            self.recovered, _ = self._compare()

    def _compare(self) -> tuple[Recovered, list[Changes]]:
        """Find the changes missing in the log, and those that the journal has without a gap."""
        number = int(self._db.get(CHANGES) or 0)
        found = journal.read(self.journal.path, number)
        if found is None:
            lost = max(0, self._number - number)
            return Recovered(number, 0, lost, no_journal=True), []
        missing: list[Changes] = []
        while (body := found.records.get(number + len(missing) + 1)) is not None:
            missing.append(journal.unpacked(body))
        left = max(0, max(found.end, self._number) - number - len(missing))
        where = found.where or (self._db.get(BOOT) or b"").decode("utf-8", "replace")
        here = where in {"", self.journal.where}
        lost, unreached = (left, 0) if here else (0, left)
        # If a process dies between the two writes of a change, the journal lacks the last change,
        # whole.
        expected = found.last + (found.end == found.last)
        silent = int(self._db.get(UNJOURNALED) or 0)
        short = here and not self._number and max(expected, silent) < number
        return Recovered(number, len(missing), lost, unreached, short=short), missing

    def _join(self) -> None:
        """Take from the journal the changes that the log lacks, and begin a new journal."""
        found, missing = self._compare()
        at = found.number
        while missing:
            some, missing = missing[:RESTORED_AT_ONCE], missing[RESTORED_AT_ONCE:]
            at += len(some)
            changes = [change for one in some for change in one]
            self._db.write(_write_batch(changes, at))
        if found.taken:
            self._db.flush()
            log.warning(
                "catalog %s: its log ends too early, after change %d: the %d changes after it are "
                "taken from the journal",
                *(self.path, found.number, found.taken),
            )
        if found.lost and self.openings > 1:  # at the first opening the catalog logs more
            log.error(
                "catalog %s: it was opened anew, and lacks its newest %d changes: run kvfs fsck",
                *(self.path, found.lost),
            )
        self.recovered = found
        self._number = at + found.lost + found.unreached
        self.journal.begin(self._number)

    def _check_whole(self) -> None:
        """Raise if CURRENT is missing beside tables: RocksDB would delete the tables."""
        left = [*self.path.glob("*.sst"), *self.path.glob("[0-9]*.log")]
        if left and not (self.path / "CURRENT").exists():
            raise ConfigError(
                f"catalog {self.path} has lost its file CURRENT, but has {left[0].name}: {CURE}"
            )

    def look_through(self, seconds: float) -> None:
        """Read the tables for at most `seconds`. Raises CatalogError for a damaged table."""
        found = self._iterator(ReadOptions())
        until = time.monotonic() + seconds
        valid, step = found.valid, found.next
        try:
            found.seek_to_first()
            while valid() and time.monotonic() < until:
                step()
            found.status()
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: scan failed: {_line(error)}") from error
        finally:
            del found, valid, step

    def close(self) -> None:
        """Sync and close. Changes written before this call survive a later power loss.

        Raises CatalogError.
        """
        self.journal.close()
        try:
            if not self._looked_at:
                self._db.flush_wal(sync=True)
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: sync failed: {error}") from error
        try:
            self._db.close()
        except Exception as error:  # noqa: BLE001 (rocksdict raises no other)
            # The disk is full. Nothing is lost: the next opening reads the changes from the log.
            log.warning(
                "catalog %s: tables were not written at the end, nothing is lost: %s",
                self.path,
                error,
            )

    def discard(self) -> None:
        """Close a database that nothing was written to."""
        self.journal.close()
        self._db.close()

    # Reading

    @property
    def state(self) -> tuple[int, int]:
        """A token: while it stays the same, everything that was read is still true."""
        return self.openings, self._number

    def get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: read failed: {_line(error)}") from error
        return value

    def get_all(self, keys: list[bytes]) -> list[bytes | None]:
        try:
            return self._db.get(keys)  # type: ignore[arg-type, return-value]  # as it says itself
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: read failed: {_line(error)}") from error

    def scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Pairs whose key begins with `prefix`, from prefix + start on; keys without the prefix.

        All pairs are as of the first of them.
        """
        options = ReadOptions()
        options.set_iterate_upper_bound(_after(prefix))
        cut = len(prefix)
        found = self._iterator(options)
        # Rdict.items() would end at an unreadable block as if it were the last key.
        valid, key, value = found.valid, found.key, found.value
        step = found.next
        try:
            found.seek(prefix + start)
            while valid():
                yield key()[cut:], value()
                step()
            found.status()
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: scan failed: {_line(error)}") from error
        finally:
            del found, valid, key, value, step  # an error's frame would keep RocksDB open

    def keys_before(self, prefix: bytes, start: bytes) -> Iterator[bytes]:
        """Keys that begin with `prefix`, without it, from prefix + start on towards lesser ones."""
        cut = len(prefix)
        found = self._iterator(ReadOptions())
        valid, key, step = found.valid, found.key, found.prev
        try:
            found.seek_for_prev(prefix + start)
            # The lower bound of rocksdict 0.3.29 sets the upper one.
            while valid() and (one := key()).startswith(prefix):
                yield one[cut:]
                step()
            found.status()
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: scan failed: {_line(error)}") from error
        finally:
            del found, valid, key, step  # as above

    def _iterator(self, options: ReadOptions) -> RdictIter:
        try:
            return self._db.iter(options)
        except Exception as error:
            raise CatalogError(f"catalog {self.path}: scan failed: {_line(error)}") from error

    # Writing

    def write(self, changes: Changes, *, sync: bool) -> None:
        """Write all changes or none, if necessary after a recovery."""
        options = self._synced if sync else self._unsynced
        number = self._number + 1
        try:
            if failpoints.active:
                failpoints.reach("catalog.commit")
            self._db.write(self._batch(changes, number), options)
        except Exception as error:  # noqa: BLE001 (rocksdict raises no other)
            self._recover(error)
            number = self._number + 1
            try:
                self._db.write(self._batch(changes, number), options)
            except Exception as again:
                raise CatalogError(f"catalog {self.path}: write failed: {again}") from again
        self._number = number
        self.journal.append(number, changes)

    def _batch(self, changes: Changes, number: int) -> WriteBatch:
        batch = _write_batch(changes, number)
        if self.journal.why:
            batch.put(UNJOURNALED, b"%d" % number)
        return batch

    def set_ballast(self) -> None:
        """Keep some disk room for the case that others fill the disk. Raises OSError."""
        os.stat(self.path)  # if its file system is gone, raise: create nothing in its place
        flags = os.O_WRONLY | os.O_CREAT
        file = own_files.open_regular(self._ballast, flags, "room for a full disk", "remove it")
        try:
            os.posix_fallocate(file, 0, BALLAST)
        finally:
            os.close(file)

    def _recover(self, error: Exception) -> None:
        """Give RocksDB room and open it again, because it refuses writes after one that failed.

        While the disk refuses writes the database stays as it is: data in its memory can be read.
        Blocks while RocksDB reads its log, once in RECOVERY_PERIOD. Raises CatalogError.
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
            try:
                self._db.close()
            except Exception as closing:  # noqa: BLE001 (rocksdict raises no other)
                log.debug("catalog %s: closed, and says again: %s", self.path, closing)
            self._open()
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

    def _open_for_reading(self) -> None:
        """Open read-only: the disk has no room even for a new log, but reads still work."""
        try:
            self._open(read_only=True)
            self._read_only = True
        except Exception as error:  # noqa: BLE001 (rocksdict raises no other)
            log.error("catalog %s cannot be read, programs get EIO: %s", self.path, error)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _write_batch(changes: Changes, number: int) -> WriteBatch:
    """The changes in RocksDB's form, which can be written only once."""
    batch = WriteBatch(raw_mode=True)
    batch.put(CHANGES, b"%d" % number)
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
    """Options with bounded memory for any number of objects: 32 MiB of blocks, 2 x 16 of writes."""
    table = BlockBasedOptions()
    table.set_block_cache(Cache(32 << 20))
    # Indices and filters stay out of the block cache: those of 10^6 objects do not fit. A look-up
    # that reads them again took 330 us instead of 5 (memory is the same, 50 MiB).
    table.set_cache_index_and_filter_blocks(v=False)
    # Misses are the usual answer to an engine's lookup.
    table.set_bloom_filter(10, block_based=False)
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
