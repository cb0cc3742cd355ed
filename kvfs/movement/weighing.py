"""A mover computes the digest of a whole file and of its chunks, in one pass.

Contract: runs in a worker process, and changes nothing. Raises SourceChangedError if the file has
another size, or a writer changes it meanwhile; SourceError if it ends early; OSError.
"""

from typing import NamedTuple

from kvfs.movement.files import expect_same, expect_size, reading
from kvfs.s3 import chunks
from kvfs.s3.chunks import Chunks


class Weighed(NamedTuple):
    """The digests of a file, and its time of modification."""

    digest: bytes
    chunks: Chunks
    mtime_ns: int


def weigh(source: str, size: int) -> Weighed:
    """Read a file through."""
    with reading(source) as inp:
        mtime_ns = expect_size(inp, source, size).st_mtime_ns
        digest, found = chunks.weigh(inp, size)
        expect_same(inp, source, size, mtime_ns)
        return Weighed(digest, found, mtime_ns)
