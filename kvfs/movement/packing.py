"""Compression by a mover: make an object smaller where that pays, and restore it.

Contract: runs in a worker process, decides nothing, knows no catalog. An object that does not
become smaller, or cannot be compressed here, stays as it is. The result says so; that is no error.
`packed` compresses for an upload: an object of at most MEMORY bytes in memory, a larger one in a
file without a name in `scratch`. The compressed bytes are gone when `packed` or the process ends.

For NVMe `pack` makes a packed copy, which is smaller than its object. If that is impossible, it
makes a plain copy as `copying.copy` does. `unpack` makes a plain copy again, and compares its
digest. Both copies get their final names only when they are complete, have the source's
modification time, and are synced if asked. A failure leaves nothing behind. `unpack` to the path of
the packed copy replaces the packed copy. If the daemon dies before it records this, the size of the
file tells that it is plain. Raises OSError, SourceChangedError, TierError.

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

MEMORY = 64 << 20  # bytes of the largest object that is packed in memory; a put takes as many


class PackingResult(NamedTuple):
    """The cost and outcome of compressing. `failure`: why it was not possible, "" otherwise."""

    cpu_seconds: float
    smaller: bool
    failure: str = ""


class Packed(NamedTuple):
    """A compressed object in an open file. size, digest: of the compressed bytes.

    content: the xxh3-128 of the uncompressed bytes.
    """

    fd: int
    size: int
    digest: bytes
    codec: str
    content: bytes


@contextmanager
def packed(
    source: int, size: int, scratch: str, element_size: int | None = None
) -> Iterator[tuple[Packed | None, PackingResult]]:
    """Compress an open file of `size` bytes. `Packed` is None if it should stay uncompressed.

    scratch: the directory for objects of more than MEMORY; "": there is none. element_size: bytes
    of one number of the tensor; None: unknown, then a sample decides.
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
            # If the source file is the cause, the upload will fail, too.
            failure = str(error)
        spent = time.thread_time() - begun
        yield found, PackingResult(spent, smaller=found is not None, failure=failure)


def _room(size: int, scratch: str) -> IO[bytes]:
    """A file for the compressed bytes. Raises OSError, NoSpaceError."""
    if size <= MEMORY:
        return os.fdopen(os.memfd_create("kvfs-packed"), "r+b")
    if not scratch:
        raise NoSpaceError(f"{size} bytes, and without a disk {MEMORY} at most are packed")
    return tempfile.TemporaryFile(dir=scratch)


class Repacked(NamedTuple):
    """The result of `pack` or `unpack`. packed: the new packed copy; None if it is plain.

    in_place: nothing was copied, because the source is a plain copy already.
    """

    moved: Moved
    packed: PackedCopy | None = None
    packing: PackingResult | None = None
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
) -> tuple[PackedCopy | None, bytes, PackingResult]:
    """The packed copy (None: make a plain one), the digest of the content, and the outcome."""
    begun, made, failure = time.thread_time(), None, ""
    try:
        made = compress(inp, out, size, element_size)
    except KvfsError as error:  # if the source is the cause, the copy will fail, too
        failure = str(error)
    packing = PackingResult(time.thread_time() - begun, smaller=made is not None, failure=failure)
    if made is None:
        return None, b"", packing
    digest = copying.digest_of(out, made.stored_size, sparse=False)
    return PackedCopy(made.codec, made.stored_size, 0, digest), made.digest, packing


def unpack(
    source: str, destination: str, packed: PackedCopy, size: int, digest: bytes, *, sync: bool
) -> Repacked:
    """Decompress a packed copy into a new file, which must have `size` bytes and this digest.

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
