"""Ghost caches: what a policy would have kept, without the objects, for a sample of the keys.

A sample is 1 in 2**shift of all keys, by a hash of the key, and its ghosts are as much smaller than
the cache that they stand for, so that their hit ratio is that of the whole (C. Waldspurger et al.,
"Efficient MRC Construction with SHARDS", FAST 2015). A key's parent in a ghost is its nearest
ancestor in the sample: found by a walk of about 2**shift parents, for one access in 2**shift.

Not for deciding anything: `kvfs.eviction.adaptive`, `kvfs.eviction.wouldbe`.
"""

from collections.abc import Callable

from kvfs.eviction.arc import Arc
from kvfs.eviction.leaffirst import LeafFirst
from kvfs.eviction.policy import Policy
from kvfs.eviction.queues import Bimodal, Lru
from kvfs.eviction.s3fifo import S3Fifo

# No single one wins: on the traces that docs/eviction.md names each is the best somewhere.
KINDS: dict[str, Callable[[int], Policy]] = {
    "lru": Lru,
    "s3fifo": S3Fifo,
    "arc": Arc,
    "bimodal": Bimodal,
}
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: Fibonacci hashing
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
        self.misses = 0.0  # the owner counts them, and lets them decay

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
