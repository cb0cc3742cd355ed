"""Files that stay open over many other calls, with the bytes that they must have.

Contract: at most `most` descriptors. A file keeps its bytes for them, whatever happens to its name.
"""

import random

from scripts.bench.workload.task import Calls, expect


class HeldFiles:
    """`rng` decides which one is read."""

    def __init__(self, calls: Calls, rng: random.Random, most: int) -> None:
        self.calls = calls
        self.rng = rng
        self.most = most
        self._files: list[tuple[int, str, bytes]] = []

    def __contains__(self, path: str) -> bool:
        return any(path == held for _, held, _ in self._files)

    def add(self, fd: int, path: str, data: bytes) -> None:
        """Keep a descriptor; the oldest one of too many is closed."""
        self._files.append((fd, path, data))
        if len(self._files) > self.most:
            self.let_go()

    def read(self) -> None:
        """Read one of the files. Raises WrongError."""
        if self._files:
            fd, path, data = self.rng.choice(self._files)
            expect(path, "content by descriptor", self.calls.contents(fd), data)

    def let_go(self) -> None:
        """Close the oldest descriptor, if there is one."""
        if self._files:
            self.calls.close(self._files.pop(0)[0])

    def let_all_go(self) -> None:
        while self._files:
            self.let_go()
