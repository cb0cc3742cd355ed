"""Compression of one file into another, and back, in a mover process.

Contract: synchronous; a few frames in memory at most; files are given as descriptors and their
offsets stay as they are. Raises domain errors only; then the destination is half written, and its
maker removes it. A sample of SAMPLE bytes, in pieces spread evenly over the object, tells the
element size and whether compressing pays. A sample knows more than a name or a header. Files of
safetensors have a dtype; .bin and .pt files of raw pages have none. Scales or packed nibbles may be
in any of them. Not for naming or syncing objects, nor for the decision to compress.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128

from kvfs.compression.container import (
    ELEMENT_SIZES,
    FRAME,
    LARGEST,
    DamagedError,
    Frame,
    codec_name,
    expect_codec,
    frames_in,
    frames_of,
    head,
    head_size,
)
from kvfs.compression.frames import pack, unpack
from kvfs.errors import InvalidError, NoSpaceError, TierError

PAYS = 1.1  # times smaller; less costs the same work and saves under a tenth of the room
SAMPLE = 512 << 10  # bytes; in less, four planes share zstd's blocks of 128 KiB, and fp32 looks bad
_PIECES = 16
_SIZES = (2, 1, 4)  # bf16 first: it wins a tie


def sampled(read: Callable[[int, int], bytes], size: int, known: int | None) -> int | None:
    """Return the element size that compresses best, or None if compressing does not pay.

    read: offset and length to bytes. known: the only size to be tried. Raises the errors of `read`.
    """
    sample = _sample(read, size)
    stored = {each: len(pack(sample, each)) for each in ([known] if known else _SIZES)}
    best = min(stored, key=stored.__getitem__)
    return best if stored[best] * PAYS <= len(sample) else None


def _sample(read: Callable[[int, int], bytes], size: int) -> bytes:
    if size <= SAMPLE:
        return read(0, size)
    piece = SAMPLE // _PIECES
    apart = (size - piece) // (_PIECES - 1) & ~7  # every piece begins with a whole element
    return b"".join(read(number * apart, piece) for number in range(_PIECES))


_ZEROS = bytes(FRAME)


class Compressed(NamedTuple):
    """The result: `ratio` is size / stored_size, in bytes; `codec` is needed to read it.

    digest: xxh3-128 of the bytes that were read and compressed.
    """

    codec: str
    stored_size: int
    ratio: float
    cpu_seconds: float
    digest: bytes


def compress(
    source: int, destination: int, size: int, element_size: int | None = None
) -> Compressed | None:
    """Compress `size` bytes into a new file; None, and an empty file, if it does not pay.

    element_size: bytes of a number in it, 1, 2, 4 or 8; None if unknown. Raises NoSpaceError,
    TierError (also if the source is shorter than `size`), InvalidError for other element sizes.
    """
    begun = time.thread_time()
    if element_size is not None and element_size not in ELEMENT_SIZES:
        raise InvalidError(f"elements of {element_size} bytes: expected 1, 2, 4 or 8")
    if not 0 < size <= LARGEST:
        return None
    found = sampled(lambda at, count: _read(source, at, count), size, element_size)
    if found is None:
        return None
    position = head_size(size)
    stored: list[tuple[int, int]] = []
    content = xxh3_128()
    for number in range(frames_of(size)):
        offset = number * FRAME
        data = _read(source, offset, min(FRAME, size - offset))
        content.update(data)
        chunk = pack(data, found)
        _write(destination, chunk, position)
        stored.append((len(chunk), xxh3_64_intdigest(chunk)))
        position += len(chunk)
        if position * PAYS > size:  # the rest compresses worse than the sample
            _resize(destination, 0)
            return None
    _write(destination, head(size, stored), 0)  # last: the file is useless without it
    spent = time.thread_time() - begun
    return Compressed(codec_name(found), position, size / position, spent, content.digest())


def decompress(codec: str, source: int, destination: int, size: int, stored_size: int) -> float:
    """Write the object's bytes into a new file, in which frames of zeros stay holes.

    size, stored_size: of the object in both forms, from its metadata. Returns the processor time in
    seconds. Raises DamagedError if the source is not as it was written, NoSpaceError, TierError;
    UnsupportedError for an unknown codec.
    """
    begun = time.thread_time()
    frames = _proven(codec, source, size, stored_size)
    _resize(destination, size)
    for frame in frames:
        data = unpack(_stored(source, frame.position, frame.stored), frame)
        if data != _ZEROS[: frame.length]:
            _write(destination, data, frame.offset)
    return time.thread_time() - begun


def content_digest(codec: str, source: int, size: int, stored_size: int) -> bytes:
    """The xxh3-128 of the object's bytes, without writing them. Raises as `decompress`."""
    frames = _proven(codec, source, size, stored_size)
    content = xxh3_128()
    for frame in frames:
        content.update(unpack(_stored(source, frame.position, frame.stored), frame))
    return content.digest()


def _proven(codec: str, source: int, size: int, stored_size: int) -> Iterator[Frame]:
    """The verified frames of a file. Raises DamagedError, TierError, UnsupportedError."""
    expect_codec(codec)
    with _failures("stat of the source"):
        there = os.fstat(source).st_size
    if there != stored_size:
        raise DamagedError(f"{there} bytes stored, expected {stored_size}")
    if stored_size < head_size(size):
        raise DamagedError(f"{stored_size} bytes stored cannot be an object of {size} bytes")
    return frames_in(_stored(source, 0, head_size(size)), size, stored_size)


def _read(source: int, offset: int, count: int) -> bytes:
    """Read `count` bytes. Raises TierError, also if there are fewer."""
    data = _pread(source, offset, count)
    if len(data) != count:
        raise TierError(f"the source ends at {offset + len(data)}, expected more")
    return data


def _stored(source: int, position: int, count: int) -> bytes:
    """Read `count` stored bytes. Raises DamagedError if there are fewer."""
    data = _pread(source, position, count)
    if len(data) != count:
        raise DamagedError(f"it ends at {position + len(data)}, expected {position + count}")
    return data


def _pread(source: int, offset: int, count: int) -> bytes:
    with _failures("read"):
        data = os.pread(source, count, offset)
        while len(data) < count and (
            more := os.pread(source, count - len(data), offset + len(data))
        ):
            data += more
        return data


def _write(destination: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    with _failures("write"):
        while left:
            written = os.pwrite(destination, left, offset)
            left, offset = left[written:], offset + written


def _resize(destination: int, size: int) -> None:
    with _failures("truncate"):
        os.ftruncate(destination, size)


@contextmanager
def _failures(verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        raise (NoSpaceError if full else TierError)(f"{verb} failed: {error}") from error
