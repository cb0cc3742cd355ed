"""The tiers that a mount is without.

Contract: nothing is in them, no namespace takes them, they have no room, and they are never down.
So callers need no test before they ask for any of that; where the difference matters by itself,
`mounted` says it. Nobody may create or open a file in them.
"""

import os
import sys
from collections import Counter
from pathlib import Path

from kvfs.s3.place import Place
from kvfs.tiers.bucket import Bucket
from kvfs.tiers.nvme import NvmeTier
from kvfs.tiers.ram import RamTier
from kvfs.tiers.tier import Tier


class NoRam(RamTier):
    """`epoch` is one that no copy has."""

    mounted = False
    epoch = -1
    lends = False
    huge = False
    huge_why = "no RAM tier"

    def __init__(self) -> None:
        Tier.__init__(self, Path(os.devnull), 0)


class NoNvme(NvmeTier):
    """`ram=` is all that is local."""

    mounted = False
    grows = False

    def __init__(self) -> None:
        Tier.__init__(self, Path(os.devnull), 0)
        self.counters = Counter()


class NoBucket(Bucket):
    """Any number of bytes may wait for it. `wait` is what opens wait for local work."""

    mounted = False

    def __init__(self) -> None:
        super().__init__(Place(""), None, most=sys.maxsize, wait=30.0)
