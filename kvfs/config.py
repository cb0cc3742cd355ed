r"""The configuration of one mount: every option, typed, with unit, default, meaning and limits.

`Config.from_options` turns the text behind `-o` into a frozen `Config`, or raises ConfigError with
one line that names the option, the value and the expected one. `Config.check` compares it with the
machine by `preflight`. Neither changes anything. A comma inside a value is written `\,` as mount(8)
does. Not for state: the catalog of a running mount has that.
"""

import ipaddress
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from kvfs import preflight, runtime
from kvfs.errors import ConfigError
from kvfs.metrics.address import Address, check_different, check_free
from kvfs.parsing import (
    DIRECTORY,
    FILE,
    SECONDS,
    SIZE,
    SWITCH,
    WORD,
    ValueKind,
    choice,
    count,
    described,
    kinds_of,
    optional,
    or_none,
    read_field,
    rows,
)
from kvfs.pool.place import PoolPlace
from kvfs.preflight import SMALLEST_TIER
from kvfs.s3.place import BucketPlace
from kvfs.units import MIB, format_duration, format_size, parse_duration, parse_size

_RAM_SHARE = 0.25

# Words of mount(8) and fstab for themselves; a file system does nothing with them.
_IGNORED = re.compile(
    "|(defaults|async|silent|loud|nofail|_netdev|(no)?(auto|users?|owner|group)"
    "|(no)?relatime|nostrictatime|nolazytime|[xX]-.*|(comment|user|uhelper|helper)=.*)"
)
# A flag for mount(2), and the word that removes it. ALWAYS: each mount of kvfs has these.
FLAGS = {"ro": "rw", "nosuid": "suid", "nodev": "dev", "noexec": "exec", "noatime": "atime"}
ALWAYS = frozenset({"nosuid", "nodev"})


def _tier_size(text: str) -> int:
    size = parse_size(text)
    if size < SMALLEST_TIER:
        raise ValueError(f"at least {format_size(SMALLEST_TIER)}")
    return size


def _ram_size(text: str) -> int:
    return 0 if text == "0" else _tier_size(text)


def _default_ram() -> int:
    return max(SMALLEST_TIER, int(runtime.memory() * _RAM_SHARE) // MIB * MIB)


def _size_or_share(text: str) -> int | float:
    """Return bytes, or a share of something from above 0 to 1."""
    share = re.fullmatch(r"([0-9]{1,3})%", text)
    value = int(share[1]) / 100 if share else parse_size(text)
    if not value or (share and value > 1):
        raise ValueError("a size such as 2G, or a share from 1% to 100%")
    return value


def _size_or_share_text(value: float) -> str:
    return format_size(value) if isinstance(value, int) else f"{round(value * 100)}%"


def _period(text: str) -> int:
    """Return seconds; 0 for off."""
    if text in {"off", "0"}:
        return 0
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0
    if not seconds:
        raise ValueError("a duration such as 12h or 7d, of 100 years at most, or off")
    return seconds


def _period_text(seconds: int) -> str:
    return format_duration(seconds) if seconds else "off"


def _networks(text: str) -> str:
    """Return networks in CIDR form, joined by +."""
    found = []
    for one in text.split("+"):
        try:
            meant = str(ipaddress.ip_network(one, strict=False))
            found.append(str(ipaddress.ip_network(one)))
        except ValueError as error:
            if "host bits" in str(error):
                raise ValueError(f"{meant} in place of {one}, which has host bits set") from None
            raise ValueError("networks such as 10.0.0.0/8, joined by +") from None
    return "+".join(found)


_TIER = SIZE._replace(parse=_tier_size)
_TIER_OR_NONE = SIZE._replace(parse=_ram_size)
_BUCKET = or_none(ValueKind("URL", lambda text: str(BucketPlace.parse(text))))
_POOL = or_none(ValueKind("URL", lambda text: str(PoolPlace.parse(text))))
_NETWORKS = ValueKind("networks", _networks)
_DIRTY = ValueKind("size or share", _size_or_share, _size_or_share_text)
_ADDRESS = or_none(ValueKind("address", lambda text: str(Address.parse(text))))
_ENDPOINT = ValueKind("URL", lambda text: BucketPlace.parse("s3://bucket", endpoint=text).endpoint)
_PERIOD = ValueKind("duration", _period, _period_text)
_MOUNT_FLAGS = ValueKind("flags", str)  # `_parse` collects them


def _hot(kind: ValueKind, meaning: str, **given: Any) -> Any:  # noqa: ANN401 - the field's
    """Define an option that changes while mounted (`kvfs set`)."""
    return described(kind, meaning, hot=True, **given)


def _upgraded(kind: ValueKind, meaning: str, **given: Any) -> Any:  # noqa: ANN401 - the field's
    """Define an option that changes with another daemon (`kvfs upgrade`)."""
    return described(kind, meaning, upgrade=True, **given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The options of one mount. `hot` options can change while it is mounted."""

    mountpoint: Path

    ram: int = _upgraded(
        _TIER_OR_NONE,
        "size of the RAM tier; 0: no RAM tier",
        factory=_default_ram,
        shown="25 % of the memory",
    )
    nvme: Path | None = described(
        or_none(DIRECTORY),
        "directory for the NVMe tier and the catalog, on ext4 or xfs",
        default=None,
    )
    nvme_size: int = _upgraded(
        _TIER, "size of the NVMe tier", default=0, shown="80 % of the free space there"
    )
    s3: str | None = described(
        _BUCKET, "bucket below the local tiers, as s3://BUCKET/PREFIX (docs/s3.md)", default=None
    )
    s3_endpoint: str | None = described(
        _ENDPOINT, "URL of the S3 store, if it is not Amazon's", default=None
    )
    s3_region: str | None = described(WORD, "region of the bucket", default=None)
    s3_profile: str | None = described(
        WORD, "profile of boto3 that has the credentials", default=None
    )
    s3_required: bool = described(
        SWITCH, "refuse to mount while the bucket is not usable", default=True
    )
    s3_dirty: int | float = _upgraded(
        _DIRTY,
        "bytes that may wait for upload before writers wait; N%: share of the local tiers",
        default=0.25,
    )
    s3_delay: float = _hot(
        SECONDS,
        "time between the seal of an object and its upload",
        default=5.0,
    )
    s3_wait: float = _hot(
        SECONDS,
        "longest wait of an open for the bucket, and of a writer for uploads",
        default=30.0,
    )
    s3_exclusive: bool = described(
        SWITCH, "claim a new prefix for this mount alone, and refuse others", default=False
    )
    s3_shared: bool = _hot(
        SWITCH,
        "look up missing names in the bucket; off: no other mount uses its prefix",
        default=True,
    )
    s3_recheck: float = _hot(
        SECONDS,
        "how long kvfs trusts a local copy before it revalidates it against the bucket",
        default=30.0,
    )
    s3_stream: int = _hot(
        SIZE,
        "objects of this size or more are readable while they download; 0: none",
        default=256 << 20,
    )
    pool: str | None = described(
        _POOL,
        "pool of nodes that read each other's objects, as redis://HOST:PORT/NAME (docs/pool.md)",
        default=None,
    )
    pool_address: str | None = described(
        WORD,
        "IP or IP:PORT at which other nodes of the pool read from here",
        default=None,
        shown="the address that reaches the index, port 7373",
    )
    pool_allow: str | None = described(
        _NETWORKS,
        "networks whose nodes may read without TLS, joined by +",
        default=None,
    )
    pool_tls: Path | None = described(
        DIRECTORY,
        "directory with ca.pem, cert.pem and key.pem for TLS between the nodes",
        default=None,
    )
    pool_credentials: Path | None = described(
        FILE,
        "file with the user and the password of the index, a line each",
        default=None,
        shown="KVFS_POOL_USER and KVFS_POOL_PASSWORD",
    )
    pool_wait: float = _hot(
        SECONDS, "longest wait of an open for the other nodes of the pool", default=2.0
    )
    pool_stream: int = _hot(
        SIZE,
        "objects of this size or more are readable while they come from a node; 0: none",
        default=256 << 20,
    )
    pool_copies: Literal["drop", "keep"] = _hot(
        choice("drop", "keep"),
        "keep: offer the pool's last copy of an object to another node before it is evicted",
        default="drop",
    )
    pool_required: bool = described(
        SWITCH, "refuse to mount while the index of the pool does not answer", default=True
    )
    passthrough: Literal["auto", "on", "off"] = described(
        choice("auto", "on", "off"),
        "let the kernel read and write the bytes; on: refuse to mount without it",
        default="auto",
    )
    fast_open: bool = described(
        SWITCH,
        "answer opens of files in RAM without Python; needs passthrough",
        default=True,
    )
    huge: Literal["within_size", "always", "advise", "never"] = _upgraded(
        choice("within_size", "always", "advise", "never"),
        "huge pages of the RAM tier, as in tmpfs(5)",
        default="within_size",
    )
    allow_other: bool = described(
        SWITCH, "let all users in, as file modes permit, not only the mounter", default=False
    )
    movers: int = _upgraded(
        count(1, 64, "processes"),
        "worker processes that copy and hash objects",
        factory=lambda: min(4, len(os.sched_getaffinity(0))),
        shown="4, or fewer with fewer CPUs",
    )
    promote_after: int = _hot(
        count(0, 1_000_000, "opens"),
        "opens of an object on NVMe before kvfs promotes it to RAM; 0: never",
        default=2,
    )
    verify_after: int = _hot(
        _PERIOD,
        "time after which an open verifies a copy on NVMe again; off: never",
        default=86400,
    )
    reclaimable: int = _hot(
        count(1, 90, "percent", suffix="%"),
        "share of the RAM tier that is free or also on NVMe",
        default=25,
    )
    namespaces: Path | None = _upgraded(
        or_none(FILE),
        "TOML file with settings for new top-level directories, by name",
        default=None,
    )
    bandwidth: int = _hot(
        SIZE, "bytes a second that namespaces share by weight; 0: no limit", default=0
    )
    nvme_writes: int = _hot(
        SIZE,
        "bytes a day that kvfs may demote to NVMe, against wear; 0: no limit",
        default=0,
    )
    scrub: int = _hot(
        _PERIOD,
        "time for one pass that verifies all local copies; off: no scrub",
        default=7 * 86400,
    )
    entry_timeout: float = _hot(
        SECONDS,
        "how long the kernel may cache names and attributes of sealed files",
        default=3600.0,
    )
    log: Path | None = _upgraded(
        FILE,
        "log file; without root, it is in the runtime directory",
        default=None,
        shown="/var/log/kvfs/NAME.log",
    )
    watchdog: float = _upgraded(
        SECONDS, "silence of the daemon after which the keeper replaces it; 0: never", default=30.0
    )
    log_level: Literal["debug", "info", "warning", "error"] = _hot(
        choice("debug", "info", "warning", "error"),
        "least severe level in the log",
        default="info",
    )
    access_log: Path | None = _hot(
        optional(FILE),
        "file for reads, writes and misses, for kvfs profile; none: no log",
        default=None,
    )
    access_log_size: int = _hot(
        SIZE, "bound on access_log; the older half is in FILE.1", default=256 * MIB
    )
    metrics: str | None = _upgraded(
        _ADDRESS,
        "Prometheus metrics at PORT of 127.0.0.1, ADDRESS:PORT or /SOCKET (docs/metrics.md)",
        default=None,
    )
    web: str | None = _upgraded(
        _ADDRESS,
        "page for browsers, at an address as for metrics; it shows file names (docs/seeing.md)",
        default=None,
    )
    mount_flags: tuple[str, ...] = described(
        _MOUNT_FLAGS,
        "given alone, as in -o ro: ro nosuid nodev noexec noatime, and their opposites",
        default=(),
        shown="none",
    )
    # Sizes that the user did not give. The bytes in a tier are not free any more. So a tier that
    # mounts again must add its share of them to a fitted size, or it would shrink each time.
    fitted: tuple[str, ...] = ()

    @classmethod
    def from_options(cls, mountpoint: Path, options: str) -> "Config":
        """Return the configuration that these mount options describe, or raise ConfigError."""
        if not mountpoint.is_absolute():
            raise ConfigError(f"mount point {mountpoint}: expected an absolute path")
        values, flags = _parse(options)
        config = cls(mountpoint=mountpoint, mount_flags=flags, **values)
        if config.nvme is None and "nvme_size" in values:
            raise ConfigError("nvme_size is given without nvme: add nvme=DIRECTORY")
        if config.nvme is None and config.ram == 0:
            raise ConfigError("ram=0 without nvme leaves no place for objects: give ram= or nvme=")
        alone = [name for name in values if name.startswith("s3_")]
        if config.s3 is None and alone:
            raise ConfigError(f"{alone[0]} is given without s3: add s3=s3://BUCKET/PREFIX")
        alone = [name for name in values if name.startswith("pool_")]
        if config.pool is None and alone:
            raise ConfigError(f"{alone[0]} is given without pool: add pool=redis://HOST:PORT/NAME")
        check_different(config.addresses)
        if config.nvme is not None and "nvme_size" not in values:
            config = replace(config, nvme_size=preflight.default_nvme_size(config.nvme))
        fitted = tuple(name for name in ("ram", "nvme_size") if name not in values)
        return replace(config, fitted=fitted)

    @property
    def place(self) -> BucketPlace | None:
        """Return the place of the bucket, None without one."""
        if self.s3 is None:
            return None
        return BucketPlace.parse(
            self.s3, endpoint=self.s3_endpoint, region=self.s3_region, profile=self.s3_profile
        )

    @property
    def pool_place(self) -> PoolPlace | None:
        """Return the place of the pool, None without one."""
        return None if self.pool is None else PoolPlace.parse(self.pool)

    @property
    def pool_networks(self) -> tuple[str, ...]:
        """Return the networks of `pool_allow`."""
        return () if self.pool_allow is None else tuple(self.pool_allow.split("+"))

    @property
    def shared(self) -> bool:
        """Return whether names that are not here are looked up in the bucket."""
        return self.s3_shared and not self.s3_exclusive

    @property
    def dirty_most(self) -> int:
        """Return the bytes that may wait for their upload."""
        if isinstance(self.s3_dirty, int):
            return self.s3_dirty
        return int((self.ram + (self.nvme_size if self.nvme is not None else 0)) * self.s3_dirty)

    def check(self) -> None:
        """Compare the configuration with this machine; raise ConfigError, change nothing."""
        preflight.check_mountpoint(self.mountpoint)
        self.check_resources()

    def check_resources(self) -> None:
        """Compare sizes and directories with this machine; raise ConfigError."""
        preflight.check_resources(
            self.mountpoint, ram=self.ram, nvme=self.nvme, nvme_size=self.nvme_size, log=self.log
        )
        if self.access_log is not None:
            tiers = () if self.nvme is None else (self.nvme,)
            preflight.check_access_log(self.access_log, self.mountpoint, tiers)
        for option, address in self.addresses.items():
            if address.path:
                preflight.check_apart(option, Path(address.path), self.mountpoint)

    @property
    def addresses(self) -> dict[str, Address]:
        """Return the addresses of metrics and the page, by option."""
        given = {name: getattr(self, name) for name in ("metrics", "web")}
        return {name: Address.parse(text) for name, text in given.items() if text is not None}

    @property
    def tiers(self) -> list[str]:
        """Return the names of the mount's tiers."""
        return [name for name, there in (("ram", self.ram), ("nvme", self.nvme)) if there]

    def changed(self, name: str, text: str) -> "Config":
        """Return this configuration with one hot option set anew, or raise ConfigError."""
        return replace(self, **{name: parse_hot(name, text)})

    def upgraded(self, options: str, by: str = "kvfs upgrade") -> "Config":
        """Return this configuration with a new daemon's options, or raise ConfigError.

        by: the command that the user gave, for the message.
        """
        values, flags = _parse(options)
        given = {name for name, value in values.items() if value != getattr(self, name)}
        fixed = {name for name in given if not _ROWS[name].upgrade}
        if "ram" in given and 0 in {values["ram"], self.ram}:
            fixed.add("ram")  # from or to none at all
        if fixed:
            told = ", ".join(f"{one}={OPTIONS[one].text(values[one])}" for one in sorted(fixed))
            raise ConfigError(
                f"{by} cannot change {told} of {self.mountpoint}: unmount, and mount with it"
            )
        if flags and set(flags) != set(self.mount_flags):
            raise ConfigError(
                f"{by} cannot change {','.join(flags)} of {self.mountpoint}: use kvfs remount"
            )
        fitted = tuple(name for name in self.fitted if name not in values)
        config = replace(self, **values, fitted=fitted)
        if given & {"metrics", "web"}:
            check_different(config.addresses)
        config.check_resources()
        check_free(config.addresses, self.addresses.values())  # else the new daemon goes on without
        return config

    def as_options(self, flags: Iterable[str] | None = None) -> dict[str, str]:
        """Return each option that has a value, as the text that from_options takes.

        flags: those that the mount has now, if they may differ from those of its beginning.
        """
        texts = {
            name: kind.text(given).replace(",", "\\,")
            for name, kind in OPTIONS.items()
            if (given := getattr(self, name)) is not None
        }
        if self.nvme is None:
            del texts["nvme_size"]
        if self.s3 is None:
            texts = {name: text for name, text in texts.items() if not name.startswith("s3_")}
        if self.pool is None:
            texts = {name: text for name, text in texts.items() if not name.startswith("pool_")}
        return texts | dict.fromkeys(self.mount_flags if flags is None else flags, "")

    def to_json(self) -> str:
        """Return the configuration as from_json takes it."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """Return the configuration that to_json wrote.

        An option that an older version did not know has its default. Raises ConfigError for an
        option that only a newer version knows, and for malformed text.
        """
        try:
            return cls._from_values(json.loads(text), text)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{text[:80]!r} is no configuration of a mount: {error}") from None

    @classmethod
    def _from_values(cls, values: Any, text: str) -> "Config":  # noqa: ANN401 - JSON
        known = {item.name for item in fields(cls)}
        if not isinstance(values, dict) or not {"mountpoint"} <= values.keys() <= known:
            unknown = sorted(set(values) - known) if isinstance(values, dict) else text[:80]
            raise ConfigError(
                f"a configuration of another version of kvfs has {unknown}: expected some of "
                f"{', '.join(sorted(known))}"
            )
        paths = {item.name for item in fields(cls) if item.type in {Path, Path | None}}
        for name in paths & values.keys():
            values[name] = None if values[name] is None else Path(values[name])
        for name in {"mount_flags", "fitted"} & values.keys():
            values[name] = tuple(values[name])
        config = cls(**values)
        config._expect_written()
        return config

    def _expect_written(self) -> None:
        """Raises an error for a value that no option can have."""
        if not self.mountpoint.is_absolute() or not set(self.mount_flags) <= FLAGS.keys():
            raise ValueError(f"mountpoint {self.mountpoint}, flags {self.mount_flags}")
        for item in fields(self):
            given, kind = getattr(self, item.name), OPTIONS.get(item.name)
            if kind is None or given is None or given == item.default:
                continue
            again = kind.parse(kind.text(given))
            if again != given or isinstance(given, str) != isinstance(again, str):
                raise ValueError(f"{item.name} {given!r}")


def bucket_place(options: str, s3: str | None = None) -> BucketPlace | None:
    """Return the place of the bucket in these mount options; None: they have none.

    s3: the known place, if the options do not have it. Raises ConfigError for options that concern
    neither the place nor its users (`bucket_shared`).
    """
    values, flags = _parse(options)
    where = {"s3", "s3_endpoint", "s3_region", "s3_profile", "s3_shared"}
    strange = sorted({*values, *flags} - where)
    if strange:
        raise ConfigError(
            f"option {strange[0]} does not say where a bucket is: expected s3, s3_endpoint, "
            "s3_region or s3_profile"
        )
    prefix = values.get("s3") or s3
    if prefix is None:
        return None
    told = (values.get(f"s3_{name}") for name in ("endpoint", "region", "profile"))
    return BucketPlace.parse(
        prefix, **dict(zip(("endpoint", "region", "profile"), told, strict=True))
    )


def bucket_shared(options: str) -> bool:
    """Return whether other nodes may use the prefix, by options that `bucket_place` has taken."""
    return bool(_parse(options)[0].get("s3_shared", True))


def parse_hot(name: str, text: str) -> Any:  # noqa: ANN401 - the type is the option's
    """Return the value of an option that may change while mounted, or raise ConfigError."""
    if name in OPTIONS and not _ROWS[name].hot:
        hot = ", ".join(row.name for row in _ROWS.values() if row.hot)
        cure = (
            f" by kvfs set, but by kvfs upgrade MOUNTPOINT -o {name}={text}"
            if _ROWS[name].upgrade
            else ": unmount, and mount again"
        )
        raise ConfigError(f"{name} cannot change while mounted{cure}; kvfs set can: {hot}")
    return read_field("option", name, text, OPTIONS, FLAGS)


OPTIONS = {name: kind for name, kind in kinds_of(Config).items() if kind is not _MOUNT_FLAGS}
_ROWS = {row.name: row for row in rows(Config)}


def option_words(options: str) -> list[str]:
    """Return the words between the commas of mount options, without the backslashes."""
    return [word.replace("\\,", ",") for word in re.split(r"(?<!\\),", options)]


def _parse(options: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    values: dict[str, Any] = {}
    flags: dict[str, None] = {}
    for word in option_words(options):
        if _IGNORED.fullmatch(word):
            continue
        if word in FLAGS:
            flags[word] = None
        elif word in FLAGS.values():
            flags = {flag: None for flag in flags if FLAGS[flag] != word}
        else:
            name, equals, text = word.partition("=")
            if name in {*FLAGS, *FLAGS.values()}:
                raise ConfigError(f"option {word}: {name} takes no value: give {name} alone")
            if name in values:
                raise ConfigError(f"option {name} is given twice: give it once")
            if not equals and OPTIONS.get(name) is SWITCH:
                text = "on"  # a switch alone, as in fstab
            values[name] = read_field("option", name, text, OPTIONS, FLAGS)
    return values, tuple(flags)
