"""The policy that follows the best of several.

Ghost caches of leaf-first LRU, S3-FIFO, ARC and BIP see a sample of all accesses, and the cache is
kept in the order of the one that hits most. With leaf-first a hit is nearly always part of a
contiguous prefix, so that hits are counted as they come. Counts decay: of a hit 1/e is left after
four capacities' worth of accesses. A kind becomes the winner when it leads by 1 % of the winner's
hits and by two standard deviations of what chance would make of those accesses that only one of the
two hits. Its order takes over as `kvfs.eviction.succession` says, and there is no further change
before nothing of the old order is left.

Contract: `kvfs.eviction.policy`; `add` is an access as well, one that missed. Beside the order
itself an access costs one multiplication, and some microseconds for a key of the sample. The ghosts
have at most 2048 entries each, and their histories, whatever the size of the cache; of a cache of
fewer all keys are in the sample. `capacity` is what the ghosts stand for: it must be near the
number of entries that there is really room for. docs/eviction.md has the figures.
"""

from collections.abc import Iterator

from kvfs.eviction.ghosts import GOLDEN, KINDS, Ghost, Sample
from kvfs.eviction.leaffirst import LeafFirst
from kvfs.eviction.succession import Succession

ENTRIES = 2048  # of a ghost at most
_WINDOW = 4  # capacities' worth of accesses: 2 changed too often, 8 too late
_STEPS = 8  # looks at the scores in a capacity's worth of accesses
_KEEP = 1 - 1 / (_WINDOW * _STEPS)
_FEWEST = 64  # accesses between two looks
_LEAD = 0.01
_DEVIATIONS = 2


class Adaptive:
    """The order of one cache. `switches` counts the changes of the winner."""

    def __init__(self, capacity: int, *, entries: int = ENTRIES) -> None:
        """`entries`: of each ghost at most."""
        self._capacity = capacity
        self._sample = Sample(capacity, entries)
        self._ghosts = tuple(Ghost(kind, self._ghost_entries()) for kind in KINDS)
        self._best = self._ghosts[0]  # the winner's
        self._apart = dict.fromkeys(KINDS, 0.0)  # accesses that only it or only the winner hit
        self._accesses = 0.0  # of all keys, up to the last one in the sample
        self._since = 0  # as many after it
        self._due = 0
        self._order = LeafFirst(KINDS[self.winner](capacity))
        self._past: Succession | None = None
        self.switches = 0

    def _ghost_entries(self) -> int:
        return max(1, self._capacity >> self._sample.shift)

    @property
    def winner(self) -> str:
        """The kind whose order is followed."""
        return self._best.kind

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, entries: int) -> None:
        self._capacity = self._order.capacity = entries
        shift = self._sample.shift
        self._sample.fit(entries)
        for ghost in self._ghosts:
            ghost.resize(self._ghost_entries(), self._sample)
            ghost.misses *= 2.0 ** (shift - self._sample.shift)

    @property
    def scores(self) -> dict[str, float]:
        """The share of accesses (0 to 1) that each kind would have hit lately."""
        sampled = max(self._sampled(), 1)
        return {ghost.kind: max(0.0, 1 - ghost.misses / sampled) for ghost in self._ghosts}

    def _sampled(self) -> float:
        """How many accesses the sample should have had: `kvfs.eviction.wouldbe` says why."""
        return self._accesses / (1 << self._sample.shift)

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:
        self._order.add(key, value, parent)
        self._since += 1
        if key in self._sample:
            self._see(key, parent)

    def touch(self, key: int) -> int | None:
        value = self._order.inner.touch(key)  # nearly all are there: a call less
        if value is None and (value := self._order.touch(key)) is None:
            return None
        self._since += 1
        if not (key * GOLDEN >> 40) & self._sample.mask:
            self._see(key, self._order.parent(key))
        return value

    def value(self, key: int) -> int | None:
        return self._order.value(key)

    def discard(self, key: int) -> int | None:
        """The ghosts keep it: it may be stored again."""
        return self._order.discard(key)

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:
        taken = self._order.take(incoming)
        if self._past is not None and not len(self._past.past):
            self._order.inner = self._past.new
            self._past = None
        return taken

    def put_back(self, key: int, value: int) -> None:
        self._order.put_back(key, value)

    def _see(self, key: int, parent: int) -> None:
        missed = [ghost for ghost in self._ghosts if ghost.touch(key) is None]
        if missed:
            if len(missed) < len(self._ghosts):
                self._compare(missed)
            ancestor = self._sample.ancestor(parent, self._order.parent)
            for ghost in missed:
                ghost.misses += 1
                ghost.store(key, ancestor)
        self._accesses += self._since
        self._since = 0
        self._due += 1
        if self._due >= max(_FEWEST, self._ghost_entries() // _STEPS):
            self._judge()

    def _compare(self, missed: list[Ghost]) -> None:
        """Count for whom it went otherwise than for the winner."""
        winner_missed = self._best in missed
        for ghost in self._ghosts:
            if (ghost in missed) is not winner_missed:
                self._apart[ghost.kind] += 1

    def _judge(self) -> None:
        """Follow the best, if it is better beyond chance; let the counts decay."""
        best = min(self._ghosts, key=lambda ghost: ghost.misses)
        hits = max(0.0, self._sampled() - self._best.misses)
        lead = self._best.misses - best.misses
        chance = _DEVIATIONS * self._apart[best.kind] ** 0.5
        if self._past is None and lead > hits * _LEAD + chance:
            self._switch(best)
        self._due = 0
        self._accesses *= _KEEP
        for ghost in self._ghosts:
            ghost.misses *= _KEEP
            self._apart[ghost.kind] *= _KEEP

    def _switch(self, best: Ghost) -> None:
        self._past = Succession(KINDS[best.kind](self._capacity), self._order.inner)
        self._order.inner = self._past
        self._apart = dict.fromkeys(KINDS, 0.0)
        self._best = best
        self.switches += 1

    def parent(self, key: int) -> int:
        """What `add` was told; 0: it has none, or is not here."""
        return self._order.parent(key)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
