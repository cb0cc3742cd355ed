import errno
import fcntl
import mmap
import os
from pathlib import Path

from tests.semantics.syscalls import fallocate, opened, refused

M = 1 << 20


def test_written_in_place(here: Path) -> None:
    with opened(here / "k", os.O_CREAT | os.O_WRONLY | os.O_TRUNC) as a:
        os.write(a, b"1" * M)
        assert os.stat(here / "k").st_size == M
        b = os.open(here / "k", os.O_RDONLY)
        assert os.read(b, 2 * M) == b"1" * M
        os.write(a, b"2" * M)
    assert os.read(b, 2 * M) == b"2" * M
    os.close(b)


def test_published(here: Path) -> None:
    (here / "k.tmp").write_bytes(b"1" * 8 * M)
    assert not (here / "k").exists()
    os.rename(here / "k.tmp", here / "k")
    with opened(here / "k", os.O_RDONLY) as b:
        assert os.read(b, 9 * M) == b"1" * 8 * M
        (here / "k.tmp").write_bytes(b"2" * 8 * M)
        os.rename(here / "k.tmp", here / "k")
        assert os.pread(b, 9 * M, 0) == b"1" * 8 * M
        assert (here / "k").read_bytes() == b"2" * 8 * M


def test_two_writers_of_one_name_share_the_file(here: Path) -> None:
    a = os.open(here / "k.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.write(a, b"aaaa")
    b = os.open(here / "k.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.write(b, b"bb")
    os.close(a)
    os.rename(here / "k.tmp", here / "k")
    assert (here / "k").read_bytes() == b"bb"
    os.write(b, b"bb")
    os.close(b)
    with refused(errno.ENOENT):
        os.rename(here / "k.tmp", here / "k")
    assert (here / "k").read_bytes() == b"bbbb"


def test_published_directory(here: Path) -> None:
    for name in ("h.tmp", "g.tmp"):
        os.mkdir(here / name)
        for part in ("data", "tokens"):
            with opened(here / name / part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o777) as file:
                os.write(file, name.encode())
                os.fsync(file)
        os.symlink("../parent", here / name / "parent")
    os.rename(here / "h.tmp", here / "h")
    assert sorted(os.listdir(here / "h")) == ["data", "parent", "tokens"]
    with refused(errno.ENOTEMPTY):
        os.rename(here / "g.tmp", here / "h")
    assert (here / "h" / "data").read_bytes() == b"h.tmp"


def test_evictor(here: Path) -> None:
    (here / "k").write_bytes(b"1" * M + b"2" * M)
    with opened(here / "k", os.O_RDONLY) as a:
        assert os.read(a, M) == b"1" * M
        os.unlink(here / "k")
        assert os.read(a, M) == b"2" * M
        with refused(errno.ENOENT):
            os.open(here / "k", os.O_RDONLY)
        (here / "k").write_bytes(b"3" * M)
    assert (here / "k").read_bytes() == b"3" * M


def test_scratch_file(here: Path) -> None:
    slot = mmap.mmap(-1, M)
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
    with opened(here / "scratch", flags, 0o600) as a:
        with refused(errno.EOPNOTSUPP):
            fallocate(a, 0, 64 * M)
        os.ftruncate(a, 64 * M)
        os.unlink(here / "scratch")
        fcntl.fcntl(a, fcntl.F_SETFL, fcntl.fcntl(a, fcntl.F_GETFL) | os.O_DIRECT)
        for number in (7, 3, 60, 0):
            slot[:] = bytes([number]) * M
            assert os.pwritev(a, [slot], number * M) == M
        for number in (60, 0, 3, 7):
            assert os.preadv(a, [slot], number * M) == M
            assert slot[:] == bytes([number]) * M
        assert os.listdir(here) == []


def test_preallocated(here: Path) -> None:
    with opened(here / ".tmp1", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600) as a:
        os.ftruncate(a, M + 88)
        os.write(a, b"h" * 88)
        assert os.stat(here / ".tmp1").st_size == M + 88
        os.write(a, b"d" * M)
        os.rename(here / ".tmp1", here / "k")
    with (
        opened(here / "k", os.O_RDONLY) as b,
        mmap.mmap(b, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapped,
    ):
        assert mapped[:] == b"h" * 88 + b"d" * M
