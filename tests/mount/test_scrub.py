"""The scrubber on a real mount: real movers, real tiers, and writers beside it."""

import json
import os
import random
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.mount.test_metrics import free_port, until, value
from tests.mount.test_packed import bf16

MIB = 1 << 20


@pytest.fixture
def port() -> int:
    return free_port()


def scrub(kv: Mounted) -> dict[str, Any]:
    found: dict[str, Any] = kv.status()["scrub"]
    return found


def rotten(kv: Mounted) -> dict[str, int]:
    """Wrong copies found since the mount, by tier."""
    return {name: found["rotten"] for name, found in scrub(kv)["tiers"].items()}


def tell(kv: Mounted, period: str) -> None:
    request(kv.path, "set", scrub=period)


def whole_pass(kv: Mounted) -> dict[str, Any]:
    """The status after a pass that begins after now, or several, with no pass running."""
    now = time.time()
    tell(kv, "1s")
    wait_for(lambda: (scrub(kv)["last"] or {"began": 0})["began"] > now, "a pass ends")
    tell(kv, "off")
    wait_for(lambda: scrub(kv)["pass"] is None, "no other one runs")
    found: dict[str, Any] = scrub(kv)["last"]
    return found


def backing(kv: Mounted, tier: str, name: str) -> Path:
    inode = os.stat(kv.path / name).st_ino
    return next(Path(kv.status()["tiers"][tier]["path"]).glob(f"objects/*/{inode:x}.*"))


def flip(path: Path) -> None:
    """Change one bit; neither size nor time shows it."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def write_back(kv: Mounted) -> None:
    """Wait until NVMe has all objects of RAM as well, with their digests."""
    kv.idle()  # what was closed is released a moment later, and is not asked for before
    wait_for(lambda: not request(kv.path, "write_back")["objects_left"], "all is on NVMe")
    kv.idle()


def events(kv: Mounted, kind: str) -> list[dict[str, Any]]:
    lines = (kv.path / ".kvfs" / "events").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def quarantined(kv: Mounted, tier: str) -> list[str]:
    folder = Path(kv.status()["tiers"][tier]["path"], "quarantine")
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_a_flipped_bit_is_found_and_the_other_copy_is_served(mount: Mount, tier: str) -> None:
    kv = mount("ram=128M,nvme={tmp}/nvme,nvme_size=1G")
    (kv.path / "teacher.kv").write_bytes(os.urandom(MIB))  # of the size of what comes
    content = random.Random(1).randbytes(3 * MIB + 17)
    for number in range(4):
        (kv.path / f"{number}.kv").write_bytes(content)
    write_back(kv)
    whole_pass(kv)
    assert rotten(kv) == {"ram": 0, "nvme": 0}
    bad = backing(kv, tier, "2.kv")
    flip(bad)
    kv.expect_log("is quarantined: its bytes do not match their digest")
    whole_pass(kv)
    assert rotten(kv) == {"ram": 0, "nvme": 0} | {tier: 1}
    kv.idle()
    assert quarantined(kv, tier) == [bad.name]
    assert (kv.path / "2.kv").read_bytes() == content
    (event,) = events(kv, "rotten")
    assert (event["tier"], event["file"]) == (tier, str(bad))
    assert events(kv, "scrub")[0]["objects"] >= 8
    assert scrub(kv)["cpu_s"] > 0
    assert kv.counter("opens_unreadable") == 0


def test_a_flipped_bit_in_a_packed_copy_is_found_and_the_file_is_a_miss(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=1G")
    subprocess.run(
        [*KVFS, "ns", "create", str(kv.path / "n"), "compression=nvme"],
        check=True,
        capture_output=True,
    )
    for name in ("teacher.bin", "a.bin", "b.bin"):
        (kv.path / "n" / name).write_bytes(bf16(1))
    kv.remount()  # and RAM is empty
    packed = kv.status()["tiers"]["nvme"]
    assert packed["used_bytes"] < packed["objects"] * len(bf16(1))
    whole_pass(kv)
    assert rotten(kv)["nvme"] == 0
    bad = backing(kv, "nvme", "n/b.bin")
    assert bad.stat().st_size < len(bf16(1)), "it is packed"
    flip(bad)
    kv.expect_log("is quarantined: its bytes do not match their digest")
    whole_pass(kv)
    assert rotten(kv)["nvme"] == 1
    kv.idle()
    assert quarantined(kv, "nvme") == [bad.name]
    assert not (kv.path / "n" / "b.bin").exists()
    assert (kv.path / "n" / "a.bin").read_bytes() == bf16(1)


def test_objects_that_come_and_go_are_no_rot(mount: Mount) -> None:
    """Writers, renames, deletes and demotions run beside a scrubber that never rests."""
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M,scrub=1s")
    seed = random.randrange(1 << 30)
    print("seed", seed)
    stop = threading.Event()
    problems: list[BaseException] = []

    def work(number: int) -> None:
        dice = random.Random(seed + number)
        try:
            while not stop.is_set():
                path = kv.path / f"{number}.{dice.randrange(30)}"
                size = dice.choice([100, 4096, 300_000, 2 * MIB])
                act = dice.random()
                if act < 0.6:
                    new = path.with_suffix(f"{path.suffix}.new")
                    new.write_bytes(dice.randbytes(size))
                    new.rename(path)
                elif act < 0.75:
                    path.write_bytes(dice.randbytes(size))
                else:
                    path.unlink(missing_ok=True)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        # Each pass needs a digest to compare, which demotions give.
        wait_for(lambda: scrub(kv)["tiers"]["nvme"]["objects"] > 50, "copies are verified")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not problems, problems
    found = scrub(kv)
    assert [tier["rotten"] for tier in found["tiers"].values()] == [0, 0]
    assert kv.counter("quarantined") == 0
    assert kv.status()["counters"].get("dropped_lost", 0) == 0


def test_a_pass_goes_on_after_the_daemon_died_and_after_an_unmount(mount: Mount) -> None:
    kv = mount("ram=128M,nvme={tmp}/nvme,nvme_size=1G")
    (kv.path / "teacher.kv").write_bytes(os.urandom(4096))
    for number in range(300):
        (kv.path / f"{number}.kv").write_bytes(os.urandom(4096))
    write_back(kv)
    tell(kv, "100s")  # breath of 1 s; the first batch has 256 copies, the next one is later
    wait_for(lambda: scrub(kv)["pass"] and scrub(kv)["pass"]["objects"] >= 256, "it has begun")
    first = scrub(kv)["pass"]
    (kv.path / "a change").touch()  # takes along what is noted
    kv.kill_daemon()
    wait_for(lambda: scrub(kv)["pass"], "the next daemon knows")
    assert scrub(kv)["pass"]["began"] == first["began"]
    assert scrub(kv)["pass"]["objects"] >= first["objects"]
    kv.remount()
    assert kv.status()["options"]["scrub"] == "7d", "what was set is over"
    wait_for(lambda: scrub(kv)["pass"], "the next mount knows")
    assert scrub(kv)["pass"]["began"] == first["began"]
    tell(kv, "1s")
    wait_for(lambda: scrub(kv)["last"], "it ends")
    assert scrub(kv)["last"]["rotten"] == 0


def test_an_unmount_does_not_wait_for_it(mount: Mount) -> None:
    """A large object takes as long as its bytes at the scrubber's rate: here at least 4 s."""
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=4G")
    (kv.path / "large").write_bytes(b"")
    with (kv.path / "large").open("r+b") as file:
        for _ in range(8):
            file.write(os.urandom(MIB) * 128)
    wait_for(lambda: kv.counter("settled") >= 1, "it has a digest")
    kv.idle()
    tell(kv, "1s")
    wait_for(lambda: scrub(kv)["state"] == "running", "it reads")
    done = subprocess.run(
        [*KVFS, "umount", str(kv.path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    kv.mount()
    assert scrub(kv)["last"] is None, "the pass was not over"


def test_status_and_metrics_tell_of_it(mount: Mount, port: int) -> None:
    kv = mount(f"ram=64M,nvme={{tmp}}/nvme,nvme_size=1G,metrics={port},scrub=off")

    def shown() -> str:
        command = [*KVFS, "status", str(kv.path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "off" in next(line for line in shown().splitlines() if "scrubber" in line)
    (kv.path / "teacher.kv").write_bytes(os.urandom(MIB))
    (kv.path / "a.kv").write_bytes(os.urandom(MIB))
    write_back(kv)
    last = whole_pass(kv)
    (line,) = [line for line in shown().splitlines() if "last pass" in line]
    assert f"{last['objects']} copies" in line
    assert "0 rotten, 0 unread" in line
    samples = until(port, "kvfs_scrub_last_completed_timestamp_seconds", last["ended"])
    assert value(samples, "kvfs_scrub_objects_total", tier="nvme") >= 2
    assert value(samples, "kvfs_scrub_rotten_copies_total", tier="nvme") == 0
    assert value(samples, "kvfs_scrub_period_seconds") == 0


def test_a_bad_period_is_refused(kv: Mounted) -> None:
    done = subprocess.run(
        [*KVFS, "set", str(kv.path), "scrub=weekly"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "option scrub=weekly: expected a duration such as 12h or 7d" in done.stderr
