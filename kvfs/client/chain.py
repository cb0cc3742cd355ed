"""Blocks of one load, opened in their order: lent by the mount, or by name.

Contract: from `begin` on the mount is asked for them, beside what else there is to do; `open` waits
until it has come to a block, and gives a descriptor of it, once, which is the caller's to close.
`map` has its lease outlive the load. Any number of threads. With `end` what is left is closed, and
leases are given back. Raises OSError as open(2) does.
Not for what the bytes are.
"""

import os
import threading
from collections.abc import Sequence
from functools import partial

import torch

from kvfs import leasing, prefix
from kvfs.client import files
from kvfs.client.leases import Leases, Lent

# Blocks of the first question, and how many times as many each further one has: reading a few
# blocks takes as long as being lent some more.
FIRST_ASKED, MORE_ASKED = 2, 4


class Chain:
    """Blocks of `size` bytes that follow `parent`, below a directory."""

    def __init__(
        self,
        directory: str,
        parent: bytes,
        keys: Sequence[bytes],
        shard: str,
        size: int,
        leases: Leases,
    ) -> None:
        self._above = [parent, *keys]
        self._directory = directory
        self._shard = shard
        self._size = size
        self._leases = leases
        self._more = threading.Condition()
        self._known = len(keys)  # of these it is known whether they are lent
        self._ended = False
        self._lent: dict[int, int] = {}  # block -> descriptor
        self._held: dict[int, int] = {}  # block -> lease

    def __len__(self) -> int:
        return len(self._above) - 1

    def part(self, start: int, end: int) -> "Chain":
        """Some of its blocks, as a chain of their own."""
        parent, *keys = self._above[start : end + 1]
        return Chain(self._directory, parent, keys, self._shard, self._size, self._leases)

    def path(self, at: int) -> str:
        """Of a block."""
        above, key = self._above[at : at + 2]
        return f"{self._directory}/{prefix.path(above, key, self._shard)}"

    def begin(self) -> None:
        """Ask for all of them, in the background."""
        if self._leases.offered and len(self):
            self._known = 0
            self._ask(FIRST_ASKED)

    def end(self) -> None:
        """No other is opened."""
        with self._more:
            self._ended = True
            lent, self._lent = self._lent, {}
            held, self._held = self._held, {}
        for fd in lent.values():
            os.close(fd)
        self._leases.give_back(held.values())

    def open(self, at: int) -> int:
        """Return a descriptor to read it by."""
        if at >= self._known:
            with self._more:
                self._more.wait_for(lambda: at < self._known)
        fd = self._lent.pop(at, -1)
        return fd if fd >= 0 else files.open_block(self.path(at))

    def map(self, at: int, fd: int, *, shared: bool = False) -> torch.Tensor:
        """`files.map_block` of it. Its lease lasts as long as the mapping."""
        lease = self._held.pop(at, None)
        ended = _nothing if lease is None else partial(self._leases.give_back, (lease,))
        try:
            return files.map_block(fd, self._size, shared=shared, unmapped=ended)
        except OSError:
            ended()
            raise

    def _ask(self, most: int) -> None:
        start = self._known
        above, *keys = self._above[start : start + most + 1]
        request = leasing.Request(above, keys, self._shard, self._size)
        self._leases.ask(request, partial(self._answered, start, len(keys)))

    def _answered(self, start: int, asked: int, found: Lent) -> None:
        """By the thread that asks. What begins with a block that is not lent goes by names."""
        with self._more:
            ended = self._ended
            if not ended:
                for at, (fd, lease) in enumerate(found, start):
                    self._held[at] = lease
                    self._lent[at] = fd
            self._known = start + asked if len(found) == asked else len(self)
            self._more.notify_all()
        if ended:
            for fd, _ in found:
                os.close(fd)
            self._leases.give_back(lease for _, lease in found)
        elif self._known < len(self):
            self._ask(min(MORE_ASKED * asked, leasing.BLOCKS_MAX))


def _nothing() -> None:
    """It was opened by name."""
