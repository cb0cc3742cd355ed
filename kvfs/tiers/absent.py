"""The tiers that a mount is without.

Contract: these tiers are empty, have no room, are never down, and no namespace takes them. So
callers can ask for this without a test. Where only the difference matters, callers ask `mounted`.
Callers must not create or open a file in these tiers.
"""

import os
import sys
from collections import Counter
from pathlib import Path

from kvfs.s3.place import BucketPlace
from kvfs.tiers.bucket import Bucket
from kvfs.tiers.nvme import NvmeTier
from kvfs.tiers.ram import RamTier
from kvfs.tiers.tier import Tier


class NoRam(RamTier):
    """No RAM tier. No copy has its `epoch`."""

    mounted = False
    epoch = -1
    lends = False
    huge = False
    huge_why = "no RAM tier"

    def __init__(self) -> None:
        Tier.__init__(self, Path(os.devnull), 0)


class NoNvme(NvmeTier):
    """No NVMe tier: RAM is the only local tier."""

    mounted = False
    capacity_excludes_objects = False

    def __init__(self) -> None:
        Tier.__init__(self, Path(os.devnull), 0)
        self.counters = Counter()


class NoBucket(Bucket):
    """No bucket. Any number of bytes may wait for it.

    `wait` is the time in seconds that opens wait for local work.
    """

    mounted = False

    def __init__(self) -> None:
        super().__init__(BucketPlace(""), None, most=sys.maxsize, wait=30.0)
