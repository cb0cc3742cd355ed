"""The digest of an object's first bytes, so that kvfs can serve them before the rest comes.

Contract: pure, except for `weigh`, which reads a file. The object has the digest as metadata
`kvfs-header` (docs/format.md): the xxh3-128 of the first SIZE stored bytes, as 32 hexadecimal
digits. Objects of LEAST bytes or less have none: all of such an object costs one request as well.
Not for parts behind the first (`chunks`).
"""

import os
import re
from collections.abc import Mapping

import xxhash

from kvfs.s3.errors import MetadataError, SourceError

NAME = "kvfs-header"
SIZE = 4096  # bytes: what connectors, and stdio, read of a file first
LEAST = 64 << 10  # bytes; a bucket sends this many in hardly more time than SIZE

_DIGEST = re.compile(r"[0-9a-f]{32}")


def weigh(fd: int, size: int) -> bytes:
    """The digest to store beside an open file of `size` bytes; b"" for none.

    Raises SourceError if the file is shorter, OSError.
    """
    if size <= LEAST:
        return b""
    data = os.pread(fd, SIZE, 0)
    if len(data) != SIZE:
        raise SourceError(f"the file ends at {len(data)}, expected {size}")
    return xxhash.xxh3_128_digest(data)


def metadata(digest: bytes) -> dict[str, str]:
    """Return the digest as user metadata of S3; nothing if there is none."""
    return {NAME: digest.hex()} if digest else {}


def of_metadata(key: str, found: Mapping[str, str]) -> bytes:
    """The digest in an object's metadata, b"" if it has none. Raises MetadataError."""
    text = found.get(NAME)
    if text is None:
        return b""
    if not _DIGEST.fullmatch(text):
        raise MetadataError(f"{key}: metadata {NAME} is {text[:80]!r}, expected 32 hexadecimals")
    return bytes.fromhex(text)


def proven(data: bytes, digest: bytes) -> bool:
    """Whether these are the bytes of the digest."""
    return len(data) == SIZE and xxhash.xxh3_128_digest(data) == digest
