"""The objects opened most, among any number of objects, in fixed memory.

Contract: a Space-Saving sketch (Metwally, Agrawal, El Abbadi: "Efficient Computation of Frequent
and Top-k Elements in Data Streams", ICDT 2005). With n opens and m counters, a count is never too
low, and too high by at most n/m. So every object with more than n/m opens is among the counters.
`decay` halves everything, for counts of the recent past; as it rounds, a count may then be too low
by less than 1. Pure; the owner calls `decay`, for example each `HALF_LIFE`.

Instead of the paper's linked buckets there is a list of the keys with the least count. When the
list is empty, a look at all m counters fills it. The least count is at most n/m and rises with each
such look, so there is at most one look for m opens: a touch is O(1) amortised.
"""

import heapq
from typing import NamedTuple

COUNTERS = 1024
HALF_LIFE = 600.0  # s


class Hot(NamedTuple):
    """An object that was opened at most `opens` times."""

    key: int
    opens: int


class HotObjects:
    """The sketch. Raises ValueError for less than one counter."""

    def __init__(self, counters: int = COUNTERS) -> None:
        if counters < 1:
            raise ValueError(f"{counters} counters: expected 1 or more")
        self._room = counters
        self._counts: dict[int, int] = {}
        self._least: list[int] = []  # keys with the least count, as of the last look
        self._floor = 0  # that count: no key without a counter has more opens

    def touch(self, key: int) -> None:
        """Count one open."""
        counts = self._counts
        if key in counts:
            counts[key] += 1
        else:
            if len(counts) == self._room:
                self._make_room()
            counts[key] = self._floor + 1

    def opens(self, key: int) -> int:
        """The most opens that an object can have; 0: it is not among the counters."""
        return self._counts.get(key, 0)

    def discard(self, key: int) -> None:
        """Forget an object that is gone."""
        self._counts.pop(key, None)

    def top(self, number: int) -> list[Hot]:
        """Return the objects with the highest counts, the hottest first."""
        found = heapq.nlargest(number, self._counts.items(), key=lambda item: item[1])
        return [Hot(key, count) for key, count in found]

    def decay(self) -> None:
        """Halve every count; forget an object whose count becomes 0."""
        self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}
        self._floor //= 2

    def _make_room(self) -> None:
        """Take the counter of a key with the least count."""
        counts = self._counts
        while True:
            if not self._least:
                self._floor = min(counts.values())
                self._least = [key for key, count in counts.items() if count == self._floor]
            victim = self._least.pop()
            if counts.get(victim) == self._floor:  # neither touched nor gone since
                break
        del counts[victim]
