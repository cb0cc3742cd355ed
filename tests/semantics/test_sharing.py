# ruff: noqa: S103  (who may do what is the point)
import errno
import fcntl
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.semantics.syscalls import (
    NOBODY,
    as_nobody,
    drop_caches,
    name_to_handle,
    open_by_handle,
    opened,
    refused,
)


def test_locks(here: Path) -> None:
    (here / "a").touch()
    os.chmod(here / "a", 0o666)

    def take_whole() -> None:
        with opened(Path("a"), os.O_RDONLY) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def take_range() -> None:
        with opened(Path("a"), os.O_RDWR) as descriptor:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 5)

    with opened(here / "a", os.O_RDWR) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert as_nobody(here, take_whole) == errno.EWOULDBLOCK
        assert as_nobody(here, take_range) == 0
        fcntl.flock(holder, fcntl.LOCK_UN)
        fcntl.lockf(holder, fcntl.LOCK_EX, 1, 14)
        assert as_nobody(here, take_whole) == 0
        assert as_nobody(here, take_range) == errno.EWOULDBLOCK
    assert as_nobody(here, take_range) == 0


def test_special_files(here: Path) -> None:
    os.mkfifo(here / "fifo", 0o600)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit((here / "fifo").read_bytes)
        (here / "fifo").write_bytes(b"through")
        assert reader.result() == b"through"
    with (
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX) as calling,
        opened(here, os.O_RDONLY | os.O_DIRECTORY) as directory,  # the whole path is too long
    ):
        listening.bind(f"/proc/self/fd/{directory}/socket")
        listening.listen()
        calling.connect(f"/proc/self/fd/{directory}/socket")
    os.mknod(here / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with refused(errno.EACCES):
        os.open(here / "null", os.O_WRONLY)
    assert os.stat(here / "null").st_rdev == os.makedev(1, 3)
    assert stat.S_ISSOCK(os.stat(here / "socket").st_mode)
    os.mknod(here / "file", stat.S_IFREG | 0o640)
    assert (os.stat(here / "file").st_size, os.stat(here / "file").st_mode) == (0, 0o100640)
    with refused(errno.EEXIST):
        os.mkfifo(here / "file")


def test_handles(here: Path, shared: Mounted) -> None:
    os.mkdir(here / "d")
    (here / "d" / "a").write_bytes(b"content")
    handles = [name_to_handle(here / "d" / "a"), name_to_handle(here / "d")]
    drop_caches()
    file = open_by_handle(shared.path, handles[0])
    assert os.read(file, 9) == b"content"
    os.close(file)
    os.rename(here / "d" / "a", here / "a")
    os.rename(here / "d", here / "e")
    (here / "e" / "inside").touch()
    drop_caches()
    file = open_by_handle(shared.path, handles[0])
    assert os.read(file, 9) == b"content"
    os.close(file)
    directory = open_by_handle(shared.path, handles[1], os.O_RDONLY | os.O_DIRECTORY)
    assert os.listdir(directory) == ["inside"]
    assert os.stat("..", dir_fd=directory).st_ino == os.stat(here).st_ino
    os.close(directory)


def test_stale_handles(here: Path, shared: Mounted) -> None:
    (here / "a").write_bytes(b"old")
    handle, old = name_to_handle(here / "a"), os.stat(here / "a").st_ino
    os.unlink(here / "a")
    (here / "a").write_bytes(b"new")

    def stale() -> bool:
        try:
            file = open_by_handle(shared.path, handle)
        except OSError as error:
            return error.errno == errno.ESTALE
        with os.fdopen(file, "rb") as still:
            assert still.read() == b"old"
        return False

    wait_for(stale, "the release of the old file, which close(2) does not wait for, is over")
    for _ in range(2):
        with refused(errno.ESTALE):
            open_by_handle(shared.path, handle)
        drop_caches()
    assert os.stat(here / "a").st_ino > old


def test_access_for_others(here: Path, mount: Mount) -> None:
    os.chmod(here, 0o777)
    assert as_nobody(here, lambda: os.close(os.open("a", os.O_CREAT | os.O_WRONLY))) == 0
    assert os.stat(here / "a").st_uid == NOBODY
    private = mount("ram=16M").path
    os.chmod(private, 0o777)
    assert as_nobody(private, lambda: os.listdir(".")) == errno.EACCES
