"""Real file systems below kvfs that are full, read-only, shut down or gone, and dying daemons.

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
    HASTY,
    Client,
    becomes,
    bounded,
    everything_else_answers,
    state,
    two_places,
)
from tests.harness import KVFS, Mounted, alive, wait_for

pytestmark = pytest.mark.usefixtures("impatient")

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
    one = mount(OPTIONS)
    one.allow_log(HASTY)
    return one


def many(kv: Mounted, name: str, count: int) -> dict[Path, bytes]:
    """Files of 4 MiB each, with their content."""
    made = {
        kv.path / f"{name}-{number}.kv": bytes([number + 1]) * 4 * MIB for number in range(count)
    }
    for path, content in made.items():
        assert bounded(partial(path.write_bytes, content)) == 4 * MIB
    return made


def check(files: dict[Path, bytes]) -> int:
    """The number of files that are there; each of them has its bytes."""
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
    """Kill the daemon; perhaps no other one can take over."""
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
            except OSError:
                piece //= 2
    assert os.statvfs(path.parent).f_bavail < 1024, "it is full"


def test_others_fill_the_disk(device: Disk, kv: Mounted) -> None:
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
    assert check(old | new | newer) >= 30  # NVMe has room for 50, and some are gone


@pytest.mark.parametrize("how", BREAKS)
def test_a_file_system_that_failed_is_unmounted_and_mounted_again(
    device: Disk, mount: Mount, how: str
) -> None:
    kv = mount(f"{OPTIONS},passthrough=auto")
    kv.allow_log(HASTY)
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


def test_a_daemon_dies_on_a_file_system_that_failed(device: Disk, kv: Mounted) -> None:
    on_nvme, in_ram = two_places(kv)
    kv.idle()
    os.sync()
    kv.allow_log("more of the same kind is not logged|is down, nothing new goes there")
    device.shut_down()
    with in_ram.open("rb") as reader:
        assert reader.read(3) == b"rrr"
        kill(kv)
        waiting = Client(in_ram.stat)
        assert os.pread(reader.fileno(), 3, 0) == b"rrr"
        kv.expect_log("takeover failed .* (nvme=.* cannot be used|its disk or file system fails)")
        kv.expect_log("given up after .*mount it again")
        wait_for(lambda: not alive(kv.keeper), "the mount is given up", seconds=GIVEN_UP)
        waiting.answer()
    device.remount()
    kv.allow_log("did not end properly")
    kv.mount()
    assert bounded(on_nvme.read_bytes) == b"n" * MIB
    assert bounded(in_ram.read_bytes) == b"r" * MIB


def test_the_directory_goes_and_comes_back(device: Disk, kv: Mounted) -> None:
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
    on_nvme, in_ram = two_places(kv)
    kv.allow_log("is down, nothing new goes there|more of the same kind is not logged")
    kv.expect_log("takeover failed .* has identity none, expected")
    kv.allow_log("copies are verified before use")
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
    """The place of a disk's blocks; it has fewer than the disk claims."""
    path = tmp_path / "store"
    path.mkdir()
    mounts.mount("test", path, "tmpfs", 0, f"size={400 * MIB},mode=0755")
    yield path
    mounts.umount(path, mounts.MNT_DETACH)


@pytest.fixture
def thin(tmp_path: Path, store: Path) -> Iterator[Disk]:
    with disk(tmp_path / "nvme", store / "image", 300 * MIB) as made:
        yield made


def test_object_that_the_disk_did_not_write_is_not_served(
    thin: Disk, store: Path, mount: Mount
) -> None:
    kv = mount(OPTIONS)
    kv.allow_log(HASTY)
    kv.allow_log("more of the same kind is not logged|nothing is changed|is down|goes on in")
    kv.allow_log(
        "catalog|not closed properly|did not end properly|quarantined|stays open|still open"
        "|written back"
    )
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
    for path in (thin.directory / "objects").glob("*/*"):
        with path.open("rb") as file:  # the page cache may have it all the while
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    check(sealed | written)
    (store / "foreign").unlink()
    done = umount(kv, "--now")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not alive(kv.keeper), "the keeper ends", seconds=GIVEN_UP)
    thin.remount()
    kv.mount()
    assert check(sealed) >= 1, "one was on NVMe, and synced"
    check(written)


def test_memory_that_others_fill(kv: Mounted) -> None:
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


def test_object_with_failed_writeback_is_a_miss_before_the_sync_of_kvfs(
    thin: Disk, store: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel writes at any time, and reports a failed write once.
    monkeypatch.setenv("KVFS_FAILPOINTS", "movement.read=delay:600")  # s: the sync does not come
    kv = mount(OPTIONS)
    kv.allow_log(HASTY)
    kv.allow_log("writeback of /|more of the same kind is not logged|nothing is changed")
    kv.allow_log("catalog|not closed properly|is down|goes on in|given up|not answer")
    thin.keep_metadata()
    fill(store / "foreign")
    written: dict[Path, bytes] = {}
    for number in range(20):  # nothing is known of such: they begin on NVMe
        path, content = kv.path / f"new.{number}", bytes([number + 1]) * 4 * MIB
        if bounded(partial(path.write_bytes, content)) == 4 * MIB:
            written[path] = content
    of_inode = {f"{path.stat().st_ino:x}": content for path, content in written.items()}
    os.sync()
    bad = 0
    for path in (thin.directory / "objects").glob("*/*"):
        content = of_inode.get(path.name.partition(".")[0], b"")
        if not content:
            continue  # of a write that failed: it is about to be unlinked
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            bad += file.read() != content
    assert bad, "the disk did not take all of it"
    assert check(written) <= len(written) - bad
    assert check(written) <= len(written) - bad, "it is not forgotten that it was told"
    (store / "foreign").unlink()
    done = umount(kv, "--now")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not alive(kv.keeper), "the keeper ends", seconds=GIVEN_UP)


def test_a_disk_that_rots_below_the_page_cache(kv: Mounted, device: Disk) -> None:
    content = os.urandom(MIB)
    (kv.path / "a.kv").write_bytes(content)
    kv.idle()
    kv.remount()
    ino = (kv.path / "a.kv").stat().st_ino
    (copy,) = device.directory.glob(f"objects/*/{ino:x}.*")
    assert copy.read_bytes() == content, "the page cache has it"
    at = device.image.read_bytes().find(content[:4096])
    with device.image.open("r+b") as image:
        image.seek(at)
        image.write(bytes([content[0] ^ 1]))
    assert (kv.path / "a.kv").read_bytes() == content
    assert kv.counter("verified") == 1
    kv.expect_log("is quarantined: its bytes do not match their digest")
    subprocess.run([*KVFS, "set", kv.path, "scrub=1s"], check=True)
    wait_for(lambda: kv.counter("quarantined"), "the scrubber has found it")
    assert not (kv.path / "a.kv").exists()
