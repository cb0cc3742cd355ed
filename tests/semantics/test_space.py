import errno
import os
from pathlib import Path

import pytest

from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.semantics.syscalls import opened, refused

M = 1 << 20
SMALL = "ram=16M,nvme={tmp}/nvme,nvme_size=48M"
MODES = ["passthrough=auto", "passthrough=off"]


def test_statfs(here: Path, shared: Mounted) -> None:
    """
    `statfs` tells the size that the tiers were given, together, in blocks of 4096 bytes (`f_bsize`
    and `f_frsize`), however full they are. Free is all that no writer has set aside: what is sealed
    may be dropped for a writer, so it counts as room. Names may have 255 bytes.
    """
    shared.idle()
    capacity = sum(tier["capacity_bytes"] for tier in shared.status()["tiers"].values())
    (here / "a").write_bytes(b"x" * M)
    shared.idle()
    found = os.statvfs(here)
    assert (found.f_bsize, found.f_frsize, found.f_namemax) == (4096, 4096, 255)
    assert found.f_blocks == found.f_bfree == found.f_bavail == capacity // 4096
    assert found.f_files == found.f_ffree > 1 << 30
    with opened(here / "b", os.O_CREAT | os.O_WRONLY):
        during = os.statvfs(here)
        assert 0 < during.f_bavail < found.f_bavail
        assert during.f_blocks == found.f_blocks
    wait_for(lambda: os.statvfs(here).f_bavail == found.f_bavail, "nothing is set aside")


@pytest.mark.parametrize("mode", MODES)
def test_never_full(mount: Mount, mode: str) -> None:
    """
    A writer never gets ENOSPC while sealed objects can be dropped for it: more can be written than
    all tiers hold. What goes first is said below, under *Namespaces and capacity*; its names are
    ENOENT at once, in listings too, and what is still there is there from its first byte to its
    last.
    """
    kv = mount(f"{SMALL},{mode}")
    names = [f"{number:03}.kv" for number in range(150)]
    for number, name in enumerate(names):
        (kv.path / name).write_bytes(bytes([number]) * M)
    kv.idle()
    left = [name for name in names if (kv.path / name).exists()]
    assert sorted(os.listdir(kv.path)) == left
    assert left[-10:] == names[-10:]
    assert 20 <= len(left) <= 64
    for name in left:
        assert (kv.path / name).read_bytes() == bytes([names.index(name)]) * M
    with refused(errno.ENOENT):
        os.open(kv.path / names[0], os.O_RDONLY)
    assert kv.counter("dropped") == kv.counter("dropped_evicted") == len(names) - len(left)


@pytest.mark.parametrize("mode", MODES)
def test_in_use(mount: Mount, mode: str) -> None:
    """
    Nothing that anybody has open or mapped is dropped, however long ago it was opened.
    """
    kv = mount(f"{SMALL},{mode}")
    (kv.path / "old.kv").write_bytes(b"old" * M)
    with opened(kv.path / "old.kv", os.O_RDONLY) as reader:
        for number in range(100):
            (kv.path / f"{number}.kv").write_bytes(b"x" * M)
        assert os.pread(reader, 3 * M, 0) == b"old" * M
        assert (kv.path / "old.kv").read_bytes() == b"old" * M
    assert kv.counter("dropped") > 0


@pytest.mark.parametrize("mode", MODES)
def test_full(mount: Mount, mode: str) -> None:
    """
    What is larger than all that kvfs may use is ENOSPC, for the writer of that file only; the mount
    stays up, and when the file is unlinked its room is free again.
    """
    kv = mount(f"ram=16M,{mode}")
    (kv.path / "before").write_bytes(b"x" * M)
    with opened(kv.path / "large", os.O_CREAT | os.O_WRONLY) as descriptor:
        with refused(errno.ENOSPC):
            for _ in range(1000):
                os.write(descriptor, b"x" * M)
        os.unlink(kv.path / "large")
    wait_for(lambda: kv.idle()["tiers"]["ram"]["used_bytes"] <= 2 * M, "room again")
    for number in range(20):
        (kv.path / f"{number}.kv").write_bytes(b"y" * M)
    assert (kv.path / "19.kv").read_bytes() == b"y" * M


@pytest.mark.parametrize("mode", MODES)
def test_too_large_for_nvme(mount: Mount, mode: str) -> None:
    """
    In memory that is at the write. NVMe is written by the kernel, which does not ask kvfs: a file
    that turns out larger than every tier that it may be in is ENOSPC at its close, one larger than
    the hard quota of its namespace EDQUOT, and either is gone with it, and named in the log.
    """
    kv = mount(f"{SMALL},{mode}")
    space = kv.path / "space"
    space.mkdir()
    os.setxattr(space, "user.kvfs.quota_hard", b"4M")
    for number in range(2):
        (space / f"{number}.kv").write_bytes(b"x" * M)

    def write_too_much(large: Path, size: int, code: int) -> None:
        kv.expect_log("inode [0-9]+, 'large' in directory [0-9]+, is lost")
        descriptor = os.open(large, os.O_CREAT | os.O_WRONLY)
        for _ in range(size // M):
            os.write(descriptor, b"y" * M)
        with refused(code):
            os.close(descriptor)
        wait_for(lambda: not large.exists(), f"{large} is gone")

    write_too_much(space / "large", 8 * M, errno.EDQUOT)
    assert [(space / f"{number}.kv").read_bytes() for number in range(2)] == [b"x" * M] * 2
    write_too_much(kv.path / "large", 64 * M, errno.ENOSPC)
    status = kv.idle()
    assert status["counters"]["dropped_too_large"] == 2
    assert status["tiers"]["nvme"]["used_bytes"] <= 48 * M
