"""What a namespace may open and move in a second.

Contract: bytes do not pass the daemon, so an object is charged whole: read when it is opened,
written when it is closed, and there its reader or writer waits, never in the middle of a file. Not
at the create: the kernel holds the directory until that is answered, against everybody. Not for
what namespaces compete for together (`kvfs.fairness.shares`).
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

    async def take(self, size: int, *, written: bool) -> None:
        """Wait until an object of so many bytes may pass, read or written, and charge it."""
        for bucket, cost in ((self._opens[written], 1), (self._bytes[written], size)):
            if not bucket.try_take(cost):
                await bucket.take(cost)
