"""Compression by a mover: make an object smaller where that pays, and restore it.

Contract: runs in a worker process, decides nothing, knows no catalog. An object that does not
become smaller, or cannot be compressed here, stays as it is: the result says so, and it is no
error. For an upload (`packed`) the result is in memory up to MEMORY bytes, else in a file without a
name in `scratch`. Either is gone when `packed` ends, or the process.

Between RAM and NVMe `pack` makes a copy that is smaller than its object, or one as `copying.copy`
does. `unpack` makes a plain copy again, and compares its digest. Either copy appears under its
final name only complete, with the source's modification time, and synced if asked. A failure leaves
nothing behind. `unpack` to the path of the packed copy replaces it. If the daemon dies before it
notes this, the plain file is recognized by its size. Raises OSError, SourceChangedError, TierError.

Not for the format (`kvfs.compression`), nor for sending.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, NamedTuple

from kvfs import failpoints
from kvfs.catalog import PackedCopy
from kvfs.compression.container import DamagedError
from kvfs.compression.files import compress, content_digest, decompress
from kvfs.errors import KvfsError, NoSpaceError
from kvfs.movement import copying
from kvfs.movement.copying import Moved
from kvfs.movement.files import (
    SourceChangedError,
    complete,
    expect_same,
    expect_size,
    part,
    reading,
)

MEMORY = 64 << 20  # bytes of an object packed in memory: a put has as many in memory


class Packing(NamedTuple):
    """Processor time in seconds, and the outcome. `failure`: why packing was not possible."""

    cpu_seconds: float
    smaller: bool
    failure: str = ""


class Packed(NamedTuple):
    """An object made smaller: an open file of `size` bytes, which have the xxh3-128 `digest`.

    content: the xxh3-128 of the bytes that were compressed.
    """

    fd: int
    size: int
    digest: bytes
    codec: str
    content: bytes


@contextmanager
def packed(
    source: int, size: int, scratch: str, element_size: int | None = None
) -> Iterator[tuple[Packed | None, Packing]]:
    """Compress an open file of `size` bytes; None if it is to be uploaded uncompressed.

    scratch: the directory for objects of more than MEMORY; "": there is none. element_size: bytes
    of a number, None if unknown; then a sample decides.
    """
    begun = time.thread_time()
    with ExitStack() as stack:
        found, failure = None, ""
        try:
            room = stack.enter_context(_room(size, scratch)).fileno()
            made = compress(source, room, size, element_size)
            if made is not None:
                digest = copying.digest_of(room, made.stored_size, sparse=False)
                found = Packed(room, made.stored_size, digest, made.codec, made.digest)
        except (KvfsError, OSError, SourceChangedError) as error:
            # If the object's own file is the cause, the upload will find that out.
            failure = str(error)
        spent = time.thread_time() - begun
        yield found, Packing(spent, smaller=found is not None, failure=failure)


def _room(size: int, scratch: str) -> IO[bytes]:
    """A file for the compressed bytes. Raises OSError, NoSpaceError."""
    if size <= MEMORY:
        return os.fdopen(os.memfd_create("kvfs-packed"), "r+b")
    if not scratch:
        raise NoSpaceError(f"{size} bytes, and without a disk {MEMORY} at most are packed")
    return tempfile.TemporaryFile(dir=scratch)


class Repacked(NamedTuple):
    """`moved` is of the object; `packed`: the compressed copy, None for a plain one.

    in_place: nothing was copied, the source is a plain copy already.
    """

    moved: Moved
    packed: PackedCopy | None = None
    packing: Packing | None = None
    in_place: bool = False


def pack(source: str, destination: str, size: int, element_size: int | None) -> Repacked:
    """Compress `size` bytes into a new file and sync it; element_size: see `compress`."""
    with reading(source) as inp:
        failpoints.reach("movement.pack")
        before = expect_size(inp, source, size)
        with part(destination) as out:
            packed, content, packing = _compressed(inp, out, size, element_size)
            if packed is not None:
                expect_same(inp, source, size, before.st_mtime_ns)
                os.utime(out, ns=(before.st_atime_ns, before.st_mtime_ns))
                os.fsync(out)
                for fd in (inp, out):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                packed = packed._replace(blocks=os.fstat(out).st_blocks)
                failpoints.reach("movement.pack.written")
                complete(destination)
    if packed is None:
        moved = copying.copy(source, destination, size, sync=True, cold=True)
        return Repacked(moved, packing=packing)
    failpoints.reach("movement.pack.renamed")
    return Repacked(Moved(content, packed.blocks, packing.cpu_seconds), packed, packing)


def _compressed(
    inp: int, out: int, size: int, element_size: int | None
) -> tuple[PackedCopy | None, bytes, Packing]:
    """The packed copy, None if it is to be copied plain; the digest of the bytes read; the cost."""
    begun, made, failure = time.thread_time(), None, ""
    try:
        made = compress(inp, out, size, element_size)
    except KvfsError as error:  # if the file itself is the cause, the copy will find that out
        failure = str(error)
    packing = Packing(time.thread_time() - begun, smaller=made is not None, failure=failure)
    if made is None:
        return None, b"", packing
    digest = copying.digest_of(out, made.stored_size, sparse=False)
    return PackedCopy(made.codec, made.stored_size, 0, digest), made.digest, packing


def unpack(
    source: str, destination: str, packed: PackedCopy, size: int, digest: bytes, *, sync: bool
) -> Repacked:
    """Decompress into a new file of `size` bytes that have this xxh3-128.

    Raises DamagedError if the source differs from the packed copy, OSError of either file.
    """
    try:
        with reading(source) as inp:
            failpoints.reach("movement.unpack")
            found = os.fstat(inp)
            if found.st_size == size:
                moved = copying.read_through(source, size, sync=sync)
                _expect_digest(source, moved.digest, digest)
                return Repacked(moved, in_place=True)
            with part(destination) as out:
                os.truncate(out, size)  # tells tmpfs that huge pages will be within the size
                spent = decompress(packed.codec, inp, out, size, packed.size)
                _expect_digest(destination, copying.digest_of(out, size, sparse=False), digest)
                os.utime(out, ns=(found.st_atime_ns, found.st_mtime_ns))
                if sync:
                    os.fsync(out)
                os.posix_fadvise(inp, 0, 0, os.POSIX_FADV_DONTNEED)
                failpoints.reach("movement.unpack.written")
                blocks = os.fstat(out).st_blocks
                complete(destination)
        failpoints.reach("movement.unpack.renamed")
        return Repacked(Moved(digest, blocks, spent))
    except KvfsError as error:
        if isinstance(error.__cause__, OSError):  # its errno tells the state of the disk
            raise error.__cause__ from None
        raise


def unpacked_digest(source: str, packed: PackedCopy, size: int) -> bytes:
    """The xxh3-128 of a packed copy's content. Raises DamagedError."""
    with reading(source) as inp:
        return content_digest(packed.codec, inp, size, packed.size)


def _expect_digest(path: str, found: bytes, expected: bytes) -> None:
    if found != expected:
        raise DamagedError(f"{path} has xxh3-128 {found.hex()}, expected {expected.hex()}")
