r"""The configuration of one mount: every option, typed, with unit, default, meaning and limits.

`Config.from_options` turns the text behind `-o` into a frozen `Config`, or raises ConfigError with
one line that names the option, the value and what was expected. `Config.check` has `preflight` hold
it against the machine. Neither changes anything. A comma inside a value is written `\,` as mount(8)
does. Not for state: what a running mount has learned is in its catalog.
"""

import json
import os
import re
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvfs import preflight, runtime
from kvfs.errors import ConfigError
from kvfs.parsing import Parser, choice, count, hint, path, seconds, switch
from kvfs.preflight import SMALLEST_TIER
from kvfs.units import MIB, format_size, parse_size

_RAM_SHARE = 0.25

# What mount(8) and fstab say to themselves; nothing for a file system to act on.
_IGNORED = re.compile(
    "|(defaults|async|silent|loud|nofail|_netdev|(no)?(auto|users?|owner|group)"
    "|(no)?relatime|nostrictatime|nolazytime|[xX]-.*|(comment|user|uhelper|helper)=.*)"
)
# A flag for mount(2), and the word that takes it back.
_FLAGS = {"ro": "rw", "nosuid": "suid", "nodev": "dev", "noexec": "exec", "noatime": "atime"}


def _tier_size(text: str) -> int:
    size = parse_size(text)
    if size < SMALLEST_TIER:
        raise ValueError(f"at least {format_size(SMALLEST_TIER)}")
    return size


def _ram_size(text: str) -> int:
    return 0 if text == "0" else _tier_size(text)


def _default_ram() -> int:
    return max(SMALLEST_TIER, int(runtime.memory() * _RAM_SHARE) // MIB * MIB)


def _option(
    parse: Parser | None,
    *,
    unit: str,
    default: str,
    meaning: str,
    hot: bool = False,
    upgrade: bool = False,
) -> dict[str, Any]:
    """Hot: changes while mounted (`kvfs set`); upgrade: with another daemon (`kvfs upgrade`)."""
    return {
        "parse": parse,
        "unit": unit,
        "default": default,
        "meaning": meaning,
        "hot": hot,
        "upgrade": upgrade or hot,
    }


class OptionRow(NamedTuple):
    """One option as documentation shows it."""

    name: str
    unit: str
    default: str
    hot: bool
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What one mount was told to be. `hot` options can change while it is mounted."""

    mountpoint: Path

    ram: int = field(
        default_factory=_default_ram,
        metadata=_option(
            _ram_size,
            unit="size",
            default="25 % of the memory",
            meaning="size of the RAM tier; 0 for none",
            upgrade=True,
        ),
    )
    nvme: Path | None = field(
        default=None,
        metadata=_option(
            path,
            unit="directory",
            default="none",
            meaning="directory of the NVMe tier and the catalog, on ext4 or xfs",
        ),
    )
    nvme_size: int = field(
        default=0,
        metadata=_option(
            _tier_size,
            unit="size",
            default="80 % of what is free there",
            meaning="size of the NVMe tier",
            upgrade=True,
        ),
    )
    passthrough: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata=_option(
            choice("auto", "on", "off"),
            unit="word",
            default="auto",
            meaning="let the kernel move the bytes; on: refuse to mount without it",
        ),
    )
    huge: Literal["within_size", "always", "advise", "never"] = field(
        default="within_size",
        metadata=_option(
            choice("within_size", "always", "advise", "never"),
            unit="word",
            default="within_size",
            meaning="which files of the RAM tier get huge pages, as tmpfs(5) has it",
            upgrade=True,
        ),
    )
    allow_other: bool = field(
        default=False,
        metadata=_option(
            switch,
            unit="on/off",
            default="off",
            meaning="let users other than the one who mounted in, as file modes permit",
        ),
    )
    movers: int = field(
        default_factory=lambda: min(4, len(os.sched_getaffinity(0))),
        metadata=_option(
            count(1, 64),
            unit="processes",
            default="4, or fewer with fewer CPUs",
            meaning="workers that copy and hash objects between the tiers",
            upgrade=True,
        ),
    )
    promote_after: int = field(
        default=2,
        metadata=_option(
            count(0, 1_000_000),
            unit="opens",
            default="2",
            meaning="opens of an object on NVMe until it is copied to RAM; 0: never",
            hot=True,
        ),
    )
    reclaimable: int = field(
        default=25,
        metadata=_option(
            count(1, 90, "%"),
            unit="percent",
            default="25",
            meaning="share of the RAM tier kept free or already copied to NVMe",
            hot=True,
        ),
    )
    namespaces: Path | None = field(
        default=None,
        metadata=_option(
            path,
            unit="file",
            default="none",
            meaning="TOML with the settings that new top-level directories get, by their names",
            upgrade=True,
        ),
    )
    bandwidth: int = field(
        default=0,
        metadata=_option(
            parse_size,
            unit="size",
            default="0",
            meaning="bytes a second for which namespaces compete by weight; 0: no limit",
            hot=True,
        ),
    )
    nvme_writes: int = field(
        default=0,
        metadata=_option(
            parse_size,
            unit="size",
            default="0",
            meaning="bytes a day that may be copied from RAM to NVMe, against wear; 0: no limit",
            hot=True,
        ),
    )
    entry_timeout: float = field(
        default=3600.0,
        metadata=_option(
            seconds,
            unit="seconds",
            default="3600",
            meaning="how long the kernel may cache names and attributes of sealed files",
            hot=True,
        ),
    )
    log: Path | None = field(
        default=None,
        metadata=_option(
            path,
            unit="file",
            default="/var/log/kvfs/NAME.log",
            meaning="where the daemon logs; without root, in its runtime directory",
            upgrade=True,
        ),
    )
    watchdog: float = field(
        default=30.0,
        metadata=_option(
            seconds,
            unit="seconds",
            default="30",
            meaning="silence after which the keeper replaces the daemon; 0: never",
            upgrade=True,
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info",
        metadata=_option(
            choice("debug", "info", "warning", "error"),
            unit="word",
            default="info",
            meaning="the least severe messages that are logged",
            hot=True,
        ),
    )
    mount_flags: tuple[str, ...] = field(
        default=(),
        metadata=_option(
            None,
            unit="flags",
            default="none",
            meaning="ro nosuid nodev noexec noatime, for mount(2); and their opposites",
        ),
    )
    # Sizes that nobody gave. What a tier holds already is not free any more, so a tier that
    # mounts again must add its share of that to a fitted size, or it would shrink each time.
    fitted: tuple[str, ...] = ()

    @classmethod
    def from_options(cls, mountpoint: Path, options: str) -> "Config":
        """Return the configuration that these mount options describe, or raise ConfigError."""
        if not mountpoint.is_absolute():
            raise ConfigError(f"mount point {mountpoint}: expected an absolute path")
        values, flags = _parse(options)
        config = cls(mountpoint=mountpoint, mount_flags=flags, **values)
        if config.nvme is None and "nvme_size" in values:
            raise ConfigError("nvme_size is given without nvme, the directory it belongs to")
        if config.nvme is None and config.ram == 0:
            raise ConfigError("ram=0 without nvme leaves no place for objects; give one of them")
        if config.nvme is not None and "nvme_size" not in values:
            config = replace(config, nvme_size=preflight.default_nvme_size(config.nvme))
        fitted = tuple(name for name in ("ram", "nvme_size") if name not in values)
        return replace(config, fitted=fitted)

    def check(self) -> None:
        """Hold the configuration against this machine; raise ConfigError, change nothing."""
        preflight.check_mountpoint(self.mountpoint)
        self.check_resources()

    def check_resources(self) -> None:
        """Hold sizes and directories against this machine; raise ConfigError."""
        preflight.check_resources(
            self.mountpoint, ram=self.ram, nvme=self.nvme, nvme_size=self.nvme_size, log=self.log
        )

    def changed(self, name: str, text: str) -> "Config":
        """Return this configuration with one hot option set anew, or raise ConfigError."""
        return replace(self, **{name: parse_hot(name, text)})

    def upgraded(self, options: str) -> "Config":
        """Return this configuration with what another daemon may change, or raise ConfigError."""
        values, flags = _parse(options)
        given = {name for name, value in values.items() if value != getattr(self, name)}
        fixed = {item.name for item in _options() if not item.metadata["upgrade"]} & given
        if "ram" in given and 0 in {values["ram"], self.ram}:
            fixed.add("ram")  # from or to none at all
        if flags and flags != self.mount_flags:
            fixed.add("mount_flags")
        if fixed:
            raise ConfigError(
                f"{', '.join(sorted(fixed))}: needs a remount; unmount, and mount with it"
            )
        fitted = tuple(name for name in self.fitted if name not in values)
        config = replace(self, **values, fitted=fitted)
        config.check_resources()
        return config

    def as_options(self) -> dict[str, str]:
        """Return each option that has a value, as the text that from_options takes."""
        values = ((item, getattr(self, item.name)) for item in _options())
        texts = {item.name: _text(item, value) for item, value in values if value is not None}
        if self.nvme is None:
            del texts["nvme_size"]
        return texts | dict.fromkeys(self.mount_flags, "")

    def to_json(self) -> str:
        """Return the configuration as from_json takes it."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """Return what to_json wrote. An option that an older version did not know has its default.

        Raises ConfigError for one that only a newer version knows.
        """
        values = json.loads(text)
        known = {item.name for item in fields(cls)}
        if not isinstance(values, dict) or not {"mountpoint"} <= values.keys() <= known:
            unknown = sorted(set(values) - known) if isinstance(values, dict) else text[:80]
            raise ConfigError(
                f"a configuration of another version of kvfs, with {unknown}; this one knows "
                f"{', '.join(sorted(known))}"
            )
        for name in {"mountpoint", "nvme", "log", "namespaces"} & values.keys():
            values[name] = None if values[name] is None else Path(values[name])
        for name in {"mount_flags", "fitted"} & values.keys():
            values[name] = tuple(values[name])
        return cls(**values)


def describe_options() -> list[OptionRow]:
    """Return a row for each option, in the order of the documentation."""
    return [
        OptionRow(item.name, *(item.metadata[key] for key in ("unit", "default", "hot", "meaning")))
        for item in fields(Config)
        if item.metadata
    ]


def parse_hot(name: str, text: str) -> Any:  # noqa: ANN401 - the type is the option's
    """Return the value of an option that may change while mounted, or raise ConfigError."""
    option = _find(name)
    if not option.metadata["hot"]:
        hot = ", ".join(item.name for item in _options() if item.metadata["hot"])
        cure = (
            f" by kvfs set, but by kvfs upgrade MOUNTPOINT -o {name}={text}"
            if option.metadata["upgrade"]
            else ": unmount, mount anew"
        )
        raise ConfigError(f"{name} cannot change while mounted{cure}; what kvfs set can: {hot}")
    return _value(option, text)


def _options() -> list[Field[Any]]:
    return [item for item in fields(Config) if item.metadata and item.metadata["parse"]]


def _find(name: str) -> Field[Any]:
    by_name = {item.name: item for item in _options()}
    if name in by_name:
        return by_name[name]
    raise ConfigError(f"unknown option {name!r}; {hint(name, [*by_name, *_FLAGS])}")


def _value(option: Field[Any], text: str) -> Any:  # noqa: ANN401 - the option's
    parse: Parser = option.metadata["parse"]
    try:
        return parse(text)
    except ValueError as expected:
        raise ConfigError(f"option {option.name}={text}: expected {expected}") from None


def _parse(options: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    values: dict[str, Any] = {}
    flags: dict[str, None] = {}
    for raw in re.split(r"(?<!\\),", options):
        word = raw.replace("\\,", ",")
        if _IGNORED.fullmatch(word):
            continue
        if word in _FLAGS:
            flags[word] = None
        elif word in _FLAGS.values():
            flags = {flag: None for flag in flags if _FLAGS[flag] != word}
        elif word == "remount":
            raise ConfigError("remount is not supported: use kvfs set, or unmount and mount anew")
        else:
            name, equals, text = word.partition("=")
            option = _find(name)
            if name in values:
                raise ConfigError(f"option {name} is given twice")
            if not equals and option.metadata["parse"] is switch:
                text = "on"  # a switch alone, as in fstab
            values[name] = _value(option, text)
    return values, tuple(flags)


def _text(option: Field[Any], value: Any) -> str:  # noqa: ANN401 - the option's
    if isinstance(value, bool):
        return "on" if value else "off"
    if option.metadata["unit"] == "size":
        return format_size(value)
    return str(value).replace(",", "\\,")
