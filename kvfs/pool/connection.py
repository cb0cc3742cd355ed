"""A connection to a Redis server, from the daemon's loop. Commands that come together go together.

Contract: `ask` sends commands in one pipeline with those of other callers, and returns their
replies. It raises IndexDownError if the connection fails, or has no answer within the patience of
the caller: a late answer is dropped. An error reply of the server is a `ReplyError` among the
replies. `run` keeps the connection, and makes a new one after a failure. The loop never blocks: a
turn parses BUFFER bytes, and a server that announces more than LONGEST elements is no server.

hiredis packs and parses, and trio carries the bytes. That takes 32 us for a lookup and 93 us for 64
of them; redis-py in a thread takes 134 us and 383 us, coredis on trio 170 us and 908 us.
"""

import os
import re
import socket
import ssl
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import hiredis
import trio

from kvfs.pool.credentials import Credentials
from kvfs.pool.errors import IndexDownError, IndexFullError, IndexRefusedError

Word: TypeAlias = str | bytes | int | float
Command: TypeAlias = tuple[Word, ...]
ReplyError = hiredis.ReplyError
Reply: TypeAlias = Any  # bytes, int, None, a list of replies, or ReplyError

PIPELINE = 1024  # commands in one write
BUFFER = 1 << 16
DIAL_S = 2.0  # s for a connection, TLS and the greeting
TLS_S = 1.5  # s of these for TLS
BROKEN = (OSError, trio.TooSlowError, trio.BrokenResourceError, hiredis.HiredisError)
LASTING = (hiredis.ProtocolError, ssl.SSLError, IndexRefusedError)
AGAIN_S = 0.5  # s between two tries to connect
HUNG_S = 5.0  # s without a reply after which the connection is made anew
IDLE_S = 3.0  # s without commands after which the server is asked whether it is still there
LARGEST = 256 << 20  # bytes of replies to one pipeline; a listing of 10^6 names has 40 MB
SEARCHED_MOST = 64 << 20  # bytes that a turn searches for ends of texts; some 10 ms
USE_PLAIN = "use redis:// for an index without TLS"
USE_TLS = "it may expect rediss://"
NO_HOST = "has no address"
NOT_ASKED = "it was not asked yet"
LONGEST = 10**7 - 1  # elements of an array: more than LARGEST has of names


_OTHER_NAME, _OTHER_TIME = (62, 64), (9, 10)  # X509_V_ERR_...: for a host, an IP; early, late

# The heads of arrays with more than LONGEST elements, and what may be the begin of a head.
_LONG = re.compile(rb"[*~>|%][0-9]{8}")
_HEAD = re.compile(rb"[*~>|%][0-9]{0,7}\Z")


class Replies:
    """Reads replies out of what a server sends."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._rest = b""  # it may be the begin of a head

    def feed(self, data: bytes) -> list[Reply]:
        """Return the replies that end in these bytes. Raises HiredisError for what is no reply."""
        data = self._rest + data
        head = _HEAD.search(data, max(0, len(data) - 8))
        end = len(data) if head is None else head.start()
        self._rest = data[end:]
        found, start, searched = list[Reply](), 0, 0
        for long in _LONG.finditer(data, 0, end):
            found += self._read(data[start : long.start()])
            start = long.start()
            # hiredis takes memory for all elements at once, and needs seconds to give it back.
            if not self._reader.has_data():  # else it is a part of a name
                raise hiredis.ProtocolError(f"an array of more than {LONGEST} elements")
            searched += self._reader.len()  # hiredis searches the end of a text from its begin
            if searched > SEARCHED_MOST:
                raise hiredis.ProtocolError("a long text of parts that look like arrays")
        return found + self._read(data[start:end])

    @property
    def begun(self) -> bool:
        """Whether bytes are left that are no whole reply yet."""
        return bool(self._rest) or self._reader.has_data()

    def _read(self, data: bytes) -> list[Reply]:
        self._reader.feed(data)
        found: list[Reply] = []
        try:
            while (reply := self._reader.gets()) is not False:
                found.append(reply)
        except (TypeError, ValueError, MemoryError) as error:  # a list as a name, say
            raise hiredis.ProtocolError(str(error)) from None
        return found


@dataclass(eq=False, slots=True)
class _Call:
    commands: Sequence[Command]
    replies: list[Reply] = field(default_factory=list)
    failed: str = ""
    ended: trio.Event = field(default_factory=trio.Event)


class Connection:
    """A connection to the server at `address`. Run `run` as long as it is used."""

    def __init__(
        self,
        address: tuple[str, int],
        credentials: Credentials,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = address
        self.credentials = credentials
        self.tls = tls
        self.why = NOT_ASKED  # why it is down; "" while it is up
        self._refused = False  # it is down for a reason that stays
        self._waiting: deque[_Call] = deque()
        self._wake = trio.Event()

    async def ask(self, commands: Sequence[Command], *, patience: float) -> list[Reply]:
        """Return a reply for each command. Raises IndexDownError.

        The first calls wait for the connection.
        """
        if self.why not in {"", NOT_ASKED}:
            raise self._down(self.why)
        call = _Call(commands)
        self._waiting.append(call)
        self._wake.set()
        with trio.move_on_after(patience):
            await call.ended.wait()
        if not call.ended.is_set():
            await trio.lowlevel.checkpoint()  # if the loop was late, the answer is here by now
        if not call.ended.is_set():
            call.ended.set()  # if it still waits, it is not sent
            raise IndexDownError(f"{self}: no answer within {patience * 1000:.0f} ms")
        if call.failed:
            raise self._down(call.failed)
        return call.replies

    def _down(self, why: str) -> IndexDownError:
        return (IndexRefusedError if self._refused else IndexDownError)(f"{self}: {why}")

    async def run(self) -> None:
        """Connect, and carry commands, for ever."""
        while True:
            try:
                with trio.fail_after(DIAL_S):
                    stream = await self.dial()
            except (*BROKEN, IndexDownError) as error:
                self.why, self._refused = reason(error), is_lasting(error)
                self._fail(self._waiting)
            else:
                self.why, self._refused = "", False
                try:
                    await self._carry(stream)
                finally:
                    await trio.aclose_forcefully(stream)  # a hung peer would not let TLS end
            await trio.sleep(AGAIN_S)

    async def dial(self) -> trio.abc.Stream:
        """Return a new connection that the server has greeted. Raises OSError, IndexDownError."""
        host, port = self.address
        try:
            stream: trio.abc.Stream = await trio.open_tcp_stream(host, port)
        except (socket.gaierror, ValueError) as error:  # no name in DNS, as a sentinel may tell
            raise IndexDownError(f"the host {host[:64]!r} {NO_HOST}: {error}") from None
        try:
            if self.tls is not None:
                stream = await _encrypted(stream, self.tls, host)
            user, password = self.credentials
            words = ("AUTH", user, password) if user else ("AUTH", password)
            greeting: list[Command] = [words] if password else []
            for reply in await self._greet(stream, [*greeting, ("PING",)]):
                if isinstance(reply, ReplyError):
                    raise refusal(str(reply))
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    async def _greet(self, stream: trio.abc.Stream, greeting: Sequence[Command]) -> list[Reply]:
        try:
            return await exchange(stream, Replies(), greeting)
        except (ConnectionResetError, trio.BrokenResourceError) as error:
            if self.tls is not None:
                raise
            # A server that wants TLS does so, and so does one that ends.
            raise ConnectionResetError(f"{reason(error)}; {USE_TLS}") from None

    async def _carry(self, stream: trio.abc.Stream) -> None:
        """Carry commands until the connection fails; then all that wait fail."""
        reader, calls = Replies(), list[_Call]()
        try:
            while True:
                with trio.move_on_after(IDLE_S):
                    await self._wake.wait()
                self._wake = trio.Event()
                calls = self._next()
                commands = [command for call in calls for command in call.commands]
                with trio.fail_after(HUNG_S):
                    replies = iter(await exchange(stream, reader, commands or [("PING",)]))
                for call in calls:
                    call.replies = [next(replies) for _ in call.commands]
                    call.ended.set()
                if self._waiting:
                    self._wake.set()
        except BROKEN as error:
            self.why = reason(error)
            self._fail((*calls, *self._waiting))

    def _fail(self, calls: Iterable[_Call]) -> None:
        """End these calls, and all that wait."""
        for call in calls:
            if not call.ended.is_set():
                call.failed = self.why
                call.ended.set()
        self._waiting.clear()

    def _next(self) -> list[_Call]:
        """Take the calls of one pipeline, without those that nobody waits for any more."""
        calls, count = list[_Call](), 0
        while self._waiting and count < PIPELINE:
            call = self._waiting.popleft()
            if not call.ended.is_set():
                calls.append(call)
                count += len(call.commands)
        return calls

    def __str__(self) -> str:
        return f"index {self.address[0]}:{self.address[1]}"


async def _encrypted(
    stream: trio.abc.Stream, tls: ssl.SSLContext, host: str
) -> trio.SSLStream[trio.abc.Stream]:
    """Return a stream after its handshake. Raises IndexDownError if the server says nothing.

    A Redis server without TLS takes a handshake for the beginning of a line, and waits for its end.
    """
    found = trio.SSLStream(stream, tls, server_hostname=host)
    with trio.move_on_after(TLS_S) as scope:
        await found.do_handshake()
    if scope.cancelled_caught:
        raise IndexDownError(f"it speaks no TLS, or hangs: {USE_PLAIN}")
    return found


async def exchange(
    stream: trio.abc.Stream, reader: Replies, commands: Sequence[Command]
) -> list[Reply]:
    """Send commands and return their replies. Raises OSError, HiredisError for what is no reply."""
    # The stub of `pack_command` takes tuples of one word only.
    packed = [hiredis.pack_command(words) for words in commands]  # type: ignore[arg-type]
    await stream.send_all(b"".join(packed))
    replies: list[Reply] = []
    left = LARGEST
    while len(replies) < len(commands):
        data = await stream.receive_some(BUFFER)
        if not data:
            raise ConnectionResetError("the server has closed the connection")
        left -= len(data)
        if left < 0:
            raise ConnectionResetError(f"the server sends more than {LARGEST >> 20} MiB of replies")
        replies += reader.feed(bytes(data))
    if reader.begun or len(replies) > len(commands):
        raise ConnectionResetError("the server sends more replies than commands")
    return replies


def reason(error: BaseException) -> str:
    """Say why a connection failed."""
    if isinstance(error, trio.TooSlowError):
        return "it does not answer"
    if isinstance(error, hiredis.ProtocolError):
        return f"it is no Redis server, or expects rediss:// ({error})"
    if isinstance(error, trio.BrokenResourceError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.errno is None and error.__cause__ is not None:
        # trio has tried each address of the host
        tries = getattr(error.__cause__, "exceptions", [error.__cause__])
        return ", ".join({os.strerror(one.errno): None for one in tries})
    if isinstance(error, ssl.SSLCertVerificationError):
        return _mistrust(error)
    if isinstance(error, ssl.SSLError):
        plain = error.reason == "WRONG_VERSION_NUMBER"  # it has begun with something else
        return f"no TLS with it: {error}" + (f"; {USE_PLAIN}" if plain else "")
    return str(error) or type(error).__name__


def _mistrust(error: ssl.SSLCertVerificationError) -> str:
    """Say why the certificate of a server is refused, and what to do."""
    cure = "add its authority to ca.pem of pool_tls=, or to this machine"
    if error.verify_code in _OTHER_NAME:
        cure = "give it the name or address in pool="
    elif error.verify_code in _OTHER_TIME:
        cure = "make one that is valid now, or set the clock of this machine"
    return f"kvfs refuses its certificate ({error.verify_message.rstrip('.')}): {cure}"


def is_lasting(error: BaseException) -> bool:
    """Whether a connection failed for a reason that only a person can mend."""
    cause = error.__cause__ if isinstance(error, trio.BrokenResourceError) else None
    failures = [one for one in (error, cause) if isinstance(one, LASTING)]
    # A server that ends may cut off a handshake.
    return bool(failures) and not isinstance(failures[-1], ssl.SSLEOFError)


def refusal(reply: str, said_by: str = "", pool: str = "NAME") -> IndexDownError:
    """Return the error of a command that the server refuses.

    said_by: goes before the reply. pool: the name of the pool.
    """
    if reply.startswith("NOPERM"):
        cure = "the user needs the commands of docs/pool.md"
        if " key" in reply:
            cure = f"the ACL of the user needs ~kvfs:{pool}:*"
        return IndexRefusedError(f"{said_by}{reply} ({cure})")
    if reply.startswith(("NOAUTH", "WRONGPASS", "ERR AUTH", "ERR invalid password")):
        cure = "check pool_credentials=FILE, KVFS_POOL_USER and KVFS_POOL_PASSWORD"
        return IndexRefusedError(f"{said_by}{reply} ({cure})")
    if "OOM command not allowed" in reply:
        return IndexFullError(f"{said_by}the memory of the index is full: raise maxmemory")
    return IndexDownError(f"{said_by}{reply}")
