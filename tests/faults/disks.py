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
SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN, with its flag; XFS has the same
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
    """Make the files in `directory` able to fail from now on; `work` is for auxiliary files."""
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
        process.wait(timeout=60)


class Disk:
    """An ext4 in a file, on a loop device: it can be taken away, and come back."""

    def __init__(self, directory: Path, image: Path, size: int) -> None:
        self.directory = directory
        self.image = image
        directory.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        self.device = _output("losetup", "--find", "--show", image)

    def mount(self) -> None:
        options = "errors=remount-ro"
        subprocess.run(["mount", "-o", options, self.device, self.directory], check=True)

    def keep_metadata(self) -> None:
        """Keep room in the image for ext4's own blocks and its journal, and none for free data."""
        with self.image.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, self.image.stat().st_size)
        subprocess.run(["fstrim", self.directory], check=True)

    def detach(self) -> None:
        """Unmount lazily: the directory is the one below; programs keep their open files."""
        subprocess.run(["umount", "-l", self.directory], check=True)

    def remount(self) -> None:
        """Mount again, as after an error: only this makes the file system writable again."""
        subprocess.run(["umount", self.directory], check=True)
        self.mount()

    def shut_down(self) -> None:
        """Answer EIO to everything; unwritten data is lost, journal and all."""
        fd = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, NO_LOG_FLUSH.to_bytes(4, sys.byteorder))
        finally:
            os.close(fd)

    def make_read_only(self) -> None:
        """Become read-only, as ext4 does at an error: EROFS also for files already open."""
        name = Path(self.device).name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("a test of kvfs")

    def remove(self) -> None:
        while os.path.ismount(self.directory):
            self.detach()
        subprocess.run(["losetup", "--detach", self.device], check=True)
        wait_for(lambda: not _output("losetup", "-j", self.image), f"{self.device} is free")


def _output(*command: str | Path) -> str:
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return found.stdout.strip()


@contextmanager
def disk(directory: Path, image: Path, size: int) -> Iterator[Disk]:
    """An ext4 of `size` bytes, mounted on the directory."""
    made = Disk(directory, image, size)
    try:
        made.mount()
        yield made
    finally:
        made.remove()


@contextmanager
def frozen(directory: Path) -> Iterator[None]:
    """Let every change of the file system wait until it is thawed.

    Not by fsfreeze(8): a child of this process would first close this process's descriptors.
    Closing a file on a mount with a waiting daemon would wait as well.
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
