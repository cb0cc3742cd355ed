"""The stored form of a compressed object: a head, then independent frames.

Contract: every FRAME bytes of the object are one frame; the last one may be shorter. Each frame is
a chunk in Blosc's own format, version 1 (README_CHUNK_FORMAT.rst of c-blosc). Blosc 2 and numcodecs
read it as well. All integers are little-endian.

Bytes and fields:

- 8: "kvfsZ", 0, 0, and the version of this form, 1.
- 8: size of the object.
- 12 for each frame: 4 bytes, its stored length; 8 bytes, XXH3-64 of its stored bytes.
- 8: XXH3-64 of all of the above.
- The frames, one behind the other, with nothing between or behind them.

The length of the head follows from the size of the object. Blosc's chunks have no checksum.
Therefore the head has checksums, and kvfs verifies each frame before the library sees it. The
codec's name, `blosc-zstd-sN/1`, for elements of N bytes, is stored beside the object; the number
behind the slash is the version above. Not for reading or writing files.
"""

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvfs.errors import TierError, TooLargeError, UnsupportedError

FRAME = 4 << 20  # bytes: an object costs 12 bytes a frame, and memory for some frames
ELEMENT_SIZES = (1, 2, 4, 8)
LARGEST = 16 << 40  # bytes, ext4's largest file; its head is 48 MiB, and no hostile one is larger

_BEGIN = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<IQ")
_END = struct.Struct("<Q")
_MAGIC = b"kvfsZ\0\0\1"
# Bytes of a Blosc chunk's head. No chunk is shorter, and none is longer than its content by more.
_CHUNK_HEAD = 16
_CODEC = re.compile(r"blosc-zstd-s([0-9]{1,2})/([0-9]{1,9})")


class DamagedError(TierError):
    """The stored bytes are not those that were written; says where.

    No byte of them was given out.
    """


class Frame(NamedTuple):
    """A frame's place in the file and in the object, in bytes; `digest` is of its stored bytes."""

    position: int
    stored: int
    digest: int
    offset: int
    length: int


def codec_name(element_size: int) -> str:
    """The codec's name for the metadata of an object with elements of this many bytes."""
    return f"blosc-zstd-s{element_size}/1"


def expect_codec(name: str) -> None:
    """Raises UnsupportedError for a codec that this version cannot read."""
    found = _CODEC.fullmatch(name)
    if found is None or int(found[1]) not in ELEMENT_SIZES or int(found[2]) != 1:
        raise UnsupportedError(f"codec {name!r}: expected {codec_name(2)}, or 1, 4 or 8 for the 2")


def frames_of(size: int) -> int:
    """The number of frames of this many bytes."""
    return -(-size // FRAME)


def head_size(size: int) -> int:
    """Bytes before the first frame. Raises TooLargeError for objects that are never compressed."""
    if not 0 <= size <= LARGEST:
        raise TooLargeError(f"an object of {size} bytes: {LARGEST} at most can be compressed")
    return _BEGIN.size + _ENTRY.size * frames_of(size) + _END.size


def head(size: int, stored: list[tuple[int, int]]) -> bytes:
    """The head of an object whose frames have these (stored length, digest)."""
    begin = _BEGIN.pack(_MAGIC, size) + b"".join(_ENTRY.pack(*entry) for entry in stored)
    return begin + _END.pack(xxh3_64_intdigest(begin))


def frames_in(data: bytes, size: int, stored_size: int) -> Iterator[Frame]:
    """Which stored bytes are which bytes of the object: all frames in order, verified.

    Reads the first `head_size(size)` bytes. Raises DamagedError unless all lengths agree, before it
    returns. `size` and `stored_size` are the sizes of both forms in the object's metadata.
    """
    if len(data) != head_size(size):
        raise DamagedError(f"its head has {len(data)} bytes, expected {head_size(size)}")
    begin = memoryview(data)[: -_END.size]
    if _END.unpack_from(data, len(begin)) != (xxh3_64_intdigest(begin),):
        raise DamagedError("its head does not have the digest that it says")
    if _BEGIN.unpack_from(data) != (_MAGIC, size):
        raise DamagedError(f"its head is not that of an object of {size} bytes")
    end = len(data)
    for number, frame in enumerate(_frames(begin, size, end)):
        if not _CHUNK_HEAD <= frame.stored <= frame.length + _CHUNK_HEAD:
            raise DamagedError(f"frame {number} has {frame.stored} bytes, more or less than it can")
        end += frame.stored
    if end != stored_size:
        raise DamagedError(f"{stored_size} bytes stored, expected {end}")
    return _frames(begin, size, len(data))


def _frames(begin: memoryview, size: int, position: int) -> Iterator[Frame]:
    for number, (stored, digest) in enumerate(_ENTRY.iter_unpack(begin[_BEGIN.size :])):
        offset = number * FRAME
        yield Frame(position, stored, digest, offset, min(FRAME, size - offset))
        position += stored
