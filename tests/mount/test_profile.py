"""`kvfs profile`: an access log of a real mount, and the results read from it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for

MIB = 1 << 20
PREFIX, BLOCK = "0" * 32, "1" * 32  # names that a connector gives, the same in each namespace


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line]


def closed(kv: Mounted) -> None:
    """Wait for the close: a read is noted if no program has the file open, some time later."""
    wait_for(lambda: kv.status()["open_handles"] == 0, "nobody has a file open")


def test_access_log_has_each_access(mount: Mount, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    space = kv.path / "n"
    space.mkdir()
    os.setxattr(space, "user.kvfs.eviction", b"lru")
    (space / "before").write_bytes(b"b")
    assert run("set", kv.path, f"access_log={log}").returncode == 0
    assert log.stat().st_mode & 0o777 == 0o600
    for number in range(4):
        (space / f"f{number}").write_bytes(b"x" * 5000)
    closed(kv)
    for number in (0, 1, 2, 3, 0):
        (space / f"f{number}").read_bytes()
        closed(kv)
    assert not (space / "none").exists()
    wait_for(lambda: len(lines(log)) >= 10, "all of it is written")
    found = lines(log)
    assert [one["path"] for one in found if one["op"] == "read"] == [
        f"n/f{number}" for number in (0, 1, 2, 3, 0)
    ]
    assert {one["tier"] for one in found if one["op"] == "read"} <= {"ram", "nvme"}
    assert [one["path"] for one in found if one["op"] == "absent"][-1] == "n/none"
    profile = json.loads(run("profile", log, "--json").stdout)
    assert (profile["reads"], profile["writes"], profile["misses"]) == (5, 4, 1)
    assert profile["namespaces"]["n"]["hit_ratio"] == 0.8333
    assert profile["objects"] == 4
    shown = run("profile", log)
    assert (shown.returncode, "hit ratio 83.3%" in shown.stdout) == (0, True)
    kv.kill_daemon()
    (space / "f0").read_bytes()
    wait_for(lambda: lines(log)[-1]["path"] == "n/f0" and len(lines(log)) > len(found), "goes on")
    assert run("set", kv.path, "access_log=none").returncode == 0
    size = log.stat().st_size
    (space / "f1").read_bytes()
    kv.umount()
    assert log.stat().st_size == size


def test_access_log_has_what_kvfs_drops(mount: Mount, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    kv = mount(f"ram=16M,access_log={log}")
    for number in range(30):
        (kv.path / str(number)).write_bytes(b"x" * MIB)
        closed(kv)  # two closes in quick succession may be handled in the other order
    assert run("ns", "create", kv.path / "n").returncode == 0
    (kv.path / "n" / "a").write_bytes(b"x" * MIB)
    assert run("evict", "--drop", kv.path / "n").returncode == 0
    kv.idle()
    dropped = kv.counter("dropped")
    assert run("set", kv.path, "access_log=none").returncode == 0
    found = [one for one in lines(log) if one["op"] == "drop"]
    assert len(found) == dropped >= 16
    assert [one["path"] for one in found[:2]] == ["./0", "./1"]
    assert {one["why"] for one in found if one["path"].startswith("./")} == {"evicted"}
    assert [one["why"] for one in found if one["path"] == "n/a"] == ["asked"]
    assert not any((kv.path / one["path"]).exists() for one in found)
    profile = json.loads(run("profile", log, "--json").stdout)
    spaces = profile["namespaces"]
    assert (spaces["."]["dropped"], spaces["n"]["dropped"]) == (dropped - 1, 1)
    assert (profile["reads"], profile["writes"]) == (0, 31)


def test_profile_follows_renames_and_keeps_namespaces_apart(mount: Mount, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    spaces = [kv.path / name for name in ("a", "b")]
    for space in spaces:
        space.mkdir()
        os.setxattr(space, "user.kvfs.eviction", b"lru")
        (space / PREFIX).mkdir()
    assert run("set", kv.path, f"access_log={log}").returncode == 0
    finals = [
        *(space / name for space in spaces for name in ("k1", "k2", f"{PREFIX}/{BLOCK}")),
        *(spaces[0] / "linked", spaces[1] / "moved"),
    ]
    for turn in range(3):
        for final in finals:
            above = spaces[0] if final.name == "moved" else final.parent
            temporary = above / f"{final.name}.{turn}.tmp"
            temporary.write_bytes(b"x" * 5000)
            if final.name == "linked":
                final.unlink(missing_ok=True)
                final.hardlink_to(temporary)
                temporary.unlink()
            else:
                temporary.rename(final)
    closed(kv)
    for final in finals:
        final.read_bytes()
        closed(kv)
    assert run("set", kv.path, "access_log=none").returncode == 0
    profile = json.loads(run("profile", log, "--json").stdout)
    assert (profile["reads"], profile["writes"]) == (len(finals), 3 * len(finals))
    assert (profile["objects"], profile["object_bytes"]) == (len(finals), 5000 * len(finals))
    assert profile["reused"] == 1.0
    assert profile["reuse_distance_bytes"]["max"] == 5000 * len(finals)
    moves = [one for one in lines(log) if one["op"] == "rename" and one["path"] == "b/moved"]
    assert [one["old_namespace"] for one in moves] == ["a"] * 3


def test_access_log_is_bounded_and_wrong_paths_are_refused(mount: Mount, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    kv = mount(f"ram=64M,access_log={log},access_log_size=4K")
    path = kv.path / "a"
    path.write_bytes(b"a")
    older = tmp_path / "access.log.1"

    def turned_over() -> bool:
        path.read_bytes()
        return older.exists()

    wait_for(turned_over, "it is turned over")
    assert lines(older)[-1]["op"] == "read"
    assert older.stat().st_size < 4096
    wait_for(log.exists, "the next one is begun")
    for text, why in (
        (f"access_log={kv.path}/x", "is inside the mount point"),
        (f"access_log={tmp_path}/none/x", "cannot be written: No such file"),
        ("access_log=x", "expected an absolute path"),
    ):
        done = run("set", kv.path, text)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert why in done.stderr
    wait_for(lambda: log.stat().st_size, "the next one has a line")
    assert run("set", kv.path, f"access_log={log}", "access_log_size=8K").returncode == 0
    assert kv.status()["options"]["access_log"] == str(log)
    for target, why in ((tmp_path / "none", "cannot be read"), (tmp_path / "kv.log", "no JSON")):
        done = run("profile", target)
        assert (done.returncode, done.stdout) == (2, "")
        assert why in done.stderr


def test_access_log_refuses_files_of_others(mount: Mount, tmp_path: Path) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    passwd, older = tmp_path / "passwd", tmp_path / "new.1"
    for foreign in (passwd, older):
        foreign.write_text("root:x:0:0\n")
    (tmp_path / "link").symlink_to("passwd")
    (tmp_path / "aside").symlink_to(kv.path)
    (tmp_path / "there").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (passwd, "passwd is no access log"),
        (tmp_path / "new", "new.1 is no access log"),
        (tmp_path / "link", "is no regular file"),
        (tmp_path / "pipe", "is no regular file"),
        (tmp_path / "there", "is no regular file"),
        (Path("/dev/null"), "is no regular file"),
        (tmp_path / "nvme" / "x", "which has a tier"),
        (tmp_path / "aside" / "x", "is inside the mount point"),
    ):
        done = run("set", kv.path, f"access_log={path}")
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert why in done.stderr
    assert "access_log" not in kv.status()["options"]
    assert {one.read_text() for one in (passwd, older)} == {"root:x:0:0\n"}
    assert not (tmp_path / "new").exists()
    done = run("mount", tmp_path / "there", "-o", f"ram=64M,access_log={passwd}")
    assert (done.returncode, "is no access log" in done.stderr) == (2, True)


def test_file_put_in_place_of_the_access_log_stays(mount: Mount, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    kv = mount(f"ram=64M,access_log={log},access_log_size=4K")
    path = kv.path / "a"
    path.write_bytes(b"a")
    log.rename(tmp_path / "away")
    log.write_text("mine\n")
    kv.expect_log("is not written .said once.: .* is no access log")

    def said() -> bool:
        path.read_bytes()
        return "is not written" in (tmp_path / "kv.log").read_text()

    wait_for(said, "it cannot be turned over")
    assert log.read_text() == "mine\n"
    assert not (tmp_path / "access.log.1").exists()
    log.unlink()

    def goes_on() -> bool:
        path.read_bytes()
        return log.exists() and bool(lines(log))

    wait_for(goes_on, "it goes on in a new file")
