"""`kvfs pin` on a real mount: a pinned object survives everything that makes room."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.harness import KVFS, Mounted


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def pinned(path: Path) -> str:
    return os.getxattr(path, "user.kvfs.pin").decode()


def crowd(space: Path, kv: Mounted, marked: str) -> None:
    """Write three times as many files as the quota allows."""
    for number in range(12):
        (space / f"{marked}{number}").write_bytes(b"c" * 5000)
        kv.idle()


def test_pinned_files_stay(kv: Mounted) -> None:
    space = kv.path / "n"
    (space / "tree").mkdir(parents=True)
    files = [space / "a", space / "tree" / "b", space / "tree" / "c"]
    for path in files:
        path.write_bytes(path.name.encode() * 5000)
    kv.idle()
    done = run("pin", space / "a", space / "tree")
    assert (done.returncode, done.stdout) == (0, "3 of 3 files are newly pinned\n")
    assert run("pin", space / "tree").stdout == "0 of 2 files are newly pinned\n"
    assert [pinned(path) for path in files] == ["on"] * 3
    assert os.listxattr(files[0]) == ["user.kvfs.pin"]
    found = json.loads(run("stat", files[0], "--json").stdout)
    assert found["kept"] == ["it was pinned (kvfs pin)"]
    assert found["next"] == "only an unlink: it was pinned (kvfs pin)"
    files[1] = files[1].rename(space / "renamed")
    assert run("ns", "set", space, "quota_objects=6", "eviction=lru").returncode == 0
    crowd(space, kv, "x")
    assert [path.read_bytes() for path in files] == [b"a" * 5000, b"b" * 5000, b"c" * 5000]
    assert len(list(space.glob("x*"))) <= 3
    assert run("evict", space, "--drop").returncode == 1
    assert all(path.exists() for path in files)
    kv.kill_daemon()
    kv.remount()
    assert [pinned(path) for path in files] == ["on"] * 3
    crowd(space, kv, "y")
    assert all(path.exists() for path in files)
    assert run("fsck", kv.path).returncode == 0
    done = run("pin", "--off", files[0], files[1])
    assert done.stdout == "2 of 2 files are newly unpinned\n"
    assert os.listxattr(files[0]) == []
    crowd(space, kv, "z")
    assert [path.exists() for path in files] == [False, False, True]
    os.setxattr(files[2], "user.kvfs.pin", b"off")
    kv.expect_log("attribute user.kvfs.pin is refused")
    with pytest.raises(OSError, match="Invalid argument"):
        os.setxattr(files[2], "user.kvfs.pin", b"maybe")
    crowd(space, kv, "w")
    assert not files[2].exists()


def test_a_pinned_file_outlives_the_rest_of_its_block(kv: Mounted) -> None:
    space = kv.path / "n"
    names = [f"meta-SEP-llama@2@{rank}@5eed@bfloat16.data" for rank in range(2)]
    space.mkdir()
    for name in names:
        (space / name).write_bytes(b"r" * 5000)
    kv.idle()
    assert run("pin", space / names[0]).returncode == 0
    assert run("evict", space / names[1], "--drop").returncode == 0
    assert [(space / name).exists() for name in names] == [True, False]
    with (space / names[0]).open("r+b") as file:  # written again it is the same file
        file.write(b"s" * 5000)
        assert pinned(space / names[0]) == "on"
    kv.idle()
    assert pinned(space / names[0]) == "on"
    (space / "other").write_bytes(b"o")
    (space / "other").rename(space / names[0])
    assert pinned(space / names[0]) == "off"


def test_namespaces_are_pinned_as_a_whole(kv: Mounted, tmp_path: Path) -> None:
    space = kv.path / "n"
    space.mkdir()
    assert run("pin", space).stdout == "namespace n: pin=on\n"
    assert os.getxattr(space, "user.kvfs.pin") == b"on"
    (space / "later").write_bytes(b"l")
    assert pinned(space / "later") == "on"
    assert run("pin", "--off", space).stdout == "namespace n: pin=off\n"
    assert pinned(space / "later") == "off"
    assert run("pin", kv.path).stdout == "namespace .: pin=on\n"
    for path, why in ((tmp_path, "is on no mount"), (space / "none", "No such file")):
        done = run("pin", space, path)
        assert (done.returncode, done.stdout) == (2, "")
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert os.getxattr(space, "user.kvfs.pin") == b"off"


def test_names_move_nothing_of_the_terminal(kv: Mounted, tmp_path: Path) -> None:
    space = kv.path / "a\x1b[2Jb"
    space.mkdir()
    for off, word in ((), "on"), (("--off",), "off"):
        assert run("pin", *off, space).stdout == f"namespace a\\x1b[2Jb: pin={word}\n"
    place = tmp_path / "m\x1b[2Jn"
    place.mkdir()
    done = run("mount", place, "-o", f"ram=32M,log={tmp_path}/n.log")
    try:
        assert (done.returncode, "m\\x1b[2Jn: passthrough" in done.stdout) == (0, True)
    finally:
        assert run("umount", place).returncode == 0
