"""Files on a mount too small for them: each may be gone at any time, and none may be wrong.

Contract: as private.py, but a sealed file that is not there is a miss, counted and made anew.
"""

import os
import random
from collections.abc import Callable

from scripts.bench.workload.held import HeldFiles
from scripts.bench.workload.task import Answer, Calls, expect

NAMES = 40
SIZES = (0, 4096, 100_000, 500_000, 2_000_000)
HELD = 2  # an open object cannot be dropped for a writer


class Evicted:
    """`answer.misses` counts."""

    def __init__(self, folder: str, calls: Calls, rng: random.Random, answer: Answer) -> None:
        self.folder = folder
        self.calls = calls
        self.rng = rng
        self.answer = answer
        self.contents: dict[str, bytes] = {}
        self.held = HeldFiles(calls, rng, HELD)
        calls.mkdir(folder)
        self.behaviours: dict[Callable[[], None], int] = {
            self.write: 6,
            self.replace: 4,
            self.read: 6,
            self.hold: 2,
            self.held.read: 4,
            self.held.let_go: 2,
        }

    def _store(self, path: str, flags: int) -> bytes:
        data = self.rng.randbytes(self.rng.choice(SIZES))
        fd = self.calls.open(path, os.O_CREAT | os.O_WRONLY | flags, 0o644)
        self.calls.write_all(fd, data, path)
        self.calls.close(fd)
        return data

    def _name(self) -> str:
        return f"{self.folder}/{self.rng.randrange(NAMES)}.kv"

    def write(self) -> None:
        path = self._name()
        if path in self.held:
            return  # it would change what the holder sees
        self.contents[path] = self._store(path, os.O_TRUNC)

    def replace(self) -> None:
        path = self._name()
        fd = self.calls.open(f"{path}.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        data = self.rng.randbytes(self.rng.choice(SIZES))
        self.calls.write_all(fd, data, path)
        self.calls.rename(f"{path}.tmp", path)  # while it is open nothing may drop it
        self.calls.close(fd)
        self.contents[path] = data

    def _open(self) -> tuple[int, str, bytes] | None:
        if not self.contents:
            return None
        path = self.rng.choice(list(self.contents))
        try:
            return self.calls.open(path, os.O_RDONLY), path, self.contents[path]
        except FileNotFoundError:
            self.answer.misses += 1
            del self.contents[path]
            return None

    def read(self) -> None:
        opened = self._open()
        if opened is not None:
            fd, path, data = opened
            expect(path, "content", self.calls.contents(fd), data)
            self.calls.close(fd)

    def hold(self) -> None:
        opened = self._open()
        if opened is not None:
            self.held.add(*opened)

    def finish(self) -> None:
        self.held.let_all_go()
        for _ in range(NAMES):
            self.read()
