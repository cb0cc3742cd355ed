"""Which objects are opened most, and which are the largest: for people, at most MOST of each.

Contract: the hottest are those of the sketch that opens count in (`fairness/hot_objects.py`), so
asking for them costs opens nothing. The largest are found by a walk over the catalog in steps of
STEP inodes, with a heap of MOST: its memory is fixed. It is made only after somebody asked, one at
a time, and the next begins at least PAUSE and SHARE times its own length after its end, so that
asking all the time does not cost more than 1/SHARE of a processor. `age_s` says how old they are.
Not for what goes next: that is an `Order`.
"""

import heapq
import time
from collections.abc import Iterable
from typing import Any

import trio

from kvfs.catalog import Inode
from kvfs.core.admin.administration import path_of
from kvfs.core.admin.lifecycle import Lifecycle
from kvfs.errors import ConfigError

MOST = 100
STEP = 128  # inodes between two turns of the loop, about 0.5 ms
DESCRIBED = 10  # objects between two turns of the loop
PAUSE = 30.0  # s
SHARE = 400
PATIENCE = 0.25  # s that who asks waits for a walk
ORDERS = ("hot", "large")


class Ranking:
    """Of one mount. `run` walks when somebody has asked."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.ledger = lifecycle.ledger
        self._wanted = trio.Event()
        self._found = trio.Event()
        self._largest: list[tuple[int, int]] = []  # size, inode; the largest first
        self._at: float | None = None  # when that was found; None: never
        self._next = 0.0  # when to look again

    async def objects(self, order: str = "hot", count: object = 10) -> dict[str, Any]:
        """`count` objects, the first first. Raises ConfigError.

        `age_s` is how old their order is, None before the first walk has ended.
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
        """Have them looked for if it is time to; wait a moment if there are none."""
        if trio.current_time() >= self._next:
            self._wanted.set()
        if self._at is None:
            with trio.move_on_after(PATIENCE):
                await self._found.wait()

    async def run(self) -> None:
        """Until cancelled. Raises CatalogError; called again it goes on."""
        while True:
            await self._wanted.wait()
            spent = await self._walk()
            self._wanted = trio.Event()
            self._at = trio.current_time()
            self._next = self._at + max(PAUSE, SHARE * spent)
            self._found.set()

    async def _walk(self) -> float:
        """Seconds that it took, without the turns of others."""
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
        """What is still there of them."""
        found = []
        for number, ino in enumerate(inos):
            if number % DESCRIBED == DESCRIBED - 1:
                await trio.lowlevel.checkpoint()
            inode = self.ledger.table.inode(ino)
            if inode is None or self.ledger.removals.is_gone(inode):
                continue
            if path := path_of(self.lifecycle, ino):
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
