"""One GET of a file that a peer's nginx serves: the whole file, or the rest from a position on.

Contract: any number of threads may call. A connection to each peer is kept between calls. Calls
raise PeerError for the peer's fault (NoFileError if it has no such file), and ConfigError for our
certificate. A peer that sends too few bytes, too many, or none for a while, is at fault. Only the
address of the call is connected to: names are not resolved, and redirections are not followed. Not
for the digests of the bytes (`fetching`, `streaming`).

The answer of nginx to such a request is a few lines with a length. We read these ourselves, because
`http.client` has no limit for the time of a whole header, and parses it as an e-mail.
"""

import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvfs.errors import ConfigError
from kvfs.pool import addresses, certificates
from kvfs.pool.errors import NoFileError, PeerError

if TYPE_CHECKING:
    from typing_extensions import Self

# s to connect, also for a handshake, and for a whole header. An open waits 1.6 s with the default
# of `pool_wait`: if the first owner hangs, there is time for the next one.
DIAL_S = HEADER_S = 0.75
SILENT_S = 2.0  # s without a byte of the file after which a peer is given up
SLOWEST = 4 << 20  # bytes/s; a peer that drips is given up
CHUNK = 1 << 20  # bytes: stays in the processor's cache between the socket and the file
HEADER = 8192  # bytes of the longest header; nginx sends 200
PEERS = 64  # connections that are kept

Peer = tuple[str, str]  # an address, and the directory with our certificate
_connections: dict[Peer, socket.socket] = {}  # the one that was used last is the last
_contexts: dict[str, tuple[certificates.State, ssl.SSLContext]] = {}  # by directory
_local = threading.local()  # the buffer of each thread

_PATH = re.compile(r"/[!-~]*")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})(?: [^\r\n]*)?")
_LENGTH = re.compile(rb"(?im)^content-length:[ \t]*(\d{1,19})[ \t]*\r?$")
_RANGE = re.compile(rb"(?im)^content-range:[ \t]*([^\r\n]*?)[ \t]*\r?$")
_CODED = re.compile(rb"(?im)^transfer-encoding:")
_LAST = re.compile(rb"(?im)^connection:[ \t]*close[ \t]*\r?$")


class PeerFile(NamedTuple):
    """A file that a peer serves. tls: the directory with our certificate, "" without TLS."""

    address: str
    path: str
    tls: str = ""

    def __str__(self) -> str:
        return f"peer {self.address}{self.path}"


class Answer:
    """The bytes of a file from `start` to its end, as they come. Use it in a `with` block.

    at: the position of the next byte. The connection is kept after the last byte, unless the block
    raises.
    """

    def __init__(self, source: PeerFile, size: int, start: int = 0) -> None:
        """Ask for a file of `size` bytes. Raises PeerError, NoFileError, ConfigError."""
        self.source = source
        self.size = size
        self.at = self._start = start
        self._connection, self._ready, self._stays = _asked(source, size, start)
        self._waited = 0.0  # s for the peer, and not for the file

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._stays and self.at == self.size:
            _keep(self.source, self._connection)
        else:
            self._connection.close()

    def read(self, most: int) -> memoryview:
        """The next bytes, at least one and at most `most`. Raises PeerError.

        They are valid until the next call in this thread. There must be bytes left.
        """
        if self._ready:
            data, self._ready = self._ready[:most], self._ready[most:]
        else:
            data = _buffer()[: min(most, self.size - self.at)]
            data = data[: self._receive(data)]
        self.at += len(data)
        return data

    def _receive(self, buffer: memoryview) -> int:
        began = time.monotonic()
        try:
            count = self._connection.recv_into(buffer)
        except OSError as error:
            raise PeerError(f"{self.source}: {error}") from None
        self._waited += time.monotonic() - began
        most = SILENT_S + (self.at - self._start) / SLOWEST
        if not count or self._waited > most:
            got = f"{self.at + count} of {self.size} bytes in {self._waited:.1f} s"
            raise PeerError(f"{self.source}: {got}")
        return count


def _asked(source: PeerFile, size: int, start: int) -> tuple[socket.socket, memoryview, bool]:
    """Ask for a file of `size` bytes; again if the peer has closed the connection that was kept.

    Returns the connection, the bytes of the file that are in the buffer already, and whether the
    connection stays open after the file. Raises PeerError.
    """
    if not _PATH.fullmatch(source.path):
        raise PeerError(f"peer {source.address}: {source.path!a} is no path")
    connection = _connections.pop((source.address, source.tls), None)
    if connection is not None:
        with suppress(ConnectionError):
            return _ask(source, connection, size, start)
    connection = _dial(source)
    try:
        return _ask(source, connection, size, start)
    except ConnectionError as error:
        raise PeerError(f"{source}: {error}") from None


def _ask(
    source: PeerFile, connection: socket.socket, size: int, start: int
) -> tuple[socket.socket, memoryview, bool]:
    """As `_asked`. ConnectionError: the peer has closed the connection before it answered."""
    lines = [f"GET {source.path} HTTP/1.1", f"Host: {source.address}"]
    if start:
        lines.append(f"Range: bytes={start}-")
    request, left = "\r\n".join([*lines, "", ""]), size - start
    deadline = time.monotonic() + HEADER_S
    try:
        connection.settimeout(HEADER_S)
        connection.sendall(request.encode())
        got, end = 0, -1
        while end < 0:
            patience = deadline - time.monotonic()
            if patience <= 0:
                raise TimeoutError("timed out")
            if got >= HEADER:
                raise PeerError(f"{source}: a header of more than {HEADER} bytes")
            connection.settimeout(patience)
            # No more than the file: what is not for us is not read.
            count = connection.recv_into(_buffer()[got : HEADER + left])
            if not count:
                raise ConnectionResetError("the peer has closed the connection")
            got += count
            end = bytes(_buffer()[: min(got, HEADER)]).find(b"\r\n\r\n")
        connection.settimeout(SILENT_S)
        stays = _expect(source, bytes(_buffer()[:end]), size, start)
        if got - end - 4 > left:
            raise PeerError(f"{source}: more than {left} bytes")
    except (ConnectionError, ssl.SSLEOFError) as error:
        connection.close()
        raise ConnectionResetError(str(error)) from None
    except OSError as error:
        connection.close()
        raise PeerError(f"{source}: {error}") from None
    except BaseException:
        connection.close()
        raise
    return connection, _buffer()[end + 4 : got], stays


def _expect(source: PeerFile, header: bytes, size: int, start: int) -> bool:
    """Return whether the connection stays. Raises PeerError unless the right bytes follow."""
    line, _, fields = header.partition(b"\r\n")
    status, lengths = _STATUS.fullmatch(line), _LENGTH.findall(fields)
    if status is None:
        raise PeerError(f"{source}: {line[:40]!a} is no answer of an HTTP server")
    if status[1] == b"404":
        raise NoFileError(f"{source}: the file is not there any more")
    code, left = b"206" if start else b"200", size - start
    if status[1] != code or lengths != [b"%d" % left] or _CODED.search(fields):
        told = b", ".join(lengths).decode() or "no length"
        raise PeerError(
            f"{source}: status {status[1].decode()} with {told}, expected {code.decode()} with "
            f"{left}"
        )
    if start and _RANGE.findall(fields) != [b"bytes %d-%d/%d" % (start, size - 1, size)]:
        raise PeerError(f"{source}: other bytes than those from {start} on")
    return _LAST.search(fields) is None


def _dial(source: PeerFile) -> socket.socket:
    """Connect to a peer. Raises PeerError, and ConfigError for our own certificate."""
    found = addresses.parse(source.address)
    context = context_of(source.tls) if source.tls else None
    try:
        if found is None:
            raise ValueError("it is no address IP:PORT")
        connection = socket.create_connection((str(found[0]), found[1]), timeout=DIAL_S)
        if context is None:
            return connection
        try:
            return context.wrap_socket(connection)
        except BaseException:
            connection.close()
            raise
    except (OSError, ValueError, OverflowError) as error:
        raise PeerError(f"peer {source.address}: {error}") from None


def _keep(source: PeerFile, connection: socket.socket) -> None:
    """Keep a connection for the next call, and no more than PEERS of them."""
    _connections[source.address, source.tls] = connection
    if len(_connections) > PEERS:
        _connections.pop(next(iter(_connections))).close()


def context_of(folder: str) -> ssl.SSLContext:
    """The context for our certificate. Raises ConfigError.

    Renewed files are taken. While they do not fit together, the context of before goes on.
    """
    state, known = certificates.state(Path(folder)), _contexts.get(folder)
    if known is not None and known[0] == state:
        return known[1]
    try:
        if known is not None:
            certificates.expect_match(Path(folder))
        found = certificates.of_peers(Path(folder))
    except ConfigError:
        if known is None:
            raise
        return known[1]
    _contexts[folder] = state, found
    return found


def _buffer() -> memoryview:
    """The buffer of this thread."""
    try:
        found: memoryview = _local.buffer
    except AttributeError:
        found = _local.buffer = memoryview(bytearray(CHUNK))
    return found
