"""The interface through which the dispatcher runs movements, and the queue of requested ones."""

from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Protocol

from kvfs.catalog import Inode

QUEUE_MAX = 65536  # movements that wait; a full queue ignores more of them: they are optional


class Movement(Protocol):
    """One kind of movement, such as demotion. Logs call it `name`."""

    @property
    def name(self) -> str: ...

    async def move(self, inodes: list[Inode]) -> None:
        """Move sealed objects that no program writes. If `move` raises, it has changed nothing."""


class MovementQueue:
    """The movements that other modules have requested, in the order of the requests."""

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
        """Take the first movement whose inode is not busy; None if there is none."""
        for movement, ino in self._waiting:
            if ino not in busy:
                del self._waiting[movement, ino]
                return movement, ino
        return None
