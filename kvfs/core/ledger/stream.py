"""An object that is read while it comes from the bucket: which of its chunks are here.

Contract: `bytes_here` returns when the bytes that it was asked for are in the file, each chunk of
them proven; until the file is replaced or closed nothing there changes any more. Whoever waits
makes its chunk come next. A stream ends once, well or with a problem: then its file is closed, and
all that is asked for fails. Its users are the open object that is read from it and the fetch that
fills it; with the last one the file is closed. Not for where the bytes come from (`core/bucket`).
"""

import os
from collections.abc import Callable

import trio

from kvfs.errors import TierError
from kvfs.tiers import Tier


class Stream:
    """`tier` is where its file is. `want(chunk)` says that somebody waits for that one."""

    def __init__(self, name: str, tier: Tier, size: int, chunk: int) -> None:
        """chunk: bytes of each but the last."""
        self.name = name
        self.tier = tier
        self.size = size
        self.fd = -1
        self.want: Callable[[int], None] = _nobody
        self.complete = False
        self.problem: Exception | None = None
        self._chunk = chunk
        self._here: set[int] = set()
        self._changed = trio.Event()
        self._users = 0

    # Who fills it

    def begin(self, fd: int) -> None:
        """A file to be filled, open for reading, which is the stream's from now on."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = fd
        self._here.clear()

    def arrived(self, chunk: int) -> None:
        """It is in the file, and proven."""
        self._here.add(chunk)
        self._wake()

    def end(self, problem: Exception | None) -> None:
        """All is there, or nothing more will come."""
        self.want = _nobody
        self.problem = problem
        self.complete = problem is None
        if problem is None:
            self._here.update(range(-(-self.size // self._chunk)))
        else:
            self._close()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    # Who reads it

    def join(self) -> None:
        """One user more."""
        self._users += 1

    def leave(self) -> None:
        """One user less."""
        self._users -= 1
        if not self._users:
            self._close()

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    async def bytes_here(self, start: int, length: int, patience: float) -> None:
        """Wait until these bytes can be read from `fd`: what stands before the end of the object.

        patience: seconds. Raises TierError if they cannot be had, or not in time.
        """
        if self.complete:
            return
        end = min(start + length, self.size)
        numbers = range(start // self._chunk, -(-end // self._chunk)) if start < end else range(0)
        with trio.move_on_after(patience):
            while self.problem is None:
                missing = [number for number in numbers if number not in self._here]
                if not missing:
                    return
                self.want(missing[0])
                await self._changed.wait()
        if self.problem is not None:
            raise TierError(f"{self.name} cannot be read: {self.problem}") from self.problem
        raise TierError(
            f"{self.name} cannot be read: bytes {start} to {end} are not here within "
            f"{patience:.0f} s"
        )


def _nobody(chunk: int) -> None:
    """Nobody fills it."""
