"""The second tries of path lookups: after ESTALE the kernel walks the path once more.

Contract: synchronous. A program never sees the first ESTALE of a call with a path, but it would see
a second one. So `refused` tells whether a thread gets ESTALE again before its call has ended: the
answer is a miss then. The thread may have looked nothing up meanwhile, because it waited for the
lookup of another thread. Each operation of the thread `begins` and `ends`: the kernel sends the
next one at once, but an operation may take seconds.

The walk ends at a file, or at a name that is nowhere. The kernel looks that name up once or twice.
A further lookup, or one of another name, belongs to another call. So does all after an open.
link(2) and rename(2) walk two paths. A call that ended otherwise may cost a miss, if the thread's
next operation begins within LATE. The daemon before this one may have refused any thread, so in a
pool each stale inode right after a takeover counts as a second try. Not for NFS servers: they use
handles, and their clients need ESTALE.
"""

import time
from typing import NamedTuple

LATE = 1_000_000_000  # ns between two operations of a call: usually less than 1 ms
MANY = 1024  # threads that are remembered
LOOKUPS = 2  # of the last name of a path: of the inode that the kernel knew, and anew


class _Call(NamedTuple):
    """A call of so many paths that got ESTALE. Its last operation began or ended `at`, in ns.

    ends: where its walks have ended, in directory and name, once for each lookup.
    """

    at: int
    paths: int
    ends: tuple[tuple[int, bytes], ...] = ()


class SecondTries:
    """`threads`: those whose call got ESTALE."""

    def __init__(self) -> None:
        self.threads: dict[int, _Call] = {}
        self._takeover_until = 0

    def takes_over(self) -> None:
        """Note that this daemon begins to answer for one that died."""
        self._takeover_until = time.monotonic_ns() + LATE

    def begins(self, thread: int) -> None:
        """Note that an operation of a thread begins."""
        if (call := self.threads.get(thread)) is not None and self.ends(thread) - call.at >= LATE:
            del self.threads[thread]

    def ends(self, thread: int) -> int:
        """Note that an operation of a thread has ended. Return the present time."""
        now = time.monotonic_ns()
        if (call := self.threads.get(thread)) is not None:
            self.threads[thread] = call._replace(at=now)
        return now

    def refused(self, thread: int, paths: int = 1) -> bool:
        """Note that an operation gets ESTALE. Return whether it was part of a second try.

        paths: of its call.
        """
        now = time.monotonic_ns()
        if self.threads.pop(thread, None) is not None or now < self._takeover_until:
            return True
        self.threads[thread] = _Call(now, paths)
        if len(self.threads) > MANY:
            del self.threads[next(iter(self.threads))]
        return False

    def opened(self, thread: int) -> None:
        """Note that an open of a thread has succeeded."""
        self.threads.pop(thread, None)

    def looks_up(self, thread: int, parent: int, name: bytes) -> None:
        """Note that a thread begins to look a name up."""
        if (call := self.threads.get(thread)) is None:
            return
        again = call.ends.count((parent, name))
        if again >= LOOKUPS or (not again and len({*call.ends}) >= call.paths):
            del self.threads[thread]

    def walked(self, thread: int, parent: int, name: bytes) -> None:
        """Note that a thread has found a file, or nothing: a path goes on at neither."""
        if (call := self.threads.get(thread)) is not None:
            self.threads[thread] = call._replace(ends=(*call.ends, (parent, name)))
