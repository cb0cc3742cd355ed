"""Other users cannot see or change anything of a mount, unless its owner asks for it."""

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from kvfs import runtime
from kvfs.control import request, request_keeper
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.semantics.syscalls import NOBODY, as_nobody


def open_to_others(path: Path) -> list[str]:
    """Paths at or below this one that users other than the owner may look at or change."""
    below = [Path(at, name) for at, folders, files in os.walk(path) for name in (*folders, *files)]
    return [
        f"{one}: {stat.filemode(found.st_mode)}"
        for one in (path, *below)
        if (found := one.lstat()).st_mode & 0o077 or found.st_uid != os.geteuid()
    ]


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_files_of_a_mount_are_closed_to_other_users(
    mount: Mount, tmp_path: Path, umask: int
) -> None:
    """This holds with any umask at the mount, after a takeover, and after a change of options."""
    before = os.umask(umask)
    try:
        kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=512M,metrics={tmp}/metrics")
    finally:
        os.umask(before)
    (kv.path / "a").write_bytes(bytes(1 << 20))
    wait_for(lambda: not request(kv.path, "write_back")["bytes_left"], "it is on both tiers")
    kv.kill_daemon()
    request(kv.path, "set", promote_after="3")
    kv.idle()
    wait_for((tmp_path / "metrics").exists, "metrics are shown")
    places = [runtime.runtime_dir(kv.path), kv.log, tmp_path / "metrics"]
    places += [Path(tier["path"]) for tier in kv.status()["tiers"].values()]
    assert [found for place in places for found in open_to_others(place)] == []


def asked_by_nobody(name: str, directory: Path, answer: Path) -> int:
    """The errno of an ordinary user's question; the reply is in `answer`."""
    told = os.open(answer, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)

    def ask() -> None:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(name)
            asking.sendall(b'{"verb": "status"}\n')
            with asking.makefile("rb") as stream:
                os.write(told, stream.readline())

    try:
        return as_nobody(directory, ask)
    finally:
        os.close(told)


@pytest.mark.parametrize("name", ["control.sock", "keeper.sock"])
def test_others_are_not_answered(kv: Mounted, tmp_path: Path, name: str) -> None:
    """This holds even if the socket is open to other users."""
    directory, answer = runtime.runtime_dir(kv.path), tmp_path / "answer"
    assert asked_by_nobody(name, directory, answer) == 13
    directory.chmod(0o711)
    (directory / name).chmod(0o666)
    assert asked_by_nobody(name, directory, answer) == 0
    assert json.loads(answer.read_text()) == {
        "error": f"uid {NOBODY} may not ask this mount: expected root, or uid 0 that mounted it",
        "invalid": True,
    }
    assert request(kv.path, "status")["keeper_pid"] == kv.keeper
    assert request_keeper(kv.path, "status")["keeper_pid"] == kv.keeper
