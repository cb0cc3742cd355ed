"""File handles: small numbers for open objects.

Contract: a number is a slot, free again after its release, so that a table of fixed slots beside
the session can say what is open (the C part binds backing ids to the same numbers).
"""

import heapq
from typing import NamedTuple

from kvfs.core.residency import OpenObject
from kvfs.errors import TooManyOpenError


class Handle(NamedTuple):
    """An open object, and in which way it was opened."""

    held: OpenObject
    writable: bool


class Handles:
    """Raises TooManyOpenError beyond `slots` handles."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._taken: dict[int, Handle] = {}
        self._free: list[int] = []
        self._next = 1  # 0 is what some tools print for "none"

    def __len__(self) -> int:
        return len(self._taken)

    def add(self, held: OpenObject, *, writable: bool) -> int:
        if self._free:
            slot = heapq.heappop(self._free)
        elif self._next < self._slots:
            slot, self._next = self._next, self._next + 1
        else:
            raise TooManyOpenError(f"all {self._slots - 1} file handles are in use")
        self._taken[slot] = Handle(held, writable)
        return slot

    def __getitem__(self, slot: int) -> Handle:
        return self._taken[slot]

    def remove(self, slot: int) -> Handle:
        handle = self._taken.pop(slot)
        heapq.heappush(self._free, slot)
        return handle
