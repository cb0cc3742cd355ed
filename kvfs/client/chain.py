"""Blocks of one load, opened in their order: lent by the mount, or by name.

Contract: from `begin` on the mount is asked for them, beside what else there is to do; `open` waits
until it has come to a block, and gives a descriptor of it, once, which is the caller's to close.
`map` has its lease outlive the load. Any number of threads. With `end` what is left is closed, and
leases are given back. Raises OSError as open(2) does.
Not for what the bytes are.
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch

from kvfs import leasing, prefix
from kvfs.client import files
from kvfs.client.leases import Leases
from kvfs.client.threads import Threads

# Blocks of the first question, and how many times as many each further one has: reading a few
# blocks takes as long as being lent some more.
FIRST_ASKED, MORE_ASKED = 2, 4
PAUSE = 0.002  # s until leases are given back: who loads has better things to do at first


class Chain:
    """Blocks of `size` bytes that follow `parent`, below a directory."""

    def __init__(
        self,
        directory: str,
        parent: bytes,
        keys: Sequence[bytes],
        shard: str,
        size: int,
        *,
        leases: Leases,
        threads: Threads,
    ) -> None:
        self._above = [parent, *keys]
        self._directory = directory
        self._shard = shard
        self._size = size
        self._leases = leases
        self._threads = threads
        self._asking: Future[None] | None = None
        self._asked = 0 if leases.offered else len(keys)
        self._more = threading.Condition()
        self._lent: dict[int, int] = {}  # block -> descriptor
        self._held: dict[int, int] = {}  # block -> lease

    def __len__(self) -> int:
        return len(self._above) - 1

    def part(self, start: int, end: int) -> "Chain":
        """Some of its blocks, as a chain of their own."""
        parent, *keys = self._above[start : end + 1]
        return Chain(
            self._directory,
            parent,
            keys,
            self._shard,
            self._size,
            leases=self._leases,
            threads=self._threads,
        )

    def path(self, at: int) -> str:
        """Of a block."""
        above, key = self._above[at : at + 2]
        return f"{self._directory}/{prefix.path(above, key, self._shard)}"

    def begin(self) -> None:
        """Ask for all of them, in the background where they are many."""
        if self._asked < len(self):
            self._ask_for(FIRST_ASKED)
        if self._asked < len(self):
            self._asking = self._threads.beside(self._ask)

    def end(self) -> None:
        """No other is opened."""
        if self._asking is not None and not self._asking.cancel():
            self._come_to(len(self))
            self._asking.result()
        for fd in self._lent.values():
            os.close(fd)
        self._lent.clear()
        if self._held:
            self._threads.later(partial(self._give_back, list(self._held.values())))

    def open(self, at: int) -> int:
        """Return a descriptor to read it by."""
        if at >= self._asked:
            with self._more:
                self._more.wait_for(lambda: at < self._asked)
        fd = self._lent.pop(at, -1)
        return fd if fd >= 0 else files.open_block(self.path(at))

    def map(self, at: int, fd: int, *, shared: bool = False) -> torch.Tensor:
        """`files.map_block` of it. Its lease lasts as long as the mapping."""
        lease = self._held.pop(at, None)
        ended = _nothing if lease is None else partial(self._leases.give_back, (lease,), now=False)
        try:
            return files.map_block(fd, self._size, shared=shared, unmapped=ended)
        except OSError:
            ended()
            raise

    def _ask(self) -> None:
        most = FIRST_ASKED
        try:
            while self._asked < len(self):
                most = min(MORE_ASKED * most, leasing.BLOCKS_MAX)
                self._ask_for(most)
        finally:  # those who wait go by the name
            self._come_to(len(self))

    def _ask_for(self, most: int) -> None:
        start = self._asked
        above, *keys = self._above[start : start + most + 1]
        found = self._leases.ask(leasing.Request(above, keys, self._shard, self._size))
        for at, (fd, lease) in enumerate(found, start):
            self._held[at] = lease
            self._lent[at] = fd
        self._come_to(start + len(keys) if len(found) == len(keys) else len(self))

    def _come_to(self, block: int) -> None:
        with self._more:
            self._asked = max(self._asked, block)
            self._more.notify_all()

    def _give_back(self, leases: list[int]) -> None:
        time.sleep(PAUSE)
        self._leases.give_back(leases)


def _nothing() -> None:
    """It was opened by name."""
