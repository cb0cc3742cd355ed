"""The second tries of opens: after ESTALE the kernel looks the name up again, and opens it.

Contract: synchronous. A program never sees the first ESTALE of an open, but it would see a second
one. So `refused` tells whether an open is of the inode that the thread's lookup has found since:
the open is answered as a miss then. An NFS server that opens by a handle looks no name up, and its
clients need ESTALE.
"""

import time

LATE = 100_000_000  # ns from ESTALE to the second one at most: usually some 5 ms
MANY = 1024  # threads that are remembered


class SecondTries:
    """The threads whose last open got ESTALE: when, in monotonic ns, and what they found since."""

    def __init__(self) -> None:
        self._refused: dict[int, tuple[int, int]] = {}

    def refused(self, thread: int, ino: int) -> bool:
        """Note that an open gets ESTALE. Return whether it was the second try of one open."""
        now = time.monotonic_ns()
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
