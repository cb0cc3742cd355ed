"""The order that follows the best of several policies, whichever that is at the moment.

When `kvfs.eviction.choice` has another winner, its order takes over as `kvfs.eviction.succession`
says, and there is no further change before nothing of the old order is left.

Contract: `kvfs.eviction.policy`, leaf-first. A file system has one cache in several orders, by tier
and by what may become of an object; each is `Following`, and the owner shows all accesses to the
choice. `Adaptive` is for a cache that is one order: it shows its accesses to a choice of its own,
and `add` is one as well, one that missed.
"""

from kvfs.eviction.choice import ENTRIES, Choice
from kvfs.eviction.ghosts import KINDS
from kvfs.eviction.leaffirst import LeafFirst
from kvfs.eviction.succession import Succession


class Following(LeafFirst):
    """`choice` says what to follow; it sees the accesses by itself."""

    __slots__ = ("_kind", "_past", "choice")

    def __init__(self, choice: Choice, capacity: int) -> None:
        self.choice = choice
        self._kind = choice.winner
        self._past: Succession | None = None
        super().__init__(KINDS[self._kind](capacity))

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:
        if self.choice.winner != self._kind:
            self._follow()
        super().add(key, value, parent)

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:
        if self.choice.winner != self._kind:
            self._follow()
        taken = super().take(incoming)
        if self._past is not None and not len(self._past.past):
            self.inner = self._past.new
            self._past = None
        return taken

    def _follow(self) -> None:
        if self._past is None:
            self._kind = self.choice.winner
            self.inner = self._past = Succession(KINDS[self._kind](self.capacity), self.inner)


class Adaptive(Following):
    """One cache in one order, with a choice of its own."""

    __slots__ = ()

    def __init__(self, capacity: int, *, entries: int = ENTRIES) -> None:
        """`entries`: of each ghost at most."""
        super().__init__(Choice(capacity, entries=entries), capacity)

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    @capacity.setter
    def capacity(self, entries: int) -> None:
        self.inner.capacity = self.choice.capacity = entries

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:
        super().add(key, value, parent)
        self.choice.see(key, parent, self.parent)

    def touch(self, key: int) -> int | None:
        value = super().touch(key)
        if value is not None:
            self.choice.see(key, self.parent(key), self.parent)
        return value
