import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for

M = 1 << 20
CLIENTS, KILLS = 4, 4


def work(folder: Path, stop: threading.Event, effects: list[int]) -> None:
    """Do operations that fail when they are carried out twice, or not at all."""
    number = 0
    while not stop.is_set():
        number += 1
        body = b"%d " % number * 1000
        descriptor = os.open(folder / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(descriptor, body)
        os.close(descriptor)
        os.link(folder / "new", folder / "link")
        os.rename(folder / "new", folder / "named")
        assert (folder / "named").read_bytes() == body
        os.unlink(folder / "link")
        os.unlink(folder / "named")
        os.mkdir(folder / "d")
        os.symlink("x", folder / "d" / "s")
        os.unlink(folder / "d" / "s")
        os.rmdir(folder / "d")
        assert os.listdir(folder) == []
    effects.append(number)


def test_the_daemon_dies(either: Mounted) -> None:
    stop, effects = threading.Event(), list[int]()
    clients = []
    for number in range(CLIENTS):
        folder = either.path / str(number)
        folder.mkdir()
        clients.append(threading.Thread(target=work, args=(folder, stop, effects)))
    for client in clients:
        client.start()
    for number in range(KILLS):
        either.kill_daemon(signal.SIGABRT if number == 0 else signal.SIGKILL)
    stop.set()
    for client in clients:
        client.join()
    assert len(effects) == CLIENTS, "a client ends early when an operation fails"
    assert either.status()["takeovers"] == KILLS


def test_open_files(either: Mounted) -> None:
    (either.path / "a").write_bytes(b"a" * M)
    reader = os.open(either.path / "a", os.O_RDONLY)
    writer = os.open(either.path / "b", os.O_CREAT | os.O_WRONLY)
    os.write(writer, b"before")
    os.unlink(either.path / "a")
    passthrough, daemon = either.status()["passthrough"]["on"], either.pid
    os.kill(daemon, signal.SIGSTOP)  # as good as dead, and nobody has taken over
    if passthrough:
        assert os.pread(reader, 2 * M, 0) == b"a" * M
        os.write(writer, b" meanwhile")
    either.allow_log("was killed by SIGKILL")
    os.kill(daemon, signal.SIGKILL)
    os.write(writer, b" after")
    assert os.pread(reader, 2 * M, 0) == b"a" * M
    sealed = either.counter("sealed")
    os.close(writer)
    assert either.counter("sealed") == sealed + 1
    os.close(reader)
    assert os.listdir(either.path) == ["b"]
    text = b"before meanwhile after" if passthrough else b"before after"
    assert (either.path / "b").read_bytes() == text


def test_replaced(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=1G,watchdog=1")
    (kv.path / "a").write_bytes(b"a")
    kv.expect_log("has not answered for")
    # Python's fault handler may itself fall over a thread that goes on: `Mounted.kill_daemon`.
    kv.expect_log("was killed by SIG(ABRT|SEGV|KILL)")
    os.kill(kv.pid, signal.SIGSTOP)
    assert (kv.path / "a").read_bytes() == b"a"
    daemon = kv.pid
    # A busy machine may keep any daemon from speaking for a second: from here on it may be longer.
    subprocess.run([*KVFS, "upgrade", str(kv.path), "-o", "ram=128M,watchdog=60"], check=True)
    assert kv.pid != daemon
    assert kv.status()["tiers"]["ram"]["capacity_bytes"] == 128 * M
    kv.expect_log("upgrade to kvfs .* failed")
    program = kv.path.parent / "python"
    program.write_text(
        f'#!/bin/sh\nexec env KVFS_FAILPOINTS=catalog.commit=kill@1 {KVFS[0]} "$@"\n'
    )
    program.chmod(0o755)
    script = f"import sys; sys.executable = {str(program)!r}; from kvfs.cli import main; main()"
    done = subprocess.run(
        [KVFS[0], "-c", script, "upgrade", str(kv.path), "-o", "ram=64M"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "serves again, nothing is changed" in done.stderr
    assert kv.status()["tiers"]["ram"]["capacity_bytes"] == 128 * M
    assert (kv.path / "a").read_bytes() == b"a"


def test_nvme_lost(kv: Mounted) -> None:
    (kv.path / "a").write_bytes(b"a" * M)
    kv.kill()  # what RAM held is in memory still
    shutil.rmtree(kv.path.parent / "nvme")
    kv.mount()
    assert os.listdir(kv.path) == []
    (kv.path / "a").write_bytes(b"b")
    assert (kv.path / "a").read_bytes() == b"b"
    wait_for(lambda: kv.idle()["objects"] == 1, "nothing of what was before is counted")
