"""Which policy is the best for one cache at the moment.

Ghost caches of leaf-first LRU, S3-FIFO, ARC and BIP see a sample of all accesses. With leaf-first
a hit is nearly always part of a contiguous prefix, so that hits are counted as they come. Counts
decay: of a hit 1/e is left after four capacities' worth of accesses. A kind becomes the winner when
it leads by 1 % of the winner's hits and by two standard deviations of what chance would make of
those accesses that only one of the two hits.

Contract: accesses go to `see`, or come by way of `Accesses`. Some microseconds for a key of the
sample; 2048 entries a ghost at most, and their histories, whatever the size of the cache; of a
cache of fewer all keys are in the sample. `capacity` is what the ghosts stand for: it must be near
the number of entries that there is really room for. Not for the order itself: several of a cache's
may follow one choice (`kvfs.eviction.adaptive`). docs/eviction.md has the figures.
"""

from kvfs.eviction.ghosts import KINDS, Ghost, Observer

ENTRIES = 2048  # of a ghost at most
_WINDOW = 4  # capacities' worth of accesses: 2 changed too often, 8 too late
_FEWEST = 64  # accesses in the sample between two looks at who leads
_LEAD = 0.01
_DEVIATIONS = 2


class Choice(Observer[str]):
    """`winner` is a name in KINDS."""

    def __init__(self, capacity: int, *, entries: int = ENTRIES) -> None:
        """`entries`: of each ghost at most."""
        super().__init__(capacity, entries, _WINDOW, fewest=_FEWEST)
        self.winner = next(iter(KINDS))
        self._apart = dict.fromkeys(KINDS, 0.0)  # accesses that only it or only the winner hit

    def _make(self) -> dict[str, Ghost]:
        return {kind: Ghost(kind, self._entries(kind)) for kind in KINDS}

    def _entries(self, which: str) -> int:  # noqa: ARG002 (all are as large)
        return max(1, self._capacity >> self.sample.shift)

    def _missed(self, missed: list[Ghost]) -> None:
        """Count for whom it went otherwise than for the winner."""
        if len(missed) == len(self.ghosts):
            return
        winner_missed = self.ghosts[self.winner] in missed
        for kind, ghost in self.ghosts.items():
            if (ghost in missed) is not winner_missed:
                self._apart[kind] += 1

    def _step(self) -> None:
        """Another winner, if it is better beyond chance."""
        misses = {kind: ghost.misses for kind, ghost in self.ghosts.items()}
        best = min(misses, key=misses.__getitem__)
        hits = max(0.0, self.sampled - misses[self.winner])
        lead = misses[self.winner] - misses[best]
        if lead > hits * _LEAD + _DEVIATIONS * self._apart[best] ** 0.5:
            self.winner = best
            self._apart = dict.fromkeys(KINDS, 0.0)
        for kind in KINDS:
            self._apart[kind] *= self._keep
