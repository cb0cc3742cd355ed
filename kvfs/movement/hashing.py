"""The digest of a file: of all its bytes, or of those that are not zeros; and where its data is.

Contract: `data_ranges` names the parts of a file that are in no hole, so that the rest is not read.
`Dense` is the xxh3-128 of all bytes; it hashes holes from memory, at 50 GB/s, which still is time
for each of their bytes. `Sparse` is for files that are mostly holes: the xxh3-128 of a prefix, each
block of BLOCK bytes that has another byte than zero with its offset before it, and the size. It
does not depend on what a file system makes holes of, and takes time for the data only. SPARSE
before it tells it from the other kind, which it never equals.
Runs in workers: it imports little. Not for choosing the kind (`Inode.sparse`).
"""

import errno
import os
from collections.abc import Iterator
from struct import Struct

import xxhash

SPARSE = b"s"  # as `kvfs.catalog` has it, which workers need not load
SPARSE_LENGTH = 17
BLOCK = 4096  # bytes: a page, whatever the file system's block is
_ZEROS = memoryview(bytes(1 << 20))
_ZERO_BLOCK = bytes(BLOCK)
_NUMBER = Struct("<Q")


def data_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each part of the first `size` bytes that is not in a hole, by whole blocks.

    A file with as many blocks as bytes is one part: only others depend on how well the file system
    knows its holes. Raises OSError.
    """
    if size and os.fstat(fd).st_blocks * 512 >= size:
        yield 0, size
        return
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there is no more
                return
            raise
        if start >= size:
            return
        end = os.lseek(fd, start, os.SEEK_HOLE)
        start -= start % BLOCK
        position = min(size, end + -end % BLOCK)
        yield start, position


class Dense:
    """Of all bytes."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self._position = 0

    def update(self, position: int, data: memoryview) -> None:
        """Data from a position on; what is between it and the data before is a hole."""
        self._skip(position)
        self._state.update(data)
        self._position = position + len(data)

    def digest(self, size: int) -> bytes:
        """Of a file of so many bytes."""
        self._skip(size)
        return self._state.digest()

    def _skip(self, position: int) -> None:
        while (hole := position - self._position) > 0:
            zeros = _ZEROS[:hole]
            self._state.update(zeros)
            self._position += len(zeros)


class Sparse:
    """Of what is not zeros."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128(b"kvfs: blocks that are not zeros\n")

    def update(self, position: int, data: memoryview) -> None:
        """Data from a position on that is a multiple of BLOCK; whole blocks but at the end."""
        for start in range(0, len(data), BLOCK):
            block = bytes(data[start : start + BLOCK])
            if block != _ZERO_BLOCK[: len(block)]:
                self._state.update(_NUMBER.pack(position + start))
                self._state.update(block)

    def digest(self, size: int) -> bytes:
        """Of a file of so many bytes."""
        self._state.update(_NUMBER.pack(size))
        return SPARSE + self._state.digest()
