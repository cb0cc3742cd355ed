"""Single values as people write them: switches, words, numbers, seconds, paths.

Contract: a parser takes a text and returns the value, or raises ValueError whose message says what
was expected; whoever asks for it knows the value's name and says it. Not for sizes and durations,
which are written back as well: `kvfs.units`.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Parser = Callable[[str], Any]


def path(text: str) -> Path:
    """Return an absolute path without `..` and double slashes."""
    if not text.startswith("/") or "\0" in text:
        raise ValueError("an absolute path")
    return Path(os.path.normpath(text))


def switch(text: str) -> bool:
    """Return whether it is on."""
    if text not in {"on", "off"}:
        raise ValueError("on or off")
    return text == "on"


def choice(*words: str) -> Parser:
    """Return a parser that takes one of these words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return parse


def count(low: int, high: int, unit: str = "") -> Parser:
    """Return a parser of whole numbers from `low` to `high`; the unit may stand behind them."""

    def parse(text: str) -> int:
        digits = text.removesuffix(unit)
        if not re.fullmatch(r"[0-9]{1,19}", digits) or not low <= int(digits) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(digits)

    return parse


def seconds(text: str) -> float:
    """Return seconds, up to a year."""
    year = 365 * 24 * 3600
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= year:
        raise ValueError(f"seconds from 0 to {year}") from None
    return found


def hint(name: str, known: Iterable[str]) -> str:
    """Return which of the known names an unknown one may have meant, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
