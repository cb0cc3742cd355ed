"""A real mount for tests. It leaves nothing behind, and unexpected log lines fail the test."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvfs import runtime
from kvfs.control import request
from kvfs.tiers.nvme import PROBE

PATIENCE = 60.0  # s; a condition that has not come true by then never will
KVFS = (sys.executable, "-m", "kvfs")


def wait_for(condition: Callable[[], Any], what: str, *, seconds: float = PATIENCE) -> Any:  # noqa: ANN401
    """Poll until `condition()` is true, and return it. Only this function of the tests sleeps."""
    began = time.monotonic()
    while not (found := condition()):
        waited = time.monotonic() - began
        assert waited < seconds, f"not within {seconds:.0f} s: {what}"
        time.sleep(min(max(0.005, waited / 20), 0.02))  # the daemon has other work
    return found


REFUSED = re.compile("writers get (ENOSPC|EDQUOT)")


class Mounted:
    """A kvfs that a test has mounted; only warnings named by `expect_log` may be in its log."""

    def __init__(self, path: Path, options: str, log: Path) -> None:
        self.path = path
        self.options = options
        self.log = log
        self._expected: list[re.Pattern[str]] = []
        self._allowed: list[re.Pattern[str]] = []
        self._memory: set[Path] = set()

    def mount(self, options: str | None = None) -> None:
        self.options = self.options if options is None else options
        command = [*KVFS, "mount", str(self.path), "-o", f"{self.options},log={self.log}"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        self.said: str = done.stderr
        status = self.status()
        self.keeper: int = status["keeper_pid"]
        self._memory |= {Path(tier["path"]) for tier in local(status).values()}

    def status(self) -> dict[str, Any]:
        return request(self.path, "status")

    @property
    def pid(self) -> int:
        """The pid of the present daemon."""
        found: int = self.status()["daemon_pid"]
        return found

    def counter(self, name: str) -> int:
        found: int = self.status()["counters"][name]
        return found

    def idle(self) -> dict[str, Any]:
        """The status once no write, copy, count or deletion is under way."""

        def still() -> dict[str, Any] | None:
            status = self.status()
            busy = status["writers"] or status["jobs"] or status["trash"]
            return None if busy or not status["census_done"] else status

        found: dict[str, Any] = wait_for(still, f"{self.path} is idle")
        return found

    def umount(self, *arguments: str) -> str:
        """Unmount, wait for the keeper's end, and return what the command prints."""
        if "--now" in arguments:  # the disk of the tests may take its 3 s, and more
            self.allow_log("waits for a disk after umount --now, and is killed")
        command = [*KVFS, "umount", *arguments, str(self.path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        wait_for(lambda: not alive(self.keeper), "the keeper ends after umount")
        return done.stdout + done.stderr

    def remount(self, options: str | None = None) -> None:
        self.umount()
        self.mount(options)

    def kill_daemon(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the daemon, as the OOM killer would; another daemon takes over."""
        before = self.status()
        # Python's fault handler says where every thread was, and may itself fall over one that goes
        # on meanwhile: seen once, in a thread that was importing.
        died_by = "SIGABRT|SIGSEGV" if number is signal.SIGABRT else number.name
        self.allow_log(
            rf"daemon \({before['daemon_pid']}\) (was killed by ({died_by})|closed its channel)"
        )
        os.kill(before["daemon_pid"], number)
        wait_for(lambda: self.status()["takeovers"] > before["takeovers"], "another one serves")

    def kill(self, *, unmount: bool = True) -> None:
        """Kill keeper and daemon, as at the end of a container; unmount the dead mount."""
        daemon = self.pid
        for pid in (self.keeper, daemon):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not alive(self.keeper) and not alive(daemon), "what was killed is gone")
        if unmount:
            subprocess.run(["umount", "-l", self.path], check=True)
        self.allow_log(f"the keeper of {self.path} is dead")

    def empty(self) -> None:
        """Delete all that is there, and wait until it is gone."""
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                request(self.path, "ns_drop", name=path.name)
            else:
                path.unlink()
        self.check_gauges()
        wait_for(lambda: not self.idle()["objects"], "what was deleted is gone")
        self.check_accounts()

    def expect_log(self, pattern: str) -> None:
        """Require a warning or error that matches: the test is about it."""
        self._expected.append(re.compile(pattern))

    def allow_log(self, pattern: str) -> None:
        """Allow a warning or error that matches, if it depends on timing."""
        self._allowed.append(re.compile(pattern))

    def check_log(self) -> None:
        """Check that all warnings were expected. A program sees a refusal itself."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        loud = [line for line in lines if re.match(r"\S+ \S+ (WARNING|ERROR|CRITICAL)", line)]
        allowed = [*self._expected, *self._allowed, REFUSED]
        surprising = [line for line in loud if not any(one.search(line) for one in allowed)]
        assert not surprising, "\n".join(["unexpected in the log:", *surprising, *lines[-40:]])
        for pattern in self._expected:
            assert any(pattern.search(line) for line in loud), f"no {pattern.pattern!r} in the log"

    def check_gauges(self) -> None:
        """Check that nothing is open, reserved or under way when no program uses the mount."""

        status: dict[str, Any] = {}

        def quiet() -> bool:
            status.update(self.status())
            reserved = sum(tier["reserved_bytes"] for tier in status["tiers"].values())
            return not (status["open_handles"] or status["writers"] or status["jobs"] or reserved)

        try:
            wait_for(quiet, "no handle, writer, job or reservation is left")
        except AssertionError as error:
            raise AssertionError(f"{error}: {status}") from error

    def check_accounts(self) -> None:
        """Check each tier's accounts: backing files, and bytes as the device counts them.

        A takeover deletes files in the background, perhaps a moment later.
        """
        wrong: list[object] = []

        def agree() -> bool:
            status = self.idle()
            wrong[:] = [
                (name, *found, status)
                for name, tier in local(status).items()
                for found in [_files(tier)]
                # One record serves both copies, whose file systems differ in metadata blocks.
                if found[0] != tier["objects"]
                or abs(found[1] - tier["used_bytes"]) > 8192 * found[0]
            ]
            return not wrong

        try:
            wait_for(agree, "tiers hold what they say")
        except AssertionError as error:
            raise AssertionError(f"{error}: {wrong}") from error

    def clean_up(self) -> None:
        mount = runtime.mount_at(self.path)
        if mount is not None:
            subprocess.run(["umount", "-l", self.path], check=False)
        keeper = getattr(self, "keeper", 0)
        if keeper and _is_kvfs(keeper) and alive(keeper):
            try:
                wait_for(lambda: not alive(keeper), "the keeper ends")
            except AssertionError:
                os.kill(keeper, signal.SIGKILL)
                os.kill(self.pid, signal.SIGKILL)
                raise
        for path in self._memory:  # what killed daemons left behind
            if runtime.mount_at(path) is not None:
                subprocess.run(["umount", "-l", path], check=True)
                path.rmdir()
        shutil.rmtree(runtime.runtime_dir(self.path), ignore_errors=True)


def _files(tier: dict[str, Any]) -> tuple[int, int]:
    """Backing files of a tier, and the bytes that they take."""
    found = []
    for path in Path(tier["path"], "objects").rglob("*"):
        if path.name != PROBE:
            with suppress(FileNotFoundError):  # it was just being swept
                found.append(path.stat())
    files = [file for file in found if stat.S_ISREG(file.st_mode)]
    return len(files), sum(max(4096, file.st_blocks * 512) for file in files)


def local(status: dict[str, Any]) -> dict[str, Any]:
    """The local tiers."""
    return {name: tier for name, tier in status["tiers"].items() if name != "s3"}


def descendants(pid: int) -> list[int]:
    """The child processes of a process, and theirs."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in lists for child in path.read_text().split()]
    return children + [one for child in children for one in descendants(child)]


def _is_kvfs(pid: int) -> bool:
    """Whether the pid still is of kvfs: another process may have the number by now."""
    try:
        return b"kvfs" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def apart(script: str, keep: Path) -> list[str]:
    """The command of a shell in a mount namespace of its own, with a copy of one mount of kvfs.

    A copy keeps its daemon alive, and other tests wait for the end of theirs.
    """
    others = f"$(findmnt -nrt fuse.kvfs -o TARGET | grep -vxF '{keep}')"
    alone = f"for one in {others}; do umount -l $one; done; {script}"
    return ["unshare", "--mount", "--propagation=private", "sh", "-euc", alone]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" or threads > 1  # a thread that still ends holds the files, and their locks
