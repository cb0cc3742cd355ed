"""Lists the objects that are opened most, or are the largest, at most MOST of each.

Contract: the hottest objects are those of the sketch that opens count in
(`fairness/hot_objects.py`), so a request for them costs opens nothing. A walk over the catalog
finds the largest objects, in steps of STEP inodes, with a heap of MOST: its memory is fixed. It
starts only after a request, and there is one walk at a time. The next one begins at least PAUSE
seconds and SHARE times its own length after its end. So constant requests cost at most 1/SHARE of a
processor. `age_s` says how old the result is. Not for the order of eviction: that is an `Order`.
"""

import heapq
import time
from collections.abc import Iterable
from typing import Any

import trio

from kvfs.catalog import Inode
from kvfs.core.admin.lifecycle import Lifecycle
from kvfs.errors import ConfigError

MOST = 100
STEP = 128  # inodes between two turns of the loop, about 0.5 ms
DESCRIBED = 10  # objects between two turns of the loop
PAUSE = 30.0  # s
SHARE = 400
PATIENCE = 0.25  # s that a request waits for a walk
ORDERS = ("hot", "large")


class Ranking:
    """The rankings of one mount. `run` walks after a request."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.ledger = lifecycle.ledger
        self._wanted = trio.Event()
        self._found = trio.Event()
        self._largest: list[tuple[int, int]] = []  # size, inode; the largest first
        self._at: float | None = None  # when the last walk ended; None: never
        self._next = 0.0  # when the next walk may begin

    async def objects(self, order: str = "hot", count: object = 10) -> dict[str, Any]:
        """The first `count` objects of a ranking. Raises ConfigError.

        `age_s` is the age of the ranking. It is None before the first walk has ended.
        """
        if order not in ORDERS:
            raise ConfigError(f"order={order!r}: expected one of {', '.join(ORDERS)}")
        if not isinstance(count, int) or not 1 <= count <= MOST:
            raise ConfigError(f"count={count!r}: expected 1 to {MOST}")
        age: float | None = 0.0
        if order == "hot":
            inos = [hot.key for hot in self.ledger.namespaces.hot.top(count)]
        else:
            await self._look()
            inos = [ino for _, ino in self._largest[:count]]
            age = None if self._at is None else trio.current_time() - self._at
        return {
            "order": order,
            "age_s": None if age is None else round(age, 3),
            "objects": await self._describe(inos),
        }

    async def _look(self) -> None:
        """Ask for a walk if one is due. Wait a moment if there is no result yet."""
        if trio.current_time() >= self._next:
            self._wanted.set()
        if self._at is None:
            with trio.move_on_after(PATIENCE):
                await self._found.wait()

    async def run(self) -> None:
        """Walk after requests, until cancelled. Raises CatalogError; it can be called again."""
        while True:
            await self._wanted.wait()
            spent = await self._walk()
            self._wanted = trio.Event()
            self._at = trio.current_time()
            self._next = self._at + max(PAUSE, SHARE * spent)
            self._found.set()

    async def _walk(self) -> float:
        """Find the largest objects. Returns the seconds spent, without the turns of others."""
        largest: list[tuple[int, int]] = []
        at, spent = 0, 0.0
        while True:
            began = time.perf_counter()
            inodes = self.ledger.catalog.inodes_after(at, STEP)
            for inode in inodes:
                if not inode.is_file or not inode.links:
                    continue
                if len(largest) < MOST:
                    heapq.heappush(largest, (inode.size, inode.ino))
                elif inode.size > largest[0][0]:
                    heapq.heapreplace(largest, (inode.size, inode.ino))
            spent += time.perf_counter() - began
            if not inodes:
                break
            at = inodes[-1].ino
            await trio.lowlevel.checkpoint()
        self._largest = sorted(largest, reverse=True)
        return spent

    async def _describe(self, inos: Iterable[int]) -> list[dict[str, Any]]:
        """The descriptions of the objects that are still there."""
        found = []
        for number, ino in enumerate(inos):
            if number % DESCRIBED == DESCRIBED - 1:
                await trio.lowlevel.checkpoint()
            inode = self.ledger.table.inode(ino)
            if inode is None or self.ledger.removals.is_gone(inode):
                continue
            if path := self.ledger.catalog.path_of(ino):
                found.append(self._one(inode, path))
        return found

    def _one(self, inode: Inode, path: str) -> dict[str, Any]:
        ledger, namespaces = self.ledger, self.ledger.namespaces
        return {
            "path": path,
            "namespace": namespaces.name(namespaces.of(inode).ino),
            "size": inode.size,
            "tiers": [
                *(tier.name for tier in ledger.tiers.holders(inode)),
                *(["s3"] if inode.in_bucket else []),
            ],
            "dirty": inode.ino in ledger.dirty,
            "opens": namespaces.hot.opens(inode.ino),
        }
