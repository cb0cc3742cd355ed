"""Leaf-first: of a prefix the deepest block goes first, before the order of the inner policy.

A block of an LLM's prompt is of use only together with all blocks before it. So an entry with
resident children is no victim. When the inner policy names it, it is *parked*, and goes as soon as
its last child is gone. A parked entry that is used goes back to the policy. If an entry comes when
its parent has just gone, it is an *orphan* (a prompt that is larger than the cache causes that). An
orphan is of no use until the parent is back, and is the next victim until then.

Contract: `kvfs.eviction.policy`; `add` names the parent, and an entry without one costs nothing. A
wrong parent, or a circle of them, harms only the order: when only parked entries are left, the one
parked last goes. Amortised O(1): an entry is parked once for each time that it was added or used.
The inner policy's history of an entry begins when it is parked.
"""

from collections.abc import Iterator
from itertools import chain

from kvfs.eviction.policy import Policy

JUST_GONE = 64  # victims that are remembered, with their parents


class LeafFirst:
    """The order of one cache: that of `inner`, except for entries with children."""

    __slots__ = ("_children", "_gone", "_orphans", "_parent", "_parked", "_ready", "inner")

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self._parent: dict[int, int] = {}  # of the entries here that have one
        self._children: dict[int, int] = {}  # resident ones; also of absent parents
        self._parked: dict[int, int] = {}  # key: value
        self._ready: dict[int, None] = {}  # the parked without children; the next victim is last
        self._orphans: dict[int, int] = {}  # key: parent; the next victim is last
        self._gone: dict[int, int] = {}  # the last victims, oldest first, and their parents

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    @capacity.setter
    def capacity(self, entries: int) -> None:
        self.inner.capacity = entries

    def parent(self, key: int) -> int:
        """Return the parent; 0: the key has none, or is not here."""
        return self._parent.get(key, 0)

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:
        self.discard(key)
        self.inner.add(key, value)
        if parent and parent != key:
            self._link(key, parent)
            if parent in self._gone and parent not in self:
                self._orphans[key] = parent

    def touch(self, key: int) -> int | None:
        value = self.inner.touch(key)
        if value is None and (value := self._parked.pop(key, None)) is not None:
            self._ready.pop(key, None)
            self.inner.add(key, value)
        return value

    def value(self, key: int) -> int | None:
        value = self.inner.value(key)
        return self._parked.get(key) if value is None else value

    def discard(self, key: int) -> int | None:
        value = self._parked.pop(key, None)
        if value is None:
            value = self.inner.discard(key)
        else:
            self._ready.pop(key, None)
        if value is not None:
            self._unlink(key)
        return value

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:
        taken = self._take_orphan() or self._take_ready() or self._take_inner(incoming)
        if taken is None and self._parked:
            taken = self._parked.popitem()
        if taken is not None:
            key, _ = taken
            self._gone.pop(key, None)
            self._gone[key] = self._unlink(key)
            if len(self._gone) > JUST_GONE:
                del self._gone[next(iter(self._gone))]
        return taken

    def _take_orphan(self) -> tuple[int, int] | None:
        while self._orphans:
            key, parent = self._orphans.popitem()
            if parent in self or key in self._children:
                continue
            value = self._parked.pop(key, None)
            if value is None:
                value = self.inner.discard(key)
            else:
                self._ready.pop(key, None)
            assert value is not None, "what goes is an orphan no more"
            return key, value
        return None

    def _take_ready(self) -> tuple[int, int] | None:
        while self._ready:
            key, _ = self._ready.popitem()
            if key not in self._children:
                return key, self._parked.pop(key)
        return None

    def _take_inner(self, incoming: int | None) -> tuple[int, int] | None:
        while (taken := self.inner.take(incoming)) is not None:
            key, value = taken
            if key not in self._children:
                return taken
            self._parked[key] = value
        return None

    def put_back(self, key: int, value: int) -> None:
        parent = self._gone.pop(key, 0)
        if parent:
            self._link(key, parent)
        self._parked[key] = value
        self._ready[key] = None

    def _link(self, key: int, parent: int) -> None:
        self._parent[key] = parent
        self._children[parent] = self._children.get(parent, 0) + 1

    def _unlink(self, key: int) -> int:
        """Remove the key from its parent, which may be without children then."""
        self._orphans.pop(key, None)
        parent = self._parent.pop(key, 0)
        if parent:
            left = self._children[parent] - 1
            if left:
                self._children[parent] = left
            else:
                del self._children[parent]
                if parent in self._parked:
                    self._ready[parent] = None
        return parent

    def __contains__(self, key: object) -> bool:
        return key in self._parked or key in self.inner

    def __len__(self) -> int:
        return len(self._parked) + len(self.inner)

    def __iter__(self) -> Iterator[int]:
        waiting = (key for key in reversed(self._parked) if key not in self._ready)
        return chain(reversed(self._ready), self.inner, waiting)
