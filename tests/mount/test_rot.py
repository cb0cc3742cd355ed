"""Bytes that a disk changes silently: a mount's answers and messages about them."""

import os
import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for

MIB = 1 << 20
OPTIONS = "ram=64M,nvme={tmp}/nvme,nvme_size=1G"


def nvme_of(kv: Mounted) -> Path:
    return Path(kv.status()["tiers"]["nvme"]["path"])


def kept(kv: Mounted) -> list[Path]:
    return sorted((nvme_of(kv) / "quarantine").iterdir())


def said(kv: Mounted) -> int:
    return len(re.findall("is quarantined", kv.log.read_text()))


def on_nvme(kv: Mounted, name: str = "a.kv") -> bytes:
    """A file that only NVMe has."""
    content = random.Random(name).randbytes(MIB)
    (kv.path / name).write_bytes(content)
    kv.idle()
    if kv.status()["tiers"]["ram"]["objects"]:
        subprocess.run([*KVFS, "evict", str(kv.path / name)], check=True, capture_output=True)
    assert kv.idle()["tiers"]["ram"]["objects"] == 0
    return content


def rot(kv: Mounted, name: str = "a.kv") -> bytes:
    """Change a byte of the file on NVMe, and return its bytes after that."""
    ino = os.stat(kv.path / name).st_ino
    (path,) = nvme_of(kv).glob(f"objects/*/{ino:x}.*")
    times, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return bytes(content)


def is_missed(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        return True
    return False


@contextmanager
def opened_twice(path: Path) -> Iterator[int]:
    """Open twice: the second open asks for the promotion, which finds the object open."""
    os.close(os.open(path, os.O_RDONLY))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        wait_for(lambda: is_missed(path), "the promotion has found it")
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_a_copy_that_is_found_rotten_is_never_opened_again(mount: Mount, passthrough: str) -> None:
    kv = mount(f"{OPTIONS},passthrough={passthrough}")
    on_nvme(kv)
    wrong = rot(kv)
    kv.expect_log("is quarantined: its bytes do not match their digest")
    again = os.urandom(MIB)
    with opened_twice(kv.path / "a.kv") as descriptor:
        kv.idle()
        for _ in range(8):
            assert is_missed(kv.path / "a.kv")
        assert os.pread(descriptor, 2 * MIB, 0) == wrong, "who has it reads on"
        assert os.listdir(kv.path) == []
        (kv.path / "a.kv").write_bytes(again)
    assert (kv.path / "a.kv").read_bytes() == again
    (file,) = kept(kv)
    assert file.read_bytes() == wrong
    assert kv.counter("quarantined") == said(kv) == 1
    kv.remount()
    assert (kv.path / "a.kv").read_bytes() == again
    assert len(kept(kv)) == 1


def test_a_daemon_that_takes_over_opens_it_as_little(mount: Mount) -> None:
    kv = mount(OPTIONS)
    on_nvme(kv)
    wrong = rot(kv)
    kv.expect_log("is quarantined: its bytes do not match their digest")
    with opened_twice(kv.path / "a.kv") as descriptor:
        kv.idle()
        kv.kill_daemon()
        assert is_missed(Path(f"/proc/self/fd/{descriptor}")), "the way to it that needs no name"
        if kv.status()["passthrough"]["on"]:
            assert os.pread(descriptor, 2 * MIB, 0) == wrong
    wait_for(lambda: kv.idle()["objects"] == 0, "it goes when it is closed")
    assert len(kept(kv)) == 1


def test_check_beside_the_mount_drops_wrong_open_copies_too(mount: Mount) -> None:
    kv = mount(OPTIONS)
    on_nvme(kv)
    wrong = rot(kv)
    kv.expect_log("repaired: put this copy into quarantine and drop the object with its names")
    command = [*KVFS, "fsck", "--repair", "--hashes", str(kv.path)]
    with open(kv.path / "a.kv", "rb", buffering=0) as file:
        assert subprocess.run(command, capture_output=True, check=False).returncode == 1
        assert is_missed(kv.path / "a.kv")
        assert file.read() == wrong
    kv.idle()
    assert kv.counter("quarantined") == len(kept(kv)) == 1


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_first_open_after_a_mount_finds_a_rotten_copy(mount: Mount, passthrough: str) -> None:
    kv = mount(f"{OPTIONS},passthrough={passthrough}")
    contents = {name: on_nvme(kv, name) for name in ("a.kv", "b.kv")}
    rot(kv)
    kv.remount()
    kv.expect_log("is quarantined: its bytes do not match their digest")
    for _ in range(8):
        assert is_missed(kv.path / "a.kv")
    assert (kv.path / "b.kv").read_bytes() == contents["b.kv"]
    kv.idle()
    assert len(kept(kv)) == kv.counter("quarantined") == said(kv) == 1
    assert kv.counter("verified") == 1


def test_verify_after_says_how_long_a_copy_is_trusted(mount: Mount) -> None:
    kv = mount(f"{OPTIONS},promote_after=0,verify_after=0")
    on_nvme(kv)
    kv.remount()
    wrong = rot(kv)
    assert (kv.path / "a.kv").read_bytes() == wrong, "that is what 0 means"
    subprocess.run([*KVFS, "set", str(kv.path), "verify_after=1d"], check=True)
    kv.expect_log("is quarantined: its bytes do not match their digest")
    assert is_missed(kv.path / "a.kv")
    kv.idle()
    assert kv.counter("quarantined") == 1


def test_the_next_daemon_compares_them_once_more(mount: Mount) -> None:
    kv = mount(f"{OPTIONS},promote_after=0")
    on_nvme(kv)
    rot(kv)
    kv.kill_daemon()
    kv.expect_log("is quarantined: its bytes do not match their digest")
    assert is_missed(kv.path / "a.kv")
    kv.idle()
    assert kv.counter("quarantined") == 1


def test_object_without_digest_gets_one_at_the_next_mount(
    monkeypatch: pytest.MonkeyPatch, mount: Mount
) -> None:
    monkeypatch.setenv("KVFS_FAILPOINTS", "movement.read=delay:600")
    kv = mount(f"{OPTIONS},promote_after=0")
    monkeypatch.delenv("KVFS_FAILPOINTS")
    kv.expect_log("the last session did not end properly: its bytes are all there")
    kv.expect_log("is quarantined: its bytes do not match their digest")
    (kv.path / "a.kv").write_bytes(os.urandom(MIB))
    wait_for(lambda: kv.status()["jobs"], "a mover is about to read it")
    kv.kill()
    kv.mount()
    kv.idle()
    assert kv.counter("settled") == 1
    rot(kv)
    kv.remount()
    assert is_missed(kv.path / "a.kv")


@pytest.mark.parametrize("mounted", [True, False])
def test_copy_reported_by_fsck_is_served_by_no_later_daemon(mount: Mount, *, mounted: bool) -> None:
    """No daemon serves it from RAM either, where an open compares nothing else."""
    kv = mount(OPTIONS)
    subprocess.run([*KVFS, "ns", "set", kv.path, "write=through"], check=True)
    (kv.path / "small.kv").write_bytes(b"x")  # by which kvfs takes the next one for small
    content = os.urandom(MIB)
    (kv.path / "a.kv").write_bytes(content)
    kv.idle()
    assert os.getxattr(kv.path / "a.kv", "user.kvfs.tier") == b"ram+nvme"
    ino, ram = os.stat(kv.path / "a.kv").st_ino, Path(kv.status()["tiers"]["ram"]["path"])
    (path,) = ram.glob(f"objects/*/{ino:x}.*")
    times = path.stat()
    path.write_bytes(b"?" + content[1:])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    kv.expect_log("is quarantined: its bytes do not match their digest")
    if not mounted:
        kv.expect_log("the last session did not end properly: its bytes are all there")
        kv.kill()
    target = kv.path if mounted else kv.path.parent / "nvme"
    command = [*KVFS, "fsck", "--hashes", str(target)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 4
    if mounted:
        kv.kill_daemon()
    else:
        kv.mount()
    assert (kv.path / "a.kv").read_bytes() == content
