"""Sizes as people write them: 16M, 2GiB, 1.5T.

Contract: units are powers of 1024, whatever they are called; what `format_size` gives, `parse_size`
takes back exactly. Not for output that may round.
"""

import re
from fractions import Fraction

MIB = 1 << 20
LARGEST_SIZE = 1 << 62  # sizes must fit off_t with room to add

_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)(?:([KMGT])i?)?B?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Return the bytes that 16M, 2G, 2GiB or 1.5T stand for; ValueError if it is none."""
    found = _SIZE.fullmatch(text)
    size = int(Fraction(found[1]) * _FACTORS[(found[2] or "").upper()]) if found else LARGEST_SIZE
    if size >= LARGEST_SIZE:
        raise ValueError("a size such as 512M, 2G or 1.5T")
    return size


def format_size(size: int) -> str:
    """Return the shortest text that parse_size turns back into exactly this size."""
    for unit, factor in reversed(_FACTORS.items()):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return "0"
