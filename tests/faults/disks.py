"""Disks that fail, for tests: small file systems in files, and a layer that injects faults.

Each is a context manager that takes away what it has mounted, also when the test fails.
"""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness import wait_for

FAULTY = Path(__file__).with_name("faulty.py")
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h
Rule = dict[str, float]


class Faults:
    """`set(open={"errno": 5})` replaces all rules, `set()` ends every fault. See faulty.py."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set()

    def set(self, rules: dict[str, Rule] | None = None) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(rules or {}))
        fresh.rename(self._path)  # it may be read at any moment


@contextmanager
def faulty(directory: Path, work: Path) -> Iterator[Faults]:
    """What is in `directory` can be made to fail from now on; `work` is for what that needs."""
    source = work / "source"
    source.mkdir(parents=True)
    directory.mkdir(parents=True, exist_ok=True)
    faults = Faults(work / "rules.json")
    command: list[str | Path] = [sys.executable, FAULTY, source, directory, work / "rules.json"]
    with (work / "faulty.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.readline()
    assert said == "mounted\n", (work / "faulty.log").read_text()
    try:
        yield faults
    finally:
        faults.set()
        subprocess.run(["umount", "-l", directory], check=True)
        process.wait(timeout=20)


@contextmanager
def disk(directory: Path, image: Path, size: int) -> Iterator[Path]:
    """An ext4 of `size` bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)
        wait_for(lambda: not _loops(image), f"no loop device has {image}")


def _loops(image: Path) -> str:
    found = subprocess.run(["losetup", "-j", image], check=True, capture_output=True, text=True)
    return found.stdout


@contextmanager
def frozen(directory: Path) -> Iterator[None]:
    """Whatever would change the file system waits until it is thawed.

    Not by fsfreeze(8): a child of this process would begin by closing what this process has open,
    and closing a file on a mount whose daemon waits is to wait as well.
    """
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, FIFREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(fd, FITHAW, 0)
    finally:
        os.close(fd)
