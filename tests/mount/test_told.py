"""Commands tell the truth of mounts, users, namespaces and objects."""

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvfs.cli import main
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import Mounted
from tests.mount.test_habits import run

OPTIONS = "ram=64M,nvme={tmp}/nvme,nvme_size=192M"
NOBODY = 65534


@pytest.fixture
def kv(mount: Mount) -> Mounted:
    return mount(OPTIONS)


@pytest.mark.parametrize("words", [["status"], ["ns", "list"], ["set"], ["top", "--once"]])
def test_another_user_is_told_who_mounted(kv: Mounted, words: list[str]) -> None:
    values = ["log_level=info"] if words == ["set"] else []
    command = [*words, str(kv.path), *values]
    assert CliRunner().invoke(main, command).exit_code == 0, "and all modules are imported"
    os.seteuid(NOBODY)
    try:
        done = CliRunner().invoke(main, command, prog_name="kvfs")
    finally:
        os.seteuid(0)
    assert done.exit_code == 2
    assert "it was mounted by root: use sudo" in done.stderr
    assert "umount" not in done.stderr


def test_lmcache_gets_less_than_the_mount_has(kv: Mounted) -> None:
    done = run("ns", "create", kv.path / "a", "--for", "lmcache-local-disk")
    assert "max_local_disk_size: 0.224  # GiB; 90 % of the mount" in done.stdout


def test_pinned_files_have_not_gone_to_a_bucket_that_is_not_there(kv: Mounted) -> None:
    (kv.path / "block").write_bytes(b"content")
    os.setxattr(kv.path / "block", "user.kvfs.pin", b"on")
    kv.idle()
    done = run("evict", "--drop", kv.path / "block")
    assert (done.returncode, "s3" in done.stdout) == (1, False)
    assert done.stdout.startswith("0 of 1 files are dropped;")
    assert "1 of 1 files stay: never dropped" in done.stderr


def test_a_quota_that_the_mount_cannot_hold_is_said(kv: Mounted) -> None:
    done = run("ns", "create", kv.path / "a", "quota_hard=1G")
    assert done.returncode == 0
    assert "quota_hard=1G is more than its tiers have, 256M" in done.stderr
    answer = request(kv.path, "ns_set", name="a", settings={"quota_hard": "256M"})
    assert not answer["note"]
    done = run("ns", "set", kv.path / "a", "media=ram", "quota_hard=100M")
    assert "quota_hard=100M is more than its tiers have, 64M" in done.stderr


def test_nvme_in_memory_is_said(tmp_path: Path) -> None:
    disk, path = tmp_path / "memory", tmp_path / "kv"
    disk.mkdir()
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64M", "none", disk], check=True)
    try:
        done = run("mount", path, "-o", f"ram=64M,nvme={disk}/nvme,nvme_size=32M")
        assert done.returncode == 0, done.stderr
        run("umount", path)
    finally:
        subprocess.run(["umount", disk], check=True)
    assert f"nvme={disk}/nvme is on a tmpfs, which is memory" in done.stderr
