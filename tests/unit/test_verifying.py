"""A mover's results for the scrubber: a copy is right, wrong, or not readable."""

import ctypes
import errno
import mmap
import os
import random
from pathlib import Path

import pytest
import xxhash

from kvfs.clock import Clock
from kvfs.movement import files
from kvfs.movement.verifying import BLOCK, PIECE, Copy, VerifyBatch, verify

ENDLESS = 1e18  # bytes a second
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5000]


def digest(content: bytes) -> bytes:
    return xxhash.xxh3_128(content).digest()


def made(path: Path, content: bytes, *, direct: bool = True) -> Copy:
    path.write_bytes(content)
    return Copy(str(path), ((len(content), digest(content)),), direct)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def results(*copies: Copy) -> list[str | OSError]:
    return verify(VerifyBatch(copies), ENDLESS).results


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("size", SIZES)
def test_flipped_bit_is_found_anywhere(tmp_path: Path, size: int, *, direct: bool) -> None:
    content = random.Random(size).randbytes(size)
    copy = made(tmp_path / "a", content, direct=direct)
    assert results(copy) == [""]
    for at in {0, size // 2, size - 1} if size else ():
        flip(tmp_path / "a", at)
        (found,) = results(copy)
        assert isinstance(found, str)
        assert "it has the digest" in found
        flip(tmp_path / "a", at)
    assert results(copy) == [""]


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_a_file_that_is_mostly_holes_is_read_in_the_time_of_its_data(
    tmp_path: Path, *, direct: bool
) -> None:
    """Its size would take days at the speed of any memory."""
    path, size = tmp_path / "a", 1 << 43
    expected = files.SparseDigest()
    with path.open("wb") as file:
        for at in (0, 5 * BLOCK, size - BLOCK):
            file.seek(at)
            file.write(b"x" * BLOCK)
            expected.update(at, memoryview(b"x" * BLOCK))
    copy = Copy(str(path), ((size, expected.digest(size)),), direct)
    assert results(copy) == [""]
    flip(path, 5 * BLOCK + 7)
    (found,) = results(copy)
    assert isinstance(found, str)
    assert "it has the digest" in found


def test_copies_of_one_batch_do_not_know_of_each_other(tmp_path: Path) -> None:
    right = made(tmp_path / "right", b"right")
    wrong = made(tmp_path / "wrong", b"wrong")
    flip(tmp_path / "wrong", 2)
    gone = Copy(str(tmp_path / "gone"), ((1, digest(b"x")),), direct=True)
    long = made(tmp_path / "long", b"long")
    (tmp_path / "long").write_bytes(b"longer")
    first, second, third, fourth, fifth = results(right, wrong, gone, long, right)
    assert first == fifth == ""
    assert second
    assert isinstance(third, FileNotFoundError)
    assert fourth == "it has 6 bytes, expected 4"


def test_a_file_may_have_one_of_two_contents_by_its_size(tmp_path: Path) -> None:
    forms = ((5, digest(b"small")), (6, digest(b"larger")))
    for content, expected in ((b"small", True), (b"larger", True), (b"nearly", False)):
        (tmp_path / "a").write_bytes(content)
        (found,) = results(Copy(str(tmp_path / "a"), forms, direct=True))
        assert (found == "") is expected


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (found,) = results(Copy(str(tmp_path / "link"), ((1, digest(b"a")),), direct=True))
    assert isinstance(found, OSError)
    assert found.errno == errno.ELOOP


def cached(path: Path) -> bool:
    """Whether the page cache has any of it. mincore(2), since a read would bring it there."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(mapped)), pages)
        del start
        assert done == 0, os.strerror(ctypes.get_errno())
        return any(page & 1 for page in pages)


def forget(path: Path) -> None:
    """The page cache has nothing of it."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_the_page_cache_stays_as_it_is(tmp_path: Path) -> None:
    content = random.Random(3).randbytes(PIECE + 100)
    copy = made(tmp_path / "a", content)
    assert cached(tmp_path / "a")
    assert results(copy) == [""]
    assert cached(tmp_path / "a"), "readers use it"
    forget(tmp_path / "a")
    assert not cached(tmp_path / "a")
    assert results(copy) == [""]
    assert not cached(tmp_path / "a")


def test_a_file_system_that_cannot_read_past_the_page_cache_is_read_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = made(tmp_path / "a", b"a" * 10_000)
    forget(tmp_path / "a")
    real = os.open

    def refuse(path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real(path, flags)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert results(copy) == [""]
    assert not cached(tmp_path / "a"), "nothing is left behind"


def test_file_written_during_its_verification_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = made(tmp_path / "a", bytes(3 * PIECE))
    pieces: list[int] = []
    real = os.preadv

    def write_meanwhile(fd: int, buffers: list[memoryview], position: int) -> int:
        pieces.append(position)
        os.utime(tmp_path / "a", ns=(1, 1))
        return real(fd, buffers, position)

    monkeypatch.setattr(os, "preadv", write_meanwhile)
    (found,) = results(copy)
    assert isinstance(found, BlockingIOError)
    assert pieces == [0]


def test_time_of_access_stays(tmp_path: Path) -> None:
    """Or a pass would write to each inode of the disk."""
    copy = made(tmp_path / "a", b"a")
    os.utime(tmp_path / "a", ns=(1, 1))
    assert results(copy) == [""]
    assert (tmp_path / "a").stat().st_atime_ns == 1


def test_no_more_than_the_rate_is_read(tmp_path: Path) -> None:
    now, slept = [0.0], [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        slept[0] += seconds

    copies = [made(tmp_path / str(number), bytes(PIECE)) for number in range(3)]
    found = verify(VerifyBatch(tuple(copies)), PIECE / 2.0, Clock(lambda: now[0], sleep))
    assert found.results == [""] * 3
    assert found.cpu_seconds >= 0
    assert slept[0] == pytest.approx(6.0)
