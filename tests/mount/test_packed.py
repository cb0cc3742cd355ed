"""Compressed copies on NVMe on a real mount: reads, accounts, and remains after deaths."""

import os
import random
import subprocess
import threading
from pathlib import Path

import pytest

from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for

MIB = 1 << 20
SIZE = 4 * MIB + 1002
SMALL = "ram=64M,nvme={tmp}/nvme,nvme_size=1G"


def bf16(number: int, size: int = SIZE) -> bytes:
    """Numbers of 2 bytes, one of which hardly varies."""
    dice, data = random.Random(number), bytearray(size)
    data[0::2] = dice.randbytes(size // 2)
    data[1::2] = bytes([0x3F, 0xBF]) * (size // 4) + bytes(size // 2 % 2)
    return bytes(data)


def ns(mounted: Mounted, verb: str, *settings: str) -> str:
    """Run `kvfs ns`; return its messages, without the text for pasting."""
    command = [*KVFS, "ns", verb, str(mounted.path / "n"), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("namespace n: ")
    return done.stderr


def begin(mounted: Mounted, *settings: str) -> str:
    """Create the namespace. The first file of a kind begins on NVMe, the next ones in RAM."""
    said = ns(mounted, "create", "compression=nvme", *settings)
    first = mounted.path / "n" / "first.bin"
    first.write_bytes(bf16(99))
    mounted.idle()
    first.unlink()
    wait_for(lambda: mounted.idle()["objects"] == 0, "it is gone")
    return said


def write_more_than_ram(kv: Mounted, count: int = 24) -> None:
    """Write one file after the other, so that demotions make room, and no file begins on NVMe."""
    for number in range(count):
        (kv.path / "n" / f"{number}.bin").write_bytes(bf16(number))
        kv.idle()
        wait_for(lambda: kv.status()["reclaimable_bytes"] >= 64 * MIB // 4 - SIZE, "room is made")


def read(kv: Mounted, number: int) -> bytes:
    return (kv.path / "n" / f"{number}.bin").read_bytes()


def packed(kv: Mounted) -> dict[str, int]:
    found: dict[str, int] = kv.status()["tiers"]["nvme"]
    return found


def test_objects_are_compressed_on_nvme_and_read_back_unchanged(mount: Mount) -> None:
    kv = mount(SMALL)
    said = begin(kv)
    assert "is read through RAM where it is compressed, not by passthrough from NVMe" in said
    write_more_than_ram(kv)
    found = packed(kv)
    assert found["compressed"] == found["objects"] > 8
    assert found["compressed_bytes"] == found["compressed"] * SIZE
    assert found["used_bytes"] < found["compressed_bytes"] / 1.5
    assert found["not_compressed"] == 0
    kv.check_accounts()
    before = kv.status()
    assert all(read(kv, number) == bf16(number) for number in range(24))
    after = kv.status()
    assert packed(kv)["decompressed"] > 8
    assert packed(kv)["hits"] - before["tiers"]["nvme"]["hits"] > 8
    for name in ("opens_passthrough", "opens_served"):
        wanted = 24 if after["passthrough"]["on"] == (name == "opens_passthrough") else 0
        assert after["counters"][name] - before["counters"][name] == wanted
    assert after["counters"]["opens_unreadable"] == after["counters"]["dropped"] == 0
    shown = subprocess.run(
        [*KVFS, "status", str(kv.path)], capture_output=True, text=True, check=True
    ).stdout
    assert "times smaller" in shown
    kv.check_accounts()
    assert ns(kv, "set", "compression=off") == ""


def test_incompressible_object_is_read_by_passthrough(mount: Mount) -> None:
    kv = mount(SMALL)
    begin(kv, "write=through")
    noise = random.Random(1).randbytes(SIZE)
    (kv.path / "n" / "noise.bin").write_bytes(noise)
    wait_for(lambda: packed(kv)["not_compressed"] == 1, "it was tried")
    kv.remount()
    before = kv.status()
    assert (kv.path / "n" / "noise.bin").read_bytes() == noise
    after = kv.status()
    assert after["tiers"]["ram"]["objects"] == 0
    assert after["tiers"]["nvme"]["hits"] == before["tiers"]["nvme"]["hits"] + 1
    assert after["tiers"]["nvme"]["decompressed"] == 0
    if after["passthrough"]["on"]:
        passed = after["counters"]["opens_passthrough"] - before["counters"]["opens_passthrough"]
        assert passed == 1


def test_an_unmount_writes_back_compressed_and_the_next_mount_reads_it(mount: Mount) -> None:
    kv = mount(SMALL)
    begin(kv)
    for number in range(4):
        (kv.path / "n" / f"{number}.bin").write_bytes(bf16(number))
    kv.remount()
    assert kv.status()["tiers"]["ram"]["objects"] == 0
    assert packed(kv)["used_bytes"] < 4 * SIZE / 1.5
    kv.check_accounts()
    assert [read(kv, number) for number in range(4)] == [bf16(number) for number in range(4)]
    kv.check_accounts()
    assert "compression=nvme: what only NVMe has is read through RAM" in kv.log.read_text()


def test_mount_without_ram_reads_compressed_copies(mount: Mount) -> None:
    kv = mount(SMALL)
    begin(kv)
    (kv.path / "n" / "0.bin").write_bytes(bf16(0))
    kv.umount()
    kv.mount(kv.options.replace("ram=64M", "ram=0"))
    used = packed(kv)["used_bytes"]
    assert "no copy on NVMe here: mount or media lack ram" in ns(kv, "set", "compression=nvme")
    assert read(kv, 0) == bf16(0)
    assert read(kv, 0) == bf16(0)
    assert packed(kv)["decompressed"] == 1, "it is plain now"
    assert packed(kv)["used_bytes"] > used
    kv.check_accounts()
    kv.umount()
    checked = subprocess.run(
        [*KVFS, "fsck", "--hashes", str(kv.path.parent / "nvme")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("how", ["daemon", "all"])
def test_deaths_in_the_middle_of_it_lose_nothing(mount: Mount, how: str) -> None:
    """The daemon dies and another one takes over, or all processes die and it is mounted again."""
    kv = mount(SMALL)
    kv.allow_log("did not end properly|stays packed|mover died|is missed|was open")
    begin(kv, "write=through")
    for number in range(12):
        (kv.path / "n" / f"{number}.bin").write_bytes(bf16(number))
    wait_for(lambda: packed(kv)["compressed"] == 12, "all are on NVMe")
    kv.idle()
    wrong: list[int] = []
    done = threading.Event()

    def reader() -> None:
        """Check that reads are right as long as a daemon serves."""
        dice = random.Random(5)
        while not done.is_set():
            number = dice.randrange(12)
            try:
                if read(kv, number) != bf16(number):
                    wrong.append(number)
            except OSError:
                if how == "daemon":
                    raise
                return

    thread = threading.Thread(target=reader)
    kv.remount()  # nothing is in RAM
    thread.start()
    try:
        wait_for(lambda: packed(kv)["decompressed"] >= 2, "some are read")
        if how == "daemon":
            for _ in range(2):
                kv.kill_daemon()
        else:
            kv.kill()
    finally:
        done.set()
        thread.join()
    if how == "all":
        kv.mount()
    assert wrong == []
    assert [read(kv, number) == bf16(number) for number in range(12)] == [True] * 12
    kv.check_accounts()


def test_a_check_knows_a_copy_that_is_damaged(mount: Mount, tmp_path: Path) -> None:
    kv = mount(SMALL)
    begin(kv)
    for number in range(2):
        (kv.path / "n" / f"{number}.bin").write_bytes(bf16(number))
    kv.umount()
    nvme = tmp_path / "nvme"

    def fsck() -> tuple[int, str]:
        command = [*KVFS, "fsck", "--hashes", str(nvme)]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        return checked.returncode, checked.stdout + checked.stderr

    assert fsck()[0] == 0, fsck()[1]
    victim = next(path for path in (nvme / "objects").rglob("*") if path.is_file())
    about = victim.stat()
    with victim.open("r+b") as file:
        file.seek(about.st_size // 2)
        byte = file.read(1)[0]
        file.seek(about.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(victim, ns=(about.st_atime_ns, about.st_mtime_ns))
    code, said = fsck()
    assert code != 0
    assert "damaged" in said
    kv.mount()
    kv.expect_log("is quarantined")
    found = []
    for number in range(2):
        try:
            found.append(read(kv, number) == bf16(number))
        except FileNotFoundError:
            found.append(False)
    assert sorted(found) == [False, True]
