"""Cached prefixes as tensors, for whoever writes an engine: docs/client.md.

Contract: what stands here is what may be used. Needs torch and xxhash, nothing else of kvfs, no
mount and no daemon: any directory will do.
"""

from kvfs.client.cache import Loaded, Match, PrefixCache
from kvfs.client.match import TierBytes
from kvfs.client.spec import Spec
from kvfs.errors import SpecMismatchError

__all__ = ("Loaded", "Match", "PrefixCache", "Spec", "SpecMismatchError", "TierBytes")
