"""Policies that forget evicted entries: FIFO, LRU, BIP, SIEVE, LFU and Never.

Contract: `kvfs.eviction.policy`. None needs a capacity. An entry takes about 130 bytes, with SIEVE
150, with LFU 240.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain


class Fifo:
    """First in, first out: the oldest entry goes first, however often it was used.

    It is also the order of `ttl`, where the oldest write expires first; the owner decides when an
    entry is too old.
    """

    __slots__ = ("_queue", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._queue: OrderedDict[int, int] = OrderedDict()  # the next victim first

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:  # noqa: ARG002 (the protocol's)
        self._queue[key] = value
        self._queue.move_to_end(key)

    def touch(self, key: int) -> int | None:
        return self._queue.get(key)

    def value(self, key: int) -> int | None:
        return self._queue.get(key)

    def discard(self, key: int) -> int | None:
        return self._queue.pop(key, None)

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:  # noqa: ARG002
        return self._queue.popitem(last=False) if self._queue else None

    def put_back(self, key: int, value: int) -> None:
        self._queue[key] = value
        self._queue.move_to_end(key, last=False)

    def __contains__(self, key: object) -> bool:
        return key in self._queue

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue)


class Lru(Fifo):
    """Least recently used: the entry with the oldest use goes first."""

    __slots__ = ()

    def touch(self, key: int) -> int | None:
        value = self._queue.get(key)
        if value is not None:
            self._queue.move_to_end(key)
        return value


class Bimodal(Lru):
    """LRU with bimodal insertion: a new entry is the next victim, except for one in 32.

    BIP, from M. K. Qureshi et al., "Adaptive Insertion Policies for High Performance Caching", ISCA
    2007, with their 1/32. A part of a working set that is larger than the cache stays, while LRU
    loses all. One in 32 is counted, not drawn, so that a run can be repeated.
    """

    __slots__ = ("_count",)
    ONE_IN = 32

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._count = 0

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:  # noqa: ARG002
        self._queue[key] = value
        self._count += 1
        self._queue.move_to_end(key, last=not self._count % self.ONE_IN)


class Never(Fifo):
    """Never: no entry goes."""

    __slots__ = ()

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:  # noqa: ARG002
        return None


class TwoQueues:
    """Entries in two queues, each with its next victim first. No key is in both."""

    __slots__ = ("_first", "_second", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._first: OrderedDict[int, int] = OrderedDict()
        self._second: OrderedDict[int, int] = OrderedDict()

    def value(self, key: int) -> int | None:
        value = self._first.get(key)
        return self._second.get(key) if value is None else value

    def discard(self, key: int) -> int | None:
        value = self._first.pop(key, None)
        return self._second.pop(key, None) if value is None else value

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def __iter__(self) -> Iterator[int]:
        return chain(self._first, self._second)


class Sieve(TwoQueues):
    """SIEVE: a queue, one bit for each entry, and a hand that moves from old to new.

    From Y. Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024. The first queue has the entries
    ahead of the hand, the second those behind it. So the hand needs no search in the middle of a
    list for an entry that it spares; the order is the same.
    """

    __slots__ = ("_visited",)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._visited: set[int] = set()

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:  # noqa: ARG002
        self.discard(key)
        self._first[key] = value

    def touch(self, key: int) -> int | None:
        value = self.value(key)
        if value is not None:
            self._visited.add(key)
        return value

    def discard(self, key: int) -> int | None:
        self._visited.discard(key)
        value = self._first.pop(key, None)
        if value is None:
            return self._second.pop(key, None)
        if not self._first:
            self._first, self._second = self._second, self._first
        return value

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:  # noqa: ARG002
        visited = self._visited
        while self._first:
            key, value = self._first.popitem(last=False)
            spared = key in visited
            if spared:
                visited.remove(key)
                self._second[key] = value
            if not self._first:  # past the youngest, the hand begins anew at the oldest
                self._first, self._second = self._second, self._first
            if not spared:
                return key, value
        return None

    def put_back(self, key: int, value: int) -> None:
        self._first[key] = value
        self._first.move_to_end(key, last=False)


class _Frequency:
    """The entries that were used `count` times, between those used less and those used more."""

    __slots__ = ("count", "less", "more", "queue")

    def __init__(self, count: int) -> None:
        self.count = count
        self.queue: OrderedDict[int, int] = OrderedDict()
        self.less = self
        self.more = self

    def after(self, count: int) -> "_Frequency":
        """Return the next frequency; make it if it is another than `count`."""
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
    """LFU: the entry used least often goes first; of equals, the first to reach that count.

    K. Shah, A. Mitra and D. Matani, "An O(1) algorithm for implementing the LFU cache eviction
    scheme", 2010: a list of frequencies, each with a queue. The policy forgets an entry's frequency
    when the entry goes, as libcachesim does.
    """

    __slots__ = ("_head", "_of", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._head = _Frequency(0)  # of a ring; its queue holds only entries that were put back
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
        """Return a victim, and forget its frequency: its next use is its first."""
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
