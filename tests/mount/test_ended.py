"""The next mount after one that other programs unmounted: it waits, or names the users."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Mount
from tests.harness import KVFS, alive, apart, descendants, wait_for

OPTIONS = "ram=256M,nvme={tmp}/nvme,nvme_size=1G"
MIB = 1 << 20


def mount_again(path: Path, options: str) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, "mount", str(path), "-o", options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("program", [["fusermount3", "-u"], ["umount"]])
def test_next_mount_waits_for_a_keeper_that_ends(mount: Mount, program: list[str]) -> None:
    """Its daemon saves what only RAM has, while nothing is open."""
    kv = mount(OPTIONS)
    contents = {kv.path / f"block-{number}": os.urandom(16 * MIB) for number in range(12)}
    for path, content in contents.items():
        path.write_bytes(content)
    keeper = kv.keeper
    subprocess.run([*program, kv.path], check=True)
    done = mount_again(kv.path, kv.options)
    assert (done.returncode, done.stderr) == (0, "")
    assert not alive(keeper)
    for path, content in contents.items():
        assert path.read_bytes() == content


def test_no_other_process_is_named_as_a_user(mount: Mount, tmp_path: Path) -> None:
    detached, other = mount(OPTIONS), mount("ram=64M", "other")
    ours = {kv.keeper for kv in (detached, other)} | {kv.pid for kv in (detached, other)}
    ours |= {pid for kv in (detached, other) for pid in descendants(kv.keeper)}
    (detached.path / "block").write_bytes(b"content")
    # Its standard output is of a mount that its namespace lacks.
    script = f"umount --all --lazy --types fuse.kvfs; touch {tmp_path}/apart; read line"
    alone = ("unshare", "--mount", "sh", "-euc", script)
    with (
        (tmp_path / "output").open("wb") as output,
        subprocess.Popen(alone, stdin=subprocess.PIPE, stdout=output) as elsewhere,
        (detached.path / "block").open("rb"),
    ):
        wait_for((tmp_path / "apart").exists, "the other namespace has no kvfs")
        subprocess.run([*KVFS, "umount", "--lazy", detached.path], check=True)
        done = mount_again(detached.path, detached.options)
        assert done.returncode == 2
        assert f"({os.getpid()})" in done.stderr
        assert f"({elsewhere.pid})" not in done.stderr
        elsewhere.communicate(b"\n")
        named = {int(pid) for pid in re.findall(r"\((?:process )?(\d+)\)", done.stderr)}
        assert named & ours == {detached.keeper}, "only as the process that serves it"
        assert f"its kvfs (process {detached.keeper})" in done.stderr
    wait_for(lambda: not alive(detached.keeper), "the keeper ends")
    assert mount_again(detached.path, detached.options).returncode == 0


def test_a_mount_namespace_that_has_a_copy_is_named(mount: Mount, tmp_path: Path) -> None:
    """As a container that started while the file system was mounted."""
    kv, elsewhere = mount(OPTIONS), tmp_path / "elsewhere"
    keeper = kv.keeper
    elsewhere.mkdir()
    script = f"mount --move {kv.path} {elsewhere}; touch {tmp_path}/copied; read line"
    with subprocess.Popen(apart(script, kv.path), stdin=subprocess.PIPE) as copying:
        wait_for((tmp_path / "copied").exists, "the copy is there")
        done = subprocess.run(
            [*KVFS, "umount", "--now", kv.path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert re.fullmatch(
            f"kvfs: {kv.path} is unmounted, but its daemon has not ended in 5 s: it serves other "
            rf"mount namespaces, with (.*, )?sh \({copying.pid}\)(, .*)?: unmount it there\n",
            done.stderr,
        )
        copying.communicate(b"\n")
    wait_for(lambda: not alive(keeper), "the keeper ends")
    assert mount_again(kv.path, kv.options).returncode == 0


def test_the_next_mount_names_a_namespace_with_a_copy(mount: Mount, tmp_path: Path) -> None:
    kv = mount(OPTIONS)
    keeper = kv.keeper
    script = f"touch {tmp_path}/copied; read line"
    with subprocess.Popen(apart(script, kv.path), stdin=subprocess.PIPE) as copying:
        wait_for((tmp_path / "copied").exists, "the copy is there")
        subprocess.run(["umount", kv.path], check=True)
        done = mount_again(kv.path, kv.options)
        assert done.returncode == 2
        assert f"kvfs (process {keeper}) serves " in done.stderr
        # Programs of other tests may have files of other detached mounts open.
        assert re.search(rf"other mount namespaces.*, with .*sh \({copying.pid}\)", done.stderr)
        copying.communicate(b"\n")
    wait_for(lambda: not alive(keeper), "the keeper ends")
    assert mount_again(kv.path, kv.options).returncode == 0
