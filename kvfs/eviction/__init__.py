"""Policies, which order objects for eviction. Pure: no I/O, no clock.

Contract: `make` gives a policy by its name; `kvfs.eviction.policy` defines a policy, and `adaptive`
follows the best of several.
"""

from collections.abc import Callable

from kvfs.errors import ConfigError
from kvfs.eviction.adaptive import Adaptive, PolicySelector, SwitchingPolicy
from kvfs.eviction.ghosts import Accesses
from kvfs.eviction.histories import Arc, S3Fifo
from kvfs.eviction.leaffirst import LeafFirst
from kvfs.eviction.policy import Policy
from kvfs.eviction.queues import Bimodal, Fifo, Lfu, Lru, Never, Sieve
from kvfs.eviction.what_if import Seeds, WhatIf

__all__ = [
    "NAMES",
    "Accesses",
    "Adaptive",
    "LeafFirst",
    "Policy",
    "PolicySelector",
    "Seeds",
    "SwitchingPolicy",
    "WhatIf",
    "make",
]

_POLICIES: dict[str, Callable[[int], Policy]] = {
    "adaptive": Adaptive,
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "arc": Arc,
    "s3fifo": lambda capacity: S3Fifo(capacity, admit=True),
    "sieve": Sieve,
    "bimodal": Bimodal,
    "ttl": Fifo,
    "never": Never,
}
NAMES = tuple(_POLICIES)
_AS_THEY_ARE = ("adaptive", "never")  # leaf-first within, or without victims


def make(name: str, capacity: int, *, leaf_first: bool = False) -> Policy:
    """Return a new policy, for a cache of `capacity` entries.

    `leaf_first`: the deepest block of a prefix goes first; without it the textbook's policy, which
    ignores parents. ConfigError: no such policy, or a capacity below 1.
    """
    if name not in _POLICIES:
        raise ConfigError(f"eviction {name!r} is not known: expected {', '.join(NAMES)}")
    if capacity < 1:
        raise ConfigError(f"a cache of {capacity} entries: expected 1 at least")
    policy = _POLICIES[name](capacity)
    return LeafFirst(policy) if leaf_first and name not in _AS_THEY_ARE else policy
