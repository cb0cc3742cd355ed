"""How long clients wait: histograms with fixed bounds, of opens, hydrations and seals by tier.

Contract: `observe` costs a bisection and two additions, since each open pays for it. Counts begin
at 0 with each daemon. Not for quantiles: a reader of the histograms keeps the
earlier counts that those need.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

# s; opens from RAM are in the first five, from NVMe in the next, from a bucket in the rest.
BOUNDS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


class Histogram:
    """`counts[i]`: at most `BOUNDS[i]`, and more than the bound before; the last: more than all."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count `times` waits of so many seconds each."""
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.seconds += seconds * times

    def describe(self) -> dict[str, Any]:
        """For status: the counts, and the sum in seconds."""
        return {"counts": list(self.counts), "sum_s": round(self.seconds, 6)}


class Latencies:
    """The histograms of one daemon, by the names of its media."""

    def __init__(self, media: Iterable[str]) -> None:
        names = list(media)
        # An open to read, by the tier of its bytes; without the time to the kernel and back.
        self.open = {name: Histogram() for name in names}
        # The hydration of a whole object from the bucket, from the request on.
        self.hydrate = {name: Histogram() for name in names if name == "s3"}
        # A seal: the wait of a writer's last close.
        self.seal = {name: Histogram() for name in names if name != "s3"}

    def add_origin(self, name: str) -> None:
        """Time opens of another place of bytes, too, which is no tier."""
        self.open[name] = Histogram()

    def describe(self) -> dict[str, Any]:
        """For status: `bounds_s`, then for each kind and tier the counts and the sum."""
        kinds = {"open": self.open, "hydrate": self.hydrate, "seal": self.seal}
        return {"bounds_s": list(BOUNDS)} | {
            kind: {name: one.describe() for name, one in histograms.items()}
            for kind, histograms in kinds.items()
        }
