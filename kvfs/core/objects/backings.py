"""What the life of objects needs of those who have the kernel and the threads.

Contract: both protocols are kept by others, one by the kernel's face and one by `Objects`; the
tests have their own. Not for deciding which file backs an object.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from kvfs.tiers import Tier

T = TypeVar("T")


class Backings(Protocol):
    """Who lets the kernel read and write a backing file by itself."""

    def register(self, fd: int) -> int:
        """An id > 0 for the open file, or 0 if the daemon must serve its bytes."""
        ...

    def release(self, backing_id: int) -> None:
        """No handle uses the id any more."""
        ...


class Io(Protocol):
    """Runs a tier's system call where it may take its time, but not for ever."""

    async def __call__(self, tier: Tier, call: Callable[[], T]) -> T:
        """Raises what the call raises, and OverdueError."""
        ...
