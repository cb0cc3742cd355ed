"""The marks of the index that this node has seen: programs have unlinked or replaced the objects.

Contract: synchronous. An index that has lost its data has lost its marks, too, and a node that has
not seen a mark announces its object again. `brings_back` recognises this object: it is from before
a mark that was seen here within GONE_S seconds, and the index does not know that mark. A new daemon
has seen none. Not for the names that programs here have taken (`leaving`).
"""

import time
from collections import OrderedDict

from kvfs.pool.index import GONE_S
from kvfs.pool.records import GoneEntry, PoolEntry

REMEMBERED = 1 << 16  # marks, some 200 bytes each


class SeenMarks:
    """The marks that one node has seen lately, by key."""

    def __init__(self) -> None:
        self._latest: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def note(self, key: str, entry: PoolEntry | GoneEntry | None) -> None:
        """Note the mark of an answer of the index, if it has one."""
        mark = entry.gone if isinstance(entry, PoolEntry) else entry
        if mark is None:
            return
        latest = max(mark.mtime_ns, self._latest.get(key, (0, 0.0))[0])
        if isinstance(entry, PoolEntry) and entry.facts.mtime_ns <= mark.mtime_ns == latest:
            latest = entry.facts.mtime_ns - 1  # a program has given the name to it since
        self._latest[key] = latest, time.monotonic()
        self._latest.move_to_end(key)
        if len(self._latest) > REMEMBERED:
            self._latest.popitem(last=False)

    def brings_back(self, key: str, entry: PoolEntry) -> bool:
        """Whether an entry has an object that lost this name before the index lost its data."""
        mtime_ns, seen = self._latest.get(key, (0, 0.0))
        known = 0 if entry.gone is None else entry.gone.mtime_ns
        late = time.monotonic() - seen > GONE_S
        return not late and known < mtime_ns and entry.facts.mtime_ns <= mtime_ns
