"""Ghost caches: what a policy would have kept, without the objects, for a sample of the keys.

A sample is 1 in 2**shift of all keys, by a hash of the key, and its ghosts are as much smaller than
the cache that they stand for, so that their hit ratio is that of the whole (C. Waldspurger et al.,
"Efficient MRC Construction with SHARDS", FAST 2015). A key's parent in a ghost is its nearest
ancestor in the sample: found by a walk of about 2**shift parents, for one access in 2**shift.

An `Observer` has several ghosts that see the same accesses, and counts what each would have missed.
Misses are counted in the sample and accesses everywhere, so that a block that all prompts begin
with does not decide the ratio by being in the sample or not (SHARDS-adj of that paper). Counts
decay, in steps. `WouldBe` tells people what it counts; `kvfs.eviction.adaptive` chooses by it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from kvfs.eviction.histories import Arc, S3Fifo
from kvfs.eviction.leaffirst import LeafFirst
from kvfs.eviction.policy import Policy
from kvfs.eviction.queues import Bimodal, Lru

# No single one wins: on the traces that docs/eviction.md names each is the best somewhere.
KINDS: dict[str, Callable[[int], Policy]] = {
    "lru": Lru,
    "s3fifo": S3Fifo,
    "arc": Arc,
    "bimodal": Bimodal,
}
TIMES = (0.5, 1.0, 2.0, 4.0)  # the capacity
ANSWERING = 512  # entries of the ghost of the cache's own size: 7.5 times as many in all
FEWEST = 400  # accesses in a sample before it is believed: 0.05 of them is chance
_WINDOW = 8  # capacities' worth of accesses
_STEPS = 8  # in a capacity's worth of accesses
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: Fibonacci hashing
Which = TypeVar("Which")  # says what a ghost of an observer stands for
_FAR = 4  # times the expected number of parents: the walk ends there, for 1 in e**4 too early


class Sample:
    """Which keys are looked at, for a cache of so many entries.

    Those of which `key * GOLDEN >> 40` has no bit of `mask`: where each access passes, that is
    asked without a call, which costs as much again.
    """

    __slots__ = ("mask", "most", "shift")

    def __init__(self, capacity: int, most: int) -> None:
        """`most`: entries of a ghost as large as the cache."""
        self.most = most
        self.shift = 0
        self.mask = 0
        self.fit(capacity)

    def fit(self, capacity: int) -> bool:
        """Whether the sample is another one now. It changes late, so as not to swing."""
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
        """The nearest in the sample, from `parent` up; 0: none."""
        if not self.shift:
            return parent
        for _ in range(_FAR << self.shift):
            if not parent or parent in self:
                return parent
            parent = parent_of(parent)
        return 0


class Ghost:
    """One policy, leaf-first, on the keys of a sample; values are not kept."""

    __slots__ = ("kind", "misses", "policy", "touch")

    def __init__(self, kind: str, entries: int) -> None:
        self.kind = kind
        self.policy = LeafFirst(KINDS[kind](entries))
        self.touch = self.policy.touch  # an access; None: it would have missed
        self.misses = 0.0  # the observer counts them, and lets them decay

    def store(self, key: int, parent: int) -> None:
        """What comes of a miss."""
        policy = self.policy
        entries = policy.capacity
        while len(policy) >= entries:
            policy.take(key)
        policy.add(key, 0, parent)

    def resize(self, entries: int, sample: Sample) -> None:
        """Another number of entries, in a sample that may have changed."""
        policy = self.policy
        policy.capacity = entries
        for key in [key for key in policy if key not in sample]:
            policy.discard(key)
        while len(policy) > entries:
            policy.take()


class Observer(ABC, Generic[Which]):
    """What several caches would have missed; each access of the real one goes to `see`.

    An access is an object opened or stored. `accesses` counts all of them, of any key.
    """

    def __init__(self, capacity: int, entries: int, window: int, *, fewest: int = 1) -> None:
        """`capacity` of the real cache, `entries` of a ghost as large, at most.

        Of what was counted 1/e is left after `window` capacities' worth of accesses, or more where
        that would make less than `fewest` of them a step.
        """
        self.sample = Sample(capacity, entries)
        self.accesses = 0.0
        self._capacity = capacity
        self._keep = 1 - 1 / (window * _STEPS)
        self._fewest = fewest
        self._due = 0
        self.ghosts: Mapping[Which, Ghost] = self._make()

    @abstractmethod
    def _make(self) -> dict[Which, Ghost]:
        """The ghosts, empty."""

    @abstractmethod
    def _entries(self, which: Which) -> int:
        """Of a ghost, in the sample."""

    def _missed(self, missed: list[Ghost]) -> None:
        """An access that some would have missed."""

    def _step(self) -> None:
        """Before each decay."""

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, entries: int) -> None:
        self._capacity = entries
        shift = self.sample.shift
        self.sample.fit(entries)
        for which, ghost in self.ghosts.items():
            ghost.resize(self._entries(which), self.sample)
            ghost.misses *= 2.0 ** (shift - self.sample.shift)

    @property
    def sampled(self) -> float:
        """How many accesses the sample should have had."""
        return self.accesses / (1 << self.sample.shift)

    def hit_ratios(self) -> dict[Which, float]:
        """The share of accesses (0 to 1) that each would have hit lately."""
        sampled = max(self.sampled, 1)
        return {which: max(0.0, 1 - ghost.misses / sampled) for which, ghost in self.ghosts.items()}

    def see(self, key: int, parent: int, parent_of: Callable[[int], int]) -> None:
        """An access, a hit or a miss. `parent_of` gives the parent of a key, or 0."""
        self.accesses += 1
        if not (key * GOLDEN >> 40) & self.sample.mask:
            self.look(key, parent, parent_of)

    def look(self, key: int, parent: int, parent_of: Callable[[int], int]) -> None:
        """An access to a key of the sample, which is counted already."""
        missed = [ghost for ghost in self.ghosts.values() if ghost.touch(key) is None]
        if missed:
            self._missed(missed)
            ancestor = self.sample.ancestor(parent, parent_of)
            for ghost in missed:
                ghost.misses += 1
                ghost.store(key, ancestor)
        self._due += 1
        if self._due >= max(self._fewest, (self._capacity >> self.sample.shift) // _STEPS):
            self._due = 0
            self._step()
            self.accesses *= self._keep
            for ghost in self.ghosts.values():
                ghost.misses *= self._keep


class WouldBe(Observer[float]):
    """What hit ratio a larger or a smaller cache would have.

    `answers` gives, for each multiple of its capacity, the share of accesses (0 to 1) that would
    have been hits, over a window that decays: of an access 1/e is left after eight capacities'
    worth of others. All from ghosts of one kind of policy. Opens of what is nowhere and is never
    stored are not counted.

    How many misses of n accesses fall into the sample is left to chance: of m the standard
    deviation is the root of m, if they are of different keys, so that a ratio is off by 1/sqrt(n)
    at most. There is no answer before that is 0.05, but where the sample is of all keys, and
    nothing is left to chance.
    """

    def __init__(self, capacity: int, kind: str = "lru", *, entries: int = ANSWERING) -> None:
        """`capacity` in entries, as a policy's; `kind`: one of KINDS."""
        self._kind = kind
        super().__init__(capacity, entries, _WINDOW)

    def _make(self) -> dict[float, Ghost]:
        return {times: Ghost(self._kind, self._entries(times)) for times in TIMES}

    def _entries(self, which: float) -> int:
        return max(1, int(self._capacity * which) >> self.sample.shift)

    def follow(self, kind: str) -> None:
        """Another kind of policy answers from now on, with the keys that the old one kept."""
        if kind == self._kind:
            return
        self._kind = kind
        old, self.ghosts = self.ghosts, self._make()
        for times, ghost in self.ghosts.items():
            ghost.misses = old[times].misses
            policy = old[times].policy
            for key in list(policy):
                ghost.policy.add(key, 0, policy.parent(key))

    def answers(self) -> dict[float, float]:
        """Times the capacity: hit ratio. Empty until enough was seen to say so."""
        enough = self.sampled >= FEWEST if self.sample.shift else self.accesses
        return self.hit_ratios() if enough else {}


class Accesses:
    """The accesses of one cache, for several observers, with one look at each key for all."""

    __slots__ = ("_mask", "_observers", "_since")

    def __init__(self, *observers: Observer[Any]) -> None:
        self._observers = observers
        self._since = 0  # accesses that no observer has counted
        self.fit()

    def fit(self) -> None:
        """Their samples may have changed: masks are of low bits, so the least is part of all."""
        self._mask = min(observer.sample.mask for observer in self._observers)

    def see(self, key: int, parent: int, parent_of: Callable[[int], int]) -> None:
        """As `Observer.see`."""
        self._since += 1
        drawn = key * GOLDEN >> 40
        if drawn & self._mask:
            return
        for observer in self._observers:
            observer.accesses += self._since
            if not drawn & observer.sample.mask:
                observer.look(key, parent, parent_of)
        self._since = 0
