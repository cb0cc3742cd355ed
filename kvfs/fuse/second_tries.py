"""The second tries of path lookups: after ESTALE the kernel walks the path once more.

Contract: synchronous. A program never sees the first ESTALE of a call with a path, but it would see
a second one. So `refused` tells whether a thread gets ESTALE again before its call has ended: the
answer is a miss then. The thread may have looked nothing up meanwhile, because it waited for the
lookup of another thread. The walk ends at a file, or at a name that is nowhere. The kernel may look
that name up once more, but if the thread looks up another one, its call has ended. So it has with
an open. A call that ended otherwise may cost a miss within LATE. The daemon before this one may
have refused any thread, so right after a takeover each stale inode counts as a second try. Not for
NFS servers: they use handles, and their clients need ESTALE.
"""

import time
from typing import NamedTuple

LATE = 1_000_000_000  # ns from ESTALE to the second one at most: usually some 5 ms
MANY = 1024  # threads that are remembered


class _Call(NamedTuple):
    """A call that got ESTALE `since`, in monotonic ns; its walk has ended at `end`, if anywhere."""

    since: int
    end: tuple[int, bytes] | None = None


class SecondTries:
    """`threads`: those whose call got ESTALE."""

    def __init__(self) -> None:
        self.threads: dict[int, _Call] = {}
        self._takeover_until = 0

    def takes_over(self) -> None:
        """Note that this daemon begins to answer for one that died."""
        self._takeover_until = time.monotonic_ns() + LATE

    def refused(self, thread: int) -> bool:
        """Note that an operation gets ESTALE. Return whether it was part of a second try."""
        now = time.monotonic_ns()
        before = self.threads.pop(thread, None)
        if (before is not None and now - before.since < LATE) or now < self._takeover_until:
            return True
        self.threads[thread] = _Call(now)
        if len(self.threads) > MANY:
            del self.threads[next(iter(self.threads))]
        return False

    def opened(self, thread: int) -> None:
        """Note that an open of a thread has succeeded."""
        self.threads.pop(thread, None)

    def looks_up(self, thread: int, parent: int, name: bytes) -> None:
        """Note that a thread begins to look a name up."""
        call = self.threads.get(thread)
        if call is not None and call.end not in {None, (parent, name)}:
            del self.threads[thread]

    def walked(self, thread: int, parent: int, name: bytes) -> None:
        """Note that a thread has found a file, or nothing: a path goes on at neither."""
        if (call := self.threads.get(thread)) is not None:
            self.threads[thread] = call._replace(end=(parent, name))
