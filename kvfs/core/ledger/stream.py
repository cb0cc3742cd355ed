"""An object that is read while it comes, from a bucket or a node: which of its chunks are here.

Contract: `bytes_here` returns once the wanted bytes are in the file, and each chunk of them is
verified. Those bytes do not change until the file is replaced or closed. A reader that waits makes
its chunk come next. A stream ends once: complete or with a problem. After a problem its file is
closed, and each wait fails. The users of a stream are the open object that reads it and the fetch
that fills it. When the last user leaves, the file is closed. Not for the source of the bytes
(`core/bucket`, `core/pool`).
"""

import os
from collections.abc import Callable

import trio

from kvfs.errors import TierError
from kvfs.tiers import Bucket, OtherNodes, Tier


class Stream:
    """`tier` has its file. `want(chunk)` tells the fetch that a reader waits for that chunk."""

    def __init__(self, tier: Tier, size: int, chunk: int, where: Bucket | OtherNodes) -> None:
        """chunk: bytes of each but the last. where: the place that the bytes come from."""
        self.tier = tier
        self.where = where
        self.size = size
        self.fd = -1
        self.want: Callable[[int], None] = _nobody
        self.complete = False
        self.problem: Exception | None = None
        self._chunk = chunk
        self._here: set[int] = set()
        self._changed = trio.Event()
        self._users = 0

    # For the fetch that fills it

    def begin(self, fd: int) -> None:
        """Take over the descriptor of the file to be filled, open for reading."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = fd
        self._here.clear()

    def arrived(self, chunk: int) -> None:
        """Note that a chunk is in the file, and verified."""
        self._here.add(chunk)
        self._wake()

    def end(self, problem: Exception | None) -> None:
        """End the stream. problem: why nothing more will come; None: all bytes are there."""
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

    # For its users

    def join(self) -> None:
        """Add a user."""
        self._users += 1

    def leave(self) -> None:
        """Remove a user; the last one closes the file."""
        self._users -= 1
        if not self._users:
            self._close()

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    async def bytes_here(self, start: int, length: int, patience: float) -> None:
        """Wait until these bytes, as far as the object has them, can be read from `fd`.

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
            raise TierError(f"it cannot be read: {self.problem}") from self.problem
        raise TierError(
            f"it cannot be read: bytes {start} to {end} are not here within {patience:.0f} s"
        )


def _nobody(chunk: int) -> None:
    """Ignore the wish for a chunk: no fetch fills the stream."""
