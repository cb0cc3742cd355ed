"""NVMe directories and a session file of the version before, from tests/data."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvfs import runtime
from kvfs.errors import ConfigError
from kvfs.fuse import session
from tests.conftest import Mount
from tests.data import make
from tests.harness import KVFS, Mounted
from tests.semantics.test_prefixes import ask

MOVED = "did not end properly: copies are verified before use"


def fsck(target: Path) -> None:
    command = [*KVFS, "fsck", "--hashes", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["findings"]) == (0, []), done.stderr


def expected(folder: Path, name: str) -> dict[str, Any]:
    """Return the state that the version before showed."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.fixture
def before(tmp_path: Path) -> Path:
    make.unpack("nvme.tar.gz", tmp_path)
    return tmp_path


def settings_known(kv: Mounted, shown: dict[str, Any]) -> dict[str, Any]:
    """The settings of each namespace, without those that the version before did not have."""
    now = make.settings(kv.path)
    assert now.keys() == shown.keys()
    return {
        space: {name: value for name, value in found.items() if name in shown[space]}
        for space, found in now.items()
    }


def same(kv: Mounted, shown: dict[str, Any]) -> None:
    assert make.state(kv.path) == shown["files"]
    assert settings_known(kv, shown["settings"]) == shown["settings"]
    assert ask(kv.path / "prefixes", KEYS, ROOT).blocks == len(KEYS)


ROOT, *KEYS = map(bytes.fromhex, [make.ROOT, *make.KEYS])


def test_a_directory_that_was_unmounted(before: Path, mount: Mount) -> None:
    shown = expected(before, "closed")
    fsck(before / "closed")
    kv = mount("ram=64M,nvme={tmp}/closed,nvme_size=1G")
    assert kv.status()["catalog"]["doubt"] == ""
    same(kv, shown)
    assert kv.status()["tiers"]["nvme"]["decompressed"] == 3
    kv.idle()
    fsck(kv.path)
    (kv.path / "plain/new").write_bytes(b"new")
    inodes = [one["ino"] for one in shown["files"].values()]
    assert (kv.path / "plain/new").stat().st_ino > max(inodes)
    (kv.path / "plain/new").unlink()
    shown["files"]["plain"] = make.state(kv.path)["plain"]  # its times
    kv.remount()
    same(kv, shown)
    fsck(kv.path)


def test_directory_of_a_killed_daemon_of_the_version_before_mounts(
    before: Path, mount: Mount
) -> None:
    """Objects that only RAM had are misses, and so is a file without its end."""
    shown = expected(before, "killed")
    fsck(before / "killed")
    for gone in ("in memory", "torn"):
        del shown["files"][f"new/{gone}"]
    kv = mount("ram=64M,nvme={tmp}/killed,nvme_size=1G")
    kv.expect_log(MOVED)
    assert kv.status()["catalog"]["doubt"] == ""
    kv.idle()
    shown["files"]["new"] |= times(kv.path / "new")
    same(kv, shown)
    fsck(kv.path)
    kv.remount()
    same(kv, shown)


def times(path: Path) -> dict[str, int]:
    """Return the times that change when a name goes."""
    return {field: getattr(path.stat(), f"st_{field}") for field in ("mtime_ns", "ctime_ns")}


def test_the_slots_of_a_session_file(before: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = before / "session"
    label = path.read_bytes()[:8192].rstrip(b"\0")
    _, _, boot, mountpoint = label.decode().split("\n")[:4]
    monkeypatch.setattr(runtime, "boot_id", lambda: boot)
    os.close(session.open_file(path, Path(mountpoint)))
    command = [sys.executable, "-c", make.SLOTS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    slots = json.loads(done.stdout)
    assert slots == json.loads((before / "session.json").read_text())
    files = expected(before, "killed")["files"]
    opened = {one["inode"]: one["writable"] for one in slots}
    assert opened == {files["new/torn"]["ino"]: True, files["plain/moved"]["ino"]: False}
    with path.open("r+b") as file:
        file.write(label.replace(b"session\n1\n", b"session\n2\n"))
    with pytest.raises(ConfigError, match=r"does not fit: it says .*session.n2"):
        session.open_file(path, Path(mountpoint))
