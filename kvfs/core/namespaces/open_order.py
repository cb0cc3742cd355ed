"""Guesses which block follows which in a prompt from the opens of a process.

Callers ask only about files whose names show a connector's block, but not its predecessor.

Contract: a block follows another if the process opened that one just before it twice: at the store
and at a read, or at two reads. Once is not enough. The next block that a process stores may be of
another prompt, and in a chain of all blocks the newest would go first. A wrong guess only harms the
order of eviction. Keys are those of policies. A remembered pair takes about 200 bytes.
"""

from collections import OrderedDict
from contextvars import ContextVar

import trio

PAUSE = 1.0  # s between two opens of one batch at most; no measurement behind it
PROCESSES = 1024
PAIRS = 1 << 16

caller: ContextVar[int] = ContextVar("caller", default=0)  # process on whose behalf the kernel asks


class OpenOrder:
    """The guesses for one namespace."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, tuple[int, float]] = OrderedDict()  # by process: key, when
        self._before: OrderedDict[int, int] = OrderedDict()  # key -> the key before it, seen once

    def follows(self, key: int) -> int:
        """Note an open of the calling process; return the key that the block follows, or 0."""
        process = caller.get()
        if not process:
            return 0
        now = trio.current_time()
        last, when = self._last.pop(process, (0, 0.0))
        self._last[process] = key, now
        if len(self._last) > PROCESSES:
            self._last.popitem(last=False)
        if not last or last == key or now - when > PAUSE:
            return 0
        if self._before.pop(key, 0) == last:
            return last
        self._before[key] = last
        if len(self._before) > PAIRS:
            self._before.popitem(last=False)
        return 0
