"""What real file systems do below kvfs: full, read-only, shut down, gone; and daemons die then.

The NVMe directory is a small ext4 of its own.
"""

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvfs import mounts
from tests.conftest import Mount
from tests.faults.disks import Disk, disk
from tests.faults.test_disks import (
    Client,
    becomes,
    bounded,
    everything_else_answers,
    state,
    two_places,
)
from tests.harness import KVFS, Mounted, alive, wait_for

MIB = 1 << 20
OPTIONS = "ram=64M,nvme={tmp}/nvme,nvme_size=200M,promote_after=0,entry_timeout=0"
UMOUNT = 30.0  # s, of which the keeper and daemon need a few to end
GIVEN_UP = 90.0  # s; the keeper's eight starts with their pauses, on a busy machine
Break = Callable[[Disk], None]
BREAKS = {"read-only": Disk.make_read_only, "shut-down": Disk.shut_down}
SAID = {"read-only": "EROFS", "shut-down": "EIO"}


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path / "nvme", tmp_path / "image", 300 * MIB) as made:
        yield made


@pytest.fixture
def kv(device: Disk, mount: Mount) -> Mounted:
    assert device.device
    return mount(OPTIONS)


def many(kv: Mounted, name: str, count: int) -> dict[Path, bytes]:
    """Files of 4 MiB each, with their content."""
    made = {
        kv.path / f"{name}-{number}.kv": bytes([number + 1]) * 4 * MIB for number in range(count)
    }
    for path, content in made.items():
        assert bounded(partial(path.write_bytes, content)) == 4 * MIB
    return made


def check(files: dict[Path, bytes]) -> int:
    """How many are there; each of those has its bytes."""
    there = 0
    for path, content in files.items():
        found = bounded(path.read_bytes)
        assert found == content or isinstance(found, FileNotFoundError), path
        there += found == content
    return there


def umount(kv: Mounted, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, "umount", *arguments, str(kv.path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=UMOUNT)


def kill(kv: Mounted) -> None:
    """The daemon dies, and another one may not be able to take over."""
    pid = kv.pid
    kv.allow_log(rf"daemon \({pid}\) (was killed by SIGKILL|closed its channel)")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(pid), "it is dead")


def fill(path: Path) -> None:
    with path.open("wb") as file:
        piece = 64 * MIB
        while piece >= 4096:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                piece //= 2


def test_others_fill_the_disk(device: Disk, kv: Mounted) -> None:
    """
    When others fill the disk under NVMe, new files go to RAM, and nobody is refused as long as
    something there may be dropped. When they give room back, copies are made there again.
    """
    kv.allow_log("others fill|No space left|ENOSPC|has no room")
    old = many(kv, "old", 20)
    kv.idle()
    foreign = device.directory / "foreign"
    fill(foreign)
    wait_for(lambda: kv.status()["tiers"]["nvme"]["why"], "kvfs sees it")
    new = many(kv, "new", 30)
    assert check(new) >= 10
    check(old)
    assert kv.status()["tiers"]["nvme"]["state"] == "healthy"
    before = kv.counter("demoted")
    foreign.unlink()
    newer = many(kv, "newer", 20)
    wait_for(lambda: kv.counter("demoted") > before, "copies are made again")
    kv.check_accounts()
    kv.remount()
    assert check(old | new | newer) >= 40


@pytest.mark.parametrize("how", BREAKS)
def test_a_file_system_that_failed_is_unmounted_and_mounted_again(
    device: Disk, mount: Mount, how: str
) -> None:
    """
    A file system that has failed for good, and is read-only or shut down, has the catalog's
    changes fail with EIO, and what only it has is as it says. What is in RAM is opened and read.
    """
    kv = mount(f"{OPTIONS},passthrough=auto")
    on_nvme, in_ram = two_places(kv)
    kv.idle()
    os.sync()
    in_ram.read_bytes()
    kv.allow_log("more of the same kind is not logged|could not be written back")
    kv.allow_log("nothing is changed|not closed properly|tables were not written|goes on in")
    kv.expect_log(f"is down, nothing new goes there: .*{SAID[how]}")
    BREAKS[how](device)
    becomes(kv, "down")
    assert bounded(in_ram.read_bytes) == b"r" * MIB
    assert bounded(lambda: sorted(os.listdir(kv.path))) == ["in-ram", "on-nvme"]
    assert bounded((kv.path / "none").exists) is False
    assert bounded(lambda: on_nvme.stat().st_size) == MIB
    found = bounded(on_nvme.read_bytes)
    assert isinstance(found, OSError) or found == b"n" * MIB
    assert isinstance(bounded(lambda: (kv.path / "new").write_bytes(b"new")), OSError)
    assert isinstance(bounded((kv.path / "directory").mkdir), OSError)
    assert bounded(in_ram.read_bytes) == b"r" * MIB

    refused = umount(kv)
    assert refused.returncode == 1
    assert "only in RAM, and NVMe takes none" in refused.stderr
    assert SAID[how] in refused.stderr
    done = umount(kv, "--now")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not alive(kv.keeper), "the keeper ends")

    device.remount()
    kv.allow_log("did not end properly")
    kv.mount()
    assert bounded(on_nvme.read_bytes) == b"n" * MIB
    assert isinstance(bounded(in_ram.read_bytes), FileNotFoundError)
    assert bounded(lambda: (kv.path / "new").write_bytes(b"new")) == 3


@pytest.mark.parametrize("how", BREAKS)
def test_a_daemon_dies_on_a_file_system_that_failed(device: Disk, kv: Mounted, how: str) -> None:
    """
    A daemon that dies while the file system of its catalog is read-only or shut down cannot be
    replaced: after some tries, less than a minute, the mount is given up. What was sealed is there
    after the next mount, also what only RAM has.
    """
    on_nvme, in_ram = two_places(kv)
    kv.idle()
    os.sync()
    kv.allow_log("more of the same kind is not logged|is down, nothing new goes there")
    BREAKS[how](device)
    with in_ram.open("rb") as reader:
        assert reader.read(3) == b"rrr"
        kill(kv)
        waiting = Client(in_ram.stat)
        assert os.pread(reader.fileno(), 3, 0) == b"rrr"
        kv.expect_log("takeover failed .* nvme=.* cannot be used")
        kv.expect_log("given up after .*mount it again")
        wait_for(lambda: not alive(kv.keeper), "the mount is given up", seconds=GIVEN_UP)
        waiting.answer()
    device.remount()
    kv.allow_log("did not end properly")
    kv.mount()
    assert bounded(on_nvme.read_bytes) == b"n" * MIB
    assert bounded(in_ram.read_bytes) == b"r" * MIB


def test_the_directory_goes_and_comes_back(device: Disk, kv: Mounted) -> None:
    """
    A file system that is detached from under kvfs is `lost`, and nothing is made in its place.
    When it is mounted there again all goes on.
    """
    on_nvme, in_ram = two_places(kv)
    kv.expect_log("is down, nothing new goes there: .*lost")
    kv.allow_log("more of the same kind is not logged")
    device.detach()
    becomes(kv, "down")
    everything_else_answers(kv, in_ram)
    assert isinstance(bounded(on_nvme.read_bytes), FileNotFoundError)
    assert list(device.directory.iterdir()) == []
    device.mount()
    becomes(kv, "healthy")
    assert bounded(on_nvme.read_bytes) == b"n" * MIB
    everything_else_answers(kv, in_ram)


def test_a_daemon_dies_while_the_directory_is_away(device: Disk, kv: Mounted) -> None:
    """
    A daemon that dies while its NVMe directory is away is not replaced by one that begins anew in
    an empty directory: clients wait, and all is there when the directory is.
    """
    on_nvme, in_ram = two_places(kv)
    kv.allow_log("is down, nothing new goes there|more of the same kind is not logged")
    kv.expect_log("takeover failed .* has identity none, expected")
    with in_ram.open("rb") as reader:
        device.detach()
        kill(kv)
        waiting = Client(on_nvme.read_bytes)
        wait_for(lambda: "takeover failed" in kv.log.read_text(), "one tries")
        assert os.pread(reader.fileno(), 3, 0) == b"rrr"
        assert waiting.waits()
        assert list(device.directory.iterdir()) == []
        device.mount()
        assert waiting.answer(60) == b"n" * MIB
        assert reader.read() == b"r" * MIB
    becomes(kv, "healthy")
    everything_else_answers(kv, in_ram)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """Where a disk's blocks are, of which there are fewer than the disk says."""
    path = tmp_path / "store"
    path.mkdir()
    mounts.mount("test", path, "tmpfs", 0, f"size={120 * MIB}")
    yield path
    mounts.umount(path, mounts.MNT_DETACH)


@pytest.fixture
def thin(tmp_path: Path, store: Path) -> Iterator[Disk]:
    with disk(tmp_path / "nvme", store / "image", 300 * MIB) as made:
        yield made


def test_what_could_not_be_written_is_not_served(thin: Disk, store: Path, mount: Mount) -> None:
    """
    What the kernel has taken, and could not write to the disk after all, is not served: an object
    whose sync failed is a miss, or is what RAM has.
    """
    kv = mount(OPTIONS)
    kv.allow_log("more of the same kind is not logged|nothing is changed|is down|goes on in")
    kv.allow_log("catalog|did not end properly|quarantined|stays open|could not be written back")
    sealed = many(kv, "sealed", 6)
    kv.idle()
    os.sync()
    fill(store / "foreign")
    written: dict[Path, bytes] = {}
    for number in range(30):  # their suffixes are new: they begin on NVMe
        path, content = kv.path / f"new.{number}", bytes([number + 1]) * 4 * MIB
        if bounded(partial(path.write_bytes, content)) == 4 * MIB:
            written[path] = content
    wait_for(lambda: kv.counter("job_failures") or state(kv) != "healthy", "kvfs sees it")
    wait_for(lambda: not kv.status()["jobs"] or state(kv) == "down", "no more is tried")
    print(len(written), kv.status())
    for path in (thin.directory / "objects").glob("*/*"):
        with path.open("rb") as file:  # the page cache may have it all the while
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    print(check(sealed), check(written))
    (store / "foreign").unlink()
    print(umount(kv, "--now"))
    wait_for(lambda: not alive(kv.keeper), "the keeper ends", seconds=GIVEN_UP)
    thin.remount()
    kv.mount()
    print(check(sealed), check(written))
    print(kv.log.read_text())


def test_memory_that_others_fill(kv: Mounted) -> None:
    """
    When somebody else takes all the room of the RAM tier's tmpfs, sealed objects make way, and a
    writer is refused only when none are left.
    """
    kv.allow_log("ENOSPC|No space left")
    files = many(kv, "old", 6)
    kv.idle()
    memory = Path(kv.status()["tiers"]["ram"]["path"])
    foreign = memory / "foreign"
    fill(foreign)
    for number in range(8):
        found = bounded(partial((kv.path / f"new-{number}.kv").write_bytes, b"x" * MIB))
        assert found == MIB or (isinstance(found, OSError) and found.errno == errno.ENOSPC)
    check(files)
    foreign.unlink()
    again = many(kv, "again", 6)
    assert check(again) == 6
