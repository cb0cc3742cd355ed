"""The records of the index of a pool, and how they are read from the replies of Redis.

Contract: nothing in a reply is trusted. A malformed record is None, or is left out, whatever its
bytes; only `read_entry` raises MetadataError, because its caller logs the key. All numbers have a
bound. docs/format.md has the format. Not for the questions (`index`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from kvfs.pool.connection import Reply
from kvfs.s3.facts import Facts
from kvfs.s3.store import Head

NAME_MOST = 256  # characters of the name of a node
VERSION_MOST = 1 << 31  # of a namespace
LEASE_MOST = 32 << 10  # bytes of a lease; a mount point of 4095 bytes takes 24 KiB
WORDS_MOST = 1 << 17  # words of a hash: the nodes of a pool, or those that have an object

# All numbers have a bound: `int` raises ValueError for more than 4300 digits.
NODE = re.compile(r"[0-9a-f-]{36}")
_SIZE = re.compile(rb"0|[1-9][0-9]{0,17}")
_VERSION = re.compile(r"[0-9]{1,10}")
_GONE = re.compile(r"([0-9a-f]{32}) ([0-9]{19})")
_OWNER = re.compile(r"([0-9a-f]{16}) (ram|nvme) ([0-9a-f]{1,16}\.[0-9a-f]{1,16})")

Announced = Literal["here", "conflict", "gone"]


class Owner(NamedTuple):
    """A node that has an object: in which life of the node, in which tier, in which file."""

    node: str
    incarnation: str
    tier: str
    file: str


class Life(NamedTuple):
    """One life of a node, from a mount to an unmount."""

    node: str
    incarnation: str


class Held(NamedTuple):
    """The facts of an object that a match needs: its size in bytes, and the nodes that have it."""

    size: int
    owners: Sequence[Life]


@dataclass(frozen=True, slots=True)
class GoneEntry:
    """An object was unlinked or replaced, for all nodes: this one, and all that are not later.

    mtime_ns: the latest time of modification of all objects that lost the name.
    """

    digest: bytes
    mtime_ns: int

    def covers(self, digest: bytes, mtime_ns: int) -> bool:
        """Whether an object of this digest and time has lost the name."""
        return digest == self.digest or mtime_ns <= self.mtime_ns


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """One object in the index: its facts, the nodes that have it, and what had its name before.

    asked_ns: when the index was asked for it, in ns since 1970.
    """

    facts: Facts
    owners: tuple[Owner, ...] = ()
    gone: GoneEntry | None = None
    asked_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of a live node, with its description.

    address: IP:PORT of its nginx; empty if it serves nobody. tls: peers need a certificate.
    room: bytes of cold objects that it could give up. objects, bytes: that it has announced.
    load: bytes/s that other nodes have read there lately.
    """

    node: str
    incarnation: str
    address: str
    tls: bool = False
    host: str = ""
    machine: str = ""
    mountpoint: str = ""
    room: int = 0
    objects: int = 0
    bytes: int = 0
    lag_s: float = 0.0
    load: float = 0.0

    @property
    def name(self) -> str:
        """The host and the mount point, for logs and events: the node chooses them."""
        text = f"{self.host}:{self.mountpoint}"[:NAME_MOST]
        return "".join(one if one.isprintable() else "?" for one in text)


class Switch(NamedTuple):
    """The version of a namespace, and the token of its last drop; 0 and "": none is known."""

    version: int
    dropped: str


class Unlinked(NamedTuple):
    """An object that a program has unlinked or replaced."""

    key: str
    digest: bytes
    mtime_ns: int


class Announcement(NamedTuple):
    """One object to announce. fresh: a program here has just written it.

    changed: a program here has changed its mode or its owner since it was announced.
    later: this node knows of an earlier object that has left the name, perhaps of the same bytes.
    other: the object in conflict with this one had the name when it was announced before.
    """

    key: str
    facts: Facts
    owner: Owner
    fresh: bool
    changed: bool = False
    later: bool = False
    other: Unlinked | None = None


def read_entry(key: str, reply: Reply, asked_ns: int = 0) -> PoolEntry | GoneEntry | None:
    """Return the object in a reply to HGETALL; None for none.

    Raises MetadataError for one that is malformed.
    """
    fields = pairs_of(reply)
    told = _GONE.fullmatch(fields.get("gone", ""))
    gone = None if told is None else GoneEntry(bytes.fromhex(told[1]), int(told[2]))
    if "kvfs-xxh3-128" not in fields:
        return gone
    facts = {name: value for name, value in fields.items() if name.startswith("kvfs-")}
    size = facts.get("kvfs-stored-size", "")
    head = Head(int(size) if _SIZE.fullmatch(size.encode()) else -1, "", 0.0, facts)
    return PoolEntry(Facts.of_head(key, head), tuple(_owners(fields)), gone, asked_ns)


def _owners(fields: Mapping[str, str]) -> Iterator[Owner]:
    for name, value in fields.items():
        if name[:1] == "@":
            told = _OWNER.fullmatch(value)
            if told and NODE.fullmatch(name[1:]):
                yield Owner(name[1:], *told.groups())


def owner_value(owner: Owner) -> str:
    """The value of an owner's field in the hash of an object."""
    return " ".join(owner[1:])


def read_held(fields: Sequence[Reply], values: Sequence[Reply]) -> Held | None:
    """As `read_entry`, for a match: the other facts are read by the open that follows."""
    size, owners = -1, list[Life]()
    for name, value in zip(fields, values, strict=False):
        if not isinstance(name, bytes) or not isinstance(value, bytes):
            continue
        if name[:1] == b"@":
            owners += _life(name, value[:17])
        elif name == b"kvfs-size" and _SIZE.fullmatch(value):
            size = int(value)
    return Held(size, owners) if size >= 0 else None


@lru_cache(maxsize=4096)  # one of each node: the objects of a prompt have the same owners
def _life(field: bytes, value: bytes) -> tuple[Life, ...]:
    """The life of a node in the field of an owner, and the beginning of its value."""
    node, incarnation = text_of(field[1:]), text_of(value)
    good = NODE.fullmatch(node) and re.fullmatch(r"[0-9a-f]{16} ", incarnation)
    return (Life(node, incarnation[:-1]),) if good else ()


def read_lease(node: str, reply: Reply) -> Lease | None:
    """The lease of a node in a reply to GET; None for none."""
    if not isinstance(reply, bytes) or len(reply) > LEASE_MOST:
        return None
    try:
        lease = Lease(node, **json.loads(reply))
    except (ValueError, TypeError, RecursionError):
        return None
    return lease if all(map(_has_kind, asdict(lease).items())) else None


def read_switch(reply: Reply) -> Switch:
    """The version and the last drop of a namespace in a reply to HGETALL."""
    told = pairs_of(reply)
    version, dropped = told.get("version", ""), told.get("dropped", "")
    return Switch(
        int(version) if _VERSION.fullmatch(version) and int(version) <= VERSION_MOST else 0,
        dropped if re.fullmatch(r"[0-9a-f]{16}", dropped) else "",
    )


def _has_kind(told: tuple[str, Any]) -> bool:
    name, value = told
    if name in {"room", "objects", "bytes", "lag_s", "load"}:
        return isinstance(value, int | float) and 0 <= value < 1 << 63
    return isinstance(value, bool if name == "tls" else str)


def read_announced(reply: Reply) -> Announced:
    """The answer of the script that announces an object."""
    text = text_of(reply)
    return text if text in {"here", "gone"} else "conflict"  # type: ignore[return-value]


def pairs_of(reply: Reply) -> Mapping[str, str]:
    """The fields of a hash; see `words_of`."""
    words = [text_of(one) for one in words_of(reply)]
    return dict(zip(words[::2], words[1::2], strict=False))


def words_of(reply: Reply) -> list[bytes]:
    """The words of a hash; none if it is too large, or has other things."""
    if not isinstance(reply, list) or len(reply) > WORDS_MOST or set(map(type, reply)) != {bytes}:
        return []
    return reply


def text_of(reply: Reply) -> str:
    """The text of a reply; empty for none."""
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "replace")
    return "" if reply is None else str(reply)
