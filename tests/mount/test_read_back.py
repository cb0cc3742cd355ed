"""Damaged small files that a mount reads back: one line reports it, and nothing else happens."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from kvfs import runtime
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.unit.test_own_files import DAMAGES

NVME = "ram=64M,nvme={tmp}/nvme,nvme_size=256M"


def mounted() -> list[str]:
    """Mount points outside the tests' directories."""
    theirs = ("/tmp/", "/run/kvfs-ram/")
    return [one.path for one in runtime.mounts() if not one.path.startswith(theirs)]


def refusal(kv: Mounted) -> str:
    """The one line of a refused mount."""
    done = subprocess.run(
        [*KVFS, "mount", str(kv.path), "-o", f"{kv.options},log={kv.log}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.removesuffix("\n").isprintable()
    return done.stderr


def entries(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


def put(path: Path, damage: str) -> bytes:
    """Damage a file; return its former content."""
    whole = path.read_bytes()
    path.unlink()
    DAMAGES[damage](path)
    return whole


def restore(path: Path, whole: bytes) -> None:
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    path.write_bytes(whole)


def test_a_damaged_identity_mounts_nothing_over_nothing(mount: Mount, tmp_path: Path) -> None:
    """The identity names the mount's memory: an empty one named the directory of all memories."""
    kv = mount(NVME)
    (kv.path / "file").write_bytes(b"bytes")
    kv.umount()
    nvme, before = tmp_path / "nvme", mounted()
    for damage in DAMAGES:
        whole = put(nvme / "identity", damage)
        there = entries(nvme)
        said = refusal(kv)
        assert f"{nvme}/identity " in said
        assert "expected " in said
        assert "remove it" in said or "take it away" in said
        assert mounted() == before
        assert runtime.mount_at(kv.path) is None
        assert entries(nvme) == there
        restore(nvme / "identity", whole)
        (nvme / "identity.inode").unlink(missing_ok=True)  # the file is another one
    kv.mount()
    assert (kv.path / "file").read_bytes() == b"bytes"


def test_a_takeover_goes_on_without_damaged_options(mount: Mount) -> None:
    """The keeper's copy of the options is right, whatever happened to the file."""
    kv = mount(NVME)
    (kv.path / "file").write_bytes(b"bytes")
    request(kv.path, "set", promote_after="7")
    path = runtime.runtime_dir(kv.path) / "config"
    kv.expect_log("options that were set since the mount are lost: ")
    kv.allow_log(r"takeover failed \(. of 8\): .* is no configuration")
    for damage in ("empty", "binary", "link", "pipe", "no options", "wrong options"):
        whole = put(path, damage if damage in DAMAGES else "empty")
        if damage == "no options":
            path.write_text("[]")
        elif damage == "wrong options":
            path.write_text(json.dumps({"mountpoint": str(kv.path), "ram": "x"}))
        kv.kill_daemon()
        assert kv.status()["options"]["promote_after"] == "2"
        assert (kv.path / "file").read_bytes() == b"bytes"
        restore(path, whole)


def test_an_upgrade_with_damaged_options_is_refused(kv: Mounted) -> None:
    path = runtime.runtime_dir(kv.path) / "config"
    for damage in DAMAGES:
        whole = put(path, damage)
        done = subprocess.run(
            [*KVFS, "upgrade", str(kv.path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert kv.status()["takeovers"] == 0
        restore(path, whole)


def test_a_takeover_forgets_questions_with_damaged_records(mount: Mount) -> None:
    """A record of a daemon that dies during the write is empty; its client opens again."""
    kv = mount(NVME)
    space = kv.path / "space"
    space.mkdir()
    os.setxattr(space, "user.kvfs.prefix", b"on")
    open_ = [os.open(space / ".match", os.O_RDWR) for _ in range(3)]
    records = sorted((runtime.runtime_dir(kv.path) / "match").iterdir())
    assert len(records) == len(open_)
    records[0].write_text("")
    records[1].write_text("7 x y")
    kv.expect_log("a descriptor of .match is lost, ")
    kv.kill_daemon()
    assert kv.status()["takeovers"] == 1
    for fd in open_:
        os.close(fd)
    wait_for(
        lambda: not list((runtime.runtime_dir(kv.path) / "match").iterdir()),
        "their records go with them",
    )


def test_a_directory_in_the_place_of_a_runtime_file_is_refused(mount: Mount) -> None:
    """The mount makes all of its runtime files again."""
    kv = mount(NVME)
    directory = runtime.runtime_dir(kv.path)
    names = [path.name for path in directory.iterdir() if not path.is_dir()]
    assert {"config", "control.sock", "keeper.sock", "lock", "nvme", "session"} <= set(names)
    kv.umount()
    for name in names:
        runtime.make_private(directory)
        (directory / name).mkdir()
        assert f"{directory}/{name} is drwx" in refusal(kv)
        assert runtime.mount_at(kv.path) is None
        if directory.exists():
            restore(directory / name, b"")
    kv.mount()


@pytest.mark.parametrize("name", ["control", "match"])
def test_a_folder_of_the_runtime_directory_that_leads_elsewhere_is_not_emptied(
    mount: Mount, tmp_path: Path, name: str
) -> None:
    kv = mount(NVME)
    kv.umount()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    directory = runtime.make_private(runtime.runtime_dir(kv.path))
    (directory / name).symlink_to(precious)
    assert f"{directory}/{name} is lrwx" in refusal(kv)
    assert (precious / "file").read_text() == "precious"
    assert runtime.mount_at(kv.path) is None
    kv.mount()
