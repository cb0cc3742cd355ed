"""Digests of an object's chunks, which verify its bytes before all of them have come.

Contract: pure, except for `weigh` and `Proof`, which read a file. The object has the text as
metadata `kvfs-chunks` (docs/format.md): the chunk's size in bytes, a space, and base64 of the
digests. Each digest is the xxh3-64 of a chunk, 8 bytes, big-endian, in the order of the chunks. S3
allows 2 KiB of metadata. `MOST` digests fit beside the longest other metadata, so chunks grow with
the object. An object of one chunk has no such text: its own digest is enough. Not for the digest of
the whole, which is compared as well.
"""

import base64
import binascii
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import xxhash

from kvfs.s3.errors import MetadataError, SourceError

NAME = "kvfs-chunks"
LEAST = 8 << 20  # bytes of a chunk: those of one request
MOST = 64  # chunks of an object
PIECE = 256 << 10  # bytes; both digests read them from the processor's cache
_DIGEST = 8  # bytes


def chunk_size(size: int) -> int:
    """Bytes of each chunk except the last: LEAST times a power of two."""
    found = LEAST
    while found * MOST < size:
        found *= 2
    return found


@dataclass(frozen=True, slots=True)
class Chunks:
    """`size`: bytes of each chunk except the last; `digests`: xxh3-64 of each chunk."""

    size: int
    digests: tuple[int, ...]

    def metadata(self) -> dict[str, str]:
        """Return them as user metadata of S3; nothing for an object of one chunk."""
        if len(self.digests) <= 1:
            return {}
        packed = b"".join(digest.to_bytes(_DIGEST, "big") for digest in self.digests)
        return {NAME: f"{self.size} {base64.b64encode(packed).decode()}"}

    @classmethod
    def of_metadata(cls, key: str, metadata: Mapping[str, str], size: int) -> "Chunks | None":
        """The chunks of an object of `size` bytes, None if it has none. Raises MetadataError."""
        text = metadata.get(NAME)
        if text is None:
            return None
        length, _, encoded = text.partition(" ")
        try:
            packed = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            packed = b""
        wanted = chunk_size(size)
        number = -(-size // wanted)
        if length != str(wanted) or len(packed) != number * _DIGEST:
            raise MetadataError(
                f"{key}: metadata {NAME} is {text[:80]!r}, expected {wanted} and the digests of "
                f"{number} chunks"
            )
        digests = (packed[at : at + _DIGEST] for at in range(0, len(packed), _DIGEST))
        return cls(wanted, tuple(int.from_bytes(digest, "big") for digest in digests))


def pieces(fd: int, start: int, end: int, name: str = "the file") -> Iterator[memoryview]:
    """Yield the bytes of an open file from `start` to `end`; each piece reuses the same memory.

    Raises SourceError, which begins with `name`, if the file is shorter; OSError.
    """
    piece = memoryview(bytearray(min(PIECE, max(end - start, 1))))
    while start < end:
        got = os.preadv(fd, [piece[: min(PIECE, end - start)]], start)
        if not got:
            raise SourceError(f"{name} ends at {start}, expected {end}")
        yield piece[:got]
        start += got


def weigh(fd: int, size: int) -> tuple[bytes, Chunks]:
    """The xxh3-128 of an open file's first `size` bytes, and the digests of its chunks.

    Both in one pass. Raises SourceError if the file is shorter, OSError.
    """
    whole, length = xxhash.xxh3_128(), chunk_size(size)
    digests = []
    for start in range(0, size, length):
        chunk = xxhash.xxh3_64()
        for piece in pieces(fd, start, min(size, start + length)):
            chunk.update(piece)
            whole.update(piece)
        digests.append(chunk.intdigest())
    return whole.digest(), Chunks(length, tuple(digests))


class Proof:
    """Verifies the chunks of a file of `size` bytes while it is filled, and then the whole.

    A chunk that is proven must not change any more. Calls raise SourceError, OSError.
    """

    def __init__(self, fd: int, size: int, chunks: Chunks, name: str) -> None:
        """name: of the file, for errors."""
        self.fd = fd
        self.size = size
        self.chunks = chunks
        self.name = name
        self._proven: set[int] = set()  # those behind the hashed ones
        self._whole = xxhash.xxh3_128()
        self._hashed = 0  # chunks that are in the hash

    def proves(self, number: int) -> bool:
        """Whether a chunk's bytes in the file are right. Those next in the whole are hashed."""
        chunk, whole = xxhash.xxh3_64(), None
        if number == self._hashed:
            whole = self._whole.copy()
        for piece in self._pieces(number):
            chunk.update(piece)
            if whole is not None:
                whole.update(piece)
        if chunk.intdigest() != self.chunks.digests[number]:
            return False
        if whole is not None:
            self._whole, self._hashed = whole, number + 1
        else:
            self._proven.add(number)
        while self._hashed in self._proven:
            self._proven.discard(self._hashed)
            for piece in self._pieces(self._hashed):
                self._whole.update(piece)
            self._hashed += 1
        return True

    def _pieces(self, number: int) -> Iterator[memoryview]:
        start = number * self.chunks.size
        return pieces(self.fd, start, min(start + self.chunks.size, self.size), self.name)

    def digest(self) -> bytes:
        """The digest of the whole, once all chunks are proven."""
        return self._whole.digest()
