"""What a namespace may open and move in a second.

Contract: bytes do not pass the daemon, so an object is charged whole: read when it is opened,
written when it is closed. Who is over a limit waits at the next open, never in the middle of a
file. Without limits `passes` is all that is asked. Not for what namespaces compete for together
(`kvfs.fairness.shares`).
"""

from kvfs.fairness.token_bucket import LATE, TokenBucket
from kvfs.settings import Settings


class Limits:
    """`on` says whether there are any."""

    def __init__(self, settings: Settings) -> None:
        self._opens = {write: TokenBucket(0, LATE) for write in (False, True)}
        self._bytes = {write: TokenBucket(0, LATE) for write in (False, True)}
        self.change(settings)

    def change(self, settings: Settings) -> None:
        """Those who wait go on at the new rates."""
        self._opens[False].rate, self._opens[True].rate = settings.read_iops, settings.write_iops
        self._bytes[False].rate, self._bytes[True].rate = settings.read_bytes, settings.write_bytes
        self.on = any(b.rate for b in (*self._opens.values(), *self._bytes.values()))

    async def open(self, size: int, *, writable: bool) -> None:
        """Wait for an open of an object of so many bytes; one to be written pays at its close."""
        opens, moved = self._opens[writable], self._bytes[writable]
        if not opens.try_take(1):
            await opens.take(1)
        cost = 0 if writable else size
        if not moved.try_take(cost):
            await moved.take(cost)

    def written(self, size: int) -> None:
        """A writer has closed what it wrote."""
        self._bytes[True].charge(size)
