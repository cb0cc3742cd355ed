"""Names that programs here have unlinked, renamed or rewritten, and the index may still have.

Contract: synchronous. `hides` says whether an object of the index would bring such a name back. A
change may reach the index 20 ms late, or much later if the index is down. After the index has lost
its data, other nodes may announce such an object again, so this node tells all of them once more
(`recent`). Times of modification tell an earlier object from one that a program has written since.
At most REMEMBERED names, for an hour.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator

from kvfs.pool.index import GONE_S, Unlinked
from kvfs.s3.facts import Facts

REMEMBERED = 1 << 16  # names; 26 MiB with keys of 50 bytes


class Leaving:
    """The keys of objects that change, leave, or have left."""

    def __init__(self) -> None:
        self._pending: dict[str, int] = {}  # keys, and the inodes that had them
        # By key, the oldest first: the latest object that left, and when: s of time.monotonic().
        self._left: OrderedDict[str, tuple[Unlinked, float]] = OrderedDict()

    def changes(self, key: str, ino: int) -> None:
        """Note that an object with this key may lose it."""
        self._pending[key] = ino

    def stays(self, key: str) -> None:
        """Note that the key stays with other nodes, or has an object again."""
        self._pending.pop(key, None)

    def announced(self, key: str, facts: Facts) -> None:
        """Note that the index has an object of this key, from here: perhaps one that left before.

        Earlier objects are remembered while a later one is there: all nodes may evict that one.
        """
        left = self._left.get(key)
        if left is not None and facts.mtime_ns <= left[0].mtime_ns:
            del self._left[key]

    def told(self, indexed: Unlinked, ino: int, *, gone: bool) -> None:
        """Note that the index has learned of a change. gone: `indexed` was unlinked there."""
        key = indexed.key
        if self._pending.get(key) == ino:
            del self._pending[key]
        if not gone:
            return
        before, _ = self._left.pop(key, (indexed, 0.0))
        latest = max(before, indexed, key=lambda one: one.mtime_ns)
        self._left[key] = latest, time.monotonic()
        if len(self._left) > REMEMBERED:
            self._left.popitem(last=False)

    def hides(self, key: str, facts: Facts) -> bool:
        """Whether an object of the index is one that left, or an earlier one."""
        if key in self._pending:
            return True
        left, when = self._left.get(key, (None, 0.0))
        if left is None or time.monotonic() - when > GONE_S:
            return False
        return facts.digest == left.digest or facts.mtime_ns <= left.mtime_ns

    def recent(self) -> Iterator[Unlinked]:
        """The objects that left, the latest first."""
        for left, when in reversed(self._left.values()):
            if time.monotonic() - when > GONE_S:
                return
            yield left
