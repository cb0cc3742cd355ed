"""ARC: recent and frequent entries, and a history of each that moves the border between them.

N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. The
names are the paper's: T1 was used once, T2 more often, B1 and B2 are what went from them, p is the
size that T1 ought to have. Contract: `kvfs.eviction.policy`. The history has as many keys as there
are entries.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain


class Arc:
    """The order of one cache."""

    __slots__ = ("_b1", "_b2", "_p", "_returning", "_t1", "_t2", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._t1: OrderedDict[int, int] = OrderedDict()  # least recently used first, as all
        self._t2: OrderedDict[int, int] = OrderedDict()
        self._b1: OrderedDict[int, None] = OrderedDict()
        self._b2: OrderedDict[int, None] = OrderedDict()
        self._p = 0.0
        self._returning: int | None = None  # was in the history when room was made for it

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:  # noqa: ARG002
        self.discard(key)
        if key == self._returning or self._learn(key):
            self._t2[key] = value
        else:
            self._t1[key] = value
        self._returning = None

    def touch(self, key: int) -> int | None:
        value = self._t2.get(key)
        if value is not None:
            self._t2.move_to_end(key)
        elif (value := self._t1.pop(key, None)) is not None:
            self._t2[key] = value
        return value

    def value(self, key: int) -> int | None:
        value = self._t1.get(key)
        return self._t2.get(key) if value is None else value

    def discard(self, key: int) -> int | None:
        value = self._t1.pop(key, None)
        return self._t2.pop(key, None) if value is None else value

    def _learn(self, key: int) -> bool:
        """Whether the key is in the history; then it leaves it, and p has moved."""
        b1, b2 = self._b1, self._b2
        if key in b1:
            self._p = min(self._p + max(len(b2) / len(b1), 1), self.capacity)
            del b1[key]
        elif key in b2:
            self._p = max(self._p - max(len(b1) / len(b2), 1), 0)
            del b2[key]
        else:
            return False
        return True

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:
        if not self._t1 and not self._t2:
            return None
        from_b2 = incoming in self._b2
        if incoming is not None and (incoming == self._returning or self._learn(incoming)):
            self._returning = incoming
            return self._replace(from_b2=from_b2)
        t1, b1, b2 = self._t1, self._b1, self._b2
        while b1 and len(t1) + len(b1) >= self.capacity:
            b1.popitem(last=False)
        if len(t1) >= self.capacity:
            return t1.popitem(last=False)  # remembered nowhere: there is no room in B1
        while b2 and len(self) + len(b1) + len(b2) >= 2 * self.capacity:
            b2.popitem(last=False)
        return self._replace(from_b2=False)

    def _replace(self, *, from_b2: bool) -> tuple[int, int]:
        t1 = self._t1
        if t1 and (len(t1) > self._p or (from_b2 and len(t1) == self._p) or not self._t2):
            key, value = t1.popitem(last=False)
            self._b1[key] = None
        else:
            key, value = self._t2.popitem(last=False)
            self._b2[key] = None
        return key, value

    def put_back(self, key: int, value: int) -> None:
        queue = self._t2 if self._b2.pop(key, 0) is None else self._t1
        self._b1.pop(key, None)
        queue[key] = value
        queue.move_to_end(key, last=False)

    def __contains__(self, key: object) -> bool:
        return key in self._t1 or key in self._t2

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def __iter__(self) -> Iterator[int]:
        return chain(self._t1, self._t2)
