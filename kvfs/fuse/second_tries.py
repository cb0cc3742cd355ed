"""The second tries of path lookups: after ESTALE the kernel walks the path once more.

Contract: synchronous. A program never sees the first ESTALE of a call with a path, but it would see
a second one. So `refused` tells whether a thread gets ESTALE again before its call has ended: the
answer is a miss then. The thread may have looked nothing up meanwhile, because it waited for the
lookup of another thread. A call ends with an open, or with a second lookup that finds nothing:
after the first one the kernel may look up once more. A call that ended otherwise may cost a miss
within LATE. The daemon before this one may have refused any thread, so right after a takeover each
stale inode counts as a second try. Not for NFS servers: they use handles, and their clients need
ESTALE.
"""

import time

LATE = 1_000_000_000  # ns from ESTALE to the second one at most: usually some 5 ms
MANY = 1024  # threads that are remembered


class SecondTries:
    """`threads`: those whose call got ESTALE: when, in monotonic ns, and their lookups in vain."""

    def __init__(self) -> None:
        self.threads: dict[int, tuple[int, int]] = {}
        self._takeover_until = 0

    def takes_over(self) -> None:
        """Note that this daemon begins to answer for one that died."""
        self._takeover_until = time.monotonic_ns() + LATE

    def refused(self, thread: int) -> bool:
        """Note that an operation gets ESTALE. Return whether it was part of a second try."""
        now = time.monotonic_ns()
        before, _ = self.threads.pop(thread, (-LATE, 0))
        if now - before < LATE or now < self._takeover_until:
            return True
        self.threads[thread] = now, 0
        if len(self.threads) > MANY:
            del self.threads[next(iter(self.threads))]
        return False

    def opened(self, thread: int) -> None:
        """Note that an open of a thread has succeeded."""
        self.threads.pop(thread, None)

    def found_nothing(self, thread: int) -> None:
        """Note a lookup in vain."""
        if (before := self.threads.pop(thread, None)) is not None and not before[1]:
            self.threads[thread] = before[0], 1
