"""The mover's job for the scrub: read sealed copies, and compare each with its digest.

Contract: runs in a worker process, decides nothing, changes nothing, knows no catalog. `verify`
reads at most `rate` bytes a second, and sleeps in between. It reads a copy on a disk with O_DIRECT.
So the bytes come from the disk, and programs keep their pages in the page cache. Not for deciding
what to do with a wrong copy (`kvfs.core.jobs.scrub`).
"""

import errno
import mmap
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from kvfs.clock import REAL, Clock
from kvfs.movement import files

PIECE = 4 << 20  # bytes, as `copying.PIECE`
BLOCK = files.BLOCK  # bytes: reads past the page cache begin and end at multiples of it

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME


class Copy(NamedTuple):
    """One backing file. `forms`: its possible contents (plain, packed), each as size and digest.

    direct: the file is on a disk, so it is read with O_DIRECT.
    """

    path: str
    forms: tuple[tuple[int, bytes], ...]
    direct: bool


class VerifyBatch(NamedTuple):
    """The copies of one job."""

    copies: tuple[Copy, ...]

    def __str__(self) -> str:
        return f"{len(self.copies)} copies from {self.copies[0].path} on"


class VerifyResult(NamedTuple):
    """results: for each copy "" if it is right, a text if it is wrong, an OSError if unread.

    cpu_seconds: processor time of the job.
    """

    results: list[str | OSError]
    cpu_seconds: float


def verify(batch: VerifyBatch, rate: float, clock: Clock = REAL) -> VerifyResult:
    """Read each copy of the batch once. rate: bytes a second at most."""
    begun, spent, read = clock.now(), time.process_time(), 0

    def has_read(count: int) -> None:
        nonlocal read
        read += count
        ahead = begun + read / rate - clock.now()
        if ahead > 0:
            clock.sleep(ahead)

    results: list[str | OSError] = []
    with mmap.mmap(-1, PIECE) as room, memoryview(room) as piece:  # aligned as disks need it
        for copy in batch.copies:
            try:
                results.append(_verify(copy, piece, has_read))
            except OSError as error:
                results.append(error)
    return VerifyResult(results, time.process_time() - spent)


def _verify(copy: Copy, piece: memoryview, has_read: Callable[[int], None]) -> str:
    fd, direct = _open(copy)
    try:
        before = os.fstat(fd)
        size = before.st_size
        expected = dict(copy.forms).get(size)
        if expected is None:
            sizes = " or ".join(str(form[0]) for form in copy.forms)
            return f"it has {size} bytes, expected {sizes}"
        sparse = len(expected) == files.SPARSE_LENGTH
        found = _digest(fd, before, piece, has_read, sparse=sparse)
        if copy.direct and not direct:  # without O_DIRECT, remove the pages afterwards
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return "" if found == expected else f"it has the digest {found.hex()}"


def _open(copy: Copy) -> tuple[int, bool]:
    """A descriptor, and whether it reads past the page cache. Raises OSError."""
    if copy.direct:
        try:
            return os.open(copy.path, _READ | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this file system cannot do it
                raise
    return os.open(copy.path, _READ), False


def _digest(
    fd: int,
    before: os.stat_result,
    piece: memoryview,
    has_read: Callable[[int], None],
    *,
    sparse: bool,
) -> bytes:
    """The digest of the bytes, without reading holes; b"" if the file ends earlier.

    Raises OSError, BlockingIOError if a program writes the file. The caller closes the descriptor
    soon: at the writer's close, an open descriptor would look like a mapping (`Tier.is_in_use`).
    """
    digest, size = files.SparseDigest() if sparse else files.DenseDigest(), before.st_size
    for start, end in files.data_ranges(fd, size):
        position = start
        while position < end:
            wanted = min(len(piece), -(-(end - position) // BLOCK) * BLOCK)
            got = min(os.preadv(fd, [piece[:wanted]], position), end - position)
            if position + got < end:
                got -= got % BLOCK  # the next read must begin at a block, too
            if not got:
                return b""
            digest.update(position, piece[:got])
            position += got
            has_read(got)
            if os.fstat(fd).st_mtime_ns != before.st_mtime_ns:
                raise BlockingIOError(errno.EAGAIN, "it was written to while it was read")
    return digest.digest(size)
