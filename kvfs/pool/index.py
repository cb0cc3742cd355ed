"""The index of a pool in Redis: which nodes have which objects, format 1 (docs/format.md).

    POOL:o:KEY     hash: the facts of an object, and a field `@NODE` for each node that has it
    POOL:d:FOLDER  set: names in a directory of the pool, with a slash behind a directory's
    POOL:n:NODE    string with an expiry: the lease of a node
    POOL:v:NAME    hash: `version` of a namespace, and `dropped`: a random number of its last drop
    POOL:h:NODE    set with an expiry: objects that a node is to take over (`kvfs.pool.offers`)
    POOL:nodes     hash: when each node was last seen, in seconds
    POOL:epoch     string: a new one after the index has lost its data
    POOL:format    string: 1

POOL is `kvfs:` and the pool's name; KEY and FOLDER are those of the bucket (`kvfs.s3.keys`). Each
object is one key, so that a cluster spreads the load, and one script changes it at a time.

Contract: methods are calls to the index, with replies checked: a malformed value is None,
or is left out. They raise IndexDownError. Callers do not
trust the index: a mover compares all bytes of an object with its digest.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from kvfs.errors import ConfigError
from kvfs.pool.connection import Command, Reply, ReplyError, refusal
from kvfs.pool.servers import Servers
from kvfs.s3.errors import MetadataError
from kvfs.s3.facts import Facts
from kvfs.s3.store import Head

FORMAT = 1
LEASE_S = 10  # s that a lease lives
GONE_S = 3600  # s for which the index knows that an object was unlinked or replaced
# s for a question of an operation. An answer takes 0.2 ms, on a machine with four times more tasks
# than processors 30 ms. An early end is a miss, and computing a block takes longer than this.
PATIENCE = 0.1
LONG = 2.0  # s for all other calls
OLDEST = (5, 0)  # of Redis: the first with all that is used here

_NODE = re.compile(r"[0-9a-f-]{36}")
_SIZE = re.compile(rb"0|[1-9][0-9]{0,17}")
_GONE = re.compile(r"([0-9a-f]{32}) ([0-9]{19})")
_OWNER = re.compile(r"([0-9a-f]{16}) (ram|nvme) ([0-9a-f]{1,16}\.[0-9a-f]{1,16})")

# Times of modification are compared as texts of 19 digits: numbers of Lua have 53 bits. A mark
# (`gone`) has the last digest that was removed, and the latest time of all that were. It outlives
# later versions of the name, since a copy of an earlier one may be announced again after them.
_MARK = """
local function time(text)
  if not text or string.sub(text, 1, 1) == '-' then text = '0' end
  return string.rep('0', 19 - #text) .. text
end
local function marked(before, digest, mtime)
  local earlier = before and string.sub(before, 34) or ''
  return digest .. ' ' .. (mtime > earlier and mtime or earlier)
end
"""

# The digest that was announced first stands, unless it was unlinked or only dead nodes have it. But
# of two objects that each had the name before the index lost its data, the later one stands.
# ARGV: "new" or "again", the digest, its time, the field and value of the owner, then the facts.
ANNOUNCE = (
    _MARK
    + """
local key, again = KEYS[1], ARGV[1] == 'again'
local known, gone = redis.call('HGET', key, 'kvfs-xxh3-128'), redis.call('HGET', key, 'gone')
if known and known ~= ARGV[2] then
  local before = time(redis.call('HGET', key, 'kvfs-mtime-ns'))
  if not again or ARGV[3] <= before then return 'conflict' end
  gone = marked(gone, known, before)
  redis.call('DEL', key)
  redis.call('HSET', key, 'gone', gone)
  known = nil
end
if not known then
  if again and gone and (string.sub(gone, 1, 32) == ARGV[2] or ARGV[3] <= string.sub(gone, 34)) then
    return 'gone'
  end
  redis.call('PERSIST', key)
  redis.call('HSET', key, unpack(ARGV, 6))
end
redis.call('HSET', key, ARGV[4], ARGV[5])
return 'here'
"""
)

# Remove one owner, and the object with its last one. ARGV: the field of the owner, seconds to
# remember a mark.
WITHDRAW = """
local key = KEYS[1]
redis.call('HDEL', key, ARGV[1])
for _, name in ipairs(redis.call('HKEYS', key)) do
  if string.sub(name, 1, 1) == '@' then return 'kept' end
end
local known, gone = redis.call('HEXISTS', key, 'kvfs-xxh3-128'), redis.call('HGET', key, 'gone')
if gone and known == 0 then return 'kept' end
redis.call('DEL', key)
if gone then
  redis.call('HSET', key, 'gone', gone)
  redis.call('EXPIRE', key, ARGV[2])
end
return 'gone'
"""

# Remove an object with this digest, or an earlier one, for all nodes. ARGV: the digest, its time,
# seconds to remember it or 0, and those for which a mark is remembered.
UNLINK = (
    _MARK
    + """
local key = KEYS[1]
local known, gone = redis.call('HGET', key, 'kvfs-xxh3-128'), redis.call('HGET', key, 'gone')
if ARGV[3] ~= '0' then gone = marked(gone, ARGV[1], ARGV[2]) end
if known and known ~= ARGV[1] and time(redis.call('HGET', key, 'kvfs-mtime-ns')) >= ARGV[2] then
  if gone then redis.call('HSET', key, 'gone', gone) end
  return 'other'
end
redis.call('DEL', key)
if gone then
  redis.call('HSET', key, 'gone', gone)
  redis.call('EXPIRE', key, ARGV[4])
end
return 'gone'
"""
)

# Only a greater version replaces another. ARGV: the version.
VERSION = """
local known = tonumber(redis.call('HGET', KEYS[1], 'version') or '0')
if not known or known < tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'version', ARGV[1])
end
return 'here'
"""

Announced = Literal["here", "conflict", "gone"]


class Owner(NamedTuple):
    """A node that has an object: in which life of the node, in which tier, in which file."""

    node: str
    incarnation: str
    tier: str
    file: str


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """One object in the index: its facts, and the nodes that have it."""

    facts: Facts
    owners: tuple[Owner, ...] = ()


class Held(NamedTuple):
    """The facts of an object that a match needs: its size in bytes, and the nodes that have it."""

    size: int
    owners: tuple[Owner, ...]


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
class Lease:
    """The lease of a live node, with its description.

    address: IP:PORT of its nginx; empty if it serves nobody. tls: peers need a certificate.
    room: bytes of cold objects that it could give up. objects, bytes: that it has announced.
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
    """One object to announce. fresh: a program here has just written it."""

    key: str
    facts: Facts
    owner: Owner
    fresh: bool


class Index:
    """The index of one pool."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.pool = f"kvfs:{servers.place.name}:"

    # Questions

    async def find(
        self, keys: Sequence[str], *, patience: float = PATIENCE
    ) -> list[PoolEntry | GoneEntry | None]:
        """Return the entries of these objects."""
        named = [self._object(key) for key in keys]
        replies = await self.ask([(name, ("HGETALL", name)) for name in named], patience)
        return [read_entry(key, reply) for key, reply in zip(keys, replies, strict=True)]

    async def held(self, keys: Sequence[str]) -> list[Held | None]:
        """Return sizes and owners of these objects, in a tenth of the time that `find` takes."""
        named = [self._object(key) for key in keys]
        replies = await self.ask([(name, ("HGETALL", name)) for name in named], PATIENCE)
        return [_read_held(reply) for reply in replies]

    async def look(self, key: str, folder: str) -> tuple[PoolEntry | GoneEntry | None, bool]:
        """Return the entry of an object, and whether a directory (folder) has names."""
        name, listed = self._object(key), self._folder(folder)
        commands: list[tuple[str, Command]] = [(name, ("HGETALL", name))]
        if folder:
            commands.append((listed, ("EXISTS", listed)))
        reply, *exists = await self.ask(commands, PATIENCE)
        return read_entry(key, reply), exists == [1]

    async def names(self, folder: str) -> list[str]:
        """The names that the index lists in a directory; some may be gone."""
        listed = self._folder(folder)
        (reply,) = await self.ask([(listed, ("SMEMBERS", listed))], LONG)
        return sorted(_text(one) for one in reply) if isinstance(reply, list) else []

    async def leases(self, nodes: Sequence[str], *, patience: float = LONG) -> list[Lease | None]:
        """The leases of these nodes; None of a node that is not alive."""
        named = [self._lease(node) for node in nodes]
        replies = await self.ask([(name, ("GET", name)) for name in named], patience)
        return [_read_lease(node, reply) for node, reply in zip(nodes, replies, strict=True)]

    async def nodes(self) -> dict[str, float]:
        """The nodes that were ever seen, and when: seconds by the clock of each."""
        (reply,) = await self.ask([(f"{self.pool}nodes", ("HGETALL", f"{self.pool}nodes"))], LONG)
        return {node: float(seen) for node, seen in _pairs(reply).items() if _is_number(seen)}

    # Announcements

    async def announce(self, wanted: Sequence[Announcement]) -> list[Announced]:
        """Announce objects. "conflict": another one has the name; "gone": it was unlinked.

        Of two objects that are not fresh, the later one gets the name.
        """
        commands: list[tuple[str, Command]] = []
        for one in wanted:
            name = self._object(one.key)
            words = [word for pair in one.facts.metadata().items() for word in pair]
            owner = (f"@{one.owner.node}", " ".join(one.owner[1:]))
            how = ("new" if one.fresh else "again", *_dated(one.facts.digest, one.facts.mtime_ns))
            commands.append((name, ("EVAL", ANNOUNCE, 1, name, *how, *owner, *words)))
        replies = await self.ask(commands, LONG)
        return [_announced(reply) for reply in replies]

    async def withdraw(self, node: str, keys: Sequence[str]) -> list[bool]:
        """Say that a node has these objects no more. Returns whether no node has each any more."""
        named = [self._object(key) for key in keys]
        commands: list[tuple[str, Command]] = [
            (name, ("EVAL", WITHDRAW, 1, name, f"@{node}", GONE_S)) for name in named
        ]
        return [_text(reply) == "gone" for reply in await self.ask(commands, LONG)]

    async def unlink(self, gone: Sequence[Unlinked], remembered: int = GONE_S) -> None:
        """Say that these objects, and earlier ones, were unlinked or replaced, for all nodes.

        remembered: seconds for which nodes that have such an object, or an earlier one of its name,
        let it go; 0: they keep it.
        """
        commands: list[tuple[str, Command]] = []
        for one in gone:
            name, dated = self._object(one.key), _dated(one.digest, one.mtime_ns)
            commands.append((name, ("EVAL", UNLINK, 1, name, *dated, remembered, GONE_S)))
        await self.ask(commands, LONG)

    async def list_names(self, names: Iterable[tuple[str, str]]) -> None:
        """Add names (folder, name) to the listings."""
        await self.ask([(at := self._folder(one), ("SADD", at, name)) for one, name in names], LONG)

    async def unlist_names(self, names: Iterable[tuple[str, str]]) -> None:
        """Remove names (folder, name) from the listings."""
        await self.ask([(at := self._folder(one), ("SREM", at, name)) for one, name in names], LONG)

    # Namespaces

    async def switches(self, names: Sequence[str]) -> list[Switch]:
        """Return the versions and drops of these namespaces; names are escaped."""
        keys = [self._version(name) for name in names]
        return [
            _read_switch(reply)
            for reply in await self.ask([(key, ("HGETALL", key)) for key in keys], LONG)
        ]

    async def set_version(self, name: str, version: int) -> None:
        """Tell all nodes the version of a namespace, unless they have a greater one."""
        key = self._version(name)
        await self.ask([(key, ("EVAL", VERSION, 1, key, version))], LONG)

    async def drop_namespace(self, name: str, token: str) -> None:
        """Tell all nodes that a namespace was dropped. Versions begin anew."""
        key = self._version(name)
        commands: list[tuple[str, Command]] = [
            (key, ("HSET", key, "dropped", token)),
            (key, ("HDEL", key, "version")),
        ]
        await self.ask(commands, LONG)

    # Nodes

    async def renew(self, lease: Lease, epoch: str, now: float) -> str:
        """Renew a lease, and return the epoch of the index: `epoch` if it has lost everything.

        now: seconds since 1970.
        """
        told = json.dumps({name: value for name, value in asdict(lease).items() if name != "node"})
        name, at = self._lease(lease.node), f"{self.pool}epoch"
        *_, found = await self.ask(
            [
                (name, ("SET", name, told, "EX", LEASE_S)),
                (f"{self.pool}nodes", ("HSET", f"{self.pool}nodes", lease.node, f"{now:.0f}")),
                (f"{self.pool}format", ("SET", f"{self.pool}format", FORMAT, "NX")),
                (at, ("SET", at, epoch, "NX")),
                (at, ("GET", at)),
            ],
            LONG,
        )
        return _text(found)

    async def leave(self, node: str) -> None:
        """End a node's lease, and forget the node."""
        name, nodes = self._lease(node), f"{self.pool}nodes"
        await self.ask([(name, ("DEL", name)), (nodes, ("HDEL", nodes, node))], LONG)

    async def expect_usable(self) -> None:
        """Raises ConfigError if the index is not a Redis of this format, or is too old."""
        key = f"{self.pool}format"
        told, found = await self.ask([(key, ("INFO", "server")), (key, ("GET", key))], LONG)
        version = re.search(r"redis_version:(\d+)\.(\d+)", _text(told))
        if version is None:
            raise ConfigError(f"pool={self.servers.place}: expected a Redis or Valkey server there")
        if (int(version[1]), int(version[2])) < OLDEST:
            raise ConfigError(
                f"pool={self.servers.place}: Redis {version[1]}.{version[2]} is too old, expected "
                f"{OLDEST[0]}.{OLDEST[1]} or newer"
            )
        if found is not None and _text(found) != str(FORMAT):
            raise ConfigError(
                f"pool={self.servers.place}: the pool has format {_text(found)[:20]}, this kvfs "
                f"knows {FORMAT}: upgrade kvfs here, or give another NAME"
            )

    # Keys and replies

    def _object(self, key: str) -> str:
        return f"{self.pool}o:{key}"

    def _folder(self, folder: str) -> str:
        return f"{self.pool}d:{folder}"

    def _version(self, name: str) -> str:
        return f"{self.pool}v:{name}"

    def _lease(self, node: str) -> str:
        return f"{self.pool}n:{node}"

    async def ask(self, commands: Sequence[tuple[str, Command]], patience: float) -> list[Reply]:
        """Ask the servers. Raises IndexDownError, also for an error reply: a full memory, say."""
        if not commands:
            return []
        replies = await self.servers.ask(commands, patience=patience)
        refused = next((reply for reply in replies if isinstance(reply, ReplyError)), None)
        if refused is not None:
            raise refusal(str(refused), f"pool={self.servers.place}: ")
        return replies


def read_entry(key: str, reply: Reply) -> PoolEntry | GoneEntry | None:
    """Return the object in a reply to HGETALL; None for none, or for one that is malformed."""
    fields = _pairs(reply)
    if "kvfs-xxh3-128" not in fields:
        gone = _GONE.fullmatch(fields.get("gone", ""))
        return None if gone is None else GoneEntry(bytes.fromhex(gone[1]), int(gone[2]))
    facts = {name: value for name, value in fields.items() if name.startswith("kvfs-")}
    size = facts.get("kvfs-stored-size", "")
    try:
        head = Head(int(size) if size.isdecimal() else -1, "", 0.0, facts)
        found = Facts.of_head(key, head)
    except MetadataError:
        return None
    return PoolEntry(found, tuple(_owners(fields)))


def _owners(fields: Mapping[str, str]) -> Iterator[Owner]:
    for name, value in fields.items():
        if name[:1] == "@":
            told = _OWNER.fullmatch(value)
            if told and _NODE.fullmatch(name[1:]):
                yield Owner(name[1:], *told.groups())


def _read_held(reply: Reply) -> Held | None:
    """As `read_entry`, for a match: the other facts are read by the open that follows."""
    if not isinstance(reply, list):
        return None
    fields = dict(zip(reply[::2], reply[1::2], strict=False))
    size = fields.get(b"kvfs-size")
    if not isinstance(size, bytes) or _SIZE.fullmatch(size) is None:
        return None
    named = {_text(name): _text(told) for name, told in fields.items() if name[:1] == b"@"}
    return Held(int(size), tuple(_owners(named)))


def _read_lease(node: str, reply: Reply) -> Lease | None:
    try:
        told = json.loads(_text(reply)) if reply else None
        lease = None if told is None else Lease(node, **told)
    except (ValueError, TypeError):
        return None
    if lease is None or not all(map(_has_kind, asdict(lease).items())):
        return None
    return lease


def _read_switch(reply: Reply) -> Switch:
    told = _pairs(reply)
    version, dropped = told.get("version", ""), told.get("dropped", "")
    return Switch(
        int(version) if re.fullmatch(r"[0-9]{1,10}", version) else 0,
        dropped if re.fullmatch(r"[0-9a-f]{16}", dropped) else "",
    )


def _has_kind(told: tuple[str, Any]) -> bool:
    name, value = told
    if name in {"room", "objects", "bytes", "lag_s", "load"}:
        return isinstance(value, int | float) and value >= 0
    return isinstance(value, bool if name == "tls" else str)


def _dated(digest: bytes, mtime_ns: int) -> tuple[str, str]:
    """A digest and a time as the scripts take them."""
    return digest.hex(), f"{max(0, mtime_ns):019}"


def _announced(reply: Reply) -> Announced:
    text = _text(reply)
    return text if text in {"here", "conflict"} else "gone"  # type: ignore[return-value]


def _pairs(reply: Reply) -> Mapping[str, str]:
    if not isinstance(reply, list):
        return {}
    words = [_text(one) for one in reply]
    return dict(zip(words[::2], words[1::2], strict=False))


def _text(reply: Reply) -> str:
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "replace")
    return "" if reply is None else str(reply)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,15}(\.[0-9]*)?", text) is not None
