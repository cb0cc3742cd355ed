"""`kvfs top` in a pseudo terminal, on a real mount."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyte
import pytest

from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, PATIENCE, wait_for


class Terminal:
    """A program in a terminal, and the text on its screen."""

    def __init__(self, command: list[str], columns: int, rows: int) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._lock = threading.Lock()
        self._master, slave = pty.openpty()
        self._size(columns, rows)
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "", "LINES": ""},
        )
        os.close(slave)
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        while not self._over.is_set():
            if not select.select([self._master], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:  # EIO: the program has ended
                return
            with self._lock:
                self._stream.feed(data)

    @property
    def text(self) -> str:
        with self._lock:
            return "\n".join(self.screen.display)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        with self._lock:
            self.screen.resize(rows, columns)
            self._size(columns, rows)

    def shows(self, what: str) -> None:
        try:
            wait_for(lambda: what in self.text, f"{what!r} is shown")
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.text}") from error

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._over.set()
        self._reader.join()
        os.close(self._master)


@pytest.fixture
def top() -> Iterator[Callable[..., Terminal]]:
    begun: list[Terminal] = []

    def start(path: Path, columns: int = 160, rows: int = 40) -> Terminal:
        begun.append(Terminal([*KVFS, "top", str(path), "-i", "0.2"], columns, rows))
        return begun[-1]

    yield start
    for one in begun:
        one.close()


def test_top_shows_a_mount_at_work_and_takes_keys(
    mount: Mount, top: Callable[..., Terminal]
) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=1G")
    for name in ("engine-a", "engine-b"):
        request(kv.path, "ns_create", name=name, settings={}, uid=0, gid=0)
    (kv.path / "engine-a" / "block").write_bytes(b"a" * 100_000)
    kv.check_gauges()  # who opens what its writer has open still joins it, and is not counted
    for _ in range(3):
        assert (kv.path / "engine-a" / "block").read_bytes()
    (kv.path / "engine-b" / "larger").write_bytes(b"b" * 300_000)

    shown = top(kv.path)
    shown.shows("engine-a/block")  # it is hot
    assert "engine-b/larger" not in shown.text
    shown.shows("s sort (bytes)")
    shown.press("o")
    shown.shows("engine-b/larger")  # it is large
    shown.press("s")
    shown.shows("s sort (objects)")
    shown.resize(50, 20)
    wait_for(lambda: "capacity" in shown.text and "hits/s" not in shown.text, "it is narrow")
    shown.press("q")
    assert shown.process.wait(PATIENCE) == 0


def test_a_takeover_and_a_silence_are_shown_and_survived(
    mount: Mount, top: Callable[..., Terminal]
) -> None:
    kv = mount("ram=64M,watchdog=0")
    shown = top(kv.path)
    shown.shows("0 takeovers")
    before = kv.pid
    kv.kill_daemon()
    shown.shows("1 takeovers")
    shown.shows(f"why daemon {before} was killed by SIGKILL")
    daemon = kv.pid
    os.kill(daemon, signal.SIGSTOP)
    try:
        shown.shows("last answer")
        shown.shows("1 takeovers")
    finally:
        os.kill(daemon, signal.SIGCONT)
    wait_for(lambda: "last answer" not in shown.text, "the daemon answers again")
    kv.umount("--now")
    assert shown.process.wait(PATIENCE) == 1
    shown.shows("is not mounted any more")


def test_top_into_a_pipe_prints_one_frame(mount: Mount) -> None:
    kv = mount("ram=64M")
    (kv.path / "a").write_bytes(b"a")
    assert (kv.path / "a").read_bytes() == b"a"

    def run(*arguments: str, columns: str = "") -> "subprocess.CompletedProcess[str]":
        command = [*KVFS, "top", str(kv.path), "-i", "0.2", *arguments]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
            env=os.environ | {"COLUMNS": columns},
        )

    done = run("--once")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "0 takeovers" in done.stdout
    assert "namespace" in done.stdout
    assert "q quit" not in done.stdout
    assert "at x4" in done.stdout
    narrow = run("--once", columns="100").stdout
    assert max(map(len, narrow.splitlines())) <= 100
    assert "at x4" not in narrow
    request(kv.path, "ns_create", name="hog", settings={"pin": "on"}, uid=0, gid=0)
    with (kv.path / "hog" / "block").open("wb", buffering=0) as file:
        file.write(bytes(5 << 20))
        found = wait_for(
            lambda: re.search(r"\nhog +0 B +5\.0 MiB.* adaptive.*, pin", run("--once").stdout),
            "top shows what is being written",
        )
        assert re.search(r"\nram +\++\.* +[0-9]+%", found.string)
    refused = run()
    assert refused.returncode == 2
    assert "--once" in refused.stderr
