"""One frame: bytes to a Blosc chunk, and back. The only module that knows the library.

Contract: `pack` unpacks and compares each chunk before it returns, because libraries err too.
(Blosc 2 gave back wrong bytes for lengths that are not a multiple of the element size, see
docs/compression.md.) `unpack` verifies the digest before the library sees a byte. The index bounds
the memory, not the chunk. One thread. Not for files.
"""

import functools
import struct
from types import ModuleType

from xxhash import xxh3_64_intdigest

from kvfs.compression.container import DamagedError, Frame
from kvfs.errors import TierError

# zstd's level 1. More work makes bf16 larger: chance matches cost more bits than coding each byte
# by its frequency; fp8 gains 3 %, at half the speed (scripts.bench.compression).
LEVEL = 1
_BLOCK = 1 << 20  # bytes; below 512 KiB planes share zstd's blocks of 128 KiB, more gains nothing
_LENGTHS = struct.Struct("<4xIII")


@functools.cache
def _library() -> ModuleType:
    # Imported by the movers only: it brings numpy along where that is installed.
    import blosc  # type: ignore[import-untyped]  # noqa: PLC0415

    blosc.set_nthreads(1)
    blosc.set_blocksize(_BLOCK)
    library: ModuleType = blosc
    return library


def pack(data: bytes, element_size: int, level: int = LEVEL) -> bytes:
    """Return the chunk of up to FRAME bytes, at most 16 bytes longer. Raises TierError."""
    blosc = _library()
    chunk: bytes = blosc.compress(
        data, typesize=element_size, clevel=level, shuffle=blosc.SHUFFLE, cname="zstd"
    )
    try:
        same = _unpacked(chunk, len(data)) == data
    except DamagedError as error:
        raise TierError(f"the library cannot read what it made of {len(data)} bytes") from error
    if not same:
        raise TierError(f"the library does not give back the {len(data)} bytes that it was given")
    return chunk


def unpack(chunk: bytes, frame: Frame) -> bytes:
    """Return the `frame.length` bytes of a chunk. Raises DamagedError."""
    if len(chunk) != frame.stored or xxh3_64_intdigest(chunk) != frame.digest:
        raise DamagedError(f"the {frame.stored} bytes at {frame.position} are not what was written")
    return _unpacked(chunk, frame.length)


def _unpacked(chunk: bytes, length: int) -> bytes:
    told, block, stored = _LENGTHS.unpack_from(chunk)
    if (told, stored) != (length, len(chunk)) or block > length:
        raise DamagedError(f"a chunk of {told} bytes in {stored}, expected {length}, {len(chunk)}")
    blosc = _library()
    try:
        data: bytes = blosc.decompress(chunk)
    except (blosc.blosc_extension.error, SystemError) as error:
        raise DamagedError(f"a chunk cannot be decompressed: {error}") from error
    if len(data) != length:
        raise DamagedError(f"a chunk has {len(data)} bytes, expected {length}")
    return data
