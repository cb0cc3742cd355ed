"""What-if: the hit ratios that a namespace would have with another size, from ghost caches.

Contract: `kvfs.eviction.ghosts`. An access is an open, or a lookup in vain. In a pool, an open that
another node serves is a miss of each ghost without the key, as it is no hit of the real cache.
"""

from collections.abc import Callable, Iterator
from typing import Any

from kvfs.eviction.ghosts import GOLDEN, GhostCache, Observer

TIMES = (0.5, 1.0, 2.0, 4.0)  # multiples of the capacity
ANSWERING = 512  # entries of the ghost of the cache's own size: 7.5 times as many in all
FEWEST = 400  # accesses in a sample before its answer counts: the error by chance is 0.05
SEEDS = 8 * ANSWERING  # keys: a sample has ANSWERING of those that there is room for, at most
SOWN_AT_ONCE = 64  # of them, each in some 10 us
_WINDOW = 8  # capacities' worth of accesses
_STEP = 16  # accesses in the sample between two decays, at least: few would swing by chance


class WhatIf(Observer[float]):
    """The hit ratios that a larger or a smaller cache would have.

    `answers` gives the share of accesses (0 to 1) that would have been hits, for each multiple of
    the capacity. An access is an open or a lookup in vain, so the answer for 1.0 is an estimate of
    the real ratio. The window decays: of an access 1/e is left after eight capacities' worth of
    others, and after 1024 at the earliest. All ghosts have one kind of policy.

    Chance decides how many misses of n accesses fall into the sample. If they have different keys,
    the standard deviation of m misses is the root of m. So a ratio is off by 1/sqrt(n) at most.
    There is no answer before that is 0.05. A sample of all keys leaves nothing to chance, but its
    first accesses are not like later ones: in an empty cache all are misses.
    """

    def __init__(self, capacity: int, kind: str = "lru", *, entries: int = ANSWERING) -> None:
        """Make the ghosts for a `capacity` in entries, as a policy's; `kind`: one of SHOWN."""
        self._kind = kind
        self._decayed = 0.0  # accesses that `accesses` has lost
        super().__init__(capacity, entries, _WINDOW, fewest=_STEP)

    def _make(self) -> dict[float, GhostCache]:
        return {times: GhostCache(self._kind, self._entries(times)) for times in TIMES}

    def _entries(self, which: float) -> int:
        return max(1, int(self._capacity * which) >> self.sample.shift)

    def count(self, opens: int, lookups: int, stores: int) -> None:
        del stores  # a lookup came before
        self.accesses += opens + lookups

    def look_for(self, key: int) -> None:
        for ghost in self.ghosts.values():
            if ghost.touch(key) is None:
                ghost.misses += 1
        self._seen_one()

    def store(self, key: int, parent: int, parent_of: Callable[[int], int]) -> None:
        self._no_guest(key)
        missed = [ghost for ghost in self.ghosts.values() if ghost.touch(key) is None]
        if missed:
            ancestor = self.sample.ancestor(parent, parent_of)
            for ghost in missed:
                ghost.store(key, ancestor)

    def forget(self, key: int) -> None:
        """Forget a key that no size of the cache would have kept."""
        if key in self.sample:
            for ghost in self.ghosts.values():
                ghost.discard(key)

    def follow(self, kind: str) -> None:
        """Answer with another kind of policy from now on, beginning with the old one's keys."""
        if kind == self._kind:
            return
        self._kind = kind
        old, self.ghosts = self.ghosts, self._make()
        for times, ghost in self.ghosts.items():
            ghost.misses, ghost.guests = old[times].misses, old[times].guests
            policy = old[times].policy
            for key in list(policy):
                ghost.policy.add(key, 0, policy.parent(key))

    def _step(self) -> None:
        self._decayed += self.accesses * (1 - self._keep)

    def count_anew(self) -> None:
        """Forget the counts, which are those of another capacity. The ghosts keep their keys."""
        self.accesses = self._decayed = 0.0
        for ghost in self.ghosts.values():
            ghost.misses = 0.0

    @property
    def seen(self) -> int:
        """The accesses since the count began; no decay lessens it."""
        return round(self.accesses + self._decayed)

    @property
    def needed(self) -> int:
        """The accesses before the first answer."""
        return FEWEST << self.sample.shift

    def answers(self) -> dict[float, float]:
        """Return hit ratios by multiple of the capacity. Empty until enough accesses were seen."""
        return self.hit_ratios() if self.seen >= self.needed else {}


class Seeds:
    """Keys that a cache has from before its ghosts began, for the sample of these ghosts.

    It keeps SEEDS of them at most, those with the least bits of the hash in common: the sample of
    a cache that has them all is a part of these.
    """

    __slots__ = ("_keys", "_mask")

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._mask = 0

    def add(self, key: int, parent: int) -> None:
        """Note a key, the longest unused first."""
        if key * GOLDEN >> 40 & self._mask:
            return
        self._keys.append((key, parent))
        if len(self._keys) > SEEDS:
            self._mask = self._mask * 2 + 1
            self._keys = [one for one in self._keys if not one[0] * GOLDEN >> 40 & self._mask]

    def sow(self, observer: Observer[Any], parent_of: Callable[[int], int]) -> Iterator[None]:
        """Store the keys in the ghosts of an observer that knows its capacity, and forget them.

        Yields after each SOWN_AT_ONCE keys.
        """
        keys, self._keys = self._keys, []
        for at, (key, parent) in enumerate(keys, 1):
            if key in observer.sample:
                observer.store(key, parent, parent_of)
            if not at % SOWN_AT_ONCE:
                yield
