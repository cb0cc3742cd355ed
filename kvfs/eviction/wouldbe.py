"""What hit ratio a larger or a smaller cache would have.

Contract: every access of the cache goes to `see`; `answers` gives, for each multiple of its
capacity, the share of accesses (0 to 1) that would have been hits, over a window that decays: of an
access 1/e is left after eight capacities' worth of others. All from ghosts of one kind of policy,
leaf-first, and of a sample (`kvfs.eviction.ghosts`). An access is an object opened or stored: opens
of what is nowhere and is never stored are not counted. Not for choosing a policy.

Misses are counted in the sample and accesses everywhere, so that a block that all prompts begin
with does not decide the ratio by being in the sample or not (SHARDS-adj of that paper).
"""

from collections.abc import Callable

from kvfs.eviction.ghosts import GOLDEN, Ghost, Sample

TIMES = (0.5, 1.0, 2.0, 4.0)
ENTRIES = 512  # of the ghost of the cache's own size: seven and a half times as many in all
_WINDOW = 8  # capacities' worth of accesses
_STEPS = 8  # a capacity's worth of accesses: the decay goes in steps
_KEEP = 1 - 1 / (_WINDOW * _STEPS)


class WouldBe:
    """The answers for one cache."""

    def __init__(self, capacity: int, kind: str = "lru", *, entries: int = ENTRIES) -> None:
        """`capacity` in entries, as a policy's; `kind`: one of `kvfs.eviction.ghosts.KINDS`."""
        self._sample = Sample(capacity, entries)
        self._capacity = capacity
        self._accesses = 0.0  # of all keys
        self._due = 0
        self._ghosts = self._make(kind)

    def _entries(self, times: float) -> int:
        return max(1, int(self._capacity * times) >> self._sample.shift)

    def _make(self, kind: str) -> dict[float, Ghost]:
        return {times: Ghost(kind, self._entries(times)) for times in TIMES}

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, entries: int) -> None:
        self._capacity = entries
        shift = self._sample.shift
        self._sample.fit(entries)
        for times, ghost in self._ghosts.items():
            ghost.resize(self._entries(times), self._sample)
            ghost.misses *= 2.0 ** (shift - self._sample.shift)

    def follow(self, kind: str) -> None:
        """Another kind of policy answers from now on, with the keys that the old one kept."""
        old = self._ghosts
        self._ghosts = self._make(kind)
        for times, ghost in self._ghosts.items():
            ghost.misses = old[times].misses
            policy = old[times].policy
            for key in list(policy):
                ghost.policy.add(key, 0, policy.parent(key))

    def see(self, key: int, parent: int, parent_of: Callable[[int], int]) -> None:
        """An access, a hit or a miss. `parent_of` gives the parent of a key, or 0."""
        self._accesses += 1
        if (key * GOLDEN >> 40) & self._sample.mask:
            return
        missed = [ghost for ghost in self._ghosts.values() if ghost.touch(key) is None]
        if missed:
            ancestor = self._sample.ancestor(parent, parent_of)
            for ghost in missed:
                ghost.misses += 1
                ghost.store(key, ancestor)
        self._due += 1
        if self._due * _STEPS >= self._entries(1.0):
            self._due = 0
            self._accesses *= _KEEP
            for ghost in self._ghosts.values():
                ghost.misses *= _KEEP

    def answers(self) -> dict[float, float]:
        """Times the capacity: hit ratio. Empty until something was seen."""
        if not self._accesses:
            return {}
        sampled = self._accesses / (1 << self._sample.shift)
        return {
            times: max(0.0, 1 - ghost.misses / sampled) for times, ghost in self._ghosts.items()
        }
