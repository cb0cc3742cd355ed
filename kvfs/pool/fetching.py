"""A mover reads an object of a peer: one GET of a file that the peer's nginx serves.

Contract: runs in a worker process, or for a small object in a thread of the daemon; any number of
threads may call. A connection to each peer is kept between calls. It decides nothing, and knows no
catalog. The file appears under its name only complete, with the right digest and the modification
time of every copy. Raises PeerError for the peer's fault, OSError for the local file, ConfigError
for our certificate; nothing is left behind. A peer that sends too few bytes, too many, other bytes,
or none for a while, is at fault. Only the address of the call is connected to: names are not
resolved, and redirections are not followed.

The answer of nginx to such a request is a few lines with a length. We read these ourselves, because
`http.client` has no limit for the time of a whole header, and parses it as an e-mail. The file is
written and not mapped: a full tier is an error then, and not a signal.
"""

import os
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvfs.movement.copying import Moved
from kvfs.movement.files import complete, part
from kvfs.pool import addresses, certificates
from kvfs.pool.errors import NoFileError, PeerError

DIAL_S = 1.0  # s to connect, and for a handshake
SILENT_S = 2.0  # s without a byte after which a peer is given up; also for a whole header
SLOWEST = 4 << 20  # bytes/s; a peer that drips is given up
CHUNK = 1 << 20  # bytes: stays in the processor's cache between the socket and the file
HEADER = 8192  # bytes of the longest header; nginx sends 200
PEERS = 64  # connections that are kept

Peer = tuple[str, str]  # an address, and the directory with our certificate
_connections: dict[Peer, socket.socket] = {}  # the one that was used last is the last
_local = threading.local()  # the buffer of each thread

_PATH = re.compile(r"/[!-~]*")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})(?: [^\r\n]*)?")
_LENGTH = re.compile(rb"(?im)^content-length:[ \t]*(\d{1,19})[ \t]*\r?$")
_CODED = re.compile(rb"(?im)^transfer-encoding:")
_LAST = re.compile(rb"(?im)^connection:[ \t]*close[ \t]*\r?$")


class PeerFile(NamedTuple):
    """A file that a peer serves. tls: the directory with our certificate, "" without TLS."""

    address: str
    path: str
    tls: str = ""


class FetchJob(NamedTuple):
    """A file of a peer and where its bytes go. `size`, `digest`: what they must be."""

    source: PeerFile
    destination: str
    size: int
    digest: bytes
    touched_ns: int


def fetch(wanted: FetchJob) -> Moved:
    """Fetch an object, and verify its digest. Raises PeerError, OSError."""
    with part(wanted.destination) as out:
        if wanted.size:
            os.truncate(out, wanted.size)  # tells tmpfs that huge pages will be within the size
        _read(wanted.source, out, wanted.size, wanted.digest)
        os.utime(out, ns=(wanted.touched_ns, wanted.touched_ns))
        blocks = os.fstat(out).st_blocks
        complete(wanted.destination)
    return Moved(wanted.digest, blocks)


def _read(source: PeerFile, out: int, size: int, digest: bytes) -> None:
    """Read a file of that size and digest into `out`. Raises PeerError, OSError."""
    connection, count, stays = _asked(source, size)
    hasher, at = xxhash.xxh3_128(), 0
    waited = 0.0  # for the peer, and not for the file
    try:
        while True:
            data = _buffer()[:count]
            hasher.update(data)
            _write(out, data, at)
            at += count
            if at == size:
                break
            began = time.monotonic()
            count = _receive(source, connection, _buffer()[: size - at])
            waited += time.monotonic() - began
            if not count or waited > SILENT_S + at / SLOWEST:
                raise PeerError(f"{_named(source)}: {at + count} of {size} bytes in {waited:.1f} s")
        if hasher.digest() != digest:
            raise PeerError(f"{_named(source)}: its bytes do not have the digest announced")
    except BaseException:
        connection.close()
        raise
    if stays:
        _keep(source, connection)
    else:
        connection.close()


def _asked(source: PeerFile, size: int) -> tuple[socket.socket, int, bool]:
    """Ask for a file of `size` bytes; again if the peer has closed the connection that was kept.

    Returns the connection, the bytes of the file that are in the buffer already, and whether the
    connection stays open after the file. Raises PeerError.
    """
    if not _PATH.fullmatch(source.path):
        raise PeerError(f"peer {source.address}: {source.path!a} is no path")
    connection = _connections.pop((source.address, source.tls), None)
    if connection is not None:
        with suppress(ConnectionError):
            return _ask(source, connection, size)
    connection = _dial(source)
    try:
        return _ask(source, connection, size)
    except ConnectionError as error:
        raise PeerError(f"{_named(source)}: {error}") from None


def _ask(source: PeerFile, connection: socket.socket, size: int) -> tuple[socket.socket, int, bool]:
    """As `_asked`. ConnectionError: the peer has closed the connection before it answered."""
    request = f"GET {source.path} HTTP/1.1\r\nHost: {source.address}\r\n\r\n"
    deadline = time.monotonic() + SILENT_S
    try:
        connection.settimeout(SILENT_S)
        connection.sendall(request.encode())
        got, end = 0, -1
        while end < 0:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            if got >= HEADER:
                raise PeerError(f"{_named(source)}: a header of more than {HEADER} bytes")
            connection.settimeout(left)
            # No more than the file: what is not for us is not read.
            count = connection.recv_into(_buffer()[got : HEADER + size])
            if not count:
                raise ConnectionResetError("the peer has closed the connection")
            got += count
            end = bytes(_buffer()[: min(got, HEADER)]).find(b"\r\n\r\n")
        connection.settimeout(SILENT_S)
        stays = _expect(source, bytes(_buffer()[:end]), size)
        more = got - end - 4
        if more > size:
            raise PeerError(f"{_named(source)}: more than {size} bytes")
        _buffer()[:more] = bytes(_buffer()[end + 4 : got])
    except (ConnectionError, ssl.SSLEOFError) as error:
        connection.close()
        raise ConnectionResetError(str(error)) from None
    except OSError as error:
        connection.close()
        raise PeerError(f"{_named(source)}: {error}") from None
    except BaseException:
        connection.close()
        raise
    return connection, more, stays


def _expect(source: PeerFile, header: bytes, size: int) -> bool:
    """Return whether the connection stays. Raises PeerError unless `size` bytes follow."""
    line, _, fields = header.partition(b"\r\n")
    status, lengths = _STATUS.fullmatch(line), _LENGTH.findall(fields)
    if status is None:
        raise PeerError(f"{_named(source)}: {line[:40]!a} is no answer of an HTTP server")
    if status[1] == b"404":
        raise NoFileError(f"{_named(source)}: the file is not there any more")
    if status[1] != b"200" or lengths != [b"%d" % size] or _CODED.search(fields):
        told = b", ".join(lengths).decode() or "no length"
        raise PeerError(
            f"{_named(source)}: status {status[1].decode()} with {told}, expected 200 with {size}"
        )
    return _LAST.search(fields) is None


def _dial(source: PeerFile) -> socket.socket:
    """Connect to a peer. Raises PeerError, and ConfigError for our own certificate."""
    found = addresses.parse(source.address)
    context = _context(source.tls) if source.tls else None
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


def _receive(source: PeerFile, connection: socket.socket, buffer: memoryview) -> int:
    try:
        return connection.recv_into(buffer)
    except OSError as error:
        raise PeerError(f"{_named(source)}: {error}") from None


@cache
def _context(folder: str) -> ssl.SSLContext:
    return certificates.of_peers(Path(folder))


def _named(source: PeerFile) -> str:
    return f"peer {source.address}{source.path}"


def _buffer() -> memoryview:
    """The buffer of this thread."""
    try:
        found: memoryview = _local.buffer
    except AttributeError:
        found = _local.buffer = memoryview(bytearray(CHUNK))
    return found


def _write(out: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(out, data, at)
        data, at = data[count:], at + count
