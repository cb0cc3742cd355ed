"""S3-FIFO: a small queue for what is new, a main one for what was used again, and a history.

J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, with what libcachesim,
which is of the same authors, has by default: a tenth of the capacity is the small queue, 0.9 of it
the history, and two uses take an entry from the small queue to the main one, where it begins
without any use. Contract: `kvfs.eviction.policy`.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

SMALL = 0.1  # of the capacity
HISTORY = 0.9
TO_MAIN = 2  # uses
MOST = 3  # that are counted: two bits


class S3Fifo:
    """The order of one cache."""

    __slots__ = ("_admit", "_history", "_main", "_returning", "_small", "_uses", "capacity")

    def __init__(self, capacity: int, *, admit: bool = False) -> None:
        """As in the paper, or with `admit` as in libcachesim.

        There what finds the small queue full goes to the main one, until room had to be made once.
        It costs up to seven points of the hit ratio where nothing has yet shown what it is worth.
        """
        self.capacity = capacity
        self._small: OrderedDict[int, int] = OrderedDict()  # oldest first, as all
        self._main: OrderedDict[int, int] = OrderedDict()
        self._history: OrderedDict[int, None] = OrderedDict()  # what went from the small queue
        self._uses: dict[int, int] = {}  # where there are any
        self._admit = admit
        self._returning: int | None = None  # was in the history when room was made for it

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:  # noqa: ARG002
        self.discard(key)
        if key == self._returning or key in self._history:
            self._history.pop(key, None)
            self._main[key] = value
        elif not self._admit or len(self._small) < int(self.capacity * SMALL):
            self._small[key] = value
        else:
            self._main[key] = value
        self._returning = None

    def touch(self, key: int) -> int | None:
        value = self.value(key)
        if value is not None:
            uses = self._uses.get(key, 0)
            if uses < MOST:
                self._uses[key] = uses + 1
        return value

    def value(self, key: int) -> int | None:
        value = self._main.get(key)
        return self._small.get(key) if value is None else value

    def discard(self, key: int) -> int | None:
        self._uses.pop(key, None)
        value = self._small.pop(key, None)
        return self._main.pop(key, None) if value is None else value

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:
        if incoming is not None and incoming in self._history:
            del self._history[incoming]
            self._returning = incoming
        self._admit = False
        main_size = self.capacity - int(self.capacity * SMALL)
        if len(self._main) <= main_size and self._small:
            taken = self._take_small()
            if taken is not None:
                return taken
        return self._take_main()

    def _take_small(self) -> tuple[int, int] | None:
        while self._small:
            key, value = self._small.popitem(last=False)
            if self._uses.pop(key, 0) >= TO_MAIN:
                self._main[key] = value
            else:
                self._history[key] = None
                while len(self._history) > int(self.capacity * HISTORY):
                    self._history.popitem(last=False)
                return key, value
        return None

    def _take_main(self) -> tuple[int, int] | None:
        while self._main:
            key, value = self._main.popitem(last=False)
            uses = self._uses.pop(key, 0)
            if not uses:
                return key, value
            if uses > 1:
                self._uses[key] = uses - 1
            self._main[key] = value
        return None

    def put_back(self, key: int, value: int) -> None:
        queue = self._small if self._history.pop(key, 0) is None else self._main
        queue[key] = value
        queue.move_to_end(key, last=False)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[int]:
        return chain(self._small, self._main)
