"""The index of a pool in Redis: which nodes have which objects, format 1 (docs/format.md).

    POOL:o:KEY     hash: the facts of an object, and a field `@NODE` for each node that has it
    POOL:d:FOLDER  set: names in a directory of the pool, with a slash behind a directory's
    POOL:n:NODE    string with an expiry: the lease of a node
    POOL:v:NAME    hash: `version` of a namespace, and `dropped`: a random number of its last drop
    POOL:h:NODE    set with an expiry: objects that a node is to take over (`kvfs.pool.offers`)
    POOL:nodes     hash: when each node was last seen, in seconds
    POOL:names     hash: the host and the mount point of each node, also of one without a lease
    POOL:epoch     string: a new one after the index has lost its data
    POOL:format    string: 1

POOL is `kvfs:` and the pool's name; KEY and FOLDER are those of the bucket (`kvfs.s3.keys`). Each
object is one key, so that a cluster spreads the load, and one script changes it at a time.

Contract: methods are calls to the index, with replies checked: a malformed value is None,
or is left out, whatever its bytes. So is a key of a wrong type. Such a key, and an object with
malformed facts, are logged once. Of an announcement of such a key the answer is "conflict". They
raise IndexDownError. Callers do not trust the index: a mover compares all bytes of an object with
its digest.
"""

import json
import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain

import trio
import trio.lowlevel

from kvfs.errors import ConfigError
from kvfs.pool import scripts
from kvfs.pool.connection import Command, Reply, ReplyError, refusal
from kvfs.pool.errors import IndexDownError
from kvfs.pool.records import (
    NODE,
    Announced,
    Announcement,
    GoneEntry,
    Held,
    Lease,
    Owner,
    PoolEntry,
    Switch,
    Unlinked,
    owner_value,
    pairs_of,
    read_announced,
    read_entry,
    read_held,
    read_lease,
    read_switch,
    text_of,
    words_of,
)
from kvfs.pool.servers import Servers
from kvfs.s3.errors import MetadataError
from kvfs.s3.keys import KEY_MAX

log = logging.getLogger(__name__)

FORMAT = 1
LEASE_S = 10  # s that a lease lives
GONE_S = 3600  # s for which the index knows that an object was unlinked or replaced
# s for a question of an operation. An answer takes 0.2 ms, on a machine with four times more tasks
# than processors 30 ms. An early end is a miss, and computing a block takes longer than this.
PATIENCE = 0.1
LONG = 2.0  # s for all other calls
WRONG_MOST = 100  # keys of a wrong type or with wrong facts that are logged
OLDEST = (5, 0)  # of Redis: the first with all that is used here
STEP = 1 << 14  # listed names that are read in a turn of the loop; some 4 ms

# All numbers have a bound: `int` raises ValueError for more than 4300 digits.
_NAME = re.compile(r"([^:/]{1,255}):(/.{0,4095})", re.DOTALL)
_SEEN = re.compile(r"[0-9]{1,15}(\.[0-9]{0,9})?")
_REDIS = re.compile(r"redis_version:([0-9]{1,4})\.([0-9]{1,4})")


class Index:
    """The index of one pool."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.pool = f"kvfs:{servers.place.name}:"
        self._wrong: set[str] = set()  # keys of a wrong type or with wrong facts that were logged

    # Questions

    async def find(
        self, keys: Sequence[str], *, patience: float = PATIENCE
    ) -> list[PoolEntry | GoneEntry | None]:
        """Return the entries of these objects."""
        named, asked_ns = [self._object(key) for key in keys], time.time_ns()
        replies = await self.ask([(name, ("HGETALL", name)) for name in named], patience)
        return [self._entry(key, reply, asked_ns) for key, reply in zip(keys, replies, strict=True)]

    async def held(
        self, keys: Sequence[str], nodes: Sequence[str] | None = None
    ) -> list[Held | None]:
        """Return sizes and owners of these objects, in a tenth of the time that `find` takes.

        nodes: ask for these owners only. With a few nodes, a reply has a tenth of the bytes.
        """
        named = [self._object(key) for key in keys]
        if nodes is None:
            replies = await self.ask([(name, ("HGETALL", name)) for name in named], PATIENCE)
            return [read_held(words[::2], words[1::2]) for words in map(words_of, replies)]
        fields = ("kvfs-size", *(f"@{node}" for node in nodes))
        replies = await self.ask([(name, ("HMGET", name, *fields)) for name in named], PATIENCE)
        asked = [field.encode() for field in fields]
        values = (reply if isinstance(reply, list) else [] for reply in replies)
        return [read_held(asked, one) for one in values]

    async def look(
        self, key: str, folder: str, namespace: str = ""
    ) -> tuple[PoolEntry | GoneEntry | None, bool, Switch]:
        """Return the entry of an object, and whether a directory (folder) has names.

        namespace: its escaped name, if it may be one. The third value is of it. It is asked for
        first: a listing from before a drop must not come with the token of that drop.
        """
        name, listed, at = self._object(key), self._folder(folder), self._version(namespace)
        commands: list[tuple[str, Command]] = [(at, ("HGETALL", at))] if namespace else []
        commands.append((name, ("HGETALL", name)))
        if folder:
            commands.append((listed, ("EXISTS", listed)))
        asked_ns = time.time_ns()
        replies = await self.ask(commands, PATIENCE)
        switch = read_switch(replies.pop(0) if namespace else None)
        reply, *more = replies
        return self._entry(key, reply, asked_ns), more == [1], switch

    async def have_names(self, folders: Sequence[str], *, patience: float = LONG) -> list[bool]:
        """Return which of these directories have names."""
        named = [self._folder(folder) for folder in folders]
        replies = await self.ask([(name, ("EXISTS", name)) for name in named], patience)
        return [reply == 1 for reply in replies]

    async def names(self, folder: str) -> list[str]:
        """The names that the index lists in a directory; some may be gone."""
        listed = self._folder(folder)
        (reply,) = await self.ask([(listed, ("SMEMBERS", listed))], LONG)
        found: list[str] = []
        for start in range(0, len(reply) if isinstance(reply, list) else 0, STEP):
            page = reply[start : start + STEP]
            found += [text_of(one) for one in page if type(one) is bytes and len(one) <= KEY_MAX]
            await trio.lowlevel.checkpoint()
        return found

    async def leases(self, nodes: Sequence[str], *, patience: float = LONG) -> list[Lease | None]:
        """The leases of these nodes; None of a node that is not alive."""
        named = [self._lease(node) for node in nodes]
        replies = await self.ask([(name, ("GET", name)) for name in named], patience)
        return [read_lease(node, reply) for node, reply in zip(nodes, replies, strict=True)]

    async def nodes(self) -> dict[str, float]:
        """The nodes that were ever seen, and when: seconds by the clock of each."""
        (reply,) = await self.ask([(f"{self.pool}nodes", ("HGETALL", f"{self.pool}nodes"))], LONG)
        return {
            node: float(seen)
            for node, seen in pairs_of(reply).items()
            if NODE.fullmatch(node) and _SEEN.fullmatch(seen)
        }

    async def node_names(self) -> dict[str, tuple[str, str]]:
        """The host and the mount point of each node that was ever seen, as it told them."""
        (reply,) = await self.ask([(f"{self.pool}names", ("HGETALL", f"{self.pool}names"))], LONG)
        found = ((node, _NAME.fullmatch(text)) for node, text in pairs_of(reply).items())
        return {node: (name[1], name[2]) for node, name in found if name is not None}

    # Announcements

    async def announce(self, wanted: Sequence[Announcement]) -> list[Announced]:
        """Announce objects. "conflict": another one has the name; "gone": it was unlinked.

        Of two objects that are not fresh, the later one gets the name. One in conflict is "gone"
        if the other one was unlinked.
        """
        commands: list[tuple[str, Command]] = []
        for one in wanted:
            name = self._object(one.key)
            words = chain.from_iterable(one.facts.metadata().items())
            owner = (f"@{one.owner.node}", owner_value(one.owner))
            attributes = "changed" if one.changed else "same"
            which = "new" if one.fresh else "later" if one.later else "again"
            how = (which, *scripts.dated(one.facts.digest, one.facts.mtime_ns), *owner, attributes)
            other = ("", "") if one.other is None else scripts.dated(*one.other[1:])
            commands.append((name, scripts.ANNOUNCE.call(name, *how, *other, *words)))
        replies = await self.ask(commands, LONG)
        return [read_announced(reply) for reply in replies]

    async def withdraw(self, node: str, keys: Sequence[str]) -> list[bool]:
        """Say that a node has these objects no more. Returns whether no node has each any more."""
        named = [self._object(key) for key in keys]
        commands: list[tuple[str, Command]] = [
            (name, scripts.WITHDRAW.call(name, f"@{node}", GONE_S)) for name in named
        ]
        return [text_of(reply) == "gone" for reply in await self.ask(commands, LONG)]

    async def forget_owners(self, key: str, owners: Iterable[Owner]) -> bool:
        """Remove owners that have these very values yet. Returns whether the object has gone."""
        name = self._object(key)
        commands: list[tuple[str, Command]] = [
            (name, scripts.WITHDRAW.call(name, f"@{one.node}", GONE_S, owner_value(one)))
            for one in owners
        ]
        return any(text_of(reply) == "gone" for reply in await self.ask(commands, LONG))

    async def unlink(
        self, gone: Sequence[Unlinked], remembered: int = GONE_S, *, again: bool = False
    ) -> list[bool]:
        """Say that these objects, and earlier ones, were unlinked or replaced, for all nodes.

        remembered: seconds for which nodes that have such an object, or an earlier one of its name,
        let it go; 0: they keep it. again: the index has lost it. Returns whether no object has each
        name now.
        """
        commands: list[tuple[str, Command]] = []
        for one in gone:
            name, dated = self._object(one.key), scripts.dated(one.digest, one.mtime_ns)
            digest = "0" * len(dated[0]) if again else dated[0]
            commands.append((name, scripts.UNLINK.call(name, *dated, remembered, GONE_S, digest)))
        return [text_of(reply) == "gone" for reply in await self.ask(commands, LONG)]

    async def list_names(self, names: Iterable[tuple[str, str]]) -> None:
        """Add names (folder, name) to the listings."""
        await self._change_names("SADD", names)

    async def unlist_names(self, names: Iterable[tuple[str, str]]) -> None:
        """Remove names (folder, name) from the listings."""
        await self._change_names("SREM", names)

    async def _change_names(self, command: str, names: Iterable[tuple[str, str]]) -> None:
        """Add names to the listings, or remove them: all names of a folder together."""
        folders: dict[str, list[str]] = {}
        for folder, name in names:
            folders.setdefault(self._folder(folder), []).append(name)
        await self.ask([(at, (command, at, *some)) for at, some in folders.items()], LONG)

    # Namespaces

    async def switches(self, names: Sequence[str], *, patience: float = LONG) -> list[Switch]:
        """Return the versions and drops of these namespaces; names are escaped."""
        keys = [self._version(name) for name in names]
        return [
            read_switch(reply)
            for reply in await self.ask([(key, ("HGETALL", key)) for key in keys], patience)
        ]

    async def set_version(self, name: str, version: int) -> None:
        """Tell all nodes the version of a namespace, unless they have a greater one."""
        key = self._version(name)
        await self.ask([(key, scripts.VERSION.call(key, version))], LONG)

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

        now: seconds since 1970. Raises IndexFullError; then `keep` may keep the lease.
        """
        told = json.dumps({name: value for name, value in asdict(lease).items() if name != "node"})
        name, at = self._lease(lease.node), f"{self.pool}epoch"
        called = f"{lease.host}:{lease.mountpoint}".encode("utf-8", "backslashreplace")
        *_, found = await self.ask(
            [
                (name, ("SET", name, told, "EX", LEASE_S)),
                (f"{self.pool}nodes", ("HSET", f"{self.pool}nodes", lease.node, f"{now:.0f}")),
                (f"{self.pool}names", ("HSET", f"{self.pool}names", lease.node, called)),
                (f"{self.pool}format", ("SET", f"{self.pool}format", FORMAT, "NX")),
                (at, ("SET", at, epoch, "NX")),
                (at, ("GET", at)),
            ],
            LONG,
        )
        if not isinstance(found, bytes):
            raise IndexDownError(f"pool={self.servers.place}: the key {at} has no text: delete it")
        return text_of(found)[:64]

    async def keep(self, lease: Lease) -> str | None:
        """Let a lease live on as it was told last, and return the epoch: this needs no memory.

        None: the index has no epoch, or no lease of this life of the node.
        """
        name, at = self._lease(lease.node), f"{self.pool}epoch"
        told, found = await self.ask([(name, ("GET", name)), (at, ("GET", at))], LONG)
        kept = read_lease(lease.node, told)
        if kept is None or kept.incarnation != lease.incarnation or not isinstance(found, bytes):
            return None
        (renewed,) = await self.ask([(name, ("EXPIRE", name, LEASE_S))], LONG)
        return text_of(found)[:64] if renewed else None

    async def leave(self, node: str) -> None:
        """End a node's lease, and forget the node."""
        name, nodes, names = self._lease(node), f"{self.pool}nodes", f"{self.pool}names"
        commands: list[tuple[str, Command]] = [
            (name, ("DEL", name)),
            (nodes, ("HDEL", nodes, node)),
            (names, ("HDEL", names, node)),
        ]
        await self.ask(commands, LONG)

    async def expect_usable(self) -> None:
        """Raises ConfigError if the index is not a Redis of this format, or is too old.

        IndexRefusedError if the user may not use a command of the scripts; IndexDownError.
        """
        key = f"{self.pool}format"
        told, found = await self.ask([(key, ("INFO", "server")), (key, ("GET", key))], LONG)
        version = _REDIS.search(text_of(told))
        if version is None:
            raise ConfigError(f"pool={self.servers.place}: expected a Redis or Valkey server there")
        if (int(version[1]), int(version[2])) < OLDEST:
            raise ConfigError(
                f"pool={self.servers.place}: Redis {version[1]}.{version[2]} is too old, expected "
                f"{OLDEST[0]}.{OLDEST[1]} or newer"
            )
        if found is not None and text_of(found) != str(FORMAT):
            raise ConfigError(
                f"pool={self.servers.place}: the pool has format {text_of(found)[:20]}, this kvfs "
                f"knows {FORMAT}: upgrade kvfs here, or give another NAME"
            )
        key = f"{self.pool}try"
        await self.ask([(key, scripts.TRY.call(key))], LONG)

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
        """Ask the servers. Raises IndexDownError, also for an error reply: a full memory, say.

        A key of another type than kvfs gives it has no reply: it must not hide all others.
        """
        if not commands:
            return []
        replies = await self._told(commands, patience)
        for at, (key, _) in enumerate(commands):
            if not isinstance(replies[at], ReplyError):
                continue
            if "WRONGTYPE" not in str(replies[at]):
                place = self.servers.place
                raise refusal(str(replies[at]), f"pool={place}: ", place.name)
            self._note_wrong(key)
            replies[at] = None
        return replies

    async def _told(self, commands: Sequence[tuple[str, Command]], patience: float) -> list[Reply]:
        """Ask the servers, and give them the scripts that they do not know. IndexDownError."""
        replies = await self.servers.ask(commands, patience=patience)
        unknown = [at for at, reply in enumerate(replies) if scripts.is_unknown(reply)]
        if unknown:  # the server was started lately, or another one has become the master
            asked = [commands[at] for at in unknown]
            again = [(key, scripts.in_full(words)) for key, words in asked]
            found = await self.servers.ask(again, patience=patience)
            for at, reply in zip(unknown, found, strict=True):
                replies[at] = reply
        return replies

    def _entry(self, key: str, reply: Reply, asked_ns: int) -> PoolEntry | GoneEntry | None:
        """Return the object in a reply to HGETALL; None for none, or for one that is malformed."""
        try:
            return read_entry(key, reply, asked_ns)
        except MetadataError as error:
            if self._is_new(name := self._object(key)):
                log.warning(
                    "pool=%s: the key %s has an object that kvfs would not write, so it is a miss: "
                    "%s: redis-cli del it",
                    *(self.servers.place, name, error),
                )
            return None

    def _note_wrong(self, key: str) -> None:
        """Log a key of a wrong type once."""
        if self._is_new(key):
            log.warning(
                "pool=%s: the key %s has a type that kvfs does not give it, so it is left out: "
                "redis-cli del it",
                *(self.servers.place, key),
            )

    def _is_new(self, key: str) -> bool:
        """Whether a wrong key is to be logged: each is once, and WRONG_MOST at most."""
        if key in self._wrong or len(self._wrong) >= WRONG_MOST:
            return False
        self._wrong.add(key)
        return True
