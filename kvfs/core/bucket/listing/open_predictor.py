"""Predicts whether a thread opens the object that it looks up: then only the open asks.

Contract: `expected` guesses whether an open comes next, from the thread's last lookup of such an
object. If the open does not come within PAUSE, `missed` is called with the inode, once. The
kernel's lookup does not say what it is for. A question at the lookup, and another one at the open,
took half of the time of a cold read. 8 readers of 1 MiB had 138 MB/s, and 289 with `s3_shared=off`,
which does not ask (one run by hand beside other work, 2 CPUs). `missed` raises nothing. Not for the
questions to the bucket.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import trio

from kvfs.core.shared_work import start_task

PAUSE = 0.1  # s; an open follows within tens of microseconds, unless the machine is busy
REMEMBERED = 4096  # threads


class _Thread:
    """The last lookup of a thread, and whether its open has come."""

    def __init__(self) -> None:
        self.ino = 0
        self.opened = False


class OpenPredictor:
    """Predicts the opens on one mount."""

    def __init__(self, missed: Callable[[int], None]) -> None:
        self._missed = missed
        self._threads: OrderedDict[int, _Thread] = OrderedDict()
        self._expected: set[tuple[int, int]] = set()  # (thread, inode) whose open is to come

    def expected(self, thread: int, ino: int) -> bool:
        """Whether a thread is about to open the object that it looks up in the bucket."""
        found = self._threads.pop(thread, None) or _Thread()
        expected = found.opened
        found.ino, found.opened = ino, False
        self._threads[thread] = found
        if len(self._threads) > REMEMBERED:
            self._threads.popitem(last=False)
        if expected and (thread, ino) not in self._expected:
            self._expected.add((thread, ino))
            start_task("a look-up ahead", partial(self._wait, thread, ino))
        return expected

    def opened(self, thread: int, ino: int) -> None:
        """Note an open."""
        found = self._threads.get(thread)
        if found is not None and found.ino == ino:
            found.opened = True
            self._expected.discard((thread, ino))

    async def _wait(self, thread: int, ino: int) -> None:
        await trio.sleep(PAUSE)
        if (thread, ino) in self._expected:
            self._expected.remove((thread, ino))
            self._missed(ino)
