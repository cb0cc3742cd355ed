# ruff: noqa: S103  (who may do what is the point)
import errno
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from tests.semantics.syscalls import (
    NOBODY,
    UTIME_NOW,
    UTIME_OMIT,
    as_nobody,
    opened,
    refused,
    utimensat,
)

HOUR = 3600 * 10**9


def test_mode_and_owner(here: Path) -> None:
    (here / "a").touch()
    os.symlink("a", here / "link")
    before = os.stat(here / "a").st_ctime_ns
    os.chown(here / "a", 1234, 5678)
    os.chmod(here / "a", 0o4711)
    found = os.stat(here / "a")
    assert (found.st_mode, found.st_uid, found.st_gid) == (0o104711, 1234, 5678)
    assert found.st_ctime_ns > before
    os.chown(here / "a", 1, -1)
    assert os.stat(here / "a").st_mode == 0o100711
    os.chmod(here / "a", 0o4777)
    assert as_nobody(here, lambda: os.close(_written(os.open("a", os.O_WRONLY)))) == 0
    assert os.stat(here / "a").st_mode == 0o100777
    for kind in (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR):
        node = here / f"{kind}"
        os.mknod(node, kind | 0o600, os.makedev(1, 3))
        os.chmod(node, 0o6711)
        os.chown(node, 1, -1)
        assert os.lstat(node).st_mode == kind | 0o711
    os.lchown(here / "link", 77, 88)
    assert os.lstat(here / "link").st_uid == 77
    assert os.stat(here / "a").st_uid == 1


def _written(descriptor: int) -> int:
    os.write(descriptor, b"x")
    return descriptor


def test_times(here: Path) -> None:
    (here / "a").touch()
    os.mkdir(here / "d")
    os.symlink("a", here / "link")
    for name in ("a", "d", "link"):
        os.utime(here / name, ns=(HOUR + 1, 2 * HOUR + 2), follow_symlinks=False)
        found = os.lstat(here / name)
        assert (found.st_atime_ns, found.st_mtime_ns) == (HOUR + 1, 2 * HOUR + 2)
    utimensat(here / "a", UTIME_NOW, UTIME_OMIT)
    assert os.stat(here / "a").st_mtime_ns == 2 * HOUR + 2
    assert os.stat(here / "a").st_atime_ns > HOUR + 1
    utimensat(here / "a", UTIME_OMIT, 3)
    assert os.stat(here / "a").st_mtime_ns == 3
    with opened(here / "a", os.O_RDONLY) as descriptor:
        os.utime(descriptor, ns=(4, 5))
        assert os.fstat(descriptor).st_mtime_ns == 5


def test_time_set_while_written(here: Path) -> None:
    with opened(here / "a", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, b"copied")
        os.utime(descriptor, ns=(HOUR, 2 * HOUR))
        assert os.fstat(descriptor).st_mtime_ns == 2 * HOUR
    assert (os.stat(here / "a").st_atime_ns, os.stat(here / "a").st_mtime_ns) == (HOUR, 2 * HOUR)
    with opened(here / "a", os.O_WRONLY) as descriptor:
        assert os.fstat(descriptor).st_mtime_ns == 2 * HOUR
        os.utime(descriptor, ns=(HOUR, HOUR))
        os.write(descriptor, b"changed")
    assert os.stat(here / "a").st_mtime_ns > 2 * HOUR


def test_times_follow(here: Path) -> None:
    directory = here / "d"
    directory.mkdir()

    def advances(path: Path, change: Callable[[], object]) -> None:
        os.utime(path, ns=(HOUR, HOUR))
        change()
        assert os.stat(path).st_mtime_ns > HOUR
        assert os.stat(path).st_ctime_ns >= os.stat(path).st_mtime_ns

    advances(directory, (directory / "a").touch)
    advances(directory / "a", lambda: (directory / "a").write_bytes(b"content"))
    advances(directory / "a", lambda: os.truncate(directory / "a", 3))
    advances(directory, lambda: os.rename(directory / "a", directory / "b"))
    shown = os.stat(directory / "b")
    with opened(directory / "b", os.O_RDONLY):
        assert os.stat(directory / "b").st_mtime_ns == shown.st_mtime_ns
    advances(directory, lambda: os.unlink(directory / "b"))
    advances(directory, lambda: os.mkdir(directory / "c"))
    advances(directory, lambda: os.rmdir(directory / "c"))


def test_access_time(here: Path) -> None:
    (here / "a").write_bytes(b"content")

    def read() -> None:
        (here / "a").read_bytes()

    def only_open() -> None:
        os.close(os.open(here / "a", os.O_RDONLY))

    for use in (only_open, read, read, only_open):  # the second read is of what is in memory
        os.utime(here / "a", ns=(HOUR, 2 * HOUR))
        assert os.stat(here / "a").st_atime_ns == HOUR
        use()
        first = os.stat(here / "a").st_atime_ns
        assert first > 2 * HOUR
        use()
        assert os.stat(here / "a").st_atime_ns == first


def test_sizes(here: Path) -> None:
    with opened(here / "a", os.O_CREAT | os.O_WRONLY) as descriptor:
        for size in (1, 100_000, 1 << 20):
            os.pwrite(descriptor, b"x", size - 1)
            assert os.fstat(descriptor).st_size == os.stat(here / "a").st_size == size
        os.pwrite(descriptor, b"x" * (1 << 20), 0)
    found = os.stat(here / "a")
    assert found.st_size == 1 << 20
    assert found.st_blocks * 512 >= 1 << 20
    assert found.st_blksize == 4096


def test_link_counts(here: Path) -> None:
    for expected, name in enumerate(("a", "b", "c"), start=3):
        os.mkdir(here / name)
        (here / name / "file").touch()
        assert os.stat(here).st_nlink == expected
    os.rename(here / "a", here / "b" / "a")
    assert (os.stat(here).st_nlink, os.stat(here / "b").st_nlink) == (4, 3)


def test_set_group(here: Path) -> None:
    os.chown(here, -1, 4242)
    os.chmod(here, 0o2775)
    (here / "file").touch()
    os.mkdir(here / "d")
    os.symlink("file", here / "link")
    assert {os.lstat(here / name).st_gid for name in ("file", "d", "link")} == {4242}
    assert os.stat(here / "d").st_mode & stat.S_ISGID
    assert not os.stat(here / "file").st_mode & stat.S_ISGID


def test_permissions(here: Path) -> None:
    (here / "secret").write_bytes(b"secret")
    os.chmod(here / "secret", 0o600)
    (here / "open").write_bytes(b"open")
    os.mkdir(here / "closed", 0o700)
    os.mkdir(here / "sticky")
    os.chmod(here / "sticky", 0o1777)
    (here / "sticky" / "mine").touch()

    def attempt(call: Callable[[], object]) -> int:
        return as_nobody(here, call)

    assert attempt(lambda: os.open("open", os.O_RDONLY)) == 0
    assert attempt(lambda: os.open("open", os.O_WRONLY)) == errno.EACCES
    assert attempt(lambda: os.open("secret", os.O_RDONLY)) == errno.EACCES
    assert attempt(lambda: os.truncate("open", 0)) == errno.EACCES
    assert attempt(lambda: os.stat("secret")) == 0
    assert attempt(lambda: os.stat("closed/x")) == errno.EACCES
    assert attempt(lambda: os.mkdir("x")) == errno.EACCES
    assert attempt(lambda: os.unlink("open")) == errno.EACCES
    assert attempt(lambda: os.chmod("open", 0o777)) == errno.EPERM
    assert attempt(lambda: os.utime("open", ns=(1, 1))) == errno.EPERM
    assert attempt(lambda: os.unlink("sticky/mine")) == errno.EPERM
    assert attempt(lambda: os.close(os.open("sticky/his", os.O_CREAT | os.O_EXCL))) == 0
    assert os.stat(here / "sticky" / "his").st_uid == NOBODY
    assert attempt(lambda: os.rename("sticky/his", "sticky/her")) == 0


def test_extended_attributes(here: Path) -> None:
    (here / "a").touch()
    os.mkdir(here / "d")
    for path in (here / "a", here / "d"):
        os.setxattr(path, "user.empty", b"")
        os.setxattr(path, "user.x", b"\0 1")
        os.setxattr(path, "trusted.x", b"2", os.XATTR_CREATE)
        os.setxattr(path, "user.x", b"3", os.XATTR_REPLACE)
        with refused(errno.EEXIST):
            os.setxattr(path, "user.x", b"4", os.XATTR_CREATE)
        with refused(errno.ENODATA):
            os.setxattr(path, "user.y", b"4", os.XATTR_REPLACE)
        assert sorted(os.listxattr(path)) == ["trusted.x", "user.empty", "user.x"]
    os.rename(here / "a", here / "b")
    assert os.getxattr(here / "b", "user.x") == b"3"
    assert os.getxattr(here / "b", "user.empty") == b""
    os.removexattr(here / "b", "user.x")
    for call in (os.getxattr, os.removexattr):
        with refused(errno.ENODATA):
            call(here / "b", "user.x")


def test_extended_attribute_limits(here: Path) -> None:
    (here / "a").touch()
    os.setxattr(here / "a", "user.big", b"x" * 65536)
    assert os.getxattr(here / "a", "user.big") == b"x" * 65536
    with refused(errno.E2BIG):
        os.setxattr(here / "a", "user.bigger", b"x" * 65537)
    with refused(errno.E2BIG):
        for number in range(300):
            os.setxattr(here / "a", f"user.{number:03}".ljust(255, "n"), b"")
    assert len("".join(f"{name}\0" for name in os.listxattr(here / "a"))) <= 65536
    os.mkdir(here / "d")
    with refused(errno.E2BIG):
        for number in range(17):
            os.setxattr(here / "d", f"user.{number}", b"x" * 65536)
    assert len(os.listxattr(here / "d")) == 16
    os.setxattr(here / "d", "user.0", b"y" * 65536)  # in place of what is there
    entries = [(1, 6), (4, 4), (32, 4)]  # owner, group and others, as an access control list
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry, -1) for entry in entries)
    for name in ("system.posix_acl_access", "system.x"):
        with refused(errno.EOPNOTSUPP):
            os.setxattr(here / "a", name, acl)
        with refused(errno.EOPNOTSUPP):
            os.getxattr(here / "a", name)
    capability = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)  # cap_net_bind_service
    with refused(errno.EOPNOTSUPP):
        os.setxattr(here / "a", "security.capability", capability)
