"""Sizes and durations as people write them: 16M, 2GiB, 1.5T; 30s, 12h, 7d.

Contract: units of sizes are powers of 1024, whether they are called M or MiB. `parse_size` takes
back the texts of `format_size` exactly, and `parse_duration` those of `format_duration`. `human`
rounds.
"""

import re
from fractions import Fraction

MIB = 1 << 20
LARGEST_SIZE = 1 << 62  # sizes must fit off_t with room to add
LONGEST_DURATION = 100 * 365 * 86400

_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)(?:([KMGT])i?)?B?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DURATION = re.compile(r"([0-9]{1,10})([smhd]?)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_size(text: str) -> int:
    """Return the bytes that 16M, 2G, 2GiB or 1.5T stand for; ValueError if it is none."""
    found = _SIZE.fullmatch(text)
    size = int(Fraction(found[1]) * _FACTORS[(found[2] or "").upper()]) if found else LARGEST_SIZE
    if size >= LARGEST_SIZE:
        raise ValueError("a size such as 512M, 2G or 1.5T")
    return size


def format_size(size: int) -> str:
    """Return the shortest text that parse_size turns back into exactly this size."""
    return _shortest(size, _FACTORS)


def human(size: int) -> str:
    """Return a number of bytes as a person reads it: 2.0 GiB."""
    amount, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while amount >= 1024 and len(units) > 1:  # noqa: PLR2004 - what the units mean
        amount /= 1024
        del units[0]
    return f"{amount:.0f} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def parse_duration(text: str) -> int:
    """Return the seconds that 30, 30s, 10m, 12h or 7d stand for; ValueError if it is none."""
    found = _DURATION.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2] or "s"] if found else LONGEST_DURATION + 1
    if seconds > LONGEST_DURATION:
        raise ValueError("a duration such as 30s, 10m, 12h or 7d, of 100 years at most")
    return seconds


def format_duration(seconds: int) -> str:
    """Return the shortest text that parse_duration turns back into exactly these seconds."""
    return _shortest(seconds, _SECONDS)


def _shortest(number: int, factors: dict[str, int]) -> str:
    for unit, factor in reversed(factors.items()):
        if number and number % factor == 0:
            return f"{number // factor}{unit}"
    return "0"
