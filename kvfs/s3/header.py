"""The digest of an object's first bytes, so that they can be read without the rest of it.

Contract: pure, but for `weigh`, which reads a file. The digest goes beside the object as the
metadata `kvfs-header` (docs/format.md): the xxh3-128 of the first SIZE bytes of what is stored, as
32 hexadecimals. Objects of LEAST bytes or less have none: all of one costs one request as well.
Not for parts behind the first (`chunks`).
"""

import os
import re
from collections.abc import Mapping

import xxhash

from kvfs.s3.errors import MetadataError, SourceError

NAME = "kvfs-header"
SIZE = 4096  # bytes: what connectors, and anybody's stdio, read of a file first
LEAST = 64 << 10  # bytes; so much comes from a bucket in hardly more time than SIZE

_DIGEST = re.compile(r"[0-9a-f]{32}")


def weigh(fd: int, size: int) -> bytes:
    """The digest that goes beside an open file of `size` bytes; b"" for none.

    Raises SourceError if the file is shorter, OSError.
    """
    if size <= LEAST:
        return b""
    data = os.pread(fd, SIZE, 0)
    if len(data) != SIZE:
        raise SourceError(f"the file ends at {len(data)}, expected {size}")
    return xxhash.xxh3_128_digest(data)


def metadata(digest: bytes) -> dict[str, str]:
    """Return it as user metadata of S3; nothing for none."""
    return {NAME: digest.hex()} if digest else {}


def of_metadata(key: str, found: Mapping[str, str]) -> bytes:
    """That of an object, b"" if it has none. Raises MetadataError."""
    text = found.get(NAME)
    if text is None:
        return b""
    if not _DIGEST.fullmatch(text):
        raise MetadataError(f"{key}: metadata {NAME} is {text[:80]!r}, expected 32 hexadecimals")
    return bytes.fromhex(text)


def proven(data: bytes, digest: bytes) -> bool:
    """Whether these are the first bytes that the digest is of."""
    return len(data) == SIZE and xxhash.xxh3_128_digest(data) == digest
