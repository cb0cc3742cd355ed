import errno
import mmap
import os
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Mount
from tests.harness import Mounted, local, wait_for
from tests.semantics.syscalls import libc, opened, refused

M = 1 << 20
SMALL = "ram=16M,nvme={tmp}/nvme,nvme_size=48M"
MODES = ["passthrough=auto", "passthrough=off"]


def test_statfs(here: Path, shared: Mounted) -> None:
    shared.idle()
    capacity = sum(tier["capacity_bytes"] for tier in shared.status()["tiers"].values())
    (here / "a").write_bytes(b"x" * M)
    shared.idle()
    found = os.statvfs(here)
    assert (found.f_bsize, found.f_frsize, found.f_namemax) == (4096, 4096, 255)
    assert found.f_blocks == capacity // 4096
    assert found.f_blocks - found.f_bfree >= M // 4096
    assert 0 < found.f_bavail <= found.f_blocks
    assert found.f_files > found.f_ffree > 1 << 30
    with opened(here / "b", os.O_CREAT | os.O_WRONLY):
        during = os.statvfs(here)
        assert 0 < during.f_bavail < found.f_bavail
        assert during.f_blocks == found.f_blocks
    wait_for(lambda: os.statvfs(here).f_bavail == found.f_bavail, "nothing is set aside")


@pytest.mark.parametrize("mode", MODES)
def test_never_full(mount: Mount, mode: str) -> None:
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
    kv = mount(f"ram=16M,{mode}")
    kv.allow_log("large' is cut off")
    (kv.path / "before").write_bytes(b"x" * M)
    with refused(errno.ENOSPC), opened(kv.path / "large", os.O_CREAT | os.O_WRONLY) as descriptor:
        for _ in range(1000):
            os.write(descriptor, b"x" * M)
    (kv.path / "large").unlink(missing_ok=True)
    wait_for(lambda: kv.idle()["tiers"]["ram"]["used_bytes"] <= 2 * M, "room again")
    for number in range(20):
        (kv.path / f"{number}.kv").write_bytes(b"y" * M)
    assert (kv.path / "19.kv").read_bytes() == b"y" * M


def held(kv: Mounted) -> int:
    """Bytes of all backing files, also of those without a name."""
    found = 0
    for tier in local(kv.status()).values():
        for file in Path(tier["path"], "objects").rglob("*.*"):
            with suppress(FileNotFoundError):
                found += file.stat().st_blocks * 512
    return found


@pytest.mark.parametrize("mode", MODES)
def test_cut_off(mount: Mount, mode: str) -> None:
    kv = mount(f"{SMALL},{mode}")
    space = kv.path / "space"
    space.mkdir()
    os.setxattr(space, "user.kvfs.quota_hard", b"4M")
    for number in range(2):
        (space / f"{number}.kv").write_bytes(b"x" * M)
    kv.idle()

    def write_too_much(large: Path, size: int, code: int) -> None:
        if mode == "passthrough=auto":
            kv.expect_log("large' is cut off")
        descriptor = os.open(large, os.O_CREAT | os.O_WRONLY)
        before = held(kv)
        if mode == "passthrough=off":
            with refused(code):
                for _ in range(size // M):
                    os.write(descriptor, b"y" * M)
            os.unlink(large)
            os.close(descriptor)
            return
        for _ in range(size // M):
            os.write(descriptor, b"y" * M)
        wait_for(lambda: not large.exists(), f"{large} has no name")
        with refused(errno.ENOENT):
            os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        wait_for(lambda: held(kv) <= before, "what it had has gone")
        os.write(descriptor, b"y" * 8 * M)
        wait_for(lambda: held(kv) <= before, "what is added goes")
        large.write_bytes(b"another")
        with refused(code):
            os.close(descriptor)
        assert large.read_bytes() == b"another"
        large.unlink()

    write_too_much(space / "large", 8 * M, errno.EDQUOT)
    write_too_much(kv.path / "large", 64 * M, errno.ENOSPC)
    status = kv.idle()
    assert status["counters"].get("dropped_too_large", 0) == (
        2 if mode == "passthrough=auto" else 0
    )
    assert status["tiers"]["nvme"]["used_bytes"] <= 48 * M


def _within(kv: Mounted, limit: int) -> bool:
    return held(kv) <= limit


@pytest.mark.parametrize("mode", MODES)
def test_bounds(mount: Mount, mode: str) -> None:
    kv = mount(f"{SMALL},{mode}")
    kv.allow_log("is cut off")
    kv.allow_log("nothing is demoted: the NVMe tier has no room")
    space = kv.path / "space"
    space.mkdir()
    os.setxattr(space, "user.kvfs.quota_hard", b"4M")
    for directory, limit in ((space, 4 * M), (kv.path, 64 * M + 8 * M)):
        files = [os.open(directory / f"{n}.bin", os.O_CREAT | os.O_WRONLY) for n in range(8)]
        refusals: set[int | None] = set()
        for _ in range(20):
            for file in files:
                try:
                    os.write(file, b"z" * M)
                except OSError as error:
                    refusals.add(error.errno)
            if mode == "passthrough=off":
                assert held(kv) <= limit
            wait_for(partial(_within, kv, limit), "it is within its limit")
        for file in files:
            try:
                os.close(file)
            except OSError as error:
                refusals.add(error.errno)
        assert refusals == {errno.EDQUOT if directory == space else errno.ENOSPC}
        for path in directory.glob("*.bin"):
            path.unlink(missing_ok=True)  # kvfs may drop what is beyond the limit after a close
        kv.idle()


@pytest.mark.parametrize("mode", MODES)
def test_mapped(mount: Mount, mode: str) -> None:
    kv = mount(f"{SMALL},{mode}")
    kv.allow_log("is (cut off|dropped at its close)")
    space = kv.path / "space"
    space.mkdir()
    os.setxattr(space, "user.kvfs.quota_hard", b"4M")
    (space / "a").write_bytes(b"a" * 3 * M)
    with opened(space / "a", os.O_RDONLY) as file:
        mapped = libc.mmap(None, 3 * M, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    (space / "a").unlink()
    wait_for(lambda: not _takes(space / "b"), "its quota has no room for another")
    libc.munmap(mapped, 3 * M)
    wait_for(lambda: _takes(space / "b"), "it has")


def _gives_at_once(kv: Mounted) -> float:
    """The part of RAM that is free, or has copies on NVMe."""
    ram = kv.status()["tiers"]["ram"]
    there: int = ram["used_bytes"] + ram["reserved_bytes"] - ram["doubled_bytes"]
    return 1 - there / float(ram["capacity_bytes"])


def _takes(path: Path) -> bool:
    """Whether there is room for 3 MiB."""
    path.unlink(missing_ok=True)
    try:
        path.write_bytes(b"b" * 3 * M)
        return path.stat().st_size == 3 * M
    except OSError:
        return False


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("suffix", ["kv", "bin"])
def test_eviction_waits_until_room_is_needed(mount: Mount, suffix: str, mode: str) -> None:
    # By default a demotion begins below 4 MiB. RAM may hold exactly that, and the first create then
    # begins one, which drops up to 12 objects of NVMe. Files of 1 MiB never come near 3.2 MiB.
    kv = mount(f"{SMALL},reclaimable=20,{mode}")
    for number in range(80):
        (kv.path / f"{number}.kv").write_bytes(b"x" * M)
    kv.idle()
    wait_for(lambda: _gives_at_once(kv) >= 0.2, "demotion has nothing to do")
    dropped = kv.idle()["counters"]["dropped"]
    assert dropped > 0
    folders = [kv.path / f"new{number}" for number in range(16)]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as files:
        written = [
            files.enter_context(opened(folder / f"a.{suffix}", os.O_CREAT | os.O_WRONLY))
            for folder in folders
        ]
        for file in written:
            os.write(file, b"y" * 100)
        assert kv.counter("dropped") <= dropped + 1, "one has the room of 256 empty ones"
    assert kv.idle()["counters"]["dropped"] <= dropped + 1
    space = kv.path / "quota"
    space.mkdir()
    os.setxattr(space, "user.kvfs.quota_hard", b"4M")
    block = "model@1@0@{}@half.data".format
    for name in (block("a"), "a.kv"):
        (space / name).write_bytes(b"z" * 3 * M)
        (space / name).unlink()
    kv.check_accounts()  # until the kernel forgets them, kvfs may free their room for another
    with opened(space / block("b"), os.O_CREAT | os.O_WRONLY):
        with refused(errno.EDQUOT):
            os.open(space / block("c"), os.O_CREAT | os.O_WRONLY)
        (space / "c.kv").write_bytes(b"z" * M)
