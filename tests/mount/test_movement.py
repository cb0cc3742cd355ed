"""Tiers at work on a real mount: demotion, promotion, eviction, and movers that die."""

import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import Mount
from tests.harness import KVFS, PATIENCE, Mounted, wait_for

MIB = 1 << 20
SIZE = 8 * MIB
SEED = 3


def content(number: int) -> bytes:
    return random.Random(SEED + number).randbytes(SIZE)


def write(one: Mounted, number: int) -> str:
    data = content(number)
    (one.path / f"{number}.bin").write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def digest(one: Mounted, number: int) -> str:
    return hashlib.sha256((one.path / f"{number}.bin").read_bytes()).hexdigest()


def test_more_than_ram_is_demoted_and_nothing_is_lost(either: Mounted) -> None:
    digests = [write(either, number) for number in range(64)]  # twice the RAM tier
    enough = 256 * MIB // 4 - SIZE
    wait_for(lambda: either.status()["reclaimable_bytes"] >= enough, "room is made for the next")
    status = either.idle()  # between two jobs it may seem so before
    assert status["counters"]["demoted"]
    assert status["tiers"]["nvme"]["objects"] >= 32, "demoted, or begun there while RAM was full"
    assert status["counters"]["dropped"] == 0
    assert status["objects"] == 64
    for tier in status["tiers"].values():
        assert tier["used_bytes"] <= tier["capacity_bytes"]
    assert [digest(either, number) for number in range(64)] == digests


def test_object_read_twice_from_nvme_is_promoted(kv: Mounted) -> None:
    digests = [write(kv, number) for number in range(40)]
    kv.idle()
    kv.remount()  # all of it is on NVMe now
    assert kv.status()["tiers"]["ram"]["objects"] == 0
    assert digest(kv, 0) == digests[0]
    assert kv.idle()["counters"]["promoted"] == 0, "read once: stays"
    assert digest(kv, 0) == digests[0]
    wait_for(lambda: kv.counter("promoted") == 1, "read twice: promoted")
    hits = kv.status()["tiers"]["ram"]["hits"]
    assert digest(kv, 0) == digests[0]
    assert kv.status()["tiers"]["ram"]["hits"] == hits + 1


def test_promote_after_0_promotes_nothing(mount: Mount) -> None:
    kv = mount("ram=128M,nvme={tmp}/nvme,nvme_size=1G,promote_after=0")
    write(kv, 0)
    kv.idle()
    kv.remount()
    for _ in range(5):
        digest(kv, 0)
    assert kv.idle()["counters"]["promoted"] == 0


def test_full_nvme_drops_the_least_recently_used_objects(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    digests = {number: write(kv, number) for number in range(20)}
    kv.idle()
    for number in range(20, 120):  # 800 MiB in all
        digests[number] = write(kv, number)
        assert digest(kv, 0) == digests[0], "in use all the time"
    status = kv.idle()
    left = sorted(int(name.partition(".")[0]) for name in os.listdir(kv.path))
    assert left[0] == 0
    assert left[-1] == 119
    assert 20 < len(left) < 45
    assert min(left[1:]) > 60, "the old ones went"
    assert status["counters"]["dropped"] == 120 - len(left)
    for tier in status["tiers"].values():
        assert tier["used_bytes"] <= tier["capacity_bytes"]
    found = {number: digest_if_there(kv, number) for number in left}
    assert all(one in (digests[number], None) for number, one in found.items())
    assert any(found.values())
    status = kv.idle()  # what was read was promoted, for which others may have gone
    assert status["counters"]["dropped"] == 120 - len(os.listdir(kv.path))


def digest_if_there(kv: Mounted, number: int) -> str | None:
    try:
        return digest(kv, number)
    except FileNotFoundError:
        return None


def test_the_kernel_forgets_names_that_were_dropped(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=128M")
    write(kv, 0)
    path = kv.path / "0.bin"
    assert path.stat().st_size == SIZE, "now the kernel has it cached for an hour"
    for number in range(1, 60):
        write(kv, number)
    wait_for(lambda: not path.exists(), "the cached entry is invalidated")
    with pytest.raises(FileNotFoundError):
        path.open("rb")


def test_an_open_file_is_never_a_victim(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=128M")
    expected = write(kv, 0)
    with (kv.path / "0.bin").open("rb") as file:
        for number in range(1, 60):
            write(kv, number)
        assert hashlib.sha256(file.read()).hexdigest() == expected
    assert digest(kv, 0) == expected


def test_enospc_only_when_nothing_may_be_dropped(mount: Mount) -> None:
    kv = mount("ram=64M")
    write(kv, 0)  # the directory's size is learned
    held: list[int] = []

    def fill() -> None:
        for number in range(1, 20):
            held.append(os.open(kv.path / f"{number}.bin", os.O_CREAT | os.O_WRONLY))
            os.pwrite(held[-1], content(number), 0)

    kv.allow_log("is cut off")  # if a look finds the bytes before the kernel has no more pages
    with pytest.raises(OSError, match="No space left") as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    assert len(held) >= 5
    for fd in held:
        try:
            os.close(fd)
        except OSError as error:  # it was cut off
            if error.errno != errno.ENOSPC:
                raise
    write(kv, 99)
    assert digest(kv, 99) == hashlib.sha256(content(99)).hexdigest()


def test_file_that_outgrows_its_expected_size_gets_room(mount: Mount) -> None:
    kv = mount("ram=256M,nvme={tmp}/nvme,nvme_size=1G")
    for number in range(3):
        (kv.path / f"small{number}.bin").write_bytes(b"x" * 4096)
    for number in range(20):
        write(kv, number)
    kv.idle()
    big = random.Random(9).randbytes(MIB)
    with (kv.path / "big.bin").open("wb", buffering=0) as file:
        for _ in range(150):
            assert file.write(big) == MIB
    assert (kv.path / "big.bin").stat().st_size == 150 * MIB
    wait_for(
        lambda: kv.idle()["tiers"]["ram"]["used_bytes"] <= 256 * MIB, "RAM is within its size again"
    )


def test_writers_get_no_enospc_from_a_stream_of_five_times_all_capacity(mount: Mount) -> None:
    kv = mount("ram=128M,nvme={tmp}/nvme,nvme_size=128M")
    failures: list[str] = []

    def stream(worker: int) -> None:
        try:
            for number in range(worker, 160, 4):
                write(kv, number)
        except OSError as error:
            failures.append(f"{worker}: {error}")

    threads = [threading.Thread(target=stream, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    kv.idle()  # RAM is made reclaimable after the last write, and older files go for that
    for name in os.listdir(kv.path):
        number = int(name.partition(".")[0])
        assert digest(kv, number) == hashlib.sha256(content(number)).hexdigest()


def mover_pids(one: Mounted) -> list[int]:
    threads = Path(f"/proc/{one.pid}/task").iterdir()
    children = [pid for thread in threads for pid in (thread / "children").read_text().split()]
    return [
        int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_a_movers_death_fails_no_operation(kv: Mounted) -> None:
    kv.expect_log("a mover died over copy")
    kv.allow_log("demote of .* failed, nothing is changed: .*3 movers died")
    digests = [write(kv, number) for number in range(24)]
    wait_for(lambda: mover_pids(kv), "movers are at work")
    killed = 0
    for number in range(24, 96):
        if killed < 4:  # a job outlives two deaths, and is tried again after more
            for pid in mover_pids(kv)[:1]:
                os.kill(pid, signal.SIGKILL)
                killed += 1
        digests.append(write(kv, number))
    status = kv.idle()
    assert killed == 4
    assert status["counters"]["mover_failures"] >= 1
    assert status["counters"]["dropped"] == 0
    assert [digest(kv, number) for number in range(96)] == digests


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 200 MiB of its own."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(200 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_others_fill_is_used_less(small_disk: Path, mount: Mount) -> None:
    """kvfs drops objects, so that no other program on that disk gets ENOSPC."""
    kv = mount(f"ram=64M,nvme={small_disk}/nvme,nvme_size=150M")
    digests = {number: write(kv, number) for number in range(16)}
    kv.idle()
    kv.allow_log("nothing is demoted: the NVMe tier has no room")
    kv.allow_log("a write failed, it is opened anew: .*No space left")
    kv.allow_log("(copy|demote) of .* failed, nothing is changed: .*No space left")
    before = kv.status()["tiers"]["nvme"]["capacity_bytes"]
    free = shutil.disk_usage(small_disk).free
    with (small_disk / "foreign").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - 4 * MIB)
    wait_for(
        lambda: kv.status()["tiers"]["nvme"]["capacity_bytes"] < before,
        "the tier shrinks with what is free",
    )
    for number in range(16, 48):
        digests[number] = write(kv, number)
    kv.idle()
    found = {}
    for number in digests:  # what is on the disk goes as others need it, the youngest as well
        with suppress(FileNotFoundError):
            found[number] = digest(kv, number)
    assert found.items() <= digests.items()
    assert len(found) > 1, "what RAM holds is there"


def test_an_unmount_says_why_nvme_takes_no_more(small_disk: Path, mount: Mount) -> None:
    """kvfs drops no object of this for lack of room, and the unmount does not wait."""
    kv = mount(f"ram=64M,nvme={small_disk}/nvme,nvme_size=150M")
    os.setxattr(kv.path, "user.kvfs.eviction", b"never")
    digests = [write(kv, number) for number in range(2)]
    kv.idle()
    free = shutil.disk_usage(small_disk).free
    with (small_disk / "foreign").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - MIB)
    kv.allow_log("nothing is demoted: the NVMe tier has no room")
    kv.allow_log("a write failed, it is opened anew: .*No space left")
    kv.allow_log("(copy|demote) of .* failed, nothing is changed: .*No space left")
    digests += [write(kv, number) for number in range(2, 5)]
    command = [*KVFS, "umount", str(kv.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert "iB are only in RAM, and NVMe takes none (nothing is demoted: " in done.stderr
    (small_disk / "foreign").unlink()
    assert [digest(kv, number) for number in range(5)] == digests


def test_a_lost_nvme_directory_is_a_miss_and_comes_back(mount: Mount, tmp_path: Path) -> None:
    """RAM works on, no object is forgotten, and the log says it once."""
    kv = mount("ram=128M,nvme={tmp}/nvme,nvme_size=512M,promote_after=0")
    digests = [write(kv, number) for number in range(8)]
    kv.idle()
    kv.remount()
    digests.append(write(kv, 8))
    digests.append(write(kv, 9))
    digests.append(write(kv, 10))
    status = kv.idle()
    assert status["tiers"]["ram"]["objects"] >= 1
    kv.expect_log("nvme tier: open of .* failed: ENOENT .*directory lost")
    kv.allow_log("nvme tier: statfs of .* failed: ENOENT")
    (tmp_path / "nvme").rename(tmp_path / "away")
    misses = 0
    for number in range(11):
        try:
            assert digest(kv, number) == digests[number]
        except FileNotFoundError:
            misses += 1
    assert misses >= 8
    kv.expect_log("is down, nothing new goes there: lost: its directory is not there")
    wait_for(lambda: kv.status()["tiers"]["nvme"]["state"] == "down", "it is noticed")
    (tmp_path / "away").rename(tmp_path / "nvme")
    assert [digest(kv, number) for number in range(11)] == digests
    wait_for(lambda: kv.status()["tiers"]["nvme"]["state"] == "healthy", "it is trusted again")
    assert kv.log.read_text().count("directory lost") == 1
