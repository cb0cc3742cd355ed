import errno
import os
from pathlib import Path

from tests.harness import Mounted, wait_for
from tests.semantics.syscalls import opened, refused

M = 1 << 20


def test_unlink(here: Path) -> None:
    (here / "a").touch()
    os.unlink(here / "a")
    assert not os.path.lexists(here / "a")
    with refused(errno.ENOENT):
        os.unlink(here / "a")
    with refused(errno.EISDIR):
        os.unlink(here)


def test_unlink_while_open(here: Path, shared: Mounted) -> None:
    before = _used(shared.idle())
    with opened(here / "a", os.O_CREAT | os.O_RDWR) as descriptor:
        os.ftruncate(descriptor, 4 * M)
        os.unlink(here / "a")
        assert os.pwrite(descriptor, b"x" * M, 3 * M) == M
        os.ftruncate(descriptor, 8 * M)
        os.pwrite(descriptor, b"y" * M, 7 * M)
        assert os.pread(descriptor, 2, 3 * M - 1) == b"\0x"
        found = os.fstat(descriptor)
        assert (found.st_nlink, found.st_size) == (0, 8 * M)
        assert _used(shared.status()) > before
    wait_for(lambda: _used(shared.idle()) == before, "the space is free again")


def test_unlink_while_read(here: Path, shared: Mounted) -> None:
    before = _used(shared.idle())
    (here / "a").write_bytes(b"old" * M)
    with opened(here / "a", os.O_RDONLY) as old:
        os.unlink(here / "a")
        (here / "a").write_bytes(b"new")
        assert os.pread(old, 6, 3 * M - 6) == b"oldold"
        assert os.fstat(old).st_ino != os.stat(here / "a").st_ino
        assert (here / "a").read_bytes() == b"new"
    os.unlink(here / "a")
    wait_for(lambda: _used(shared.idle()) == before, "the space is free again")


def _used(status: dict[str, dict[str, dict[str, int]]]) -> int:
    return sum(tier["used_bytes"] + tier["reserved_bytes"] for tier in status["tiers"].values())


def test_rmdir(here: Path) -> None:
    os.makedirs(here / "d" / "e")
    (here / "file").touch()
    with refused(errno.ENOTEMPTY):
        os.rmdir(here / "d")
    with refused(errno.ENOTDIR):
        os.rmdir(here / "file")
    with opened(here / "d" / "e", os.O_RDONLY | os.O_DIRECTORY) as inside:
        os.rmdir(here / "d" / "e")
        assert os.listdir(inside) == []
        assert os.stat(inside).st_nlink == 0
        for make in (os.mkdir, os.mkfifo):
            with refused(errno.ENOENT):
                make("x", dir_fd=inside)
        with refused(errno.ENOENT):
            os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=inside)
    os.rmdir(here / "d")
    assert os.stat(here).st_nlink == 2
