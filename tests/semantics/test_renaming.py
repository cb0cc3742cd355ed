import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.semantics.syscalls import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    opened,
    refused,
    renameat2,
)


def test_over_file(here: Path) -> None:
    size = 100_000
    (here / "a").write_bytes(b"0" * size)
    done = threading.Event()
    seen: list[tuple[int, int]] = []

    def read() -> None:
        while not done.is_set():
            data = (here / "a").read_bytes()
            seen.append((len(data), len(set(data))))

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        try:
            for number in range(100):
                (here / "a.tmp").write_bytes(b"%d" % (number % 10) * size)
                os.rename(here / "a.tmp", here / "a")
        finally:
            done.set()
        reader.result()
    assert set(seen) == {(size, 1)}
    assert os.listdir(here) == ["a"]


def test_over_open_file(here: Path) -> None:
    (here / "a").write_bytes(b"old")
    (here / "b").write_bytes(b"new")
    with opened(here / "a", os.O_RDWR) as old, opened(here / "b", os.O_RDWR) as new:
        os.rename(here / "b", here / "a")
        assert os.pread(old, 9, 0) == b"old"
        assert os.fstat(old).st_nlink == 0
        os.pwrite(old, b"older", 0)
        os.pwrite(new, b"newer", 0)
        assert os.pread(old, 9, 0) == b"older"
        assert (here / "a").read_bytes() == b"newer"
    assert (here / "a").read_bytes() == b"newer"


def test_while_writing(here: Path) -> None:
    with opened(here / "a.tmp", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, b"begun ")
        os.rename(here / "a.tmp", here / "a")
        os.write(descriptor, b"ended")
        assert (here / "a").read_bytes() == b"begun ended"
    assert (here / "a").read_bytes() == b"begun ended"
    assert os.listdir(here) == ["a"]


def test_full_directory(here: Path) -> None:
    os.makedirs(here / "from" / "x.tmp" / "deep")
    os.mkdir(here / "to")
    (here / "from" / "x.tmp" / "f").write_bytes(b"content")
    with opened(here / "from" / "x.tmp" / "f", os.O_RDONLY) as descriptor:
        os.rename(here / "from" / "x.tmp", here / "to" / "x")
        assert os.read(descriptor, 9) == b"content"
    assert sorted(os.listdir(here / "to" / "x")) == ["deep", "f"]
    assert os.stat(here / "to" / "x" / "..").st_ino == os.stat(here / "to").st_ino
    assert [os.stat(here / name).st_nlink for name in ("from", "to")] == [2, 3]


def test_over_directory(here: Path) -> None:
    for name in ("a", "empty", "full/x", "file"):
        os.makedirs(here / name) if name != "file" else (here / name).touch()
    before = os.stat(here / "a").st_ino
    for target, code in (("full", errno.ENOTEMPTY), ("file", errno.ENOTDIR)):
        with refused(code):
            os.rename(here / "a", here / target)
    with refused(errno.EISDIR):
        os.rename(here / "file", here / "a")
    assert sorted(os.listdir(here)) == ["a", "empty", "file", "full"]
    os.rename(here / "a", here / "empty")
    assert os.stat(here / "empty").st_ino == before
    assert os.stat(here).st_nlink == 4


def test_into_itself(here: Path) -> None:
    os.makedirs(here / "a" / "b" / "c")
    with refused(errno.EINVAL):
        os.rename(here / "a", here / "a" / "x")
    with refused(errno.EINVAL):
        os.rename(here / "a", here / "a" / "b" / "c" / "x")
    with refused(errno.EINVAL):
        renameat2(here / "a", here / "a" / "b", RENAME_EXCHANGE)
    assert os.path.isdir(here / "a" / "b" / "c")


def test_noreplace(here: Path) -> None:
    (here / "a").write_bytes(b"a")
    (here / "b").write_bytes(b"b")
    with refused(errno.EEXIST):
        renameat2(here / "a", here / "b", RENAME_NOREPLACE)
    assert (here / "b").read_bytes() == b"b"
    renameat2(here / "a", here / "c", RENAME_NOREPLACE)
    assert sorted(os.listdir(here)) == ["b", "c"]


def test_exchange(here: Path) -> None:
    (here / "file").write_bytes(b"content")
    os.makedirs(here / "dir" / "sub")
    renameat2(here / "file", here / "dir", RENAME_EXCHANGE)
    assert (here / "dir").read_bytes() == b"content"
    assert os.listdir(here / "file") == ["sub"]
    renameat2(here / "dir", here / "file" / "sub", RENAME_EXCHANGE)
    assert (here / "file" / "sub").read_bytes() == b"content"
    assert os.stat(here / "dir" / "..").st_ino == os.stat(here).st_ino
    assert (os.stat(here).st_nlink, os.stat(here / "file").st_nlink) == (4, 2)
    with refused(errno.ENOENT):
        renameat2(here / "file", here / "no", RENAME_EXCHANGE)
    with refused(errno.EINVAL):
        renameat2(here / "file", here / "no", RENAME_WHITEOUT)


def test_same_file(here: Path) -> None:
    (here / "a").touch()
    os.link(here / "a", here / "b")
    os.rename(here / "a", here / "b")
    assert sorted(os.listdir(here)) == ["a", "b"]


def test_missing_source(here: Path) -> None:
    (here / "b").write_bytes(b"b")
    with refused(errno.ENOENT):
        os.rename(here / "a", here / "b")
    assert (here / "b").read_bytes() == b"b"
