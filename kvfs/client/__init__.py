"""Cached prefixes as tensors, for the authors of engines: docs/client.md.

Contract: the names exported here are the public interface. The client needs torch and xxhash. It
needs no other part of kvfs, no mount and no daemon: any directory will do.
"""

from kvfs.client.cache import Loaded, Match, PrefixCache
from kvfs.client.match import TierBytes
from kvfs.client.spec import Spec
from kvfs.errors import SpecMismatchError

__all__ = ("Loaded", "Match", "PrefixCache", "Spec", "SpecMismatchError", "TierBytes")
