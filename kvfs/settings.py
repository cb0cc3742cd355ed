"""All that a namespace can be told: every field typed, with unit, default, meaning and limits.

Contract: `Settings` is frozen and always consistent. `parse` and `changed` take texts by field name
and give a new `Settings`, or raise ConfigError naming the field, the value and what is allowed;
`to_text` gives texts that `parse` takes back. Whether a mount has what they ask for (a tier, say)
is for the daemon to see. Not for options of the whole mount: `kvfs.config`; nor for rules by which
new namespaces get theirs: `kvfs.templates`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, get_args

from kvfs.errors import ConfigError
from kvfs.parsing import Parser, choice, count, hint, switch
from kvfs.units import format_duration, format_size, parse_duration, parse_size

MEDIA = ("ram", "nvme", "s3")  # the fastest first
Eviction = Literal["adaptive", "lru", "lfu", "fifo", "arc", "s3fifo", "sieve", "ttl", "never"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)

_MOST_OBJECTS = 10**12
_MOST_OPENS = 10**9  # a second
_LARGEST_ID = (1 << 32) - 2  # chown(2) takes the last one for "leave it"
_LONGEST_FINGERPRINT = 255  # bytes


def _media(text: str) -> tuple[str, ...]:
    words = [] if text == "all" else text.split("+")
    if len(set(words)) < len(words) or not set(words) <= set(MEDIA):
        raise ValueError(f"all, or some of {', '.join(MEDIA)} joined by +")
    return tuple(medium for medium in MEDIA if medium in words)


def _optional(parse: Parser) -> Parser:
    return lambda text: parse(text) if text else None


def _mode(text: str) -> int:
    digits = text.removeprefix("0o")
    if not 1 <= len(digits) <= 4 or set(digits) - set("01234567") or int(digits, 8) > 0o777:  # noqa: PLR2004
        raise ValueError("an octal mode from 0 to 0777, such as 0600, or nothing")
    return int(digits, 8)


def _fingerprint(text: str) -> str:
    if not text.isprintable() or len(text.encode()) > _LONGEST_FINGERPRINT:
        raise ValueError(f"one line of printable text, at most {_LONGEST_FINGERPRINT} bytes")
    return text


def _setting(
    parse: Parser, unit: str, meaning: str, text: Callable[[Any], str] = str
) -> dict[str, Any]:
    """`text` turns a value back into what `parse` takes; a value of None is the empty text."""
    return {"parse": parse, "unit": unit, "meaning": meaning, "text": text}


def _switch_text(value: bool) -> str:  # noqa: FBT001 (a formatter of one value)
    return "on" if value else "off"


class SettingRow(NamedTuple):
    """One setting as documentation shows it."""

    name: str
    unit: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one namespace was told to be. Raises ConfigError where two fields contradict."""

    media: tuple[str, ...] = field(
        default=(),
        metadata=_setting(
            _media,
            "tiers",
            "where its objects may be: ram+nvme, say; all: every tier of the mount",
            lambda media: "+".join(media) or "all",
        ),
    )
    eviction: Eviction = field(
        default="adaptive",
        metadata=_setting(
            choice(*EVICTIONS), "word", "which object goes first when room is needed"
        ),
    )
    quota_soft: int = field(
        default=0,
        metadata=_setting(
            parse_size,
            "size",
            "physical bytes beyond which its objects go before those of others; 0: none",
            format_size,
        ),
    )
    quota_hard: int = field(
        default=0,
        metadata=_setting(
            parse_size, "size", "physical bytes that it never exceeds; 0: no limit", format_size
        ),
    )
    quota_objects: int = field(
        default=0,
        metadata=_setting(
            count(0, _MOST_OBJECTS), "objects", "objects that it never exceeds; 0: no limit"
        ),
    )
    ttl: int = field(
        default=0,
        metadata=_setting(
            parse_duration, "duration", "age at which an object is gone; 0: none", format_duration
        ),
    )
    ttl_from: Literal["write", "use"] = field(
        default="write",
        metadata=_setting(choice("write", "use"), "word", "what the age counts from"),
    )
    pin: bool = field(
        default=False,
        metadata=_setting(
            switch, "on/off", "its objects are never dropped to make room", _switch_text
        ),
    )
    weight: int = field(
        default=100,
        metadata=_setting(
            count(1, 1000), "number", "its share of what namespaces compete for, beside theirs"
        ),
    )
    read_iops: int = field(
        default=0,
        metadata=_setting(count(0, _MOST_OPENS), "opens/s", "opens to read; 0: no limit"),
    )
    write_iops: int = field(
        default=0,
        metadata=_setting(count(0, _MOST_OPENS), "opens/s", "opens to write; 0: no limit"),
    )
    read_bytes: int = field(
        default=0,
        metadata=_setting(
            parse_size, "size/s", "sizes of objects opened to read; 0: no limit", format_size
        ),
    )
    write_bytes: int = field(
        default=0,
        metadata=_setting(
            parse_size, "size/s", "sizes of objects written; 0: no limit", format_size
        ),
    )
    priority: Literal["normal", "bulk"] = field(
        default="normal",
        metadata=_setting(
            choice("normal", "bulk"), "word", "bulk: gives way to normal; for model weights"
        ),
    )
    write: Literal["back", "through"] = field(
        default="back",
        metadata=_setting(
            choice("back", "through"),
            "word",
            "back: lower tiers get an object when room is needed; through: when it is closed",
        ),
    )
    publish: Literal["immediate", "close"] = field(
        default="immediate",
        metadata=_setting(
            choice("immediate", "close"), "word", "when others see a new file's name"
        ),
    )
    uid: int | None = field(
        default=None,
        metadata=_setting(
            _optional(count(0, _LARGEST_ID)), "number", "owner of new files, whoever makes them"
        ),
    )
    gid: int | None = field(
        default=None,
        metadata=_setting(
            _optional(count(0, _LARGEST_ID)), "number", "group of new files, whoever makes them"
        ),
    )
    mode: int | None = field(
        default=None,
        metadata=_setting(
            _optional(_mode), "octal", "mode of new files, whatever they ask for", "{:04o}".format
        ),
    )
    fingerprint: str = field(
        default="",
        metadata=_setting(_fingerprint, "text", "what its objects were made by: model, dtype"),
    )
    version: int = field(
        default=1,
        metadata=_setting(
            count(1, 1 << 31), "number", "objects of other versions are not there any more"
        ),
    )

    def __post_init__(self) -> None:
        soft, hard = format_size(self.quota_soft), format_size(self.quota_hard)
        ttl = format_duration(self.ttl)
        for wrong, one, other, cure in (
            (
                0 < self.quota_hard < self.quota_soft,
                f"quota_soft={soft}",
                f"quota_hard={hard}",
                "a soft quota is at most the hard one",
            ),
            (
                self.eviction == "ttl" and not self.ttl,
                "eviction=ttl",
                "ttl=0",
                "give a ttl, such as 12h",
            ),
            (
                self.pin and self.ttl > 0,
                "pin=on",
                f"ttl={ttl}",
                "what is pinned never expires: pin=off or ttl=0",
            ),
            (
                self.write == "through" and self.media == ("ram",),
                "write=through",
                "media=ram",
                "there is no lower tier to write to: add one, such as media=ram+nvme",
            ),
        ):
            if wrong:
                raise ConfigError(f"setting {one} contradicts {other}: {cure}")

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> "Settings":
        """Return the defaults with these fields set, or raise ConfigError."""
        return cls().changed(texts)

    def changed(self, texts: Mapping[str, str]) -> "Settings":
        """Return these settings with some fields set anew, all or none; raises ConfigError."""
        return replace(self, **{name: _value(name, text) for name, text in texts.items()})

    def to_text(self) -> dict[str, str]:
        """Return every field as the text that `parse` takes."""
        return {item.name: _text(item, getattr(self, item.name)) for item in fields(self)}

    def to_json(self) -> str:
        """Return every field, so that a later version's defaults change no namespace."""
        return json.dumps(self.to_text())

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Return what to_json wrote. A field that an older version did not know has its default.

        Raises ConfigError for one that only a newer version knows, and for what is no settings.
        """
        try:
            texts = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"settings {text[:80]!r}: expected JSON: {error}") from None
        if not isinstance(texts, dict) or not all(isinstance(one, str) for one in texts.values()):
            raise ConfigError(f"settings {text[:80]}: expected texts by name")
        return cls.parse(texts)

    @classmethod
    def rows(cls) -> list[SettingRow]:
        """Return a row for each field, in the order of the documentation."""
        return [
            SettingRow(
                item.name,
                item.metadata["unit"],
                _text(item, item.default) or "none",
                item.metadata["meaning"],
            )
            for item in fields(cls)
        ]


def _value(name: str, text: str) -> Any:  # noqa: ANN401 - the field's
    item = _FIELDS.get(name)
    if item is None:
        raise ConfigError(f"unknown setting {name!r}; {hint(name, _FIELDS)}")
    parse: Parser = item.metadata["parse"]
    try:
        return parse(text)
    except ValueError as expected:
        raise ConfigError(f"setting {name}={text}: expected {expected}") from None


def _text(item: Field[Any], value: object) -> str:
    return "" if value is None else str(item.metadata["text"](value))


_FIELDS = {item.name: item for item in fields(Settings)}
