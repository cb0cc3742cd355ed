"""Files that are mostly holes, and movers that do not end: neither holds up an unmount."""

import multiprocessing
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, alive, wait_for

MIB, TIB = 1 << 20, 1 << 40
LARGEST = (1 << 63) - 4096  # bytes, that a file in memory may have; ext4 takes 16 TiB
NOBODY = 65534


def _make(directory: Path, sizes: list[int], content: bytes) -> None:
    os.chdir(directory)  # pytest's own directories are root's
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    for number, size in enumerate(sizes):
        with Path(f"{number}.bin").open("xb") as file:
            file.write(content)
            file.truncate(size)


def sparse(kv: Mounted, *sizes: int, content: bytes = b"0123456789") -> Path:
    """Another user makes files of these sizes in RAM, with holes after the first bytes."""
    directory = kv.path / "ns"
    told = ["quota_hard=20M"]
    subprocess.run([*KVFS, "ns", "create", directory, *told], check=True, capture_output=True)
    directory.chmod(0o777)
    (directory / "small.bin").write_bytes(b"x")  # by which kvfs takes the next ones for small
    (directory / "small.bin").unlink()
    maker = multiprocessing.get_context("fork").Process(
        target=_make, args=(directory, list(sizes), content)
    )
    maker.start()
    maker.join()
    assert maker.exitcode == 0
    return directory


def tier(path: Path) -> bytes:
    return os.getxattr(path, "user.kvfs.tier")


def first(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(12)


def test_an_unmount_does_not_wait_for_holes(mount: Mount) -> None:
    kv = mount("ram=256M,nvme={tmp}/nvme,nvme_size=2G,allow_other")
    sizes = [TIB, 4 * TIB]
    directory = sparse(kv, *sizes)
    assert {tier(path) for path in directory.iterdir()} == {b"ram"}
    kv.remount()
    for number, size in enumerate(sizes):
        path = directory / f"{number}.bin"
        assert (path.stat().st_size, path.stat().st_blocks <= 16) == (size, True)
        assert (tier(path), first(path)) == (b"nvme", b"0123456789\0\0")
    kv.remount()
    assert first(directory / "1.bin") == b"0123456789\0\0"


def test_file_too_large_for_lower_tiers_is_lost_with_ram_and_logged(mount: Mount) -> None:
    kv = mount("ram=256M,nvme={tmp}/nvme,nvme_size=2G,allow_other")
    kv.expect_log("whose files cannot have its 9223372036854771712 bytes; .*File too large")
    directory = sparse(kv, LARGEST, *[LARGEST] * 20, MIB)
    assert "21 of them are too large for NVMe, see the log" in kv.umount()
    kv.mount()
    assert os.listdir(directory) == ["21.bin"]
    assert kv.status()["counters"]["job_failures"] == 0


def stuck(monkeypatch: pytest.MonkeyPatch, mount: Mount, point: str) -> Mounted:
    """A mount whose movers do not end, at work on the new files."""
    monkeypatch.setenv("KVFS_FAILPOINTS", f"{point}=delay:600")
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=2G")
    monkeypatch.delenv("KVFS_FAILPOINTS")
    subprocess.run([*KVFS, "ns", "set", kv.path, "write=through"], check=True)
    (kv.path / "a").write_bytes(bytes(MIB))
    (kv.path / "b").write_bytes(b"b" * MIB)
    return kv


def movers(daemon: int) -> set[int]:
    """The processes of a daemon's group, without the daemon."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if int(path.name) != daemon and os.getpgid(int(path.name)) == daemon:
                found.add(int(path.name))
    return found


@pytest.mark.parametrize("point", ["movement.copy", "movement.copy.written", "movement.read"])
def test_umount_now_waits_for_no_mover(
    monkeypatch: pytest.MonkeyPatch, mount: Mount, point: str
) -> None:
    kv = stuck(monkeypatch, mount, point)
    kv.allow_log("is not synced within 2 s")  # by a disk that others keep busy
    wait_for(lambda: kv.status()["jobs"], "a mover is at work")
    pid = kv.pid
    wait_for(lambda: movers(pid), "a mover is there")
    kv.umount("--now")  # which says so if the mount has not ended within 5 s
    assert not alive(pid)
    wait_for(lambda: not movers(pid), "the dead are buried")
    kv.mount()
    assert kv.status()["counters"]["job_failures"] == 0
    assert kv.status()["counters"]["mover_failures"] == 0
    left = {path.name: path.read_bytes() for path in kv.path.iterdir()}
    if point == "movement.read":  # that holds up the digest of a; b may have been copied meanwhile
        assert left.pop("b", b"b" * MIB) == b"b" * MIB
    assert left == {"a": bytes(MIB)}, "what NVMe had is there, what only RAM had is gone"


def test_umount_now_ends_the_write_back_of_a_plain_umount(
    monkeypatch: pytest.MonkeyPatch, mount: Mount
) -> None:
    kv = stuck(monkeypatch, mount, "movement.copy")
    kv.allow_log("is not synced within 2 s")
    subprocess.run(["umount", kv.path], check=True)
    assert alive(kv.keeper), "it writes back"
    kv.umount("--now")
    assert not alive(kv.keeper)
    refused = subprocess.run(
        [*KVFS, "umount", "--now", kv.path], capture_output=True, text=True, check=False
    )
    assert (refused.returncode, "is not a mount point" in refused.stderr) == (2, True)


def test_a_daemon_that_does_not_end_by_itself_is_killed_after_umount_now(kv: Mounted) -> None:
    """Its last record is not written."""
    kv.expect_log("has not ended in time after umount --now, and is killed")
    kv.expect_log("the last session did not end properly: its bytes are all there")
    (kv.path / "a").write_bytes(b"a" * MIB)
    kv.idle()
    pid = kv.pid
    request(kv.path, "discard_ram", on=True)
    request(kv.path, "arm", faults="catalog.commit=delay:600")
    subprocess.run(["umount", kv.path], check=True)
    wait_for(lambda: not alive(kv.keeper), "the keeper ends")
    assert not alive(pid)
    kv.mount()
    assert (kv.path / "a").read_bytes() == b"a" * MIB


def test_a_hole_counts_for_no_limit(kv: Mounted) -> None:
    """Otherwise one user's holes would delay all writers there for a day."""
    subprocess.run([*KVFS, "ns", "set", kv.path, "write_bytes=64M", "read_bytes=64M"], check=True)
    subprocess.run([*KVFS, "set", kv.path, "bandwidth=64M"], check=True)
    with (kv.path / "holes").open("wb") as file:
        file.write(b"data")
        file.truncate(4 * TIB)
    copy = ["dd", f"if={kv.path}/holes", "bs=1M", "count=1", "status=none"]
    for name in "ab":
        subprocess.run([*copy, f"of={kv.path}/{name}"], check=True, timeout=60)
    assert (kv.path / "b").stat().st_size == MIB
