"""A mount that was detached while programs had files open: it is told, and nothing is lost."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from kvfs import mounts
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, alive, wait_for

OPTIONS = "ram=64M,nvme={tmp}/nvme,nvme_size=256M"
MIB = 1 << 20
MNT_FORCE = 1  # of umount(2): the kernel ends the connection, also of a mount in use


@pytest.fixture
def kv(mount: Mount) -> Mounted:
    return mount(OPTIONS)


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_files_that_a_detached_mount_closes_last_are_saved(mount: Mount, passthrough: str) -> None:
    """The kernel ends such a mount at the last close, and drops the requests it had not sent."""
    kv = mount(f"{OPTIONS},passthrough={passthrough}")
    (kv.path / "sealed").write_bytes(b"s" * MIB)
    for attempt in range(5):
        names = [f"{attempt}-{number}" for number in range(3)]
        files = [(kv.path / name).open("wb", buffering=0) for name in names]
        reader = (kv.path / "sealed").open("rb")
        for file in files:
            file.write(b"a" * MIB)
        subprocess.run([*KVFS, "umount", "--lazy", kv.path], check=True)
        for file in files:
            file.write(b"b" * MIB)
        for file in files:
            file.close()
        reader.close()
        wait_for(lambda: not alive(kv.keeper), "the keeper ends")
        kv.mount()
        for name in names:
            assert (kv.path / name).read_bytes() == b"a" * MIB + b"b" * MIB


def test_a_file_that_an_abort_cuts_off_is_lost_with_a_warning(kv: Mounted) -> None:
    kv.expect_log("1 files were still being written when the mount ended, and are lost.*'cut'")
    (kv.path / "sealed").write_bytes(b"s" * MIB)
    kv.idle()
    file = os.open(kv.path / "cut", os.O_CREAT | os.O_WRONLY)
    os.write(file, b"c" * MIB)
    # By this process: a child that closes its copy of the file would seal it.
    with pytest.raises(OSError, match="busy"):
        mounts.umount(kv.path, MNT_FORCE)
    wait_for(lambda: not alive(kv.keeper), "the keeper ends")
    with pytest.raises(OSError, match="connected"):
        os.close(file)
    subprocess.run(["umount", "-l", kv.path], check=True)
    kv.mount()
    assert os.listdir(kv.path) == ["sealed"]
    assert (kv.path / "sealed").read_bytes() == b"s" * MIB


def run(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_lazy_unmount_names_the_processes_that_still_use_the_mount(kv: Mounted) -> None:
    with (kv.path / "file").open("wb"):
        done = run("umount", "--lazy", kv.path)
    assert done.returncode == 0
    assert f"{kv.path} is detached, and still in use by " in done.stderr
    assert f"({os.getpid()})" in done.stderr
    assert "end these processes" in done.stderr
    wait_for(lambda: not alive(kv.keeper), "the keeper ends")


def test_each_detached_mount_names_its_own_processes(mount: Mount) -> None:
    """Also a process that has only its working directory there, and none of a dead mount."""
    made = {name: mount("ram=64M", name) for name in ("first", "second", "dead")}
    users = {}
    for name, kv in made.items():
        (kv.path / "folder").mkdir()
        users[name] = subprocess.Popen(["sleep", "600"], cwd=kv.path / "folder")
    try:
        made["dead"].kill()
        for name in ("first", "second"):
            assert f"({users[name].pid})" in run("umount", "--lazy", made[name].path).stderr
        for name in ("first", "second"):
            told = run("status", made[name].path).stderr
            found = re.findall(r"Its files are open in sleep \((\d+)\)$", told, re.MULTILINE)
            assert found == [str(users[name].pid)], told
    finally:
        for user in users.values():
            user.kill()
            user.wait()


def test_a_detached_mount_is_told_by_all_that_show_mounts(kv: Mounted, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    pid, keeper = kv.pid, kv.keeper
    assert kv.status()["state"] == "mounted"
    with (kv.path / "file").open("wb", buffering=0) as file:
        file.write(b"content")
        assert run("umount", "--lazy", kv.path).returncode == 0
        assert request(kv.path, "status")["state"] == "detached"
        [one] = [
            one
            for one in json.loads(run("mounts", "--json").stdout)
            if one["mountpoint"] == str(kv.path)
        ]
        assert (one["state"], one["daemon_pid"], one["problem"]) == ("detached", pid, "")
        listed = run("mounts").stdout
        again = f"nvme={tmp_path}/nvme,nvme_size=256M"
        refusals = [
            run("status", kv.path),
            run("top", "--once", kv.path),
            run("umount", kv.path),
            run("mount", kv.path, "-o", f"ram=64M,{again}"),
            run("mount", elsewhere, "-o", f"ram=64M,{again}"),
        ]
    assert re.search(rf"^ *{kv.path} +detached +{pid} ", listed, re.MULTILINE), listed
    for told in (listed, one["why"], *(done.stderr for done in refusals)):
        assert f"{kv.path} was detached, and its kvfs (process {keeper}) serves it until" in told
        assert "end the processes that use it" in told
        assert f"({os.getpid()})" in told
    assert [done.returncode for done in refusals] == [2] * len(refusals)
    assert f"nvme={tmp_path}/nvme is in use by a detached mount" in refusals[-1].stderr
    wait_for(lambda: not alive(keeper), "the keeper ends with the last close")
    assert str(kv.path) not in run("mounts").stdout
    assert f"{kv.path} is not a mount point" in run("status", kv.path).stderr
    kv.mount()
    assert (kv.path / "file").read_bytes() == b"content"
