import errno
import fcntl
import mmap
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.harness import Mounted
from tests.semantics.syscalls import opened, refused

M = 1 << 20


def test_create(here: Path) -> None:
    umask = os.umask(0o027)
    try:
        with opened(here / "a", os.O_CREAT | os.O_WRONLY, 0o666):
            found = os.stat(here / "a")
    finally:
        os.umask(umask)
    assert os.listdir(here) == ["a"]
    assert (found.st_mode, found.st_size, found.st_nlink) == (0o100640, 0, 1)
    assert (found.st_uid, found.st_gid) == (os.geteuid(), os.getegid())


def test_exclusive(here: Path) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.symlink("nowhere", here / "link")
    with refused(errno.EEXIST):
        os.open(here / "link", flags)
    with ProcessPoolExecutor(4) as pool:
        for name in (str(here / f"{number}") for number in range(8)):
            won = list(pool.map(_try_open, [name] * 8, [flags] * 8))
            assert won.count(0) == 1
            assert won.count(errno.EEXIST) == 7


def _try_open(path: str, flags: int) -> int:
    try:
        os.close(os.open(path, flags))
    except OSError as error:
        return error.errno or -1
    return 0


def test_absent(here: Path) -> None:
    for _ in range(3):
        assert not os.access(here / "later", os.F_OK)
        with refused(errno.ENOENT):
            os.stat(here / "later")
    with ProcessPoolExecutor(1) as pool:
        assert pool.submit(_try_open, str(here / "later"), os.O_CREAT | os.O_WRONLY).result() == 0
    assert os.stat(here / "later").st_size == 0


def test_truncating_open(here: Path) -> None:
    (here / "a").write_bytes(b"x" * M)
    before = os.stat(here / "a").st_ino
    with opened(here / "a", os.O_RDONLY) as reader:
        assert os.pread(reader, 1, 0) == b"x"
        with opened(here / "a", os.O_WRONLY | os.O_TRUNC) as writer:
            assert os.fstat(reader).st_size == 0
            assert os.pread(reader, 1, 0) == b""
            os.write(writer, b"new")
            assert os.pread(reader, 10, 0) == b"new"
    with opened(here / "a", os.O_WRONLY | os.O_TRUNC):
        assert os.stat(here / "a").st_size == 0
    assert os.stat(here / "a").st_ino == before


def test_append(here: Path) -> None:
    (here / "log").write_bytes(b"head\n")
    records = 300
    with ProcessPoolExecutor(2) as pool:
        futures = [pool.submit(_append, str(here / "log"), mark, records) for mark in "ab"]
        for future in futures:
            future.result()
    lines = (here / "log").read_text().splitlines()
    assert lines[0] == "head"
    for mark in "ab":
        mine = [line for line in lines if line[0] == mark]
        assert mine == [f"{mark}{n} {mark * 100}" for n in range(records)]
    assert len(lines) == 1 + 2 * records


def _append(path: str, mark: str, records: int) -> None:
    with opened(Path(path), os.O_WRONLY | os.O_APPEND) as descriptor:
        for number in range(records):
            os.write(descriptor, f"{mark}{number} {mark * 100}\n".encode())


def test_direct_aligned(here: Path) -> None:
    memory = mmap.mmap(-1, 8 * M)
    memory.write(os.urandom(8 * M))
    for name in ("first", "second"):  # the second one knows its size beforehand, and may be in RAM
        with opened(here / name, os.O_CREAT | os.O_WRONLY | os.O_DIRECT) as descriptor:
            assert os.write(descriptor, memory) == 8 * M
        back = mmap.mmap(-1, 8 * M)
        with opened(here / name, os.O_RDONLY | os.O_DIRECT) as descriptor:
            assert os.preadv(descriptor, [back], 0) == 8 * M
        assert back[:] == memory[:]
    with opened(here / "third", os.O_CREAT | os.O_RDWR) as descriptor:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        assert os.pwrite(descriptor, memory, 0) == 8 * M


def test_direct_odd(here: Path, shared: Mounted) -> None:
    (here / "a.odd").write_bytes(b"kvfs learns the size of such files, and puts them into RAM")
    status = shared.status()
    strict = status["passthrough"]["on"] and "ram" not in status["tiers"]
    data = memoryview(os.urandom(M + 28))[1:]
    with opened(here / "b.odd", os.O_CREAT | os.O_RDWR | os.O_DIRECT) as descriptor:
        if strict:
            with refused(errno.EINVAL):
                os.write(descriptor, data)
            assert os.fstat(descriptor).st_size == 0
        else:
            assert os.write(descriptor, data) == len(data)
            assert os.pread(descriptor, M, 5) == data[5 : M + 5]


@pytest.mark.parametrize("size", [8 * M, 32 * M + 28])
def test_large_write(here: Path, size: int) -> None:
    data = os.urandom(size)
    with opened(here / "a", os.O_CREAT | os.O_WRONLY | os.O_TRUNC) as descriptor:
        assert os.write(descriptor, data) == size
    with opened(here / "a", os.O_RDONLY) as descriptor:
        assert os.read(descriptor, size + 1) == data


def test_refusals(here: Path) -> None:
    (here / "file").touch()
    os.symlink("file", here / "link")
    for name, flags, code in (
        ("link", os.O_RDONLY | os.O_NOFOLLOW, errno.ELOOP),
        ("file", os.O_RDONLY | os.O_DIRECTORY, errno.ENOTDIR),
        (".", os.O_WRONLY, errno.EISDIR),
        (".", os.O_WRONLY | os.O_CREAT, errno.EISDIR),
        ("file/x", os.O_WRONLY | os.O_CREAT, errno.ENOTDIR),
        ("no/x", os.O_WRONLY | os.O_CREAT, errno.ENOENT),
        (".", os.O_RDWR | os.O_TMPFILE, errno.EOPNOTSUPP),
    ):
        with refused(code):
            os.open(here / name, flags)
    os.close(os.open(here / "file", os.O_RDONLY | os.O_NOATIME | os.O_CLOEXEC))
    assert sorted(os.listdir(here)) == ["file", "link"]
