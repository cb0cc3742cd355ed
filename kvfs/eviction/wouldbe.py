"""What hit ratio a larger or a smaller cache would have.

Contract: every access of the cache goes to `see`, or comes by way of `Accesses`; `answers` gives,
for each multiple of its capacity, the share of accesses (0 to 1) that would have been hits, over a
window that decays: of an access 1/e is left after eight capacities' worth of others. All from
ghosts of one kind of policy, leaf-first, and of a sample (`kvfs.eviction.ghosts`). Opens of what is
nowhere and is never stored are not counted. Not for choosing a policy.
"""

from kvfs.eviction.ghosts import Ghost, Observer

TIMES = (0.5, 1.0, 2.0, 4.0)
ENTRIES = 512  # of the ghost of the cache's own size: seven and a half times as many in all
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
        """Times the capacity: hit ratio. Empty until something was seen."""
        return self.hit_ratios() if self.accesses else {}
