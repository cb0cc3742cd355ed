"""The calls of an engine without an engine: open, fstat, read and close of whole files.

Between two files the process does what engines do between two blocks: a matrix product and 4 MiB of
random numbers, or a copy of 64 MiB. Both put the daemon's code out of the processors' caches; the
product also leaves torch's threads spinning on all processors for some milliseconds. A tight loop
shows neither. The first calls on a file after its write are told apart from later ones. The files
have names of SGLang's pages, so kvfs knows them as blocks.
"""

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from scripts.bench.drivers.driver import Content, Driver

FIRST = ("first open", "first fstat")  # of a file after its write
CALLS = ("open", "fstat", "read", "close")
COPIED = "open after a copy"


class Loop(Driver):
    """Whole files, each read by one call."""

    def __init__(self, bytes_each: int) -> None:
        self._content = Content(bytes_each)
        self._memory = torch.zeros(bytes_each, dtype=torch.uint8)
        self._matrix = torch.randn(1500, 1500)
        self._random = torch.Generator()
        self._copied = torch.ones(64 << 20, dtype=torch.uint8)
        self._copy = torch.empty_like(self._copied)

    def turn(self, folder: Path, numbers: range) -> dict[str, list[float]]:
        paths = _paths(folder, numbers)
        written = self._write(paths, numbers)
        return written | self._read(FIRST, paths, numbers) | self._again(paths, numbers)

    def _write(self, paths: list[str], numbers: range) -> dict[str, list[float]]:
        data: Any = self._memory.numpy().data
        seconds: list[float] = []
        clock = time.perf_counter
        for path, number in zip(paths, numbers, strict=True):
            self._content.fill(self._memory, number)
            begin = clock()
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            os.write(descriptor, data)
            os.close(descriptor)
            seconds.append(clock() - begin)
        self._memory.zero_()
        return {"write": seconds}

    def _read(
        self, names: tuple[str, ...], paths: list[str], numbers: range
    ) -> dict[str, list[float]]:
        data: Any = self._memory.numpy().data
        found: dict[str, list[float]] = {name: [] for name in names}
        clock = time.perf_counter
        for path, number in zip(paths, numbers, strict=True):
            torch.mm(self._matrix, self._matrix)
            torch.randint(0, 255, (4 << 20,), dtype=torch.uint8, generator=self._random)
            times = [clock()]
            descriptor = os.open(path, os.O_RDONLY)
            times.append(clock())
            os.fstat(descriptor)
            times.append(clock())
            os.readv(descriptor, [data])
            times.append(clock())
            os.close(descriptor)
            times.append(clock())
            for name, (begin, end) in zip(names, pairwise(times), strict=False):
                found[name].append(end - begin)
            self._content.check(self._memory, number)
        return found

    def _again(self, paths: list[str], numbers: range) -> dict[str, list[float]]:
        found = self._read(CALLS, paths, numbers)
        copied: list[float] = []
        for path in paths * 2:
            self._copy.copy_(self._copied)
            begin = time.perf_counter()
            descriptor = os.open(path, os.O_RDONLY)
            copied.append(time.perf_counter() - begin)
            os.close(descriptor)
        return found | {COPIED: copied}


class Resident(Loop):
    """The same files in all turns of a folder. The first turn writes them and times no call."""

    def turn(self, folder: Path, numbers: range) -> dict[str, list[float]]:
        paths = _paths(folder, numbers)
        if not os.path.exists(paths[0]):
            self._write(paths, numbers)
            return {}
        return self._again(paths, numbers)


def _paths(folder: Path, numbers: range) -> list[str]:
    return [os.path.join(folder, f"{number:064x}_model.bin") for number in numbers]
