"""A daemon dies while it carries out a request: the client gets one answer, and one effect.

A failure names the operation, the fail point and the passing.
"""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvfs import failpoints
from kvfs.control import request, request_keeper
from kvfs.keeper.keeper import SHORT_LIFE
from tests.faults.lives import COUNT
from tests.harness import Mounted, wait_for
from tests.semantics.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2

pytestmark = pytest.mark.slow

PASSINGS = 20  # of one point by one operation; it passes any less often
OLD, NEW = b"old" * 1000, b"new!" * 2000


@dataclass(frozen=True)
class Operation:
    """`prepare` and `act` get an empty directory; `check` looks at the result."""

    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    check: Callable[[Path], None]


def nothing(_: Path) -> None:
    """Prepare nothing."""


def old(at: Path) -> None:
    (at / "a").write_bytes(OLD)


def old_and_other(at: Path) -> None:
    (at / "a").write_bytes(OLD)
    (at / "b").write_bytes(NEW)


def write(name: str, flags: int) -> Callable[[Path], None]:
    def act(at: Path) -> None:
        descriptor = os.open(at / name, os.O_WRONLY | flags, 0o640)
        assert os.write(descriptor, NEW) == len(NEW)
        os.close(descriptor)

    return act


def holds(**files: bytes) -> Callable[[Path], None]:
    """Check for exactly these names, with this content."""

    def check(at: Path) -> None:
        assert sorted(os.listdir(at)) == sorted(files)
        for name, content in files.items():
            assert (at / name).read_bytes() == content
            assert (at / name).stat().st_size == len(content)

    return check


def is_a(name: str, kind: Callable[[int], bool], links: int = 1) -> Callable[[Path], None]:
    def check(at: Path) -> None:
        assert os.listdir(at) == [name]
        found = os.lstat(at / name)
        assert kind(found.st_mode)
        assert found.st_nlink == links

    return check


def unlink_while_open(at: Path) -> None:
    descriptor = os.open(at / "a", os.O_RDWR)
    os.unlink(at / "a")
    assert os.pread(descriptor, 1 << 20, 0) == OLD
    os.pwrite(descriptor, NEW, 0)
    assert os.pread(descriptor, 1 << 20, 0) == NEW
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)


def read_twice(at: Path) -> None:
    first, second = (os.open(at / "a", os.O_RDONLY) for _ in range(2))
    os.close(first)
    assert os.pread(second, 1 << 20, 0) == OLD
    os.close(second)


def listed_twice(at: Path) -> None:
    os.link(at / "a", at / "b")
    assert os.stat(at / "a").st_nlink == 2


def no_names(at: Path) -> None:
    assert os.listdir(at) == []
    assert os.stat(at).st_nlink == 2


def attributes(at: Path) -> None:
    found = os.stat(at / "a")
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns, found.st_size) == (0o600, 2, 5)
    assert os.getxattr(at / "a", "user.x") == b"y"
    assert (at / "a").read_bytes() == OLD[:5]


def set_attributes(at: Path) -> None:
    os.truncate(at / "a", 5)
    os.chmod(at / "a", 0o600)
    os.setxattr(at / "a", "user.x", b"y")
    os.utime(at / "a", ns=(1, 2))


def xattr(at: Path) -> None:
    old(at)
    os.setxattr(at / "a", "user.x", b"y")


def no_xattr(at: Path) -> None:
    assert os.listxattr(at / "a") == []


def published(at: Path) -> None:
    os.setxattr(at, "user.kvfs.publish", b"close")


def two_writers(at: Path) -> None:
    """The first writer that completes gets the name; no reader sees either before."""
    first, second = (os.open(at / "a", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for _ in range(2))
    os.write(first, OLD)
    os.write(second, NEW)
    assert os.listdir(at) == []
    os.close(second)
    os.close(first)


def told(at: Path) -> None:
    os.setxattr(at, "user.kvfs.quota_hard", b"1G")
    os.setxattr(at, "user.kvfs.weight", b"7")
    os.removexattr(at, "user.kvfs.weight")


def is_told(at: Path) -> None:
    assert os.getxattr(at, "user.kvfs.quota_hard") == b"1G"
    assert os.listxattr(at) == ["user.kvfs.quota_hard"]
    assert (at / "a").read_bytes() == OLD


def namespace(at: Path) -> None:
    old(at)
    (at / "d").mkdir()
    (at / "d" / "b").write_bytes(NEW)
    os.setxattr(at, "user.kvfs.fingerprint", b"x")


def is_new(at: Path) -> None:
    assert os.listdir(at) == []
    assert os.getxattr(at, "user.kvfs.version") == b"2"
    assert os.getxattr(at, "user.kvfs.fingerprint") == b"x"


OPERATIONS = {
    "create": Operation(nothing, write("a", os.O_CREAT | os.O_EXCL), holds(a=NEW)),
    "create what is there": Operation(old, write("a", os.O_CREAT | os.O_TRUNC), holds(a=NEW)),
    "append": Operation(old, write("a", os.O_APPEND), holds(a=OLD + NEW)),
    "rewrite in place": Operation(old, write("a", 0), holds(a=NEW)),
    "read": Operation(old, read_twice, holds(a=OLD)),
    "mkdir": Operation(nothing, lambda at: os.mkdir(at / "d"), is_a("d", stat.S_ISDIR, 2)),
    "rmdir": Operation(lambda at: os.mkdir(at / "d"), lambda at: os.rmdir(at / "d"), no_names),
    "symlink": Operation(nothing, lambda at: os.symlink("x", at / "s"), is_a("s", stat.S_ISLNK)),
    "fifo": Operation(nothing, lambda at: os.mkfifo(at / "f"), is_a("f", stat.S_ISFIFO)),
    "mknod": Operation(nothing, lambda at: os.mknod(at / "f"), holds(f=b"")),
    "link": Operation(old, listed_twice, holds(a=OLD, b=OLD)),
    "unlink": Operation(old, lambda at: os.unlink(at / "a"), no_names),
    "unlink while open": Operation(old, unlink_while_open, no_names),
    "rename": Operation(old, lambda at: os.rename(at / "a", at / "b"), holds(b=OLD)),
    "rename over": Operation(old_and_other, lambda at: os.rename(at / "a", at / "b"), holds(b=OLD)),
    "rename new": Operation(
        old, lambda at: renameat2(at / "a", at / "b", RENAME_NOREPLACE), holds(b=OLD)
    ),
    "exchange": Operation(
        old_and_other,
        lambda at: renameat2(at / "a", at / "b", RENAME_EXCHANGE),
        holds(a=NEW, b=OLD),
    ),
    "attributes": Operation(old, set_attributes, attributes),
    "remove an attribute": Operation(
        xattr, lambda at: os.removexattr(at / "a", "user.x"), no_xattr
    ),
    "publish": Operation(published, write("a", os.O_CREAT), holds(a=NEW)),
    "publish the first": Operation(published, two_writers, holds(a=NEW)),
    "settings": Operation(old, told, is_told),
    "another version": Operation(
        namespace, lambda at: os.setxattr(at, "user.kvfs.version", b"2"), is_new
    ),
}


def run(kv: Mounted, operation: Operation, at: Path, faults: str) -> dict[str, int]:
    """The points passed meanwhile, if the daemon survived the operation."""
    wait_for(lambda: request_keeper(kv.path, "status")["standby_loaded"], "the standby is loaded")
    # Daemons that die one after the other as soon as they serve are taken for a lost cause.
    wait_for(lambda: kv.status()["uptime_s"] > 2 * SHORT_LIFE, "the daemon has lived")
    operation.prepare(at)
    wait_for(lambda: not kv.status()["open_handles"], "what was prepared is closed")
    request(kv.path, "arm", faults=faults)
    operation.act(at)
    wait_for(lambda: not kv.status()["open_handles"], "every RELEASE has come")
    passed: dict[str, int] = request(kv.path, "arm", faults="")["passed"]
    operation.check(at)
    return passed


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_request_has_one_effect_and_one_answer(kv: Mounted, name: str) -> None:
    kv.allow_log("was killed by SIGKILL")
    print(name)
    operation, number = OPERATIONS[name], 0

    def fresh() -> Path:
        nonlocal number
        number += 1
        (kv.path / str(number)).mkdir()
        return kv.path / str(number)

    points = run(kv, operation, fresh(), COUNT)
    assert points
    for point in points:
        for passing in range(1, PASSINGS):
            before = kv.status()["takeovers"]
            print(point, passing)
            run(kv, operation, fresh(), f"{point}=kill@{passing}")
            if kv.status()["takeovers"] == before:
                break
        else:
            pytest.fail(f"{name} passes {point} more than {PASSINGS} times")
    for each in range(1, number + 1):
        operation.check(kv.path / str(each))


def test_every_point_of_the_kernels_face_is_passed(kv: Mounted) -> None:
    (kv.path / "d").mkdir()
    passed = run(kv, OPERATIONS["append"], kv.path / "d", COUNT)
    face = "fuse." if kv.status()["passthrough"]["on"] else "fuse.handle."
    assert {point for point in failpoints.POINTS if point.startswith(face)} <= set(passed)
