"""The next mount after one that other programs unmounted: it waits, or names the users."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Mount
from tests.harness import KVFS, alive, descendants, wait_for

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


def test_no_process_of_kvfs_is_named_as_a_user(mount: Mount) -> None:
    detached, other = mount(OPTIONS), mount("ram=64M", "other")
    detached.allow_log("objects were still open")  # the kernel ends before it sends the RELEASE
    ours = {kv.keeper for kv in (detached, other)} | {kv.pid for kv in (detached, other)}
    ours |= {pid for kv in (detached, other) for pid in descendants(kv.keeper)}
    (detached.path / "block").write_bytes(b"content")
    with (detached.path / "block").open("rb"):
        subprocess.run([*KVFS, "umount", "--lazy", detached.path], check=True)
        done = mount_again(detached.path, detached.options)
        assert done.returncode == 2
        assert f"({os.getpid()})" in done.stderr
        named = {int(pid) for pid in re.findall(r"\((?:process )?(\d+)\)", done.stderr)}
        assert named & ours == {detached.keeper}, "only as the process that serves it"
        assert f"its kvfs (process {detached.keeper})" in done.stderr
    wait_for(lambda: not alive(detached.keeper), "the keeper ends")
    assert mount_again(detached.path, detached.options).returncode == 0
