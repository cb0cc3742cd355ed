"""Control files: programs can read them, and can do nothing else to them."""

import errno
import json
import os
import stat
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvfs import runtime
from kvfs.control import request
from tests.harness import KVFS, Mounted, wait_for

NAME = ".kvfs"


def test_they_can_be_read(here: Path, shared: Mounted) -> None:
    top = shared.path / NAME
    (here / "a").write_bytes(b"a")
    assert NAME not in os.listdir(shared.path)
    assert sorted(os.listdir(top)) == ["config", "events", "stats"]
    assert stat.S_IMODE(top.stat().st_mode) == 0o500
    assert {stat.S_IMODE((top / name).stat().st_mode) for name in os.listdir(top)} == {0o400}
    assert {(top / name).stat().st_uid for name in os.listdir(top)} == {os.geteuid()}
    stats = json.loads((top / "stats").read_text())
    status = request(shared.path, "status")
    assert stats.keys() == status.keys()
    assert stats["daemon_pid"] == status["daemon_pid"]
    assert json.loads((top / "config").read_text()) == status["options"]
    events = [json.loads(line) for line in (top / "events").read_text().splitlines()]
    assert events[-1] in request(shared.path, "events")["events"]
    assert {"time", "kind"} <= events[0].keys()
    with (top / "stats").open("rb", buffering=0) as file:
        began = file.read(100)
        shared.kill_daemon()
        rest = file.read()
        assert json.loads(began + rest)["daemon_pid"] == status["daemon_pid"]
        assert os.pread(file.fileno(), 100, 0) == began
        assert os.pread(file.fileno(), 100, 1 << 30) == b""
    kept = runtime.runtime_dir(shared.path) / "control"
    wait_for(lambda: not list(kept.iterdir()), "nothing is kept of what was closed")
    mine, theirs = (
        subprocess.run(
            ["cat", name],
            cwd=shared.path,
            user=12345,
            group=12345,
            capture_output=True,
            check=False,
        )
        for name in (f"{here.name}/a", f"{NAME}/stats")
    )
    assert mine.stdout == b"a"
    assert b"Permission denied" in theirs.stderr
    assert theirs.stdout == b""


def test_control_files_refuse_everything_except_reads(here: Path, shared: Mounted) -> None:
    top, file = shared.path / NAME, here / "a"
    file.write_bytes(b"a")
    before = shared.idle()["objects"]
    refused: list[Callable[[], object]] = [
        partial((top / "new").write_bytes, b""),
        partial((top / "stats").write_bytes, b""),
        partial(os.open, top / "stats", os.O_RDWR),
        partial(os.open, top / "stats", os.O_RDONLY | os.O_TRUNC),
        partial(os.truncate, top / "stats", 0),
        partial(os.mkdir, top / "new"),
        partial(os.symlink, "x", top / "new"),
        partial(os.link, file, top / "new"),
        partial(os.mkfifo, top / "new"),
        partial(os.rename, file, top / "new"),
        partial(os.rename, top / "stats", here / "new"),
        partial(os.rename, top, shared.path / "other"),
        partial(os.rmdir, top),
        partial(os.unlink, top / "stats"),
        partial(os.chmod, top, 0o777),
        partial(os.utime, top / "stats"),
        partial(os.setxattr, top / "stats", "user.x", b"1"),
        partial(os.setxattr, top, "user.kvfs.ttl", b"1h"),
    ]
    for act in refused:
        with pytest.raises(OSError, match="not permitted") as caught:
            act()
        assert caught.value.errno == errno.EPERM, act
    (here / "d").mkdir()
    with pytest.raises(OSError, match="not permitted"):
        os.rename(here / "d", top)
    with pytest.raises(FileExistsError):
        top.mkdir()
    assert os.listxattr(top) == []
    for word in ("create", "set", "drop"):
        command = [*KVFS, "ns", word, str(top), *(["ttl=1h"] if word == "set" else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert "kvfs's own" in done.stderr
    assert shared.idle()["objects"] == before
    assert file.read_bytes() == b"a"
    (here / NAME).mkdir()
    (here / NAME / "stats").write_bytes(b"mine")
    assert (here / NAME / "stats").read_bytes() == b"mine"
    with pytest.raises(OSError, match="not permitted"):
        os.rename(here / NAME, top)
