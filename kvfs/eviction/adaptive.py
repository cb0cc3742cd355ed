"""The order that follows the best of several policies at the moment.

When a `PolicySelector` has another winner, the winner's order takes over as `Handover` says. The
order does not change again until the old order is empty.

Contract: `kvfs.eviction.policy`, leaf-first. A file system divides one cache among several orders:
the tier and the allowed moves of an object decide its order. Each order is a `SwitchingPolicy`, and
the owner shows all accesses to the selector. `Adaptive` is for a cache that is one order: it shows
its accesses to a selector of its own. There an `add` is an access too, one that missed.
"""

from collections.abc import Iterator
from itertools import chain

from kvfs.eviction.ghosts import KINDS, GhostCache, Observer
from kvfs.eviction.leaffirst import LeafFirst
from kvfs.eviction.policy import Policy

ENTRIES = 2048  # of a ghost at most
_WINDOW = 4  # windows, in capacities of accesses: 2 changed too often, 8 too late
_FEWEST = 64  # accesses in the sample between two comparisons
_LEAD = 0.01
_DEVIATIONS = 2


class PolicySelector(Observer[str]):
    """The best policy for one cache at the moment: `winner`, a name in KINDS.

    Ghost caches of leaf-first LRU, S3-FIFO, ARC and BIP see a sample of all accesses. With
    leaf-first a hit is nearly always part of a contiguous prefix, so each hit counts. Counts decay:
    of a hit 1/e is left after four capacities' worth of accesses.

    A kind becomes the winner when its lead exceeds the sum of two numbers. One is 1 % of the
    winner's hits. The other is two standard deviations: twice the square root of the number of
    accesses that either the winner or the kind hit, but not both.

    A key of the sample takes some microseconds. A ghost has 2048 entries at most, and their
    histories, for any size of the cache. If the cache has fewer entries, all keys are in the
    sample. `capacity` is the size that the ghosts stand for: it must be near the number of entries
    that there is really room for. docs/eviction.md has the figures.
    """

    def __init__(self, capacity: int, *, entries: int = ENTRIES) -> None:
        """Make the ghosts, each of at most `entries`."""
        super().__init__(capacity, entries, _WINDOW, fewest=_FEWEST)
        self.winner = next(iter(KINDS))
        self._apart = dict.fromkeys(KINDS, 0.0)  # accesses that only it or only the winner hit

    def _make(self) -> dict[str, GhostCache]:
        return {kind: GhostCache(kind, self._entries(kind)) for kind in KINDS}

    def _entries(self, which: str) -> int:  # noqa: ARG002 (all are as large)
        return max(1, self._capacity >> self.sample.shift)

    def _missed(self, missed: list[GhostCache]) -> None:
        """Count the ghosts whose result differed from the winner's."""
        if len(missed) == len(self.ghosts):
            return
        winner_missed = self.ghosts[self.winner] in missed
        for kind, ghost in self.ghosts.items():
            if (ghost in missed) is not winner_missed:
                self._apart[kind] += 1

    def _step(self) -> None:
        """Change the winner if another is better beyond chance."""
        misses = {kind: ghost.misses for kind, ghost in self.ghosts.items()}
        best = min(misses, key=misses.__getitem__)
        hits = max(0.0, self.sampled - misses[self.winner])
        lead = misses[self.winner] - misses[best]
        if lead > hits * _LEAD + _DEVIATIONS * self._apart[best] ** 0.5:
            self.winner = best
            self._apart = dict.fromkeys(KINDS, 0.0)
        for kind in KINDS:
            self._apart[kind] *= self._keep


class Handover:
    """One policy takes over from another, in O(1): entries present then go first, in the old order.

    An entry that is used meanwhile moves to the new policy. The owner uses `new` alone as soon as
    `past` is empty.
    """

    __slots__ = ("new", "past")

    def __init__(self, new: Policy, past: Policy) -> None:
        self.new = new
        self.past = past

    @property
    def capacity(self) -> int:
        return self.new.capacity

    @capacity.setter
    def capacity(self, entries: int) -> None:
        self.new.capacity = entries

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:
        self.past.discard(key)
        self.new.add(key, value, parent)

    def touch(self, key: int) -> int | None:
        value = self.past.discard(key)
        if value is not None:
            self.new.add(key, value)
        return self.new.touch(key)

    def value(self, key: int) -> int | None:
        value = self.new.value(key)
        return self.past.value(key) if value is None else value

    def discard(self, key: int) -> int | None:
        value = self.past.discard(key)
        return self.new.discard(key) if value is None else value

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:
        return self.past.take(incoming) or self.new.take(incoming)

    def put_back(self, key: int, value: int) -> None:
        (self.past if len(self.past) else self.new).put_back(key, value)

    def __contains__(self, key: object) -> bool:
        return key in self.new or key in self.past

    def __len__(self) -> int:
        return len(self.new) + len(self.past)

    def __iter__(self) -> Iterator[int]:
        return chain(self.past, self.new)


class SwitchingPolicy(LeafFirst):
    """One order that follows the winner of `choice`, which sees the accesses by itself."""

    __slots__ = ("_kind", "_past", "choice")

    def __init__(self, choice: PolicySelector, capacity: int) -> None:
        self.choice = choice
        self._kind = choice.winner
        self._past: Handover | None = None
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
            self.inner = self._past = Handover(KINDS[self._kind](self.capacity), self.inner)


class Adaptive(SwitchingPolicy):
    """One cache in one order, with a choice of its own."""

    __slots__ = ()

    def __init__(self, capacity: int, *, entries: int = ENTRIES) -> None:
        """Make the order; its ghosts have at most `entries` each."""
        super().__init__(PolicySelector(capacity, entries=entries), capacity)

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
