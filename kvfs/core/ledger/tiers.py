"""The tiers of a mount. `Tiers` tells which of them hold a copy of an object.

Contract: synchronous and without state of its own: an object's record says which tiers hold it.
`local` has RAM and NVMe if they are mounted, fastest first. Not for files and bytes (`kvfs.tiers`).
"""

from kvfs.catalog import Inode
from kvfs.tiers import Bucket, NoBucket, NoNvme, NoRam, NvmeTier, OtherNodes, RamTier, Tier


class Tiers:
    """RAM, NVMe and the bucket. At least one of RAM and NVMe is mounted."""

    def __init__(
        self, ram: RamTier | None, nvme: NvmeTier | None, bucket: Bucket | None = None
    ) -> None:
        self.ram = ram or NoRam()
        self.nvme = nvme or NoNvme()
        self.bucket = bucket or NoBucket()
        self.has_afar = bucket is not None  # objects may be in the bucket, or on other nodes, only
        self.nodes = OtherNodes()  # no tier: an object that came from there is in one of these
        self.local: list[Tier] = [tier for tier in (ram, nvme) if tier is not None]

    @property
    def media(self) -> list[str]:
        """The names of the mounted tiers, including the bucket."""
        lower = [self.bucket.name] if self.bucket.mounted else []
        return [*(tier.name for tier in self.local), *lower]

    def holders(self, inode: Inode) -> list[Tier]:
        """The local tiers that hold a copy, fastest first."""
        found: list[Tier] = []
        if inode.ram_epoch == self.ram.epoch:
            found.append(self.ram)
        if inode.on_nvme and self.nvme.mounted:
            found.append(self.nvme)
        return found

    def cost(self, inode: Inode, tier: Tier) -> int:
        """Bytes to account for an object's copy in a tier, compressed (packed) or not."""
        if inode.packed is not None and tier is self.nvme:
            return tier.cost(inode.packed.blocks)
        return tier.cost(inode.blocks)

    def is_packed_in(self, inode: Inode, tier: Tier) -> bool:
        """Whether its copy in a tier is compressed (packed): programs cannot open such a copy."""
        return inode.packed is not None and tier is self.nvme

    def can_open(self, inode: Inode) -> bool:
        """Whether some local copy can be opened without decompression."""
        return any(not self.is_packed_in(inode, tier) for tier in self.holders(inode))

    def set_holder(self, inode: Inode, tier: Tier, *, holds: bool) -> None:
        """Set whether a tier has a copy. For a compressed copy, the caller sets `packed` next."""
        if tier is self.ram:
            inode.ram_epoch = self.ram.epoch if holds else 0
        else:
            inode.on_nvme = holds
            inode.packed = None
