"""SIEVE: a queue, one bit for each entry, and a hand that moves from old to new.

From Y. Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024. Contract: `kvfs.eviction.policy`.
The queue is kept as two, what the hand has passed and what is ahead of it, so that what the hand
spares need not be found in the middle of a list: it is the same order. About 150 bytes an entry.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain


class Sieve:
    """The order of one cache; needs no capacity."""

    __slots__ = ("_ahead", "_passed", "_visited", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._passed: OrderedDict[int, int] = OrderedDict()  # oldest first, as below
        self._ahead: OrderedDict[int, int] = OrderedDict()  # the hand is at its first
        self._visited: set[int] = set()

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:  # noqa: ARG002
        self.discard(key)
        self._ahead[key] = value

    def touch(self, key: int) -> int | None:
        value = self.value(key)
        if value is not None:
            self._visited.add(key)
        return value

    def value(self, key: int) -> int | None:
        value = self._ahead.get(key)
        return self._passed.get(key) if value is None else value

    def discard(self, key: int) -> int | None:
        self._visited.discard(key)
        value = self._ahead.pop(key, None)
        if value is None:
            return self._passed.pop(key, None)
        if not self._ahead:
            self._ahead, self._passed = self._passed, self._ahead
        return value

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:  # noqa: ARG002
        visited = self._visited
        while self._ahead:
            key, value = self._ahead.popitem(last=False)
            spared = key in visited
            if spared:
                visited.remove(key)
                self._passed[key] = value
            if not self._ahead:  # past the youngest, the hand begins anew at the oldest
                self._ahead, self._passed = self._passed, self._ahead
            if not spared:
                return key, value
        return None

    def put_back(self, key: int, value: int) -> None:
        self._ahead[key] = value
        self._ahead.move_to_end(key, last=False)

    def __contains__(self, key: object) -> bool:
        return key in self._ahead or key in self._passed

    def __len__(self) -> int:
        return len(self._ahead) + len(self._passed)

    def __iter__(self) -> Iterator[int]:
        return chain(self._ahead, self._passed)
