"""The servers of an index: which of them answers for a key, in each topology.

Contract: `ask` sends commands to the servers of their keys, in one pipeline for each server, and
returns their replies in order. It raises IndexDownError if a server does not answer; error replies
are among the replies. `run` finds the servers, and finds them again after a failure: the master
that sentinels name, or the slots of a cluster (`redis.crc` gives the slot of a key). While a
cluster moves a slot, `ask` follows one redirection to a server that it knows.

Sentinels are asked without a password, and with that of the index if they want one.
"""

import re
import ssl
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import trio
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from kvfs.pool import certificates
from kvfs.pool.connection import (
    BROKEN,
    DIAL_S,
    NOT_ASKED,
    Command,
    Connection,
    Replies,
    Reply,
    ReplyError,
    exchange,
    is_lasting,
    reason,
    refusal,
)
from kvfs.pool.credentials import Credentials
from kvfs.pool.errors import IndexDownError, IndexRefusedError
from kvfs.pool.member import Membership
from kvfs.pool.place import PoolPlace

LOOK_S = 1.0  # s between two questions where the master is, or which server has which slots
SERVERS_MOST = 1000  # of a cluster
NOT_FOUND = "no server was found yet"

Address: TypeAlias = tuple[str, int]

_MOVED = ("MOVED ", "ASK ", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "LOADING", "MASTERDOWN")
NO_MASTER = "no master of service"  # of what a sentinel does not know
_PLAIN = ("unknown command", "cluster support disabled")  # said by what is no server of the kind
_REDIRECTION = re.compile(r"(?P<how>MOVED|ASK) \d+ (?P<host>\S+):(?P<port>\d{1,5})", re.ASCII)


class Servers:
    """The servers of one index. Run `run` as long as it is used."""

    def __init__(
        self, place: PoolPlace, credentials: Credentials, tls: ssl.SSLContext | None = None
    ) -> None:
        self.place = place
        self.credentials = credentials
        self.tls = tls
        self.why = NOT_FOUND  # why there are none; "" if some are known
        self._connections: dict[Address, Connection] = {}
        self._scopes: dict[Address, trio.CancelScope] = {}
        self._slots: list[Connection | None] = [None] * REDIS_CLUSTER_HASH_SLOTS  # of a cluster
        self._master: Connection | None = None  # if there is one server for all keys
        self._look = trio.Event()
        self._first = trio.Event()  # the first try to find them has ended
        self._refused = False  # none is known, for a reason that stays

    @classmethod
    def of_member(cls, member: Membership) -> "Servers":
        """The servers as a member asks them. Raises ConfigError for its certificates."""
        tls = certificates.of_index(member.tls) if member.place.tls else None
        return cls(member.place, member.credentials, tls)

    def use(
        self, *, credentials: Credentials | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Use renewed credentials or certificates for each new connection."""
        self.credentials = credentials or self.credentials
        self.tls = tls or self.tls
        for connection in self._connections.values():
            connection.credentials, connection.tls = self.credentials, self.tls

    async def expect_login(self, credentials: Credentials) -> None:
        """Try credentials at each known server. Raises IndexDownError with the reason."""
        for address in list(self._connections):
            trial = Connection(address, credentials, tls=self.tls)
            try:
                with trio.fail_after(DIAL_S):
                    await trio.aclose_forcefully(await trial.dial())
            except (*BROKEN, IndexDownError) as error:
                raise IndexDownError(f"{trial}: {reason(error)}") from None

    @property
    def tried(self) -> bool:
        """Whether a try to reach each server has ended, well or not."""
        if self.why:
            return self.why != NOT_FOUND
        return all(one.why != NOT_ASKED for one in self._connections.values())

    async def ask(self, commands: Sequence[tuple[str, Command]], *, patience: float) -> list[Reply]:
        """Return the reply to each command; each comes with the key that finds its server."""
        if not self._first.is_set():  # else names would be misses after each takeover
            with trio.move_on_after(patience):
                await self._first.wait()
        if self.place.kind != "cluster":
            if self._master is None:
                raise self._down(self.why)
            return await self._ask(self._master, [words for _, words in commands], patience)
        return await self._ask_cluster(commands, patience)

    def _down(self, why: str) -> IndexDownError:
        return (IndexRefusedError if self._refused else IndexDownError)(f"{self.place}: {why}")

    async def _ask_cluster(
        self, commands: Sequence[tuple[str, Command]], patience: float
    ) -> list[Reply]:
        by_server: dict[Connection, list[int]] = defaultdict(list)
        for number, (key, _) in enumerate(commands):
            server = self._slots[key_slot(key.encode())]
            if server is None:
                raise self._down(self.why or "no server has the slot")
            by_server[server].append(number)
        replies: list[Reply] = [None] * len(commands)
        failures: list[IndexDownError] = []

        async def ask(server: Connection, numbers: list[int]) -> None:
            try:
                found = await self._told(server, [commands[n][1] for n in numbers], patience)
                for number, reply in zip(numbers, found, strict=True):
                    replies[number] = await self._redirected(reply, commands[number][1], patience)
            except IndexDownError as error:
                failures.append(error)

        with trio.move_on_after(2 * patience) as scope:  # also of many redirections
            async with trio.open_nursery() as nursery:
                for server, numbers in by_server.items():
                    nursery.start_soon(ask, server, numbers)
        if scope.cancelled_caught:
            failures.append(IndexDownError(f"{self.place}: no answer in {patience * 2000:.0f} ms"))
        if failures:
            raise failures[0]
        return replies

    async def _redirected(self, reply: Reply, command: Command, patience: float) -> Reply:
        """Return the reply of the server to which a reply redirects, or else the reply."""
        found = _REDIRECTION.fullmatch(str(reply)) if _is_moved(reply) else None
        server = self._connections.get((found["host"], int(found["port"]))) if found else None
        if found is None or server is None:
            return self._expect_served(reply)
        self._look.set()
        # ASK: the slot moves now, and this key has no place at the old server any more.
        first: list[Command] = [("ASKING",)] if found["how"] == "ASK" else []
        *_, reply = await self._told(server, [*first, command], patience)
        return self._expect_served(reply)

    async def _ask(
        self, server: Connection, commands: Sequence[Command], patience: float
    ) -> list[Reply]:
        replies = await self._told(server, commands, patience)
        for reply in replies:
            self._expect_served(reply)
        return replies

    async def _told(
        self, server: Connection, commands: Sequence[Command], patience: float
    ) -> list[Reply]:
        try:
            return await server.ask(commands, patience=patience)
        except IndexDownError:
            self._look.set()
            raise

    def _expect_served(self, reply: Reply) -> Reply:
        """Return a reply. Raises IndexDownError if it says that another server is asked."""
        if _is_moved(reply):
            self._look.set()
            raise IndexDownError(f"{self.place}: {reply!s}")
        return reply

    async def run(self) -> None:
        """Find the servers, and keep a connection to each, for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                self._look = trio.Event()
                try:
                    self._keep(nursery, await self._found())
                    self.why, self._refused = "", False
                except IndexDownError as error:
                    self.why, self._refused = str(error), isinstance(error, IndexRefusedError)
                    self._look.set()
                self._first.set()
                if self.place.kind == "single":
                    await trio.sleep_forever()
                await self._look.wait()
                await trio.sleep(LOOK_S)

    def _keep(self, nursery: trio.Nursery, found: dict[Address, list[range]]) -> None:
        """Have a connection to each of these servers, and to no other."""
        for address in self._connections.keys() - found.keys():
            self._scopes.pop(address).cancel()
            del self._connections[address]
        for address in found.keys() - self._connections.keys():
            connection = Connection(address, self.credentials, tls=self.tls)
            self._connections[address] = connection
            scope = self._scopes[address] = trio.CancelScope()
            nursery.start_soon(_run, connection, scope)
        slots: list[Connection | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for address, ranges in found.items():
            self._master = self._connections[address]
            for some in ranges:
                slots[some.start : some.stop] = [self._master] * len(some)
        self._slots = slots

    async def _found(self) -> dict[Address, list[range]]:
        """Return each server with the slots that it has. Raises IndexDownError."""
        place = self.place
        if place.kind == "single":
            return {place.hosts[0]: []}
        failures, lasting = list[str](), True
        known = self._connections if place.kind == "cluster" else {}
        for host in dict.fromkeys([*known, *place.hosts]):
            try:
                return await self._told_by(host)
            except (*BROKEN, IndexDownError) as error:
                failures.append(f"{host[0]}:{host[1]}: {reason(error)}")
                lasting = lasting and is_lasting(error)
        raise (IndexRefusedError if lasting else IndexDownError)("; ".join(failures))

    async def _told_by(self, host: Address) -> dict[Address, list[range]]:
        """Return each server and its slots, as `host` tells. Raises what `dial` does, too."""
        sentinel = self.place.kind == "sentinel"
        credentials = Credentials() if sentinel else self.credentials
        try:
            reply = await self._answer(host, credentials)
        except IndexDownError as error:
            if not sentinel or not str(error).startswith("NOAUTH"):
                raise
            reply = await self._answer(host, self.credentials)
        if isinstance(reply, ReplyError):
            if any(text in str(reply) for text in _PLAIN):
                scheme = "rediss" if self.place.tls else "redis"
                other = f"{scheme}+cluster" if sentinel else f"{scheme}+sentinel"
                raise IndexRefusedError(
                    f"it is no {self.place.kind}: give {scheme}:// for a plain Redis server, or "
                    f"{other}:// for a {other.rpartition('+')[2]}"
                )
            raise refusal(str(reply))
        if not isinstance(reply, list) or not reply:
            named = f"{NO_MASTER} {self.place.service}" if sentinel else "no slots"
            raise IndexDownError(f"it knows {named}")
        try:
            return _master(reply) if sentinel else _slots(reply, host[0])
        except (TypeError, ValueError):
            raise IndexDownError("it does not answer as a server of this kind") from None

    async def _answer(self, host: Address, credentials: Credentials) -> Reply:
        """Ask a server of which we keep no connection where the others are."""
        question: Command = ("CLUSTER", "SLOTS")
        if self.place.kind == "sentinel":
            question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.place.service)
        with trio.fail_after(DIAL_S):
            stream = await Connection(host, credentials, tls=self.tls).dial()
            try:
                (reply,) = await exchange(stream, Replies(), [question])
            finally:
                await trio.aclose_forcefully(stream)
        return reply


async def _run(connection: Connection, scope: trio.CancelScope) -> None:
    with scope:
        await connection.run()


def _master(reply: list[Reply]) -> dict[Address, list[range]]:
    """Read the reply of a sentinel. Raises TypeError, ValueError."""
    name, port = reply
    return {(_text(name), _port(port)): []}


def _slots(reply: list[Reply], teller: str) -> dict[Address, list[range]]:
    """Read the reply to CLUSTER SLOTS of `teller`. Raises TypeError, ValueError."""
    found: dict[Address, list[range]] = defaultdict(list)
    left = REDIS_CLUSTER_HASH_SLOTS
    for first, last, (name, port, *_), *_ in reply:
        if not 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
            raise ValueError(f"slots {first} to {last}")
        left -= last + 1 - first
        found[_text(name) or teller, _port(port)].append(range(first, last + 1))
        if left < 0 or len(found) > SERVERS_MOST:
            raise ValueError("more slots or servers than a cluster has")
    return found


def _port(reply: Reply) -> int:
    """Return a port. Raises TypeError, ValueError."""
    port = int(reply)
    if not 0 < port < 1 << 16:
        raise ValueError(f"port {port}")
    return port


def _is_moved(reply: Reply) -> bool:
    return isinstance(reply, ReplyError) and str(reply).startswith(_MOVED)


def _text(reply: Reply) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply or "")
