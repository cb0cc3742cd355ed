"""Leaf-first: of a prefix the deepest block goes first, whatever the policy inside says.

A block of an LLM's prompt is of use only together with all blocks before it. So an entry that has
resident children is no victim: when the policy inside names it, it is *parked*, and goes as soon as
its last child is gone; a parked entry that is used goes back to the policy. An entry whose parent has
only just gone (a prompt larger than the cache does that to itself) is of no use until the parent is
back, and goes before all others.

Contract: `kvfs.eviction.policy`; `add` names the parent, and an entry without one costs nothing. A
wrong parent, or a circle of them, does no harm but to the order: when all that is left is parked,
what was parked last goes. Amortised O(1): an entry is parked once for each time that it was added or
used. About 100 bytes for each entry that has a parent and 100 for each that has children, beside the
policy's own. What the policy inside remembers of an entry begins when it is parked.
"""

from collections.abc import Iterator
from itertools import chain

from kvfs.eviction.policy import Policy

JUST_GONE = 64  # victims whose parents are remembered: for put_back, and to know orphans


class LeafFirst:
    """The order of one cache: `inner`'s, but for what has children."""

    __slots__ = ("_children", "_gone", "_orphans", "_parent", "_parked", "_ready", "inner")

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self._parent: dict[int, int] = {}  # of those here that have one
        self._children: dict[int, int] = {}  # how many are here; also of parents that are not
        self._parked: dict[int, int] = {}  # key: value
        self._ready: dict[int, None] = {}  # parked and without children; the last is the next victim
        self._orphans: dict[int, int] = {}  # by the parent that had just gone: the child
        self._gone: dict[int, int] = {}  # the last victims, oldest first, with their parents

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    @capacity.setter
    def capacity(self, entries: int) -> None:
        self.inner.capacity = entries

    def parent(self, key: int) -> int:
        """0: it has none, or is not here."""
        return self._parent.get(key, 0)

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:
        self.discard(key)
        self.inner.add(key, value)
        if parent and parent != key:
            self._parent[key] = parent
            self._children[parent] = self._children.get(parent, 0) + 1
            if parent in self._gone and parent not in self:
                self._orphans[parent] = key
        if self._orphans:
            self._orphans.pop(key, None)  # its child has its parent again

    def touch(self, key: int) -> None:
        if key in self._parked:
            value = self._parked.pop(key)
            self._ready.pop(key, None)
            self.inner.add(key, value)
        else:
            self.inner.touch(key)

    def discard(self, key: int) -> None:
        if key in self._parked:
            del self._parked[key]
            self._ready.pop(key, None)
        elif key in self.inner:
            self.inner.discard(key)
        else:
            return
        self._unlink(key)

    def _unlink(self, key: int) -> int:
        """It is here no longer; its parent, which may be without children now."""
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

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:
        taken = self._take_orphan() or self._take_ready() or self._take_inner(incoming)
        if taken is None and self._parked:
            taken = self._parked.popitem()
        if taken is not None:
            key = taken[0]
            self._gone.pop(key, None)
            self._gone[key] = self._unlink(key)
            if len(self._gone) > JUST_GONE:
                oldest = next(iter(self._gone))
                del self._gone[oldest]
                self._orphans.pop(oldest, None)
        return taken

    def _take_orphan(self) -> tuple[int, int] | None:
        while self._orphans:
            parent, key = self._orphans.popitem()
            if self._parent.get(key) == parent and key not in self._children:
                value = self._parked.pop(key, None)
                if value is None:
                    value = 0  # XXX
                    self.inner.discard(key)
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
            if taken[0] not in self._children:
                return taken
            self._parked[taken[0]] = taken[1]
        return None

    def put_back(self, key: int, value: int) -> None:
        parent = self._gone.pop(key, 0)
        if parent:
            self._parent[key] = parent
            self._children[parent] = self._children.get(parent, 0) + 1
        self._parked[key] = value
        self._ready[key] = None

    def __contains__(self, key: object) -> bool:
        return key in self._parked or key in self.inner

    def __len__(self) -> int:
        return len(self._parked) + len(self.inner)

    def __iter__(self) -> Iterator[int]:
        waiting = (key for key in self._parked if key not in self._ready)
        return chain(self._ready, self.inner, waiting)
