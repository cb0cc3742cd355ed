"""The files that a mover reads and makes: their holes, their digests and their names.

Contract: `reading` opens a backing file, never a link. `part` makes a new file with a temporary
name, and `complete` gives the file its final name. A failure within the block of `part` removes the
file. All of them raise OSError.

`data_ranges` gives the parts of a file outside holes, so that holes are not read. `DenseDigest` is
the xxh3-128 of all bytes. It hashes holes from memory, at 50 GB/s, which still takes time for each
of their bytes. `SparseDigest` is for files that are mostly holes. It is the xxh3-128 of these
bytes: a fixed text, then the offset and the bytes of each block (BLOCK bytes) that is not all
zeros, and at the end the size. It does not depend on the holes that a file system makes, and takes
time for the data only. Such a digest begins with SPARSE, which distinguishes it from a
`DenseDigest`. Workers run this module, so it imports little. Not for choosing the kind of digest
(`Inode.sparse`).
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from struct import Struct

import xxhash

from kvfs.acl import FILE_MODE

PART = ".part"


class SourceChangedError(Exception):
    """The source is not the file that the job expects: its size or time differs."""


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """Open a file. If the open makes it, its mode is that of all object files (`acl.FILE_MODE`)."""
    fd = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
    try:
        yield fd
    finally:
        os.close(fd)


def reading(source: str) -> AbstractContextManager[int]:
    """Open a backing file to read it."""
    return opened(source, os.O_RDONLY | os.O_NOFOLLOW)


def nameless(beside: str) -> AbstractContextManager[int]:
    """Make a file without a name in the directory of `beside`, to read and write it."""
    return opened(os.path.dirname(beside), os.O_TMPFILE | os.O_RDWR)


def expect_same(inp: int, source: str, size: int, mtime_ns: int) -> None:
    """Raises SourceChangedError if an open file has another size, or was written to."""
    found = expect_size(inp, source, size)
    if found.st_mtime_ns != mtime_ns:
        raise SourceChangedError(
            f"{source} was written at {found.st_mtime_ns} ns, expected {mtime_ns}"
        )


def expect_size(inp: int, source: str, size: int) -> os.stat_result:
    """Return the status of an open file. Raises SourceChangedError if it has another size."""
    found = os.fstat(inp)
    if found.st_size != size:
        raise SourceChangedError(f"{source} has {found.st_size} bytes, expected {size}")
    return found


@contextmanager
def part(destination: str) -> Iterator[int]:
    """Make a new file beside its destination, to read and write it."""
    path = destination + PART
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as out:
        try:
            yield out
        except BaseException:
            Path(path).unlink(missing_ok=True)
            raise


def complete(destination: str) -> None:
    """Give the file its final name; remove the file if that fails."""
    path = destination + PART
    try:
        os.rename(path, destination)
    except OSError:
        Path(path).unlink(missing_ok=True)
        raise


def remove_parts(destinations: Sequence[str]) -> None:
    """Remove the half-made files of a mover that was killed."""
    for destination in destinations:
        Path(destination + PART).unlink(missing_ok=True)


SPARSE = b"s"  # as in `kvfs.catalog`, which workers need not load
SPARSE_LENGTH = 17
BLOCK = 4096  # bytes: a page, for any block size of the file system
_ZEROS = memoryview(bytes(1 << 20))
_ZERO_BLOCK = bytes(BLOCK)
_NUMBER = Struct("<Q")


def data_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each part of the first `size` bytes outside holes, by whole blocks.

    A file whose blocks take at least `size` bytes is one part: its digest does not depend on the
    holes that the file system reports. Raises OSError.
    """
    if size and os.fstat(fd).st_blocks * 512 >= size:
        yield 0, size
        return
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there is no more data
                return
            raise
        if start >= size:
            return
        end = os.lseek(fd, start, os.SEEK_HOLE)
        start -= start % BLOCK
        position = min(size, end + -end % BLOCK)
        yield start, position


class DenseDigest:
    """The digest of all bytes."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self._position = 0

    def update(self, position: int, data: memoryview) -> None:
        """Add data at a position; the gap before it is a hole."""
        self._skip(position)
        self._state.update(data)
        self._position = position + len(data)

    def digest(self, size: int) -> bytes:
        """The digest of a file of this many bytes."""
        self._skip(size)
        return self._state.digest()

    def _skip(self, position: int) -> None:
        while (hole := position - self._position) > 0:
            zeros = _ZEROS[:hole]
            self._state.update(zeros)
            self._position += len(zeros)


class SparseDigest:
    """The digest of the nonzero blocks."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128(b"kvfs: blocks that are not zeros\n")

    def update(self, position: int, data: memoryview) -> None:
        """Add data at a multiple of BLOCK; whole blocks, except at the end."""
        for start in range(0, len(data), BLOCK):
            block = bytes(data[start : start + BLOCK])
            if block != _ZERO_BLOCK[: len(block)]:
                self._state.update(_NUMBER.pack(position + start))
                self._state.update(block)

    def digest(self, size: int) -> bytes:
        """The digest of a file of this many bytes."""
        self._state.update(_NUMBER.pack(size))
        return SPARSE + self._state.digest()
