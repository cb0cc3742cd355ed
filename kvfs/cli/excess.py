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

    def some(part: int) -> str:
        return f"about {-(-tier['objects'] * part // used)} objects of {human(part)}"

    if copies:
        yield f"{name}: the copies of {some(copies)} go, as it has {human(used)}; nvme keeps them"
    if (rest := goes - copies) > 0:
        ends = "the log says how many were dropped"
        if below:
            ends = "a lower tier takes those that it has room for, and the log says how many were "
            ends += "dropped"
        yield f"{name}: {some(rest)} go, as it has {human(used)}; {ends}"
    if kept > size:
        yield (
            f"{name}: {human(kept)} stay, more than its size of {human(size)}: kvfs evicts none of "
            "these objects"
        )
