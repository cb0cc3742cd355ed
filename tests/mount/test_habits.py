"""Habits of other commands work: defaults, any path on a mount, suggestions, groups, -l, --yes."""

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from kvfs.cli import COMMANDS, GROUPS
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for

OPTIONS = "ram=64M"


def run(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def kv(mount: Mount) -> Mounted:
    return mount(OPTIONS)


@pytest.mark.parametrize("words", [["status"], ["ns", "list"], ["flush"], ["top", "--once"]])
def test_any_path_on_a_mount_stands_for_it(kv: Mounted, words: list[str]) -> None:
    (kv.path / "space").mkdir()
    (kv.path / "space" / "file").write_bytes(b"content")
    there, below = run(*words, kv.path), run(*words, kv.path / "space" / "file")
    assert (below.returncode, below.stderr) == (there.returncode, there.stderr)


def test_one_mount_is_the_default_and_of_two_one_is_to_be_given(mount: Mount) -> None:
    """Other tests may have mounts of their own: these are seen in a mount namespace."""
    kv, other = mount(OPTIONS), mount(OPTIONS, "other")
    hide = (
        f"for one in $(findmnt -nrt fuse.kvfs -o TARGET | grep -v '^{kv.path}$'); do "
        'umount -l $one; done; exec "$@"'
    )
    alone = ["unshare", "--mount", "--propagation", "private", "sh", "-c", hide, "sh"]
    told = json.loads(subprocess.check_output([*alone, *KVFS, "status", "--json"]))
    assert told["mountpoint"] == str(kv.path)
    done = run("status")
    assert done.returncode == 2
    assert str(kv.path) in done.stderr
    assert str(other.path) in done.stderr
    done = run("umount")
    assert (done.returncode, kv.path.is_mount(), other.path.is_mount()) == (2, True, True)


def test_mounts_and_version(kv: Mounted) -> None:
    (kv.path / "file").write_bytes(b"content")
    kv.idle()
    found = json.loads(run("mounts", "--json").stdout)
    (one,) = (one for one in found if one["mountpoint"] == str(kv.path))
    assert (one["objects"], one["daemon_pid"], one["problem"]) == (1, kv.pid, "")
    assert str(kv.path) in run("mounts").stdout
    version = json.loads(run("version", "--json").stdout)["version"]
    assert version == one["version"]
    assert run("version").stdout.startswith(f"kvfs {version} (Python 3.")


@pytest.mark.parametrize(
    ("typed", "meant"), [("staus", "status"), ("unmount", "umount"), ("mout", "mount")]
)
def test_a_mistyped_command_gets_a_suggestion(typed: str, meant: str) -> None:
    done = run(typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"no such command '{typed}': did you mean {meant}" in done.stderr
    assert "see kvfs --help" in run("xyzzy").stderr


def test_help_has_each_command_in_a_group() -> None:
    text = run("--help").stdout
    assert all(f"\n{title}:\n" in text for title in GROUPS)
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert len(set(COMMANDS)) == len(COMMANDS)


def test_umount_l_detaches(kv: Mounted) -> None:
    with (kv.path / "file").open("wb"):
        assert run("umount", kv.path).returncode == 1
        assert run("umount", "-l", kv.path).returncode == 0
        assert not kv.path.is_mount()


def test_mounts_and_status_show_the_same_bytes(kv: Mounted) -> None:
    (kv.path / "sealed").write_bytes(bytes(1 << 20))
    kv.idle()
    with (kv.path / "file").open("wb", buffering=0) as file:
        file.write(bytes(1 << 20))
        listed = next(row for row in run("mounts").stdout.splitlines() if str(kv.path) in row)
        found = re.search(r"ram (.*) \+ (.*) reserved", listed)
        assert found is not None, listed
        shown = " ".join(run("status", kv.path).stdout.split())
        assert f" {found[1]} {found[2]} " in shown


def test_a_drop_on_a_terminal_asks(kv: Mounted) -> None:
    for name in ("asked", "agreed", "piped"):
        assert run("ns", "create", kv.path / name).returncode == 0
    assert _answer("n\n", "ns", "drop", kv.path / "asked") == 1
    assert (kv.path / "asked").is_dir()
    assert _answer("y\n", "ns", "drop", kv.path / "asked") == 0
    assert _answer("", "ns", "drop", "--yes", kv.path / "agreed") == 0
    assert run("ns", "drop", kv.path / "piped").returncode == 0
    wait_for(lambda: not os.listdir(kv.path), "all are dropped")


def _answer(text: str, *words: str | Path) -> int:
    """The exit code of a command in a terminal in which this is typed."""
    master, slave = pty.openpty()
    try:
        with subprocess.Popen(
            [*KVFS, *map(str, words)], stdin=slave, stdout=slave, stderr=slave
        ) as process:
            os.close(slave)
            os.write(master, text.encode())
            return process.wait(60)
    finally:
        os.close(master)
