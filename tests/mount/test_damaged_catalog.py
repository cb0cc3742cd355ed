"""A catalog whose log or tables are damaged: a mount and `kvfs fsck` of it."""

import json
import os
import random
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvfs import runtime
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for

COUNT = 120
DAMAGES = ("flipped", "cut", "deleted")
SEEDS = {"flipped": 101, "cut": 102, "deleted": 103}

State = dict[str, tuple[object, ...]]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*KVFS, *arguments], capture_output=True, text=True, check=False)


def fsck(target: Path, *options: str) -> tuple[int, list[tuple[str, str]]]:
    """Run fsck: (exit code, (kind, state) of each finding)."""
    done = run("fsck", "--json", *options, str(target))
    assert not done.stderr, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, [(one["kind"], one["state"]) for one in answer["findings"]]


def nvme_of(one: Mounted) -> Path:
    return Path(one.status()["tiers"]["nvme"]["path"])


def inhabit(one: Mounted, seed: int) -> None:
    """Make, rename, replace and unlink names, and move some with their directory."""
    print("seed", seed)
    chance = random.Random(seed)
    folder = one.path / "first"
    folder.mkdir(mode=0o750)
    for number in range(COUNT):
        path = folder / f"{number}.tmp"
        path.write_bytes(chance.randbytes(chance.randrange(1, 9000)))
        if number % 3 == 0:
            path.chmod(0o640)
            os.chown(path, 1000 + number, 2000)
            os.utime(path, ns=(number, 10**18 + number))
            os.setxattr(path, "user.number", str(number).encode())
        path.rename(folder / f"{number}.kv")
    folder.rename(one.path / "second")
    for number in range(0, COUNT, 10):
        new = one.path / f"{number}.new"
        new.write_bytes(chance.randbytes(500))
        new.rename(one.path / "second" / f"{number}.kv")
    for number in range(5, COUNT, 20):
        (one.path / "second" / f"{number}.kv").unlink()
        (one.path / f"{number}.gone").write_bytes(b"gone")
        (one.path / f"{number}.gone").unlink()
    os.link(one.path / "second/1.kv", one.path / "linked")


def state(one: Mounted) -> State:
    """All that a program can see, by path."""
    found: State = {}
    for path in sorted(one.path.rglob("*")):
        if path.parts[-2:-1] == (".kvfs",) or path.name == ".kvfs":
            continue
        status = path.lstat()
        found[str(path.relative_to(one.path))] = (
            *(status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_nlink),
            *(status.st_size, status.st_mtime_ns, status.st_ctime_ns),
            path.read_bytes() if stat.S_ISREG(status.st_mode) else b"",
            {name: os.getxattr(path, name) for name in os.listxattr(path)},
        )
    return found


def damage(catalog: Path, how: str, seed: int) -> None:
    logs = sorted(catalog.glob("*.log"), key=lambda log: log.stat().st_size)
    log, chance = logs[-1], random.Random(seed)
    size = log.stat().st_size
    if how == "flipped":
        data = bytearray(log.read_bytes())
        for _ in range(3):
            data[chance.randrange(size // 10, size)] ^= 1 << chance.randrange(8)
        log.write_bytes(data)
    elif how == "cut":
        os.truncate(log, size * 2 // 3)
    else:
        for one in logs:
            one.unlink()


def flip(path: Path, part: float) -> None:
    with path.open("r+b") as file:
        file.seek(int(path.stat().st_size * part))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def backing_files(nvme: Path) -> int:
    ram = runtime.ram_root() / (nvme / "identity").read_text().strip()
    return sum(path.is_file() for tier in (nvme, ram) for path in (tier / "objects").rglob("*.*"))


@pytest.mark.parametrize("how", DAMAGES)
def test_a_mount_restores_all_names_and_says_so(kv: Mounted, how: str) -> None:
    nvme = nvme_of(kv)
    inhabit(kv, SEEDS[how])
    kv.idle()
    before = state(kv)
    kv.kill()
    damage(nvme / "catalog", how, SEEDS[how])
    kv.expect_log(r"its log ends too early, after change \d+: the \d+ changes .* from the journal")
    kv.expect_log("its log was damaged, what was missing is restored")
    kv.mount()
    kv.idle()
    assert state(kv) == before
    assert kv.status()["catalog"]["restored"] > 0
    assert kv.counter("swept") == 0
    assert "its bytes are all there" not in kv.log.read_text()
    assert fsck(kv.path, "--hashes") == (0, [])
    (kv.path / "new").write_bytes(b"new")
    assert (kv.path / "new").stat().st_ino > max(int(str(one[0])) for one in before.values())


@pytest.mark.parametrize("how", DAMAGES)
def test_a_check_finds_it_and_a_repair_restores_all_names(kv: Mounted, how: str) -> None:
    nvme = nvme_of(kv)
    inhabit(kv, SEEDS[how] + 10)
    kv.idle()
    before = state(kv)
    kv.kill()
    damage(nvme / "catalog", how, SEEDS[how] + 10)
    files = backing_files(nvme)
    assert fsck(nvme) == (4, [("log", "found")])
    assert fsck(nvme) == (4, [("log", "found")]), "a look has changed nothing"
    assert fsck(nvme, "--repair", "--hashes") == (1, [("log", "repaired")])
    assert fsck(nvme) == (0, [])
    assert backing_files(nvme) == files
    kv.expect_log("did not end properly: its bytes are all there")
    kv.mount()
    assert state(kv) == before


def test_another_daemon_takes_over_with_a_damaged_log(kv: Mounted) -> None:
    """The daemon is stopped during the damage: the keeper replaces it within milliseconds."""
    nvme = nvme_of(kv)
    inhabit(kv, 7)
    kv.idle()
    before = state(kv)
    damage(nvme / "catalog", "cut", 7)  # under the daemon, which reads its log never again
    kv.expect_log("its log ends too early")
    kv.kill_daemon()
    kv.idle()
    assert state(kv) == before


def test_memory_only_has_a_journal_as_well(mount: Mount) -> None:
    kv = mount("ram=256M")
    inhabit(kv, 9)
    kv.idle()
    before = state(kv)
    ram = Path(kv.status()["tiers"]["ram"]["path"])
    kv.kill()
    damage(ram / "catalog", "deleted", 9)
    kv.expect_log("its log ends too early")
    kv.expect_log("did not end properly: its log was damaged")
    kv.mount()
    assert state(kv) == before


def test_copies_in_ram_stay_if_log_and_journal_are_gone(kv: Mounted) -> None:
    """kvfs no longer knows even which RAM tier belongs to this catalog."""
    nvme = nvme_of(kv)
    for number in range(20):
        (kv.path / str(number)).write_bytes(b"x" * 5000)
    kv.idle()
    kv.kill()
    damage(nvme / "catalog", "deleted", 0)
    shutil.rmtree(nvme / "catalog.journal")
    files = backing_files(nvme)
    kv.expect_log("its journal is gone")
    kv.allow_log("names may be missing|repaired: ")
    kv.mount()
    kv.idle()
    assert os.listdir(kv.path) == []
    assert backing_files(nvme) == files == 20
    assert "its journal is gone" in run("status", str(kv.path)).stdout.replace("\n", " ")
    assert fsck(kv.path)[0] == 4
    code, findings = fsck(kv.path, "--repair")
    assert code == 1
    assert ("log", "repaired") in findings
    assert backing_files(nvme) == 0
    assert fsck(kv.path) == (0, [])


@pytest.mark.parametrize("offline", [False, True], ids=["mounted", "offline"])
def test_a_session_that_log_and_journal_lost_keeps_its_files(kv: Mounted, *, offline: bool) -> None:
    """The session before ended properly, and had another RAM tier."""
    (kv.path / "first").write_bytes(b"first")
    kv.remount()
    nvme = nvme_of(kv)
    for number in range(20):
        (kv.path / str(number)).write_bytes(b"x" * 5000)
    kv.idle()
    kv.kill()
    damage(nvme / "catalog", "deleted", 0)
    shutil.rmtree(nvme / "catalog.journal")
    files = backing_files(nvme)
    kv.allow_log("names may be missing|repaired: |its journal is gone")
    if offline:
        assert ("log", "repaired") in fsck(nvme, "--repair")[1]
    kv.mount()
    kv.idle()
    assert [name for name in os.listdir(kv.path) if name != ".kvfs"] == ["first"]
    if not offline:
        assert backing_files(nvme) == files
        assert ("log", "repaired") in fsck(kv.path, "--repair")[1]
    ram = runtime.ram_root() / (nvme / "identity").read_text().strip()
    aside = [one for tier in (nvme, ram) for one in (tier / "quarantine").iterdir()]
    assert len(aside) + backing_files(nvme) == files
    assert (kv.path / "first").read_bytes() == b"first"


def test_ends_that_log_and_journal_lack_are_said_and_nothing_is_swept(kv: Mounted) -> None:
    nvme = nvme_of(kv)
    for number in range(COUNT):
        (kv.path / str(number)).write_bytes(b"x" * 100)
    kv.idle()
    kv.kill()
    log = max((nvme / "catalog").glob("*.log"), key=lambda one: one.stat().st_size)
    for one in (log, *(nvme / "catalog.journal").iterdir()):
        os.truncate(one, one.stat().st_size * 2 // 3)
    files = backing_files(nvme)
    assert ("log", "found") in fsck(nvme)[1]
    kv.expect_log("names may be missing")
    kv.allow_log("ends too early|; repaired: ")
    kv.mount()
    kv.idle()
    assert len(os.listdir(kv.path)) < COUNT
    assert backing_files(nvme) >= files - 1, "the last name that is left may be of an open file"
    assert "its bytes are all there" not in kv.log.read_text()
    assert ("log", "repaired") in fsck(kv.path, "--repair")[1]
    assert fsck(kv.path) == (0, [])


@pytest.mark.parametrize("part", [0.01, 0.3, 0.6], ids=["begin", "third", "middle"])
def test_a_damaged_table_is_refused_and_nothing_is_deleted(kv: Mounted, part: float) -> None:
    nvme = nvme_of(kv)
    inhabit(kv, 11)
    kv.umount()
    table = max((nvme / "catalog").glob("*.sst"), key=lambda one: one.stat().st_size)
    flip(table, part)
    files = backing_files(nvme)
    done = run("mount", str(kv.path), "-o", f"{kv.options},log={kv.log}")
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1
    assert str(table) in done.stderr
    assert "Corruption" in done.stderr
    assert "restore it, or remove the whole NVMe directory" in done.stderr
    assert runtime.mount_at(kv.path) is None
    checked = run("fsck", str(nvme))
    assert checked.returncode == 8
    assert checked.stderr.count("\n") == 1
    assert "Traceback" not in kv.log.read_text() + done.stderr + checked.stderr
    assert backing_files(nvme) == files > 0


@pytest.mark.parametrize("name", ["MANIFEST-*", "CURRENT"])
@pytest.mark.parametrize("how", ["flipped", "emptied", "deleted"])
def test_damaged_first_files_of_rocksdb_refuse_the_mount(kv: Mounted, name: str, how: str) -> None:
    nvme = nvme_of(kv)
    inhabit(kv, 12)
    kv.umount()
    (path,) = (nvme / "catalog").glob(name)
    if how == "flipped":
        flip(path, 0.3)
    elif how == "emptied":
        os.truncate(path, 0)
    else:
        path.unlink()
    files = backing_files(nvme)
    done = run("mount", str(kv.path), "-o", f"{kv.options},log={kv.log}")
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1
    assert str(nvme / "catalog") in done.stderr
    assert "restore it, or remove the whole NVMe directory" in done.stderr
    checked = run("fsck", str(nvme))
    assert checked.returncode == 8
    assert checked.stderr.count("\n") == 1
    assert "Traceback" not in kv.log.read_text() + done.stderr + checked.stderr
    assert backing_files(nvme) == files > 0


def test_a_table_that_is_damaged_beside_a_mount_ends_no_daemon(kv: Mounted) -> None:
    nvme = nvme_of(kv)
    inhabit(kv, 13)
    kv.remount()
    kv.idle()
    pid, files = kv.pid, backing_files(nvme)
    for table in (nvme / "catalog").glob("*.sst"):
        for part in range(5, 70, 5):
            flip(table, part / 100)
    kv.allow_log("Corruption: block checksum mismatch")
    failed = 0
    for number in range(COUNT):
        try:
            (kv.path / "second" / f"{number}.kv").read_bytes()
        except OSError:  # EIO for what cannot be read; else the names that were unlinked
            failed += 1
    print(f"{failed} of {COUNT} cannot be read")
    wait_for(lambda: kv.pid == pid, "the same daemon serves")
    assert "Traceback" not in kv.log.read_text()
    assert backing_files(nvme) == files
    kv.umount("--now")
