"""What a mover does to an object on its way up: it is made smaller, where that pays.

Contract: runs in a worker process. What is packed is in memory up to MEMORY bytes, else in a file
without a name in `scratch`; either is gone when `packed` ends, or the process. An object that does
not become smaller, or cannot be compressed here, goes up as it is: that is no error, but said.
Raises OSError of the object's own file. Not for the form (`kvfs.compression`), nor for sending.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, NamedTuple

from kvfs.compression.files import compress
from kvfs.errors import KvfsError, NoSpaceError
from kvfs.movement import copying
from kvfs.movement.parts import SourceChangedError

MEMORY = 64 << 20  # bytes of an object that is packed in memory: as many as a put has in it


class Packing(NamedTuple):
    """Processor time in seconds, and what it came to. `failure`: why it could not be tried."""

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
    """Compress an open file of `size` bytes; None if it is to go up as it is.

    scratch: the directory for what is more than MEMORY; "": there is none. element_size: bytes of a
    number, if that is known; else a sample tells.
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
            # If it is the object's own file, who sends it as it is finds that out.
            failure = str(error)
        spent = time.thread_time() - begun
        yield found, Packing(spent, smaller=found is not None, failure=failure)


def _room(size: int, scratch: str) -> IO[bytes]:
    """Raises OSError, NoSpaceError."""
    if size <= MEMORY:
        return os.fdopen(os.memfd_create("kvfs-packed"), "r+b")
    if not scratch:
        raise NoSpaceError(f"{size} bytes, and without a disk {MEMORY} at most are packed")
    return tempfile.TemporaryFile(dir=scratch)
