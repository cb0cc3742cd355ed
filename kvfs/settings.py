"""All settings of a namespace: every field typed, with unit, default, meaning and limits.

Contract: `Settings` is frozen and always consistent. `parse` and `changed` take texts by field name
and give a new `Settings`. ConfigError names the field, the value and the allowed ones. `to_text`
gives texts that `parse` takes back. The daemon checks whether a mount has the resources for them (a
tier, for example). Not for options of the whole mount: `kvfs.config`; nor for the rules for new
namespaces: `kvfs.templates`.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, get_args

from kvfs.errors import ConfigError
from kvfs.parsing import (
    DURATION,
    SIZE,
    SWITCH,
    ValueKind,
    choice,
    count,
    described,
    kinds_of,
    optional,
    read_field,
)
from kvfs.units import format_size

MEDIA = ("ram", "nvme", "s3")  # the fastest first
Eviction = Literal["adaptive", "lru", "lfu", "fifo", "arc", "s3fifo", "sieve", "ttl", "never"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)

LEAST_QUOTA = 4096  # bytes that a tier counts for the smallest object: `Tier.cost`
_LONGEST_FINGERPRINT = 2048  # bytes: the longest JSON text of a `kvfs.prefix.Fingerprint`


def _media(text: str) -> tuple[str, ...]:
    words = [] if text == "all" else text.split("+")
    if len(set(words)) < len(words) or not set(words) <= set(MEDIA):
        raise ValueError(f"all, or some of {', '.join(MEDIA)} joined by +")
    return tuple(medium for medium in MEDIA if medium in words)


def _mode(text: str) -> int:
    digits = text.removeprefix("0o")
    if not 1 <= len(digits) <= 4 or set(digits) - set("01234567") or int(digits, 8) > 0o777:  # noqa: PLR2004
        raise ValueError("an octal mode from 0 to 0777, such as 0600, or none")
    return int(digits, 8)


def _fingerprint(text: str) -> str:
    if not text.isprintable() or len(text.encode()) > _LONGEST_FINGERPRINT:
        raise ValueError(f"one line of printable text, at most {_LONGEST_FINGERPRINT} bytes")
    return text


_TIERS = ValueKind("tiers", _media, lambda media: "+".join(media) or "all")
_MODE = optional(ValueKind("octal", _mode, "{:04o}".format))
_TEXT = ValueKind("text", _fingerprint)
_OBJECTS = count(0, 10**12, "objects")
_OPENS = count(0, 10**9, "opens/s")
_BYTES = SIZE._replace(unit="size/s")
_ID = optional(count(0, (1 << 32) - 2))  # chown(2) takes the last one for "leave it"


def _setting(default: Any, kind: ValueKind, meaning: str) -> Any:  # noqa: ANN401 - the field's
    words = f" ({', '.join(kind.words)})" if kind.words else ""
    return described(kind, meaning + words, default=default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one namespace. Raises ConfigError where two fields contradict."""

    media: tuple[str, ...] = _setting(
        (), _TIERS, "tiers for its objects, such as ram+nvme; all: every tier of the mount"
    )
    eviction: Eviction = _setting(
        "adaptive", choice(*EVICTIONS), "policy that orders its objects for eviction"
    )
    quota_soft: int = _setting(
        0, SIZE, "physical bytes above which it gives room before other namespaces; 0: none"
    )
    quota_hard: int = _setting(0, SIZE, "physical bytes that it may have at most; 0: no limit")
    quota_objects: int = _setting(0, _OBJECTS, "objects that it may have at most; 0: no limit")
    ttl: int = _setting(0, DURATION, "age at which kvfs drops an object; 0: no age")
    ttl_from: Literal["write", "use"] = _setting(
        "write", choice("write", "use"), "event from which the age counts"
    )
    pin: bool = _setting(default=False, kind=SWITCH, meaning="never drop its objects to make room")
    weight: int = _setting(
        100, count(1, 1000), "its share of bandwidth and of room, relative to other namespaces"
    )
    read_iops: int = _setting(0, _OPENS, "opens for reading; 0: no limit")
    write_iops: int = _setting(0, _OPENS, "opens for writing; 0: no limit")
    read_bytes: int = _setting(0, _BYTES, "bytes of objects opened for reading; 0: no limit")
    write_bytes: int = _setting(0, _BYTES, "bytes of objects written; 0: no limit")
    priority: Literal["normal", "bulk"] = _setting(
        "normal", choice("normal", "bulk"), "bulk gives way to normal; for model weights"
    )
    write: Literal["back", "through"] = _setting(
        "back",
        choice("back", "through"),
        "through: lower tiers get an object at its close; back: when RAM needs room",
    )
    compression: Literal["off", "s3", "nvme"] = _setting(
        "off",
        choice("off", "s3", "nvme"),
        "s3: compress uploads, without loss; nvme: compress copies on NVMe as well",
    )
    publish: Literal["immediate", "close"] = _setting(
        "immediate", choice("immediate", "close"), "when other processes see the name of a new file"
    )
    prefetch: bool = _setting(
        default=True,
        kind=SWITCH,
        meaning="fetch the next blocks of a prefix from the bucket or other nodes ahead",
    )
    pool: bool = _setting(
        default=True,
        kind=SWITCH,
        meaning="share its objects with the other nodes of the pool",
    )
    prefix: bool = _setting(
        default=False,
        kind=SWITCH,
        meaning="directories are prefixes: each block has one for the blocks after it",
    )
    uid: int | None = _setting(None, _ID, "owner of new files, for every writer")
    gid: int | None = _setting(None, _ID, "group of new files, for every writer")
    mode: int | None = _setting(None, _MODE, "mode of new files, for every writer")
    fingerprint: str = _setting("", _TEXT, "model, dtype and so on that made its objects")
    version: int = _setting(1, count(1, 1 << 31), "a change makes all its objects vanish at once")

    def __post_init__(self) -> None:
        if 0 < self.quota_hard < self.quota_soft:
            self._contradict("quota_soft", "quota_hard", "a soft quota is at most the hard quota")
        if self.eviction == "ttl" and not self.ttl:
            self._contradict("eviction", "ttl", "give a ttl, such as 12h")
        if self.pin and self.ttl > 0:
            self._contradict("pin", "ttl", "a pinned object never expires: give pin=off or ttl=0")
        if self.write == "through" and self.media == ("ram",):
            cure = "there is no lower tier to write to: add one, such as media=ram+nvme"
            self._contradict("write", "media", cure)

    def _contradict(self, one: str, other: str, cure: str) -> NoReturn:
        texts = self.to_text()
        raise ConfigError(f"setting {one}={texts[one]} contradicts {other}={texts[other]}: {cure}")

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> "Settings":
        """Return the defaults with these fields set, or raise ConfigError."""
        return cls().changed(texts)

    def changed(self, texts: Mapping[str, str]) -> "Settings":
        """Return these settings with some fields set anew, all or none; raises ConfigError."""
        values = {name: read_field("setting", name, texts[name], _KINDS) for name in texts}
        return replace(self, **values)

    def to_text(self) -> dict[str, str]:
        """Return every field as the text that `parse` takes."""
        return {name: kind.text(getattr(self, name)) for name, kind in _KINDS.items()}

    def to_json(self) -> str:
        """Return every field, so that a later version's defaults change no namespace."""
        return json.dumps(self.to_text())

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Return the settings that to_json wrote.

        A field that an older version did not know has its default. Raises ConfigError for a field
        that only a newer version knows, and for text that has no settings.
        """
        try:
            texts = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"settings {text[:80]!r}: expected JSON: {error}") from None
        if not isinstance(texts, dict) or not all(isinstance(one, str) for one in texts.values()):
            raise ConfigError(f"settings {text[:80]!r}: expected texts by name")
        return cls.parse({name: _with_unit(name, written) for name, written in texts.items()})

    def check_quota(self) -> None:
        """Check that an object fits the hard quota. An earlier version took any. ConfigError."""
        if 0 < self.quota_hard < LEAST_QUOTA:
            raise ConfigError(
                f"setting quota_hard={format_size(self.quota_hard)}: expected 0, or at least 4K, "
                "which each object takes"
            )

    def check_media(self, mounted: Collection[str]) -> None:
        """Raise ConfigError for a tier that is not mounted, or for the bucket alone."""
        missing = set(self.media) - set(mounted)
        if missing:
            raise ConfigError(
                f"setting media={'+'.join(self.media)}: this mount has no {min(missing)} "
                f"tier, expected some of {'+'.join(sorted(mounted))}, or all"
            )
        if self.media == ("s3",):
            raise ConfigError(
                "setting media=s3: programs write to a local tier first, expected one more tier, "
                "such as media=nvme+s3"
            )


def _with_unit(name: str, text: str) -> str:
    """Return a size with its unit; catalogs of earlier versions have bytes without one."""
    kind = _KINDS.get(name)
    return f"{text}B" if kind in {SIZE, _BYTES} and text.isdigit() else text


_KINDS = kinds_of(Settings)
