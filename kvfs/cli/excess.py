"""Says what goes from tiers that have more than their size, and what stays beyond it.

Contract: plain values of a status; all numbers are estimates. A copy that goes is no loss if
another tier has the object. Not for the log, which has the exact number of dropped objects.
"""

from collections.abc import Iterator
from typing import Any

from kvfs.cli import human


def lines(name: str, tier: dict[str, Any], size: int, *, below: bool) -> Iterator[str]:
    """Yield what a tier with more than `size` bytes says to a person.

    tier: as in a status; `used_bytes` are those now. below: a tier below takes its objects, too.
    """
    used = tier["used_bytes"]
    if used <= size:
        return
    # A daemon of an earlier version does not say these.
    kept, doubled = tier.get("kept_bytes", 0), tier.get("doubled_bytes", 0)
    goes = used - max(size, kept)
    copies = max(0, min(goes, doubled)) if name == "ram" else 0  # RAM gives these first

    if copies:
        some = _some(tier["objects"], used, copies)
        yield f"{name}: the copies of {some} go, as it has {human(used)}; nvme keeps them"
    if (rest := goes - copies) > 0:
        ends = "the log says how many were dropped"
        if below:
            ends = "a lower tier takes those that it has room for, and the log says how many were "
            ends += "dropped"
        yield f"{name}: {_some(tier['objects'], used, rest)} go, as it has {human(used)}; {ends}"
    if kept > size:
        yield (
            f"{name}: {human(kept)} stay, more than its size of {human(size)}: kvfs evicts none of "
            "these objects"
        )


def together(ram: dict[str, Any], nvme: dict[str, Any], size: int) -> Iterator[str]:
    """Yield what finds no room if both tiers have `size` bytes together, and no bucket is below.

    RAM's copies of objects on NVMe are no further objects, so RAM has the rest of NVMe's room.
    """
    doubled = ram.get("doubled_bytes", 0)
    used = ram["used_bytes"] - doubled + nvme["used_bytes"]
    if used > size:
        objects = nvme["objects"] + ram["objects"] * (used - nvme["used_bytes"]) // (
            ram["used_bytes"] or 1
        )
        yield (
            f"ram and nvme together: {_some(objects, used, used - size)} are dropped, as they have "
            f"{human(used)}, and room for {human(size)}"
        )


def _some(objects: int, used: int, part: int) -> str:
    """Name a part of a tier's bytes with the objects that it is likely to hold."""
    number = -(-objects * part // used)
    return f"about {number} object{'s' * (number != 1)} of {human(part)}"
