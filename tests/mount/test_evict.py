"""`kvfs evict` and `kvfs du` on a real mount: evicted and remaining copies, and their counts."""

import json
import mmap
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for

MIB = 1 << 20


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def tier(path: Path) -> str:
    return os.getxattr(path, "user.kvfs.tier").decode()


def filled(kv: Mounted, name: str, files: int = 8) -> dict[Path, bytes]:
    """A namespace with files in RAM, some of them in a directory below."""
    space = kv.path / name
    (space / "deep").mkdir(parents=True)
    found = {space / (f"deep/{n}" if n % 2 else f"{n}"): b"%d" % n * 99_999 for n in range(files)}
    os.setxattr(space, "user.kvfs.eviction", b"lru")
    for learned in (space / "learn", space / "deep/learn"):
        learned.write_bytes(b"l" * 99_999)  # of what size files are here is known from now on
    kv.idle()
    for learned in (space / "learn", space / "deep/learn"):
        learned.unlink()
    for path, data in found.items():
        path.write_bytes(data)
    kv.idle()
    assert {tier(path) for path in found} == {"ram"}
    return found


def test_memory_is_left_for_nvme(kv: Mounted) -> None:
    files = filled(kv, "n")
    held, free = next(iter(files)), list(files)[1:]
    with held.open("rb"):
        done = run("evict", kv.path / "n", "--dry-run")
        assert "7 of 8 files would go to nvme" in done.stdout
        assert {tier(path) for path in files} == {"ram"}
        done = run("evict", kv.path / "n", "--json")
        assert done.returncode == 1
        assert done.stderr == "kvfs: 1 of 8 files stay: open (1)\n"
        found = json.loads(done.stdout)
        assert (found["evicted"], found["refused"], found["dropped"]) == (7, 1, 0)
        assert found["freed_bytes"] >= sum(len(files[path]) for path in free)
        for dry, told in (("--dry-run", "would go"), ("--to=nvme", "have gone")):
            done = run("evict", kv.path / "n", dry)
            gone = f"0 of 8 files {told} to nvme, 7 of 8 files are not in ram already;"
            assert gone in done.stdout
            assert done.stderr == "kvfs: 1 of 8 files stay: open (1)\n"
    assert {tier(path) for path in free} == {"nvme"}
    kv.check_gauges()
    kv.check_accounts()
    done = run("evict", held, *free)
    assert (done.returncode, done.stderr) == (0, "")
    assert {tier(path) for path in files} == {"nvme"}
    assert kv.idle()["tiers"]["ram"]["objects"] == 0
    assert {path: path.read_bytes() for path in files} == files
    kv.remount()
    assert {path: path.read_bytes() for path in files} == files


def test_refused_evictions_lose_no_object(mount: Mount) -> None:
    kv = mount("ram=64M")
    files = filled(kv, "n", 2)
    one, other = files
    for arguments, why in (
        ((one,), "has neither nvme= nor s3=; --drop loses what only is here"),
        ((one, "--to", "nvme"), "expected a mount with"),
        ((one, "--to", "s3"), "has no bucket"),
        ((one, "--to", "nvme", "--drop"), "loses nothing"),
        ((kv.path / "none", "--drop"), "No such file"),
    ):
        done = run("evict", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert one.read_bytes() == files[one]
    with one.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        file.close()
        done = run("evict", one, "--drop")
        assert (done.returncode, "1 of 1 files stay: open" in done.stderr) == (1, True)
        assert mapped[:] == files[one]
    kv.check_gauges()
    assert run("ns", "set", kv.path / "n", "pin=on").returncode == 0
    assert "pinned: namespace n has pin=on" in run("evict", one, "--drop").stderr
    assert run("ns", "set", kv.path / "n", "pin=off").returncode == 0
    assert (
        "1 of 1 files would be dropped; 100.0 KiB would be free in local tiers"
        in run("evict", one, "--drop", "--dry-run").stdout
    )
    assert one.exists()
    done = run("evict", one, "--drop")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1 of 1 files are dropped; 100.0 KiB are free in local tiers\n"
    assert not one.exists()
    assert other.read_bytes() == files[other]
    counters = kv.status()["counters"]
    assert (counters["dropped_asked"], counters.get("dropped_evicted", 0)) == (1, 0)
    said = "kvfs evict --drop dropped 1 objects of 97.7 KiB: 1 of namespace n"
    assert len([line for line in kv.log.read_text().splitlines() if line.endswith(said)]) == 1


def test_a_full_nvme_tier_loses_nothing(mount: Mount) -> None:
    """Files whose copy does not fit there stay in RAM, and no other file makes room for them."""
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=56M")
    kv.allow_log("nothing is demoted: the NVMe tier has no room")
    space = kv.path / "n"
    space.mkdir()
    (space / "learn").write_bytes(b"l" * MIB)
    for number in range(140):
        (space / f"{number}").write_bytes(b"%d" % number * MIB)
    kv.idle()
    files = set(space.iterdir())
    planned = json.loads(run("evict", space, "--dry-run", "--json").stdout)
    done = run("evict", space, "--json")
    found = json.loads(done.stdout)
    assert set(space.iterdir()) == files
    assert done.returncode == 1
    assert "nvme has no room for it" in found["why"]
    assert kv.counter("dropped_evicted") == 141 - len(files)
    assert (planned["evicted"], planned["why"]) == (found["evicted"], found["why"])


def test_file_unlinked_during_its_eviction_stays_removed(kv: Mounted) -> None:
    """The files are unlinked while copies to NVMe are under way."""
    files = filled(kv, "n", 64)
    job = request(kv.path, "evict", inos=[(kv.path / "n").stat().st_ino])["job"]
    for path in files:
        path.unlink()
    wait_for(lambda: request(kv.path, "swept", job=job)["over"], "all were visited")
    found = request(kv.path, "swept", job=job)
    assert (found["refused"], found["why"], found["problem"]) == (0, {}, "")
    assert found["evicted"] + found["already"] == found["files"]


def du(*arguments: object) -> dict[str, Any]:
    done = run("du", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_du_counts_bytes_by_namespace_and_model(kv: Mounted) -> None:
    files = filled(kv, "n")
    names = [f"m_0123456789ab_r0/000/00_g0/{n:016x}.bin" for n in range(3)]
    for name in names:
        (kv.path / "v" / name).parent.mkdir(parents=True, exist_ok=True)
        (kv.path / "v" / name).write_bytes(b"v" * 5000)
    os.link(next(iter(files)), kv.path / "n" / "again")
    assert run("evict", kv.path / "n" / "deep").returncode == 0
    kv.idle()
    found = du(kv.path / "n")
    status = kv.status()
    assert (found["walked"], found["objects"]) == (True, 8)
    assert found["size"] == sum(map(len, files.values()))
    assert {name: one["objects"] for name, one in found["by"]["tier"].items()} == {
        "ram": 4,
        "nvme": 4,
    }
    assert found["by"]["namespace"] == {"n": {"bytes": found["bytes"], "objects": 8}}
    assert found["memory_only"]["objects"] == 4
    whole, walked = du(kv.path), du(kv.path, "--walk")
    assert (whole["walked"], walked["walked"]) == (False, True)
    assert whole["objects"] == walked["objects"] == status["objects"] == 11
    for by in ("tier", "namespace", "model"):
        assert whole["by"][by] == walked["by"][by]
    assert [one["objects"] for one in whole["by"]["model"].values()] == [3]
    shown = run("du", kv.path / "n", "--by", "namespace").stdout
    assert "model" not in shown
    assert "8" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [("du", "{tmp}"), ("du", "{kv}/none"), ("du", "{kv}", "--by", "x")]
)
def test_du_of_other_paths_is_refused(
    kv: Mounted, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = run(*(word.format(tmp=tmp_path, kv=kv.path) for word in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_du_counts_compressed_copies(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    space = kv.path / "n"
    assert run("ns", "create", space, "compression=nvme").returncode == 0
    path, data = space / "a", b"1" * (2 * MIB)
    (space / "a").write_bytes(data)
    path.unlink()
    path.write_bytes(data)
    kv.idle()
    assert run("evict", path).returncode == 0
    wait_for(lambda: tier(path) == "nvme", "it is there only")
    found = du(space)
    assert found["packed"]["objects"] == 1
    assert found["packed"]["size"] == len(data) > 10 * found["packed"]["bytes"]
    assert path.read_bytes() == data
