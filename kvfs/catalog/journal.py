"""The catalog's second log: each change once more, in files that RocksDB does not know.

Contract: RocksDB reads its log up to the first damaged record, and reports nothing. Changes are
numbered, and the database stores the number of its last change. So the journal tells how many
changes are missing, and has them. `append` follows each write of the database, and never fails. If
the journal cannot be written, kvfs begins a new one later, and `why` gives the reason meanwhile.
`read` trusts a record by its checksum only. A segment is deleted once RocksDB's tables have all its
changes. Nothing is synced. The journal survives the death of the process, as the log does; after a
power loss it has the part that reached the disk.

A segment is named by the number of its first change, in hexadecimal. It is a row of records:
`_HEAD` (magic, checksum, number, length of the body), then the changes in MessagePack: an array of
(key, value), nil to delete. The first record has the number before the segment's first change, and
says on which mount of its file system it was written.
"""

import contextlib
import errno
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import msgpack

from kvfs import own_files
from kvfs.errors import ConfigError

log = logging.getLogger(__name__)

SEGMENT = 8 << 20  # bytes; read within 20 ms when the catalog is opened
LARGEST = 8 * SEGMENT  # bytes; kvfs reads no more of one segment. One change may exceed SEGMENT
RETRY = 10.0  # s until a new journal is begun after a failed write

Changes = list[tuple[bytes, bytes | None]]

_MAGIC = b"kvj1"
_HEAD = Struct("<4sIQI")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_NAME = re.compile(r"[0-3][0-9a-f]{15}")  # more changes than a catalog ever has
_NEW = "new"  # the name of a segment before its first record


class JournalContent(NamedTuple):
    """The content of a journal. `end`: changes up to this number were made, at least."""

    records: dict[int, bytes]  # changes by their number
    end: int
    last: int  # the greatest number of a change in it
    where: str  # the mount of the file system that the newest segment was written on


class Journal:
    """The journal of one catalog; `where` names this mount of its file system."""

    def __init__(self, path: Path, tables: Path, where: str) -> None:
        self.path = path
        self.where = where
        self.why = ""  # reason why nothing is written
        self._tables = tables  # directory of RocksDB's files
        # 1.9 us for the changes of a create, which struct would pack in 5.
        self._pack = msgpack.Packer(use_bin_type=True).pack
        self._fd = -1
        self._size = 0
        self._tried = 0.0
        self._segments: list[tuple[Path, int]] = []  # full ones, with the newest log of that time
        self._current = path

    # Writing

    def begin(self, number: int) -> None:
        """Begin a new journal after change `number`: the tables have all changes up to it."""
        self.close()
        self._segments.clear()
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            before = [path for _, path in _segments(self.path)]
        except OSError as error:
            self._stop(error)
            return
        self._begin(number)
        if not self.why:
            _unlink([path for path in before if path != self._current])

    def _begin(self, number: int) -> None:
        self._current = self.path / f"{number + 1:016x}"
        self._tried = time.monotonic()
        fresh = self.path / _NEW
        try:
            fresh.unlink(missing_ok=True)
            self._fd = os.open(fresh, _FLAGS, 0o600)
            record = _record(number, self.where.encode())
            self._size = os.write(self._fd, record)
            if self._size < len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fresh.rename(self._current)
            self.why = ""
        except OSError as error:
            self._stop(error)

    def append(self, number: int, changes: Changes) -> None:
        """Write the changes of one batch that RocksDB has taken."""
        if self._fd < 0:
            if time.monotonic() - self._tried < RETRY:
                return
            self._begin(number - 1)
            if self._fd < 0:
                return
        record = _record(number, self._pack(changes))
        try:
            rest = record
            while rest:  # a full disk takes a part, then says why
                rest = rest[os.write(self._fd, rest) :]
            self._size += len(record)
            if self._size > SEGMENT:
                self._rotate(number)
        except OSError as error:
            self._cut()
            self._stop(error)

    def _cut(self) -> None:
        """Cut off a partly written record, so that it does not look like damage."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._size)

    def _rotate(self, number: int) -> None:
        """Begin a new segment.

        A thread deletes those whose changes the tables have. Raises OSError.
        """
        self.close()
        newest = max(self._logs(), default=0)
        self._segments.append((self._current, newest))
        self._begin(number)
        oldest = min(self._logs(), default=0)
        gone = [path for path, log_of_it in self._segments if log_of_it < oldest]
        self._segments = [one for one in self._segments if one[0] not in gone]
        if gone:
            threading.Thread(target=_unlink, args=(gone,), daemon=True).start()

    def _logs(self) -> Iterator[int]:
        """Numbers of RocksDB's logs: RocksDB removes one when the tables have its changes."""
        for name in os.listdir(self._tables):
            number, _, kind = name.partition(".")
            if kind == "log" and number.isdigit():
                yield int(number)

    def _stop(self, error: OSError) -> None:
        self.close()
        if not self.why:
            log.warning(
                "catalog %s: its journal is not written, so that a damaged log could not be "
                "mended; it is tried again: %s",
                *(self._tables, error),
            )
        self.why = str(error)

    def close(self) -> None:
        """Close the file. The next `append` but one begins a new journal."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _unlink(paths: list[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.info("%s stays until the catalog is opened anew: %s", path, error)


def unpacked(body: bytes) -> Changes:
    """The changes of a record whose checksum is right. Raises ValueError for anything else."""
    try:
        found = [(key, value) for key, value in msgpack.unpackb(body)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"a record of {len(body)} bytes has no changes: {error!r}") from error
    changes = [
        (key, value)
        for key, value in found
        if isinstance(key, bytes) and (value is None or isinstance(value, bytes))
    ]
    if len(changes) != len(found):
        raise ValueError(f"a record of {len(body)} bytes has other things than changes")
    return changes


def _record(number: int, body: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, _checksum(number, body), number, len(body)) + body


def _checksum(number: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(number.to_bytes(8, "little")))


# Reading


def _segments(path: Path) -> list[tuple[int, Path]]:
    """All segments, by the number of their first change."""
    found = []
    for name in os.listdir(path) if path.is_dir() else ():
        if _NAME.fullmatch(name):
            found.append((int(name, 16), path / name))
        elif name != _NEW:
            log.info("%s is no file of a journal, and stays", path / name)
    return sorted(found)


def read(path: Path, number: int) -> JournalContent | None:
    """Changes after this number; None if there is no journal. Raises OSError."""
    segments = _segments(path)
    if not segments:
        return None
    # A segment is useless if the next one begins at, or before, the wanted change.
    firsts = [first for first, _ in segments[1:]]
    needed = [
        one
        for one, following in zip(segments, [*firsts, number + 2], strict=True)
        if following > number + 1
    ]
    records: dict[int, bytes] = {}
    end, last, where = 0, 0, ""
    for first, file in needed:
        where, has, tells = _read_segment(file, first, number, records)
        end, last = max(end, tells), max(last, has)
    return JournalContent(records, end, last, where)


def _read_segment(
    path: Path, first: int, after: int, records: dict[int, bytes]
) -> tuple[str, int, int]:
    """Where a segment was written, its greatest change number, and the greatest one it implies.

    Changes after number `after` are added to `records`. Every complete segment has its first
    record.
    """
    try:
        data = _content(path)
    except (ConfigError, OSError) as error:
        log.error("%s cannot be read, its changes may be missing: %s", path, error)
        return "", 0, first
    at, whole, begun, where, has, tells = 0, True, False, "", 0, first - 1
    while at < len(data):
        end = _record_end(data, at)
        if end is None:
            if whole:
                tells += 1  # the damaged part had one change at least
            whole = False
            at = data.find(_MAGIC, at + 1)
            if at < 0:
                break
            continue
        _, _, number, _ = _HEAD.unpack_from(data, at)
        if number == first - 1:
            begun = True
            where = data[at + _HEAD.size : end].decode("utf-8", "replace")
        elif number > after:
            records[number] = data[at + _HEAD.size : end]
        has, tells = max(has, number), max(tells, number)
        at = end
    return where, has, tells if begun else max(tells, first)


def _content(path: Path) -> bytes:
    """The content of a segment. Raises ConfigError, OSError."""
    file = own_files.open_regular(path, os.O_RDONLY, "a segment of a journal", "remove it")
    try:
        size = os.fstat(file).st_size
        if size > LARGEST:
            log.error(
                "%s has %d bytes, expected %d at most: the rest is ignored", path, size, LARGEST
            )
        return os.pread(file, min(size, LARGEST), 0)
    finally:
        os.close(file)


def _record_end(data: bytes, at: int) -> int | None:
    """Where the record ends that begins at `at`; None if no record begins there."""
    if len(data) - at < _HEAD.size:
        return None
    magic, checksum, number, length = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size
    end: int = start + length
    if magic != _MAGIC or end > len(data) or _checksum(number, data[start:end]) != checksum:
        return None
    return end
