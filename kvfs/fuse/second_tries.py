"""The second tries of opens: after ESTALE the kernel looks the name up again, and opens it.

Contract: synchronous. A program never sees the first ESTALE of an open, but it would see a second
one. So `refused` tells whether an open is of the inode that the thread's lookup has found since:
the open is answered as a miss then. The daemon before this one may have refused any thread, so
right after a takeover each stale open counts as a second try. Not for NFS servers: they open by
handles, and their clients need ESTALE.
"""

import time

LATE = 100_000_000  # ns from ESTALE to the second one at most: usually some 5 ms
AFTER_TAKEOVER = 1_000_000_000  # ns: requests have waited for this daemon
MANY = 1024  # threads that are remembered


class SecondTries:
    """The threads whose last open got ESTALE: when, in monotonic ns, and what they found since."""

    def __init__(self) -> None:
        self._refused: dict[int, tuple[int, int]] = {}
        self._takeover_until = 0

    def takes_over(self) -> None:
        """Note that this daemon begins to answer for one that died."""
        self._takeover_until = time.monotonic_ns() + AFTER_TAKEOVER

    def refused(self, thread: int, ino: int) -> bool:
        """Note that an open gets ESTALE. Return whether it was the second try of one open."""
        now = time.monotonic_ns()
        if now < self._takeover_until:
            return True
        before, found = self._refused.pop(thread, (0, 0))
        if found == ino and now - before <= LATE:
            return True
        self._refused[thread] = now, 0
        if len(self._refused) > MANY:
            del self._refused[next(iter(self._refused))]
        return False

    def found(self, thread: int, ino: int) -> None:
        """Note what a thread's lookup has found; 0: nothing, so its open ends."""
        if (before := self._refused.pop(thread, None)) is not None and ino:
            self._refused[thread] = before[0], ino
