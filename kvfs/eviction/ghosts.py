"""Ghost caches: the keys that a policy would have kept, without the objects, for a sample.

A sample is 1 in 2**shift of all keys, by a hash of the key. Its ghosts are smaller than their cache
by the same factor, so that their hit ratio is that of the whole. Source: C. Waldspurger et al.,
"Efficient MRC Construction with SHARDS", FAST 2015. A key's parent in a ghost is its nearest
ancestor in the sample. A walk of about 2**shift parents finds it, for one access in 2**shift.

An `Observer` has several ghosts that see the same accesses, and counts the misses of each. It
counts misses in the sample and accesses everywhere (SHARDS-adj of that paper). Otherwise a block
that all prompts begin with would decide the ratio by its presence in the sample. Counts decay, in
steps. `what_if` shows its counts to people: an access is an open, or a lookup in vain.
`adaptive` chooses by them: an access is an open, or a store, which a miss leads to.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from kvfs.eviction.histories import Arc, S3Fifo
from kvfs.eviction.leaffirst import LeafFirst
from kvfs.eviction.policy import Policy
from kvfs.eviction.queues import Bimodal, Fifo, Lfu, Lru, Sieve

# No single one wins: each is the best on some of the traces in docs/eviction.md.
KINDS: dict[str, Callable[[int], Policy]] = {
    "lru": Lru,
    "s3fifo": S3Fifo,
    "arc": Arc,
    "bimodal": Bimodal,
}
SHOWN = KINDS | {"lfu": Lfu, "fifo": Fifo, "ttl": Fifo, "sieve": Sieve}  # `WhatIf` has them as well
_STEPS = 8  # in a capacity's worth of accesses
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: Fibonacci hashing
Which = TypeVar("Which")  # says which cache a ghost of an observer stands for
_FAR = 4  # times the expected number of parents: the walk ends there, for 1 in e**4 too early


class Sample:
    """The keys to look at, for a cache of so many entries.

    They are those for which `key * GOLDEN >> 40` has no bit of `mask`. The places that see each
    access test that without a call, which would cost as much again.
    """

    __slots__ = ("mask", "most", "shift")

    def __init__(self, capacity: int, most: int) -> None:
        """Make a sample; `most`: entries of a ghost as large as the cache."""
        self.most = most
        self.shift = 0
        self.mask = 0
        self.resize(capacity)

    def resize(self, capacity: int) -> bool:
        """Return whether the sample has changed now. It changes late, so as not to swing."""
        shift = self.shift
        while capacity >> shift > self.most:
            shift += 1
        while shift and capacity >> shift < self.most // 4:
            shift -= 1
        changed = shift != self.shift
        self.shift, self.mask = shift, (1 << shift) - 1
        return changed

    def __contains__(self, key: int) -> bool:
        return not (key * GOLDEN >> 40) & self.mask

    def ancestor(self, parent: int, parent_of: Callable[[int], int]) -> int:
        """Return the nearest ancestor in the sample, from `parent` up; 0: none."""
        if not self.shift:
            return parent
        for _ in range(_FAR << self.shift):
            if not parent or parent in self:
                return parent
            parent = parent_of(parent)
        return 0


class GhostCache:
    """One policy, leaf-first, on the keys of a sample; it keeps no values.

    Guests are copies from other nodes. They go first, the oldest first, until their next access.
    """

    __slots__ = ("guests", "kind", "misses", "policy", "touch")

    def __init__(self, kind: str, entries: int) -> None:
        self.kind = kind
        self.policy = LeafFirst(SHOWN[kind](entries))
        self.touch = self.policy.touch  # an access; None: a miss
        self.misses = 0.0  # the observer counts them, and lets them decay
        self.guests: dict[int, None] = {}  # keys, the oldest first

    def store(self, key: int, parent: int, *, guest: bool = False) -> None:
        """Store a key after a miss."""
        policy = self.policy
        entries = policy.capacity
        while len(policy) >= entries:
            self._take(key)
        policy.add(key, 0, parent)
        if guest:
            self.guests[key] = None

    def discard(self, key: int) -> None:
        """Forget a key, if it is here."""
        self.guests.pop(key, None)
        self.policy.discard(key)

    def _take(self, incoming: int | None = None) -> None:
        """Evict a key."""
        if self.guests:
            self.discard(next(iter(self.guests)))
        else:
            self.policy.take(incoming)

    def resize(self, entries: int, sample: Sample) -> None:
        """Change the number of entries, in a sample that may have changed."""
        policy = self.policy
        policy.capacity = entries
        for key in [key for key in policy if key not in sample]:
            self.discard(key)
        while len(policy) > entries:
            self._take()


class Observer(ABC, Generic[Which]):
    """Counts the misses of several ghost caches; each access of the real one goes to `see`.

    `accesses` counts all of them, of any key.
    """

    def __init__(self, capacity: int, entries: int, window: int, *, fewest: int = 1) -> None:
        """Make the ghosts for a cache of `capacity`; one as large has at most `entries`.

        Of a count 1/e is left after `window` capacities' worth of accesses. The window is longer if
        a step would otherwise have less than `fewest` of them.
        """
        self.sample = Sample(capacity, entries)
        self.accesses = 0.0
        self.has_guests = False  # whether a ghost ever had one
        self._capacity = capacity
        self._keep = 1 - 1 / (window * _STEPS)
        self._fewest = fewest
        self._due = 0
        self.ghosts: Mapping[Which, GhostCache] = self._make()

    @abstractmethod
    def _make(self) -> dict[Which, GhostCache]:
        """Return the ghosts, empty."""

    @abstractmethod
    def _entries(self, which: Which) -> int:
        """Return the entries of a ghost, in the sample."""

    def _missed(self, missed: list[GhostCache]) -> None:
        """Handle an access that some ghosts would have missed."""

    def _step(self) -> None:
        """Act before each decay."""

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, entries: int) -> None:
        self._capacity = entries
        shift = self.sample.shift
        self.sample.resize(entries)
        for which, ghost in self.ghosts.items():
            ghost.resize(self._entries(which), self.sample)
            ghost.misses *= 2.0 ** (shift - self.sample.shift)

    @property
    def sampled(self) -> float:
        """Return the expected number of accesses in the sample."""
        return self.accesses / (1 << self.sample.shift)

    def hit_ratios(self) -> dict[Which, float]:
        """Return the share of accesses (0 to 1) that each ghost would have hit lately."""
        sampled = max(self.sampled, 1)
        return {which: max(0.0, 1 - ghost.misses / sampled) for which, ghost in self.ghosts.items()}

    def see(self, key: int, parent: int, parent_of: Callable[[int], int]) -> None:
        """See an access, a hit or a miss. `parent_of` gives the parent of a key, or 0."""
        self.accesses += 1
        if not (key * GOLDEN >> 40) & self.sample.mask:
            self.look(key, parent, parent_of)

    def count(self, opens: int, lookups: int, stores: int) -> None:
        """Count accesses of any keys: opens, lookups in vain, and stores."""
        del lookups  # their store follows
        self.accesses += opens + stores

    def look_for(self, key: int) -> None:
        """See a lookup in vain of a key of the sample."""

    def store(self, key: int, parent: int, parent_of: Callable[[int], int]) -> None:
        """See the store of a key of the sample."""
        self.look(key, parent, parent_of)

    def look(self, key: int, parent: int, parent_of: Callable[[int], int]) -> None:
        """See an access to a key of the sample, which is counted already."""
        if self.has_guests:
            self._no_guest(key)
        missed = [ghost for ghost in self.ghosts.values() if ghost.touch(key) is None]
        if missed:
            self._missed(missed)
            ancestor = self.sample.ancestor(parent, parent_of)
            for ghost in missed:
                ghost.misses += 1
                ghost.store(key, ancestor)
        self._seen_one()

    def look_at_guest(
        self, key: int, parent: int, parent_of: Callable[[int], int], *, hit: bool
    ) -> None:
        """See the first open of a copy from another node; its key is of the sample, and counted.

        hit: the copy came before the open, as it would have with a cache of any size.
        """
        self._no_guest(key)
        missed = [ghost for ghost in self.ghosts.values() if ghost.touch(key) is None]
        if missed:
            self.has_guests = True
            if not hit:
                self._missed(missed)
            ancestor = self.sample.ancestor(parent, parent_of)
            for ghost in missed:
                ghost.misses += not hit
                ghost.store(key, ancestor, guest=True)
        self._seen_one()

    def _no_guest(self, key: int) -> None:
        """Let a key be an entry like the others from now on."""
        for ghost in self.ghosts.values():
            ghost.guests.pop(key, None)

    def _seen_one(self) -> None:
        self._due += 1
        if self._due >= max(self._fewest, (self._capacity >> self.sample.shift) // _STEPS):
            self._due = 0
            self._step()
            self.accesses *= self._keep
            for ghost in self.ghosts.values():
                ghost.misses *= self._keep


class Accesses:
    """The accesses and stores of one cache, for several observers: one look at each key for all."""

    __slots__ = ("_lookups", "_mask", "_observers", "_opens", "_stores")

    def __init__(self, *observers: Observer[Any]) -> None:
        self._observers = observers
        self._opens = self._lookups = self._stores = 0  # that no observer has counted
        self.update_mask()

    def update_mask(self) -> None:
        """Adapt to changed samples: masks are of low bits, so the least is part of all."""
        self._mask = min(observer.sample.mask for observer in self._observers)

    def opened(self, key: int, parent: int, parent_of: Callable[[int], int]) -> None:
        """See an open. `parent_of` gives the parent of a key, or 0."""
        self._opens += 1
        for observer in self._drawn(key):
            observer.look(key, parent, parent_of)

    def opened_guest(
        self, key: int, parent: int, parent_of: Callable[[int], int], *, hit: bool
    ) -> None:
        """See the first open of a copy from another node. hit: the copy came before the open."""
        self._opens += 1
        for observer in self._drawn(key):
            observer.look_at_guest(key, parent, parent_of, hit=hit)

    def opened_again(self, times: int) -> None:
        """See further opens of keys that were opened just now: hits in a cache of any size."""
        self._opens += times

    def looked_up(self, key: int) -> None:
        """See a lookup in vain."""
        self._lookups += 1
        for observer in self._drawn(key):
            observer.look_for(key)

    def stored(self, key: int, parent: int, parent_of: Callable[[int], int]) -> None:
        """See a store."""
        self._stores += 1
        for observer in self._drawn(key):
            observer.store(key, parent, parent_of)

    def count(self) -> None:
        """Have the observers count all accesses so far."""
        for observer in self._observers:
            observer.count(self._opens, self._lookups, self._stores)
        self._opens = self._lookups = self._stores = 0

    def _drawn(self, key: int) -> Iterable[Observer[Any]]:
        """The observers with this key in their sample. They have counted all accesses so far."""
        drawn = key * GOLDEN >> 40
        if drawn & self._mask:
            return ()
        self.count()
        return [one for one in self._observers if not drawn & one.sample.mask]
