"""Which object goes first. Pure: no I/O, no clock."""

from kvfs.eviction.policy import Policy
from kvfs.eviction.queues import Lru, Never


def make(name: str, capacity: int) -> Policy:
    return Never(capacity) if name == "never" else Lru(capacity)


NAMES = ("lru", "never")
__all__ = ["NAMES", "Policy", "make"]
