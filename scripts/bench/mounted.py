"""A kvfs mount of the benchmark's own, on a temporary mount point, always unmounted.

Uses the command line only, as a person would: nothing of kvfs is imported.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

KVFS = [sys.executable, "-m", "kvfs"]
QUIET_S = 0.1  # how long a daemon must have done next to nothing
QUIET_LIMIT_S = 120.0


class Failed(click.ClickException):
    """The benchmark cannot go on: one line, exit code 1."""


def command(*arguments: str, program: Sequence[str] = KVFS) -> str:
    """Run `kvfs` with these arguments; its output, or Failed."""
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip()
        raise Failed(f"kvfs {' '.join(arguments)} exited {done.returncode}: {reason}")
    return done.stdout


class Mounted:
    """One mount. `options` as `kvfs mount -o` takes them; `program` is the kvfs that makes it."""

    def __init__(self, path: Path, options: str, program: Sequence[str] = KVFS) -> None:
        self.path = path
        self.options = options
        self.program = program

    def mount(self) -> None:
        self._command("mount", str(self.path), "-o", self.options)

    def umount(self, *, now: bool = False) -> None:
        self._command("umount", str(self.path), *(["--now"] if now else []))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._command("status", str(self.path), "--json"))
        return found

    def _command(self, *arguments: str) -> str:
        return command(*arguments, program=self.program)

    @property
    def pid(self) -> int:
        return int(self.status()["daemon_pid"])

    def settle(self) -> dict[str, Any]:
        """Wait until nothing is moved or removed and the daemon idles; the status then."""
        deadline = time.monotonic() + QUIET_LIMIT_S
        while True:
            status = self.status()
            busy = status["jobs"] or status["writers"] or status["trash"]
            if not busy and idle(int(status["daemon_pid"])):
                return status
            if time.monotonic() > deadline:
                raise Failed(f"{self.path}: still busy after {QUIET_LIMIT_S:.0f} s: {status}")

    def require(self, feature: str, *, on: bool) -> None:
        """A figure of a feature that is off would be a wrong figure."""
        found = self.status()[feature]
        if found["on"] is not on:
            state = "on" if found["on"] else "off"
            raise Failed(f"{self.options}: {feature} is {state} ({found['why']}): not measured")


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def started_at(pid: int) -> float:
    """When a process started, on CLOCK_BOOTTIME (in steps of 10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise Failed(f"/proc/{pid}/status has no VmRSS")


def is_mounted(path: Path) -> bool:
    """Whether something is mounted there, also when it does not answer any more."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return str(path) in {line.split()[4] for line in lines}


def idle(pid: int) -> bool:
    """Whether a process does next to nothing for a moment."""
    before = cpu_seconds(pid)
    time.sleep(QUIET_S)
    return cpu_seconds(pid) - before <= QUIET_S / 5


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """A folder that is gone afterwards; what is mounted below it must be unmounted before."""
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-", dir=parent) as folder:
        yield Path(folder)


@contextlib.contextmanager
def kvfs(mountpoint: Path, options: str, program: Sequence[str] = KVFS) -> Iterator[Mounted]:
    """A mount that is gone afterwards."""
    mountpoint.mkdir(parents=True)
    mounted = Mounted(mountpoint, options, program)
    mounted.mount()
    try:
        yield mounted
    finally:
        try:
            if is_mounted(mountpoint):
                mounted.umount(now=True)
        except Failed:
            # Never leave a mount behind, and never remove a folder through one.
            if is_mounted(mountpoint):
                subprocess.run(["umount", "-l", str(mountpoint)], check=True)
            raise
