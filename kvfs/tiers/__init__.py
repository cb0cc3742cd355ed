"""The tiers RAM, NVMe and bucket. RAM and NVMe have one backing file for each copy of an object."""

from kvfs.tiers.absent import NoBucket, NoNvme, NoRam
from kvfs.tiers.bucket import Bucket
from kvfs.tiers.calls import OverdueError, TierCall, sync_patience
from kvfs.tiers.nvme import NvmeTier, identity_in
from kvfs.tiers.other_nodes import OtherNodes
from kvfs.tiers.ram import RamTier
from kvfs.tiers.tier import Reservation, Tier

__all__ = [
    "Bucket",
    "NoBucket",
    "NoNvme",
    "NoRam",
    "NvmeTier",
    "OtherNodes",
    "OverdueError",
    "RamTier",
    "Reservation",
    "Tier",
    "TierCall",
    "identity_in",
    "sync_patience",
]
