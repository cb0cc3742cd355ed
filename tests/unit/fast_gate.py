"""A table of fast opens in this process: what the C part's thread does, one step at a time."""

import os
import time
from itertools import count
from typing import TYPE_CHECKING

import trio

from kvfs.core.ledger.fast_opens import ObjectOpens, Taken
from kvfs.core.ledger.open_table import OpenObject

if TYPE_CHECKING:
    from tests.unit.world import World


class TableGate:
    """Opens and releases handles of the objects that kvfs has offered."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.on = False
        self.entries: dict[int, OpenObject] = {}
        self.handles: dict[int, int] = {}  # handle -> inode
        self.adopted: dict[int, OpenObject] = {}  # handles that kvfs serves by now
        self.noted: dict[int, list[int]] = {}  # opens, and those of them that were the first
        self._numbers = count(1)

    # The kernel's side

    def open(self, ino: int) -> int:
        """The handle of an open for reading; 0: the daemon has to answer it."""
        held = self.entries.get(ino)
        if held is None or not self.on:
            return 0
        found = os.stat(held.path)
        assert (found.st_size, found.st_mtime_ns) == (held.inode.size, held.inode.backing_mtime_ns)
        noted = self.noted.setdefault(ino, [0, 0])
        noted[0] += 1
        noted[1] += ino not in self.handles.values()
        handle = next(self._numbers)
        self.handles[handle] = ino
        return handle

    def release(self, handle: int) -> bool:
        """Whether the handle was still the table's."""
        return self.handles.pop(handle, 0) > 0

    # kvfs's side

    def offer(self, held: OpenObject, deadline_ns: int, use_step_ns: int) -> bool:
        assert min(deadline_ns, use_step_ns) > 0
        assert held.inode.ino not in self.entries
        record = self.world.catalog.inode(held.inode.ino)
        assert record is not None, "what was dropped must not stay open"
        assert (record.version, record.links) == (held.inode.version, held.inode.links)
        if self.on:
            self.entries[held.inode.ino] = held
        return self.on

    def take(self, ino: int, *, even_open: bool) -> "Taken | bool":
        if ino not in self.entries:
            return False
        handles = [handle for handle, of in self.handles.items() if of == ino]
        if handles and not even_open:
            return True
        held = self.entries.pop(ino)
        for handle in handles:
            del self.handles[handle]
        opens, first = self.noted.pop(ino, (0, 0))
        since = ObjectOpens(ino, opens, first, 1, 1000 * opens, time.time_ns() if opens else 0)
        return Taken(held.backing_id, handles, since, read=True)

    def has(self, ino: int) -> bool:
        return ino in self.entries

    def adopt(self, taken: Taken, held: OpenObject) -> None:
        self.adopted.update(dict.fromkeys(taken.handles, held))

    def close(self, backing_id: int) -> None:
        self.world.backings.release(backing_id)

    def inode_of(self, handle: int) -> int:
        return self.handles.get(handle, 0)

    def opens(self) -> list[ObjectOpens]:
        noted, self.noted = self.noted, {}
        now = time.time_ns()
        return [
            ObjectOpens(ino, opens, first, 1, 1000, now) for ino, (opens, first) in noted.items()
        ]

    def turn(self, *, on: bool) -> None:
        self.on = on

    def answer_lookups(self, *, on: bool) -> None:
        """The walk looks no names up beside kvfs."""

    def inodes(self, limit: int) -> list[int]:
        return list(self.entries)[:limit]

    def open_inodes(self) -> list[int]:
        return list(dict.fromkeys(self.handles.values()))

    def surplus(self) -> int:
        closed = (ino for ino in self.entries if ino not in self.handles.values())
        return next(closed, 0) if len(self.entries) == 6 else 0

    async def used(self) -> None:
        while not self.noted:  # noqa: ASYNC110 (the walk's clock is not a real one)
            await trio.sleep(0.01)
