"""Compression gives back what it was given, or says that it cannot."""

import os
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import blosc  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvfs.compression import container
from kvfs.compression.container import FRAME, LARGEST, DamagedError, frames_in, head, head_size
from kvfs.compression.files import PAYS, SAMPLE, Compressed, compress, decompress, sampled
from kvfs.compression.frames import pack, unpack
from kvfs.errors import InvalidError, NoSpaceError, TierError, TooLargeError, UnsupportedError
from kvfs.mounts import mount, umount

SEED = 11
MiB = 1 << 20


def numbers(count: int, element_size: int) -> bytes:
    """As activations are: normally distributed; bf16 is the upper half of a float32."""
    whole = np.random.default_rng(SEED).standard_normal(count, dtype=np.float32)
    if element_size == 4:
        return whole.tobytes()
    if element_size == 8:
        return whole.astype(np.float64).tobytes()
    assert element_size == 2
    return (whole.view(np.uint32) >> 16).astype(np.uint16).tobytes()


BF16 = numbers(3 * FRAME // 2, 2)  # three frames
RANDOM = random.Random(SEED).randbytes(2 * FRAME)


@contextmanager
def file(content: bytes = b"") -> Iterator[int]:
    fd = os.memfd_create("test")
    try:
        os.pwrite(fd, content, 0)
        yield fd
    finally:
        os.close(fd)


def content_of(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size + 1, 0)


def stored(content: bytes, element_size: int | None = None) -> tuple[Compressed, bytes]:
    with file(content) as source, file() as destination:
        found = compress(source, destination, len(content), element_size)
        assert found is not None
        return found, content_of(destination)


def restored(codec: str, data: bytes, size: int, stored_size: int | None = None) -> bytes:
    with file(data) as source, file() as destination:
        spent = decompress(
            codec, source, destination, size, len(data) if stored_size is None else stored_size
        )
        assert spent >= 0
        return content_of(destination)


@pytest.mark.parametrize("element_size", [None, 1, 2, 4, 8])
@pytest.mark.parametrize(
    "size", [200, 4095, SAMPLE, SAMPLE + 1, FRAME - 1, FRAME, FRAME + 1, 2 * FRAME + 777_777]
)
def test_decompressed_bytes_equal_the_content(size: int, element_size: int | None) -> None:
    """Also where the size is no multiple of the element's, which Blosc 2 gets wrong."""
    content = bytes(size) if size < 4096 else BF16[:size]
    found, data = stored(content, element_size)
    assert found.stored_size == len(data)
    assert found.ratio == size / len(data) >= PAYS
    assert found.cpu_seconds > 0
    assert restored(found.codec, data, size) == content


@pytest.mark.parametrize("element_size", [2, 4])
def test_the_element_size_is_found(element_size: int) -> None:
    content = numbers(FRAME // element_size, element_size)
    assert stored(content)[0].codec == f"blosc-zstd-s{element_size}/1"
    assert min((1, 2, 4), key=lambda size: len(pack(content, size))) == element_size


@pytest.mark.parametrize("content", [b"", b"x", RANDOM[:100], RANDOM[: FRAME + 1], RANDOM])
def test_incompressible_content_is_not_compressed(content: bytes) -> None:
    with file(content) as source, file() as destination:
        assert compress(source, destination, len(content)) is None
        assert content_of(destination) == b""


def test_a_sample_that_was_not_like_the_rest_costs_no_room() -> None:
    read: list[tuple[int, int]] = []

    def reader(offset: int, count: int) -> bytes:
        read.append((offset, count))
        return bytes(count)

    assert sampled(reader, len(RANDOM), None) is not None
    assert sum(count for _, count in read) == SAMPLE
    assert min(read)[0] == 0
    assert len(RANDOM) - SAMPLE // 8 < sum(max(read)) <= len(RANDOM)
    content = bytearray(RANDOM)
    for offset, count in read:
        content[offset : offset + count] = bytes(count)
    with file(bytes(content)) as source, file() as destination:
        assert compress(source, destination, len(content)) is None
        assert content_of(destination) == b""


def test_objects_beyond_the_largest_are_left_alone() -> None:
    with file() as source, file() as destination:
        assert compress(source, destination, LARGEST + 1) is None
        with pytest.raises(TooLargeError, match="at most"):
            decompress("blosc-zstd-s2/1", source, destination, LARGEST + 1, 0)


def test_holes_stay_holes(tmp_path: Path) -> None:
    size = 64 * MiB
    source, destination, back = (
        os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("source", "to", "back")
    )
    try:
        os.pwrite(source, BF16[:FRAME], 20 * FRAME // 2)
        os.truncate(source, size)
        found = compress(source, destination, size)
        assert found is not None
        assert found.ratio > 10
        decompress(found.codec, destination, back, size, found.stored_size)
        assert os.fstat(back).st_size == size
        assert os.fstat(back).st_blocks * 512 <= 2 * FRAME
        assert content_of(back) == content_of(source)
    finally:
        for fd in (source, destination, back):
            os.close(fd)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_object() -> None:
    """There are a few frames for any size."""
    size = 32 * FRAME
    with file() as source, file() as destination, file() as back:
        for number in range(32):
            os.pwrite(source, BF16[:FRAME], number * FRAME)
        tracemalloc.start()
        try:
            found = compress(source, destination, size)
            assert found is not None
            decompress(found.codec, destination, back, size, found.stored_size)
            assert tracemalloc.get_traced_memory()[1] < 5 * FRAME
        finally:
            tracemalloc.stop()


# Damage

SMALL = BF16[: 64 << 10] * 130  # three frames that become small, so that flips hit everything
FOUND, DATA = stored(SMALL, 2)
FLIPS = st.lists(
    st.tuples(st.one_of(st.integers(0, len(DATA) - 1), st.integers(0, 200)), st.integers(1, 255)),
    min_size=1,
    max_size=4,
)


def expect_damage(data: bytes, size: int = len(SMALL), stored_size: int | None = None) -> None:
    """It is refused, and what was written by then is right."""
    with file(data) as source, file() as destination:
        with pytest.raises(DamagedError):
            decompress(
                FOUND.codec,
                source,
                destination,
                size,
                len(data) if stored_size is None else stored_size,
            )
        got = content_of(destination)
    for offset in range(0, len(got), FRAME):
        assert got[offset : offset + FRAME] in {
            SMALL[offset : offset + FRAME],
            bytes(len(got[offset : offset + FRAME])),
        }


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(FLIPS)
def test_flipped_bits_are_found(flips: list[tuple[int, int]]) -> None:
    data = bytearray(DATA)
    for position, bits in flips:
        data[position] ^= bits
    if data == DATA:
        assert restored(FOUND.codec, bytes(data), len(SMALL)) == SMALL
    else:
        expect_damage(bytes(data))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.booleans())
def test_truncation_is_found(length: int, told: bool) -> None:  # noqa: FBT001 (drawn)
    expect_damage(DATA[:length], stored_size=None if told else len(DATA))
    with file(DATA[:length]) as source, file() as destination:
        os.truncate(source, len(DATA))  # the end is a hole
        with pytest.raises(DamagedError):
            decompress(FOUND.codec, source, destination, len(SMALL), len(DATA))


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=100), st.integers(0, len(DATA)))
def test_bytes_too_many_are_found(more: bytes, position: int) -> None:
    data = DATA[:position] + more + DATA[position:]
    expect_damage(data)
    expect_damage(data, stored_size=len(DATA))


@pytest.mark.parametrize(
    "size", [0, 1, len(SMALL) - 1, len(SMALL) + 1, len(SMALL) + FRAME, LARGEST]
)
def test_a_wrong_size_is_found(size: int) -> None:
    with file(DATA) as source, file() as destination, pytest.raises(DamagedError):
        decompress(FOUND.codec, source, destination, size, len(DATA))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(FLIPS, st.booleans())
def test_hostile_chunks_with_right_digests_end_in_an_error_or_in_as_many_bytes(
    flips: list[tuple[int, int]],
    lengths_kept: bool,  # noqa: FBT001 (drawn)
) -> None:
    """Digests keep accidents away from the library; it must also survive what gets through."""
    length = 64 << 10
    chunk = bytearray(pack(SMALL[:length], 2))
    before = bytes(chunk[:16])
    for position, bits in flips:
        chunk[position % len(chunk)] ^= bits
    if lengths_kept:
        chunk[4:8], chunk[12:16] = before[4:8], before[12:16]
    frame = container.Frame(0, len(chunk), xxh3_64_intdigest(bytes(chunk)), 0, length)
    with suppress(DamagedError):
        assert len(unpack(bytes(chunk), frame)) == length


@pytest.mark.parametrize("told", [0, 1, FRAME + 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_length_in_a_chunk_allocates_no_memory(told: int) -> None:
    for field in (4, 8, 12):
        chunk = bytearray(pack(SMALL[:1000], 2))
        struct.pack_into("<I", chunk, field, told)
        frame = container.Frame(0, len(chunk), xxh3_64_intdigest(bytes(chunk)), 0, 1000)
        tracemalloc.start()
        try:
            with pytest.raises(DamagedError):
                unpack(bytes(chunk), frame)
            assert tracemalloc.get_traced_memory()[1] < MiB
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("length", [0, 15, FRAME + 17, 2**32 - 1])
def test_length_in_a_head_allocates_no_memory(length: int) -> None:
    begin = head(FRAME, [(length, 0)])
    with pytest.raises(DamagedError, match="frame 0"):
        frames_in(begin, FRAME, len(begin) + length)


@pytest.mark.parametrize("length", [0, 7, 8, 59, 61])
def test_a_head_of_another_length_is_refused(length: int) -> None:
    """A caller that fetches the head may get less of it, or other bytes."""
    begin = DATA[: head_size(len(SMALL))]
    with pytest.raises(DamagedError, match="head has"):
        frames_in((begin + bytes(9))[:length], len(SMALL), len(DATA))


def test_a_head_of_the_largest_object_is_not_read_from_a_small_one() -> None:
    with file(b"x" * 100) as source, file() as destination:
        tracemalloc.start()
        try:
            with pytest.raises(DamagedError, match="cannot be an object of"):
                decompress("blosc-zstd-s2/1", source, destination, LARGEST, 100)
            assert tracemalloc.get_traced_memory()[1] < MiB
        finally:
            tracemalloc.stop()


def test_objects_of_the_first_version_can_be_read() -> None:
    """Written when the form was made; the same bytes are what is written today."""
    content = bytes(range(256)) * 32
    data = bytes.fromhex(FIRST)
    assert restored("blosc-zstd-s2/1", data, len(content)) == content
    chunk = data[head_size(len(content)) :]
    begin = struct.pack("<8sQIQ", b"kvfsZ\0\0\1", 8192, len(chunk), xxh3_64_intdigest(chunk))
    assert data == begin + struct.pack("<Q", xxh3_64_intdigest(begin)) + chunk


FIRST = (
    "6b7666735a0000010020000000000000300100006cdb90bef3bfd4ecb258ae6469cea9f1020191020020000000"
    "20000030010000140000001801000028b52ffd60001f750800041000020406080a0c0e10121416181a1c1e2022"
    "2426282a2c2e30323436383a3c3e40424446484a4c4e50525456585a5c5e60626466686a6c6e70727476787a7c"
    "7e80828486888a8c8e90929496989a9c9ea0a2a4a6a8aaacaeb0b2b4b6b8babcbec0c2c4c6c8caccced0d2d4d6"
    "d8dadcdee0e2e4e6e8eaeceef0f2f4f6f8fafcfe01030507090b0d0f11131517191b1d1f21232527292b2d2f31"
    "333537393b3d3f41434547494b4d4f51535557595b5d5f61636567696b6d6f71737577797b7d7f81838587898b"
    "8d8f91939597999b9d9fa1a3a5a7a9abadafb1b3b5b7b9bbbdbfc1c3c5c7c9cbcdcfd1d3d5d7d9dbdddfe1e3e5"
    "e7e9ebedeff1f3f5f7f9fbfdff020080be832f017d1ff8460a"
)


@pytest.mark.parametrize(
    "codec", ["", "zstd", "blosc-zstd-s2/2", "blosc-zstd-s3/1", "blosc-zstd-s2", "blosc-zstd-s2/1 "]
)
def test_an_unknown_codec_is_refused(codec: str) -> None:
    with pytest.raises(UnsupportedError, match="expected blosc-zstd-s2/1"):
        restored(codec, DATA, len(SMALL))


# Other failures


@pytest.mark.parametrize("element_size", [0, -1, 3, 16, 256])
def test_element_sizes_that_no_number_has_are_refused(element_size: int) -> None:
    with pytest.raises(InvalidError, match="expected 1, 2, 4 or 8"):
        stored(BF16, element_size)


def test_a_source_that_is_too_short_is_an_error() -> None:
    with file(BF16) as source, file() as destination, pytest.raises(TierError, match="ends at"):
        compress(source, destination, len(BF16) + 1, 2)


def test_reads_may_be_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a network file system; and what ends while it is read is damaged."""
    whole, ends = os.pread, len(DATA)

    def short(fd: int, count: int, at: int) -> bytes:
        return whole(fd, max(0, min(count, 99_999, ends - at)) if fd == source else count, at)

    monkeypatch.setattr(os, "pread", short)
    with file(DATA) as source, file() as destination:
        decompress(FOUND.codec, source, destination, len(SMALL), len(DATA))
        assert content_of(destination) == SMALL
        for ends in (0, 10, len(DATA) - 1):
            with pytest.raises(DamagedError, match=f"ends at {ends}"):
                decompress(FOUND.codec, source, destination, len(SMALL), len(DATA))


def test_failed_system_call_is_a_tier_error(tmp_path: Path) -> None:
    (tmp_path / "closed").write_bytes(DATA)
    readable = os.open(tmp_path / "closed", os.O_RDONLY)
    writable = os.open(tmp_path / "closed", os.O_WRONLY)
    try:
        with file(BF16) as source:
            with pytest.raises(TierError, match="write failed"):
                compress(source, readable, len(BF16))
            with pytest.raises(TierError, match="read failed"):
                compress(writable, source, len(BF16))
            with pytest.raises(TierError, match="truncate failed"):
                decompress(FOUND.codec, readable, readable, len(SMALL), len(DATA))
        with pytest.raises(TierError, match="stat of the source failed"):
            decompress(FOUND.codec, -1, readable, len(SMALL), len(DATA))
    finally:
        os.close(readable)
        os.close(writable)


def test_a_full_disk_is_said_so(tmp_path: Path) -> None:
    mount("none", tmp_path, "tmpfs", 0, "size=1M")
    try:
        destination = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        try:
            with file(BF16) as source, pytest.raises(NoSpaceError):
                compress(source, destination, len(BF16))
            found, data = stored(BF16, 2)
            with file(data) as source, pytest.raises(NoSpaceError):
                decompress(found.codec, source, destination, len(BF16), len(data))
        finally:
            os.close(destination)
    finally:
        umount(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: data[:-1], lambda _: b""],
    ids=["flipped", "short", "empty"],
)
def test_a_library_that_errs_is_found_out_before_it_counts(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[bytes], bytes]
) -> None:
    right = blosc.decompress
    monkeypatch.setattr(blosc, "decompress", lambda chunk: wrong(right(chunk)))
    with pytest.raises(TierError, match="the library"):
        stored(BF16, 2)


def test_the_daemon_does_not_load_the_library() -> None:
    """It knows the jobs by name only; the library would bring numpy into it."""
    code = (
        "import sys, kvfs.compression.files; print([m for m in sys.modules if m in "
        "('blosc', 'numpy')])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
