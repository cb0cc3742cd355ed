"""Policies that keep one queue: FIFO, LRU, BIP, and the one that lets nothing go.

Contract: `kvfs.eviction.policy`. They remember nothing of what has gone, and need no capacity.
About 130 bytes for each entry.
"""

from collections import OrderedDict
from collections.abc import Iterator


class Fifo:
    """First in, first out: what was added first goes first, however often it was used.

    It is also the order of `ttl`, where the oldest write expires first: when an entry is too old is
    the owner's to say.
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
    """Least recently used."""

    __slots__ = ()

    def touch(self, key: int) -> int | None:
        value = self._queue.get(key)
        if value is not None:
            self._queue.move_to_end(key)
        return value


class Bimodal(Lru):
    """LRU with bimodal insertion: a new entry is the next victim, but for one in 32.

    BIP, from M. K. Qureshi et al., "Adaptive Insertion Policies for High Performance Caching",
    ISCA 2007, with their 1/32. Of a working set that is larger than the cache a part stays, where
    LRU loses all. One in 32 is counted, not drawn, so that a run can be repeated.
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
    """Nothing goes."""

    __slots__ = ()

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:  # noqa: ARG002
        return None
