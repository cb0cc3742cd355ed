"""Objects that stand for the tiers which a mount does not have.

Contract: such a tier is empty, has no room, and is never down; no namespace has objects there. So
callers can ask it these questions like a real tier. `mounted` tells whether a tier is a real one.
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
    """Stands for no RAM tier. No record of a copy has its `epoch`."""

    mounted = False
    epoch = -1
    lends = False
    huge = False
    huge_why = "no RAM tier"

    def __init__(self) -> None:
        Tier.__init__(self, Path(os.devnull), 0)


class NoNvme(NvmeTier):
    """Stands for no NVMe tier: RAM is the only local tier."""

    mounted = False
    capacity_excludes_objects = False

    def __init__(self) -> None:
        Tier.__init__(self, Path(os.devnull), 0)
        self.counters = Counter()


class NoBucket(Bucket):
    """Stands for no bucket. No number of dirty bytes is too large.

    `wait` is the time in seconds that opens wait for local work.
    """

    mounted = False

    def __init__(self) -> None:
        super().__init__(BucketPlace(""), None, most=sys.maxsize, wait=30.0)
