"""Values as people write them, and the dataclass fields that are written so.

Contract: a `ValueKind` takes a text and returns the value, or raises ValueError, whose message has
the expected form. It turns the value back into a text that it takes. `described` makes a field that
has a kind and a meaning, `rows` shows all of these, and `read_field` and `read_value` read one by
name.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from kvfs.errors import ConfigError
from kvfs.units import format_duration, format_size, parse_duration, parse_size


class ValueKind(NamedTuple):
    """One kind of value. `unit` is its name in the documentation, `words` are all its values."""

    unit: str
    parse: Callable[[str], Any]
    text: Callable[[Any], str] = str
    words: tuple[str, ...] = ()


class Row(NamedTuple):
    """One field for the documentation."""

    name: str
    unit: str
    default: str
    hot: bool
    upgrade: bool
    meaning: str


def described(
    kind: ValueKind,
    meaning: str,
    *,
    default: Any = MISSING,  # noqa: ANN401 - the field's
    factory: Any = MISSING,  # noqa: ANN401 - the field's
    shown: str = "",
    hot: bool = False,
    upgrade: bool = False,
) -> Any:  # noqa: ANN401 - the field's
    """Define a field of a dataclass. Hot: changes while mounted; upgrade: with another daemon.

    shown: the default in the documentation, if that is not the value.
    """
    text = shown or ("" if default is None else kind.text(default).removesuffix(".0")) or "none"
    row = Row("", kind.unit, text, hot, upgrade or hot, meaning)
    return field(default=default, default_factory=factory, metadata={"kind": kind, "row": row})


def kinds_of(described_class: Any) -> dict[str, ValueKind]:  # noqa: ANN401 - any dataclass
    """Return the kind of each described field, by its name."""
    return {one.name: one.metadata["kind"] for one in fields(described_class) if one.metadata}


def rows(described_class: Any) -> list[Row]:  # noqa: ANN401 - any dataclass
    """Return a row for each described field, in the order of the documentation."""
    found = [one for one in fields(described_class) if one.metadata]
    return [one.metadata["row"]._replace(name=one.name) for one in found]


def read_field(
    what: str, name: str, text: str, kinds: Mapping[str, ValueKind], others: Iterable[str] = ()
) -> Any:  # noqa: ANN401 - the kind's
    """Return the value of a field, or raise ConfigError, also for an unknown name.

    others: further names that an unknown one may stand for.
    """
    if name not in kinds:
        raise ConfigError(f"unknown {what} {name!r}; {hint(name, [*kinds, *others])}")
    return read_value(what, name, text, kinds[name])


def read_value(what: str, name: str, text: str, kind: ValueKind) -> Any:  # noqa: ANN401 - the kind's
    """Return the value of `what` (an option, a setting) of this name, or raise ConfigError."""
    try:
        return kind.parse(text)
    except ValueError as expected:
        raise ConfigError(f"{what} {name}={_shown(text)}: expected {expected}") from None


def _shown(text: str) -> str:
    """Return a value for a message, which may end in a log: without likely passwords."""
    return re.sub(r"//[^/]*@", "//...@", text)


def hint(name: str, known: Iterable[str]) -> str:
    """Return the known names that an unknown one may stand for, or all of them."""
    names = list(known)
    if _NETWORK.fullmatch(name):
        return "join networks by +, not by a comma"
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"


def _path(text: str) -> Path:
    """Return a path without `..` and double slashes."""
    if not text.startswith("/") or "\0" in text:
        raise ValueError("an absolute path")
    return Path(os.path.normpath(text))


def _word(text: str) -> str:
    if not text.isprintable() or not text or any(map(str.isspace, text)):
        raise ValueError("one word")
    return text


def _switch(text: str) -> bool:
    if text not in {"on", "off"}:
        raise ValueError("on or off")
    return text == "on"


def _seconds(text: str) -> float:
    year = 365 * 24 * 3600
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= year:
        raise ValueError(f"seconds from 0 to {year}") from None
    return found


_NETWORK = re.compile(r"[0-9a-fA-F.:]+/\d+")
SIZE = ValueKind("size", parse_size, format_size)
DURATION = ValueKind("duration", parse_duration, format_duration)
SECONDS = ValueKind("seconds", _seconds)  # up to a year, and parts of one
SWITCH = ValueKind("on/off", _switch, lambda on: "on" if on else "off")
WORD = ValueKind("word", _word)
DIRECTORY = ValueKind("directory", _path)
FILE = ValueKind("file", _path)


def choice(*words: str) -> ValueKind:
    """Return the kind whose values are these words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return ValueKind("word", parse, words=words)


def count(low: int, high: int, unit: str = "number", *, suffix: str = "") -> ValueKind:
    """Return the kind of whole numbers from `low` to `high`; the suffix may follow them."""

    def parse(text: str) -> int:
        digits = text.removesuffix(suffix)
        if not re.fullmatch(r"[0-9]{1,19}", digits) or not low <= int(digits) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(digits)

    return ValueKind(unit, parse)


def or_none(kind: ValueKind) -> ValueKind:
    """Return the kind whose value may also be missing: `none`, and None."""

    def parse(text: str) -> Any:  # noqa: ANN401 - the kind's
        if text == "none":
            return None
        try:
            return kind.parse(text)
        except ValueError as expected:
            raise ValueError(f"{expected}, or none") from None

    return ValueKind(
        kind.unit, parse, lambda found: "none" if found is None else kind.text(found), kind.words
    )


def optional(kind: ValueKind) -> ValueKind:
    """Return the kind whose value may also be missing: `none`, the empty text, and None."""
    return ValueKind(
        kind.unit,
        lambda text: None if text in {"", "none"} else kind.parse(text),
        lambda found: "" if found is None else kind.text(found),
    )
