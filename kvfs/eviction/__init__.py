"""Which object goes first. Pure: no I/O, no clock."""

from kvfs.eviction.lru import LeastRecentlyUsed

__all__ = ["LeastRecentlyUsed"]
