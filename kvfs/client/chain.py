"""Blocks of one load, which follow each other, opened in their order: lent by the mount, or by name.

Contract: `open` gives a descriptor of a block, once, which is the caller's to close; `map` has
its lease outlive the load. Any number of threads, which want the blocks in turn. With the end of
the `with` what is left is closed, and leases are given back. Raises OSError as open(2) does.
Not for what the bytes are.
"""

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

import torch

from kvfs import leasing, prefix
from kvfs.client import files
from kvfs.client.leases import Leases

FIRST_ASKED, MOST_ASKED = 4, 32  # blocks: the first are soon there, the others at few questions


class Chain:
    """`later(call)` calls when there is time."""

    def __init__(
        self,
        directory: str,
        parent: bytes,
        keys: Sequence[bytes],
        shard: str,
        size: int,
        *,
        leases: Leases,
        later: Callable[[Callable[[], None]], object],
    ) -> None:
        self._above = [parent, *keys]
        self._directory = directory
        self._shard = shard
        self._size = size
        self._leases = leases
        self._later = later
        self._lock = threading.Lock()
        self._asked = 0 if leases.offered else len(keys)
        self._step = FIRST_ASKED
        self._lent: dict[int, int] = {}  # block -> descriptor
        self._held: dict[int, int] = {}  # block -> lease

    def __enter__(self) -> "Chain":  # noqa: PYI034 (typing has Self since 3.11)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for fd in self._lent.values():
            os.close(fd)
        self._lent.clear()
        if self._held:
            self._later(partial(self._leases.give_back, list(self._held.values())))

    def __len__(self) -> int:
        return len(self._above) - 1

    def part(self, start: int, end: int) -> "Chain":
        """Some of its blocks, as a chain of their own."""
        return Chain(
            *(self._directory, self._above[start], self._above[start + 1 : end + 1]),
            *(self._shard, self._size),
            leases=self._leases,
            later=self._later,
        )

    def path(self, at: int) -> str:
        """Of a block."""
        above, key = self._above[at : at + 2]
        return f"{self._directory}/{prefix.path(above, key, self._shard)}"

    def open(self, at: int) -> int:
        """Return a descriptor to read it by."""
        fd = self._lent.pop(at, -1)
        if fd < 0 and at >= self._asked:
            with self._lock:
                while at >= self._asked:
                    self._ask()
            fd = self._lent.pop(at, -1)
        return fd if fd >= 0 else files.open_block(self.path(at))

    def map(self, at: int, fd: int, *, shared: bool = False) -> torch.Tensor:
        """`files.map_block` of it. Its lease lasts as long as the mapping."""
        lease = self._held.pop(at, None)
        ended = _nothing if lease is None else partial(self._give_back, lease)
        try:
            return files.map_block(fd, self._size, self.path(at), shared=shared, unmapped=ended)
        except OSError:
            ended()
            raise

    def _give_back(self, lease: int) -> None:
        self._leases.give_back((lease,), now=False)

    def _ask(self) -> None:
        start, end = self._asked, min(len(self), self._asked + self._step)
        above, *keys = self._above[start : end + 1]
        found = self._leases.ask(leasing.Request(above, keys, self._shard, self._size))
        for at, (fd, lease) in enumerate(found, start):
            self._held[at] = lease
            self._lent[at] = fd
        self._step = min(2 * self._step, MOST_ASKED)
        self._asked = end if len(found) == end - start else len(self)


def _nothing() -> None:
    """It was opened by name."""
