"""Why objects are dropped: the reasons that are counted, and what one command drops.

Contract: plain values. Not for choosing what goes.
"""

from dataclasses import dataclass
from typing import Literal

from kvfs.catalog import Inode
from kvfs.units import human

# Of commands: `kvfs evict --drop` and `kvfs ns drop`, a greater version, a lower hard quota, a
# smaller tier.
OfCommand = Literal["asked", "version", "quota", "shrunk"]
Reason = Literal[
    "evicted", "expired", "lost", "stale", "too_large", "unfinished", "incomplete", OfCommand
]


@dataclass(slots=True)
class Drops:
    """The objects that a command has dropped by now. They are counted with its `reason`."""

    reason: OfCommand
    objects: int = 0
    bytes: int = 0

    def add(self, inode: Inode) -> None:
        self.objects += 1
        self.bytes += inode.size

    def __str__(self) -> str:
        return f"{self.objects} objects of {human(self.bytes)}"
