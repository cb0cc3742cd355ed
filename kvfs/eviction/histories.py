"""Policies that remember as many evicted entries as there are entries at most: ARC and S3-FIFO.

Contract: `kvfs.eviction.policy`.
"""

from collections import OrderedDict

from kvfs.eviction.queues import TwoQueues

SMALL = 0.1  # of the capacity
HISTORY = 0.9
TO_MAIN = 2  # uses
MOST = 3  # that are counted: two bits


class Arc(TwoQueues):
    """ARC: recent and frequent entries, and a history of each that moves the border between them.

    N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Its
    T1, used once, is the first queue here, and T2, used more often, the second. The other names are
    the paper's: B1 and B2 are the histories of T1 and T2, p is the target size of T1.
    """

    __slots__ = ("_b1", "_b2", "_p", "_returning")

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._b1: OrderedDict[int, None] = OrderedDict()  # least recently used first, as in all
        self._b2: OrderedDict[int, None] = OrderedDict()
        self._p = 0.0
        self._returning: int | None = None  # was in the history at the last `take`

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:  # noqa: ARG002
        self.discard(key)
        if key == self._returning or self._learn(key):
            self._second[key] = value
        else:
            self._first[key] = value
        self._returning = None

    def touch(self, key: int) -> int | None:
        value = self._second.get(key)
        if value is not None:
            self._second.move_to_end(key)
        elif (value := self._first.pop(key, None)) is not None:
            self._second[key] = value
        return value

    def _learn(self, key: int) -> bool:
        """Return whether the key is in the history; then remove it there and adapt p."""
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
        if not self._first and not self._second:
            return None
        from_b2 = incoming in self._b2
        if incoming is not None and (incoming == self._returning or self._learn(incoming)):
            self._returning = incoming
            return self._replace(from_b2=from_b2)
        t1, b1, b2 = self._first, self._b1, self._b2
        while b1 and len(t1) + len(b1) >= self.capacity:
            b1.popitem(last=False)
        if len(t1) >= self.capacity:
            return t1.popitem(last=False)  # in no history: there is no room in B1
        while b2 and len(self) + len(b1) + len(b2) >= 2 * self.capacity:
            b2.popitem(last=False)
        return self._replace(from_b2=False)

    def _replace(self, *, from_b2: bool) -> tuple[int, int]:
        t1 = self._first
        if t1 and (len(t1) > self._p or (from_b2 and len(t1) == self._p) or not self._second):
            key, value = t1.popitem(last=False)
            self._b1[key] = None
        else:
            key, value = self._second.popitem(last=False)
            self._b2[key] = None
        return key, value

    def put_back(self, key: int, value: int) -> None:
        queue = self._second if self._b2.pop(key, 0) is None else self._first
        self._b1.pop(key, None)
        queue[key] = value
        queue.move_to_end(key, last=False)


class S3Fifo(TwoQueues):
    """S3-FIFO: a small queue (the first) for new entries, and a main one for entries used again.

    J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. Sizes are the
    defaults of libcachesim, by the same authors. The small queue has a tenth of the capacity, the
    history 0.9 of it. Two uses take an entry from the small queue to the main one, where it begins
    without any use.
    """

    __slots__ = ("_admit", "_history", "_returning", "_uses")

    def __init__(self, capacity: int, *, admit: bool = False) -> None:
        """Follow the paper, or with `admit` libcachesim.

        There an entry that finds the small queue full goes to the main one, until the first
        eviction. It costs up to seven points of the hit ratio while no entry has yet shown its
        worth.
        """
        super().__init__(capacity)
        self._history: OrderedDict[int, None] = OrderedDict()  # keys that left the small queue
        self._uses: dict[int, int] = {}  # of entries with uses
        self._admit = admit
        self._returning: int | None = None  # was in the history at the last `take`

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:  # noqa: ARG002
        self.discard(key)
        if key == self._returning or key in self._history:
            self._history.pop(key, None)
            self._second[key] = value
        elif not self._admit or len(self._first) < int(self.capacity * SMALL):
            self._first[key] = value
        else:
            self._second[key] = value
        self._returning = None

    def touch(self, key: int) -> int | None:
        value = self.value(key)
        if value is not None:
            uses = self._uses.get(key, 0)
            if uses < MOST:
                self._uses[key] = uses + 1
        return value

    def discard(self, key: int) -> int | None:
        self._uses.pop(key, None)
        value = self._first.pop(key, None)  # as the base does, without another call
        return self._second.pop(key, None) if value is None else value

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:
        if incoming is not None and incoming in self._history:
            del self._history[incoming]
            self._returning = incoming
        self._admit = False
        main_size = self.capacity - int(self.capacity * SMALL)
        if len(self._second) <= main_size and self._first:
            taken = self._take_small()
            if taken is not None:
                return taken
        return self._take_main()

    def _take_small(self) -> tuple[int, int] | None:
        while self._first:
            key, value = self._first.popitem(last=False)
            if self._uses.pop(key, 0) >= TO_MAIN:
                self._second[key] = value
            else:
                self._history[key] = None
                while len(self._history) > int(self.capacity * HISTORY):
                    self._history.popitem(last=False)
                return key, value
        return None

    def _take_main(self) -> tuple[int, int] | None:
        while self._second:
            key, value = self._second.popitem(last=False)
            uses = self._uses.pop(key, 0)
            if not uses:
                return key, value
            if uses > 1:
                self._uses[key] = uses - 1
            self._second[key] = value
        return None

    def put_back(self, key: int, value: int) -> None:
        queue = self._first if self._history.pop(key, 0) is None else self._second
        queue[key] = value
        queue.move_to_end(key, last=False)
