"""The jobs of a mover process: copy a backing file, or read it through, and hash it meanwhile.

Contract: runs in a worker process, decides nothing, knows no catalog. A destination gets its final
name only when it is complete, has the source's modification time, and is synced if asked. Workers
import this module, so it imports little. Not for choosing what to move.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvfs import failpoints, mounts
from kvfs.movement.files import (
    DenseDigest,
    SourceChangedError,
    SparseDigest,
    complete,
    data_ranges,
    expect_same,
    expect_size,
    part,
    reading,
    remove_parts,
)

NICENESS = 15  # opens while movers work: see scripts/bench/busy.py
PIECE = 4 << 20  # bytes; larger pieces measured no faster, smaller ones cost system calls


class Moved(NamedTuple):
    """The result of a copy. digest: dense or sparse, see `files`; blocks: of 512 bytes each."""

    digest: bytes
    blocks: int
    cpu_seconds: float = 0.0  # processor time of compressing or decompressing
    mtime_ns: int = 0  # of `read_through`: the file's time, taken after its last byte


class LostError(OSError):
    """The bytes written to a file may be lost, though the page cache may still have them."""


def copy(
    source: str, destination: str, size: int, *, sync: bool, cold: bool, sparse: bool = False
) -> Moved:
    """Copy `size` bytes to a new file beside its final name, then rename it there.

    - sync: fsync before the rename.
    - cold: leave no pages of either file in the page cache, because programs read these bytes
      elsewhere.
    - sparse: the digest is a `SparseDigest`.

    Raises OSError, LostError of the source, SourceChangedError; then nothing is left behind.
    """
    moved = _copy_part(source, destination, size, sync=sync, cold=cold, sparse=sparse)
    _finish(destination)
    return moved


def copy_all(
    items: list[tuple[str, str, int, bool]],
) -> list[Moved | OSError | SourceChangedError]:
    """Copy many small files, (source, destination, size, sparse) each; sync them with one call.

    An fsync for each would cost a journal commit for each: milliseconds for a file of 4 KiB. The
    result has a `Moved` or a failure for each item. Raises OSError if the sync fails; then nothing
    is left behind.
    """
    results: list[Moved | OSError | SourceChangedError] = []
    for source, destination, size, sparse in items:
        try:
            results.append(
                _copy_part(source, destination, size, sync=False, cold=False, sparse=sparse)
            )
        except (OSError, SourceChangedError) as error:
            results.append(error)
    done = [
        item[1] for item, result in zip(items, results, strict=True) if isinstance(result, Moved)
    ]
    try:
        if done:
            mounts.syncfs(Path(done[0]).parent)
    except OSError:
        remove_parts(done)
        raise
    for destination in done:
        _finish(destination)
    return results


def _copy_part(
    source: str, destination: str, size: int, *, sync: bool, cold: bool, sparse: bool
) -> Moved:
    """Copy the bytes to a file with a temporary name."""
    with reading(source) as inp:
        failpoints.reach("movement.copy")
        with part(destination) as out:
            before = expect_size(inp, source, size)
            if size and not sparse:
                os.truncate(out, size)  # tells tmpfs that huge pages will be within the size
            digest = _stream(inp, size, out, sparse=sparse)
            expect_written(inp, source)
            if sparse:
                os.truncate(out, size)  # earlier, each few bytes would take a huge page
            expect_same(inp, source, size, before.st_mtime_ns)
            os.utime(out, ns=(before.st_atime_ns, before.st_mtime_ns))
            if sync:
                os.fsync(out)
            if cold:
                os.posix_fadvise(inp, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(out, 0, 0, os.POSIX_FADV_DONTNEED)
            failpoints.reach("movement.copy.written")
            return Moved(digest, os.fstat(out).st_blocks)


def _finish(destination: str) -> None:
    complete(destination)
    failpoints.reach("movement.copy.renamed")


def read_through(source: str, size: int, *, sync: bool, sparse: bool = False) -> Moved:
    """Hash a file where it is, and fsync it if asked. sparse: as for `copy`.

    Raises LostError if the fsync fails, OSError, SourceChangedError.
    """
    with reading(source) as inp:
        failpoints.reach("movement.read")
        blocks = expect_size(inp, source, size).st_blocks
        digest = _stream(inp, size, None, sparse=sparse)
        if sync:
            with _lost(source):
                os.fsync(inp)
        return Moved(digest, blocks, mtime_ns=os.fstat(inp).st_mtime_ns)


def read_all_through(
    items: list[tuple[str, int, bool]],
) -> list[Moved | OSError | SourceChangedError]:
    """As `read_through`, for many small files: (source, size, sparse) of each. Syncs none."""
    results: list[Moved | OSError | SourceChangedError] = []
    for source, size, sparse in items:
        try:
            results.append(read_through(source, size, sync=False, sparse=sparse))
        except (OSError, SourceChangedError) as error:
            results.append(error)
    return results


def digest_of(fd: int, size: int, *, sparse: bool) -> bytes:
    """The digest of the first bytes of an open file. Raises OSError, SourceChangedError."""
    return _stream(fd, size, None, sparse=sparse)


@contextmanager
def _lost(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LostError(error.errno, os.strerror(error.errno or 0), source) from error


def expect_written(inp: int, source: str) -> None:
    """Raises LostError if the kernel may have lost bytes that programs wrote to the file."""
    with _lost(source):
        mounts.expect_written(inp)


def _stream(inp: int, size: int, out: int | None, *, sparse: bool) -> bytes:
    """Hash the data outside holes, and write the pieces that are not all zeros. Returns the digest.

    Holes are not read: a file of 100 GB with 1 GB of data takes the time and room of 1 GB.
    """
    piece = memoryview(bytearray(min(PIECE, max(size, 1))))
    zeros = memoryview(bytes(len(piece)))
    digest = SparseDigest() if sparse else DenseDigest()
    for start, end in data_ranges(inp, size):
        position = start
        while position < end:
            got = _fill(inp, piece[: end - position], position)
            if got < min(len(piece), end - position):
                raise SourceChangedError(f"ended at {position + got} of {size} bytes")
            digest.update(position, piece[:got])
            if out is not None and piece[:got] != zeros[:got]:
                written = 0
                while written < got:
                    written += os.pwritev(out, [piece[written:got]], position + written)
                failpoints.reach("movement.copy.piece")
            position += got
    if (there := os.fstat(inp).st_size) < size:  # else the rest would count as a hole
        raise SourceChangedError(f"ended at {there} of {size} bytes")
    return digest.digest(size)


def _fill(inp: int, piece: memoryview, position: int) -> int:
    """Read until the piece is full, or the file ends. Returns the number of bytes."""
    filled = 0
    while filled < len(piece) and (got := os.preadv(inp, [piece[filled:]], position + filled)):
        filled += got
    return filled


def give_way(niceness: int) -> bool:
    """Lower the priority of a new worker, because no program waits for a copy. Returns True."""
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    return True
