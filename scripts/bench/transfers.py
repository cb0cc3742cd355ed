"""Files of one size, written and read back on a target, with the clock around the right calls.

Not for mounting, comparing or printing: io.py does.
"""

import contextlib
import mmap
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from scripts.bench.mounted import Failed, Mounted

SHIFTS = 4096  # how many different contents a call can have, 64 bytes apart


class Content:
    """The written bytes: every call of every file differs, yet all stay in the CPU's cache.

    The speed of reading the source from memory must not limit a fast target.
    """

    def __init__(self, seed: int, call: int) -> None:
        self.call = call
        self._pool = memoryview(random.Random(seed).randbytes(call + SHIFTS * 64))  # noqa: S311

    def piece(self, round_: int, file: int, offset: int, length: int) -> memoryview:
        shift = (round_ * 977 + file * 131 + offset // self.call) % SHIFTS * 64
        return self._pool[shift : shift + length]


@dataclass(slots=True)
class Spent:
    """Seconds in the calls that carry bytes, and with open and close."""

    transfer: float = 0.0
    whole: float = 0.0


@dataclass(slots=True)
class Target:
    """One place to measure. `base` is the target whose rate is 1."""

    name: str
    folder: Path
    base: str
    cold: tuple[Path, ...] = ()  # folders whose files' page cache is dropped before a cold read
    mounted: Mounted | None = None
    tier: str = ""
    rates: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


class Work:
    """One object size: the same files on every target."""

    def __init__(self, content: Content, bytes_each: int, total: int) -> None:
        self.content = content
        self.size = bytes_each
        self.files = max(1, min(256, total // bytes_each))
        self.amount = bytes_each * self.files
        self.call = min(content.call, bytes_each)
        self.buffer = memoryview(mmap.mmap(-1, bytes_each))
        self.buffer[:] = bytes(bytes_each)

    def path(self, target: Target, file: int) -> str:
        return os.path.join(target.folder, f"{self.size}-{file}")

    def write(self, target: Target, round_: int) -> Spent:
        spent, clock = Spent(), time.perf_counter
        for file in range(self.files):
            pieces = [
                self.content.piece(round_, file, offset, min(self.call, self.size - offset))
                for offset in range(0, self.size, self.call)
            ]
            opening = clock()
            descriptor = os.open(
                self.path(target, file), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644
            )
            start = clock()
            for piece in pieces:
                if os.write(descriptor, piece) != len(piece):
                    raise Failed(f"{target.name}: {self.path(target, file)}: short write")
            end = clock()
            os.close(descriptor)
            spent.transfer += end - start
            spent.whole += clock() - opening
        return spent

    def rehearse(self, base: Target) -> None:
        """Write and unlink the same files natively, so that the memory is there.

        A virtual machine's host takes free memory back and gives it again slowly, at the first
        touch. Memory that was freed a moment ago is still there, and is allocated first.
        """
        folder = base.folder / "rehearsal"
        folder.mkdir(exist_ok=True)
        rehearsal = Target(base.name, folder, base.name)
        self.write(rehearsal, 0)
        self.unlink(rehearsal)

    def read(self, target: Target) -> Spent:
        spent, clock = Spent(), time.perf_counter
        views = [self.buffer[: self.call]]
        for file in range(self.files):
            opening = clock()
            descriptor = os.open(self.path(target, file), os.O_RDONLY)
            start, position = clock(), 0
            while count := os.preadv(descriptor, views, position):
                position += count
            end = clock()
            os.close(descriptor)
            spent.transfer += end - start
            spent.whole += clock() - opening
            if position != self.size:
                raise Failed(f"{target.name}: read {position} of {self.size} bytes")
        return spent

    def map(self, target: Target) -> Spent:
        spent, clock = Spent(), time.perf_counter
        for file in range(self.files):
            opening = clock()
            descriptor = os.open(self.path(target, file), os.O_RDONLY)
            start = clock()
            with (
                mmap.mmap(descriptor, self.size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped,
                memoryview(mapped) as view,
            ):
                self.buffer[:] = view
            end = clock()
            os.close(descriptor)
            spent.transfer += end - start
            spent.whole += clock() - opening
        return spent

    def verify(self, target: Target, round_: int) -> None:
        """Outside of what is timed: every byte of every file is what was written."""
        for file in range(self.files):
            with open(self.path(target, file), "rb") as stream:
                for offset in range(0, self.size, self.call):
                    wanted = self.content.piece(
                        round_, file, offset, min(self.call, self.size - offset)
                    )
                    if stream.read(len(wanted)) != wanted:
                        raise Failed(f"{target.name}: {self.path(target, file)} is wrong")

    def unlink(self, target: Target) -> None:
        for file in range(self.files):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(target, file))


def drop_page_cache(folders: tuple[Path, ...]) -> None:
    """Writes back and drops what the page cache holds of the files below, and of nothing else."""
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
                except OSError:
                    continue  # gone meanwhile, or a socket
                with contextlib.suppress(OSError):
                    os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
