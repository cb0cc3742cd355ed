"""Figures from samples: rates, percentiles, ratios and the bars they are held against.

Pure: no clock, no files, no output. Not for deciding what to measure.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """Bytes of "64K", "32MiB" or "1G": powers of 1024."""
    match = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is no size: expected a number with K, M or G, such as 64K")
    return int(match[1]) * UNITS[match[2].upper()]


def size_name(count: int) -> str:
    """64 KiB, 32 MiB: the largest unit without a fraction."""
    for unit, factor in sorted(UNITS.items(), key=lambda pair: -pair[1]):
        if count >= factor and count % factor == 0:
            return f"{count // factor} {unit}iB" if unit else f"{count} B"
    return f"{count} B"


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below or at which `share` (0 to 1) of all samples lie: always a real sample."""
    if not samples:
        raise ValueError("no samples")
    if not 0 <= share <= 1:
        raise ValueError(f"share {share} is not between 0 and 1")
    rank = math.ceil(round(share * len(samples), 9))  # rounded: 0.07 * 100 is above 7
    return sorted(samples)[max(0, rank - 1)]


def ratio(value: float, base: float) -> float | None:
    """None where there is nothing to compare with."""
    return value / base if base else None


def paired_ratio(values: Sequence[float], bases: Sequence[float]) -> float | None:
    """The median of the rounds' own ratios: what drifts slowly on the machine cancels out."""
    if len(values) != len(bases):
        raise ValueError(f"{len(values)} rounds cannot be paired with {len(bases)}")
    if not values or not all(bases):
        return None
    return median(value / base for value, base in zip(values, bases, strict=True))


@dataclass(frozen=True, slots=True)
class Series:
    """Rates of one thing measured once a round; more is better."""

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates:
            raise ValueError("a series needs one round at least")

    @property
    def best(self) -> float:
        return max(self.rates)

    @property
    def median(self) -> float:
        return median(self.rates)

    @property
    def scatter(self) -> float:
        """How many times slower the median round was than the best."""
        return self.best / self.median

    def against(self, base: "Series") -> dict[str, float | None]:
        """Ratio of the best rounds, and the median of the ratios of paired rounds."""
        return {
            "best": ratio(self.best, base.best),
            "median": paired_ratio(self.rates, base.rates),
        }


@dataclass(frozen=True, slots=True)
class Bar:
    """A bound that a figure is held against. `at_least` False: the figure must not exceed it."""

    name: str
    bound: float
    at_least: bool = True

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def judged(
        self, value: float | None, detail: str = "", paired: float | None = None
    ) -> dict[str, object]:
        """A row of a report; `paired` is told beside the value and decides nothing."""
        verdict = "not measured" if value is None else "yes" if self.holds(value) else "NO"
        return {
            "bar": self.name,
            "at": detail,
            "bound": f"{'>=' if self.at_least else '<='} {self.bound:g}",
            "value": value,
            "paired": paired,
            "holds": verdict,
        }


def turns(count: int, number: int) -> list[int]:
    """The order of `count` competitors in round `number`: each is first in its turn."""
    return [(index + number) % count for index in range(count)]


def against_best(ours: Series, rivals: Mapping[str, Series]) -> tuple[str, dict[str, float | None]]:
    """Return the rival with the best median round, and our ratios to it."""
    name = max(rivals, key=lambda rival: rivals[rival].median)
    return name, ours.against(rivals[name])
