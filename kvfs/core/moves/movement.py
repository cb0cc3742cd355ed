"""The interface of movements to the dispatcher, and the queue of requested movements."""

from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Protocol

from kvfs.catalog import Inode

QUEUE_MAX = 65536  # movements that wait; the queue forgets more: they are optional


class Movement(Protocol):
    """One kind of movement. Logs call it `name`."""

    @property
    def name(self) -> str: ...

    async def move(self, inodes: list[Inode]) -> None:
        """Work on sealed objects that no program writes. If it raises, it has changed nothing."""


class MovementQueue:
    """The movements that kvfs was asked for, in the order of the requests."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: OrderedDict[tuple[Movement, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, movement: Movement, ino: int) -> None:
        if len(self._waiting) < QUEUE_MAX:
            self._waiting[movement, ino] = None
            self._wake()

    def take(self, busy: Container[int]) -> tuple[Movement, int] | None:
        """The first one whose inode is not busy."""
        for movement, ino in self._waiting:
            if ino not in busy:
                del self._waiting[movement, ino]
                return movement, ino
        return None
