"""LFU: the entry that was used least often goes first, of several the one that came to that first.

K. Shah, A. Mitra and D. Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme",
2010: a list of frequencies, each with a queue. Contract: `kvfs.eviction.policy`. A frequency is
forgotten when its entry goes, as libcachesim does it. About 240 bytes an entry.
"""

from collections import OrderedDict
from collections.abc import Iterator


class _Frequency:
    """The entries that were used `count` times, between those used less and those used more."""

    __slots__ = ("count", "less", "more", "queue")

    def __init__(self, count: int) -> None:
        self.count = count
        self.queue: OrderedDict[int, int] = OrderedDict()
        self.less = self
        self.more = self

    def after(self, count: int) -> "_Frequency":
        """The next frequency, which is made if it is another than `count`."""
        if self.more.count == count:
            return self.more
        new = _Frequency(count)
        new.less, new.more = self, self.more
        self.more.less = new
        self.more = new
        return new

    def unlink(self) -> None:
        self.less.more, self.more.less = self.more, self.less


class Lfu:
    """The order of one cache; needs no capacity."""

    __slots__ = ("_head", "_of", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._head = _Frequency(0)  # of a ring; its queue holds only what was put back
        self._of: dict[int, _Frequency] = {}

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:  # noqa: ARG002
        self.discard(key)
        self._insert(self._head.after(1), key, value)

    def touch(self, key: int) -> int | None:
        old = self._of.get(key)
        if old is None:
            return None
        value = old.queue.pop(key)
        self._insert(old.after(old.count + 1), key, value)
        self._tidy(old)
        return value

    def value(self, key: int) -> int | None:
        frequency = self._of.get(key)
        return None if frequency is None else frequency.queue[key]

    def discard(self, key: int) -> int | None:
        frequency = self._of.pop(key, None)
        if frequency is None:
            return None
        value = frequency.queue.pop(key)
        self._tidy(frequency)
        return value

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:  # noqa: ARG002
        least = self._head if self._head.queue else self._head.more
        if not least.queue:
            return None
        key, value = least.queue.popitem(last=False)
        del self._of[key]
        self._tidy(least)
        return key, value

    def put_back(self, key: int, value: int) -> None:
        """How often it was used is forgotten: its next use is its first."""
        self._insert(self._head, key, value)
        self._head.queue.move_to_end(key, last=False)

    def _insert(self, frequency: _Frequency, key: int, value: int) -> None:
        frequency.queue[key] = value
        self._of[key] = frequency

    def _tidy(self, frequency: _Frequency) -> None:
        if not frequency.queue and frequency is not self._head:
            frequency.unlink()

    def __contains__(self, key: object) -> bool:
        return key in self._of

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[int]:
        frequency = self._head
        yield from frequency.queue
        while (frequency := frequency.more) is not self._head:
            yield from frequency.queue
