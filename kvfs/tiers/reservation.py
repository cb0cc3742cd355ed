"""Bytes of a tier that are set aside for one file before it has them.

Contract: nothing else changes `Tier.reserved`. A reservation has one owner: a `with` block, an open
object, or an orphan. Leaving the block returns what the block has not handed on by `keep`.
Not for deciding whether there is room: that is `Room`.
"""

from types import TracebackType
from typing import TYPE_CHECKING

from kvfs.tiers.tier import Tier

if TYPE_CHECKING:
    from typing_extensions import Self


class Reservation:
    """`size` bytes of `tier`, until `release`."""

    __slots__ = ("size", "tier")

    def __init__(self, tier: Tier, size: int) -> None:
        self.tier = tier
        self.size = 0
        self.resize(size)

    def resize(self, size: int) -> None:
        """Set aside so many bytes instead."""
        self.tier.reserved += size - self.size
        self.size = size

    def release(self) -> None:
        """Return the bytes; a second time there are none."""
        self.resize(0)

    def keep(self) -> "Reservation":
        """Hand the bytes to a new owner; this one has none from now on."""
        kept = Reservation(self.tier, 0)
        kept.size, self.size = self.size, 0
        return kept

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Reservation({self.tier.name}, {self.size})"
