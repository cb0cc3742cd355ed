"""`kvfs stat` on a real mount: its output is true."""

import json
import subprocess
from pathlib import Path
from typing import Any

import xxhash

from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for

MIB = 1 << 20


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def stat(path: Path) -> dict[str, Any]:
    done = run("stat", path, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_file_while_it_is_written_and_afterwards(kv: Mounted) -> None:
    space = kv.path / "n"
    assert run("ns", "create", space, "eviction=lru").returncode == 0
    path, data = space / "a [b]", b"k" * (2 * MIB)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        found = stat(path)
        assert (found["path"], found["kind"], found["state"]) == ("n/a [b]", "file", "staging")
        assert found["size"] == len(data)
        assert found["open"]["writers"] == 1
        assert found["holds"] == ["it is being written"]
        assert found["next"] == "nothing: it is being written"
    kv.idle()
    (space / "later").write_bytes(b"l")
    wait_for(lambda: stat(path)["digest"], "it is hashed")
    found = stat(path)
    assert found["digest"] == xxhash.xxh3_128_hexdigest(data)
    assert (found["state"], found["open"], found["kept"]) == ("sealed", None, [])
    assert found["ino"] == path.stat().st_ino
    assert found["namespace"]["name"] == "n"
    assert set(found["tiers"]) <= {"ram", "nvme"}
    assert all(tier["bytes"] >= len(data) for tier in found["tiers"].values())
    order = found["heat"]["orders"][0]
    assert (order["policy"], order["goes"], order["place"]) == ("lru", True, 0)
    assert "place 0" in found["next"]
    with path.open("rb") as file:
        assert file.read() == data
        assert stat(path)["open"]["readers"] == 1
    assert stat(path)["heat"]["opens"] == 1
    assert request(kv.path, "stat", path="n/a [b]")["ino"] == found["ino"]
    shown = run("stat", path)
    assert "n/a [b]" in shown.stdout
    assert "eviction=lru" in shown.stdout


def test_stat_of_pinned_blocks_and_of_directories(kv: Mounted) -> None:
    space = kv.path / "v"
    assert run("ns", "create", space, "--for", "vllm-fs", "eviction=lru").returncode == 0
    name = "m_0123456789ab_r{rank}/000/00_g0/0000000000001eef.bin"
    for rank in (0, 1):
        path = space / name.format(rank=rank)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"b" * 5000)
    kv.idle()
    found = stat(space / name.format(rank=0))
    assert found["group"]["engine"] == "vllm"
    assert found["group"]["files"] == [f"v/{name.format(rank=rank)}" for rank in (0, 1)]
    assert run("ns", "set", space, "pin=on").returncode == 0
    found = stat(space / name.format(rank=0))
    assert found["kept"] == ["namespace v has pin=on"]
    assert found["next"] == "only an unlink: namespace v has pin=on"
    found = stat(space)
    assert (found["kind"], found["namespace"]["objects"]) == ("directory", 2)
    assert "tiers" not in found
    assert stat(kv.path)["path"] == ""
    (space / "link").symlink_to("nowhere")
    assert stat(space / "link")["kind"] == "symlink"


def test_stat_of_missing_foreign_and_control_files_is_refused(kv: Mounted, tmp_path: Path) -> None:
    own = "the name is kvfs's own, for its control files"
    for path, why in (
        (kv.path / "none", "No such file"),
        (tmp_path, "is on no mount of kvfs"),
        (kv.path / ".kvfs", own),
        (kv.path / ".kvfs" / "stats", own),
    ):
        done = run("stat", path)
        assert (done.returncode, done.stdout) == (2, "")
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_ram_only_in_which_a_life_ends(mount: Mount) -> None:
    kv = mount("ram=64M")
    space = kv.path / "n"
    assert run("ns", "create", space, "eviction=never", "ttl=1h").returncode == 0
    (space / "a").write_bytes(b"a")
    kv.idle()
    found = stat(space / "a")
    assert found["kept"] == ["namespace n has eviction=never"]
    assert found["next"].startswith("its ttl, in ")
    assert set(found["tiers"]) == {"ram"}
    assert found["dirty"] == {"s3": "no", "since": None, "due": None, "nvme": False}
