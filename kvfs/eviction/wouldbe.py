"""What hit ratio a larger or a smaller cache would have.

Contract: every access of the cache goes to `see`, or comes by way of `Accesses`; `answers` gives,
for each multiple of its capacity, the share of accesses (0 to 1) that would have been hits, over a
window that decays: of an access 1/e is left after eight capacities' worth of others. All from
ghosts of one kind of policy, leaf-first, and of a sample (`kvfs.eviction.ghosts`). Opens of what is
nowhere and is never stored are not counted. Not for choosing a policy.

How many misses of n accesses fall into the sample is left to chance: of m the standard deviation is
the root of m, if they are of different keys, so that a ratio is off by 1/sqrt(n) at most. There is
no answer before that is 0.05, but where the sample is of all keys, and nothing is left to chance.
"""

from kvfs.eviction.ghosts import Ghost, Observer

TIMES = (0.5, 1.0, 2.0, 4.0)
ENTRIES = 512  # of the ghost of the cache's own size: seven and a half times as many in all
FEWEST = 400  # accesses that a sample should have had before it is believed: 0.05 of them is chance
_WINDOW = 8  # capacities' worth of accesses


class WouldBe(Observer[float]):
    """The answers for one cache."""

    def __init__(self, capacity: int, kind: str = "lru", *, entries: int = ENTRIES) -> None:
        """`capacity` in entries, as a policy's; `kind`: one of `kvfs.eviction.ghosts.KINDS`."""
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
