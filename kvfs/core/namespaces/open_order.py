"""Which block follows which in a prompt, where no name says it: from how a process opens files.

Only files that a connector's name shows to be blocks are asked about.

Contract: a block whose predecessor is the same twice, once when it was stored and once when it was
read, or at two readings, is taken for its successor. Once is not enough: what a process stores next
may be of another prompt, and a chain of everything would make the newest go first. Wrong guesses do
no harm but to the order of eviction. Keys are those of policies. About 200 bytes a remembered pair.
"""

from collections import OrderedDict
from contextvars import ContextVar

import trio

PAUSE = 1.0  # s between two opens of one batch at most; no measurement behind it
PROCESSES = 1024
PAIRS = 1 << 16

caller: ContextVar[int] = ContextVar("caller", default=0)  # process that the kernel asks for


class OpenOrder:
    """One for each namespace."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, tuple[int, float]] = OrderedDict()  # by process: key, when
        self._before: OrderedDict[int, int] = OrderedDict()  # key -> the one before it, once

    def follows(self, key: int) -> int:
        """The calling process opens this one; the key that it follows for sure, or 0."""
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
