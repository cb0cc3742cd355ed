"""A mover fetches an object: from a real nginx, and from peers that lie, drip or hang."""

import contextlib
import http.client
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from kvfs.errors import ConfigError
from kvfs.pool import fetching, peer_file
from kvfs.pool.errors import PeerError
from kvfs.pool.fetching import FetchJob, fetch
from kvfs.pool.nginx import Nginx, Served
from kvfs.pool.peer_file import PeerFile
from tests.pool.authority import authority
from tests.pool.servers import free_port, peer

MiB = 1 << 20
LIMIT_S = 20  # far above what a hostile peer may cost; a hang is an error, a slow machine is not


@pytest.fixture(autouse=True)
def _no_connections() -> Iterator[None]:
    yield
    while peer_file._connections:
        peer_file._connections.popitem()[1].close()


@pytest.fixture(scope="module")
def seed() -> int:
    found = random.randrange(1 << 32)
    print(f"seed {found}")
    return found


class Node:
    """A peer with a real nginx that serves `root`."""

    def __init__(self, folder: Path, tls: Path | None = None) -> None:
        self.root = folder / "objects"
        self.port = free_port()
        self.server = Nginx(folder / "server")
        self.tls = tls
        (self.root / "1f").mkdir(parents=True)
        for above in (self.root, self.root / "1f", folder):
            above.chmod(0o755)
        self.start()

    def start(self) -> None:
        self.server.start(
            Served(
                f"127.0.0.1:{self.port}",
                {"ram": self.root},
                allow=("127.0.0.0/8",),
                tls=self.tls,
                user="root" if os.geteuid() == 0 else "",
            )
        )

    def put(self, name: str, data: bytes) -> FetchJob:
        (self.root / "1f" / name).write_bytes(data)
        return job(self.port, self.root.parent / "got", data, f"/ram/1f/{name}", self.tls)


def job(
    port: int, at: Path, data: bytes, path: str = "/ram/1f/1f.1", tls: Path | None = None
) -> FetchJob:
    source = PeerFile(f"127.0.0.1:{port}", path, str(tls or ""))
    return FetchJob(source, str(at), len(data), xxhash.xxh3_128_digest(data), 123_456_789)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path)
    try:
        yield found
    finally:
        found.server.stop()


def expect_fetched(wanted: FetchJob, data: bytes) -> None:
    moved = fetch(wanted)
    at = Path(wanted.destination)
    assert at.read_bytes() == data
    assert moved.digest == wanted.digest
    assert moved.blocks == at.stat().st_blocks
    assert at.stat().st_mtime_ns == wanted.touched_ns
    assert os.listdir(at.parent).count(at.name) == 1
    at.unlink()


@pytest.mark.parametrize("size", [0, 1, 8191, 8192, 65536, MiB, MiB + 1, 8 * MiB])
def test_object_of_each_size_is_fetched(node: Node, seed: int, size: int) -> None:
    data = random.Random(seed).randbytes(size)
    expect_fetched(node.put("1f.1", data), data)


def test_connection_is_kept_and_made_anew(node: Node) -> None:
    wanted = node.put("1f.1", b"bytes")
    expect_fetched(wanted, b"bytes")
    (kept,) = peer_file._connections.values()
    ours = kept.getsockname()
    expect_fetched(wanted, b"bytes")
    (again,) = peer_file._connections.values()
    assert again.getsockname() == ours
    node.server.stop()
    node.start()
    expect_fetched(wanted, b"bytes")
    (new,) = peer_file._connections.values()
    assert new.getsockname() != ours


def test_missing_file_is_the_fault_of_the_peer_and_keeps_no_file(node: Node) -> None:
    wanted = node.put("1f.1", b"bytes")
    (node.root / "1f" / "1f.1").unlink()
    expect_refused(wanted, "the file is not there any more")
    node.put("1f.1", b"byte")
    expect_refused(wanted, "status 200 with 4, expected 200 with 5")


def test_peer_that_ends_is_a_peer_error(node: Node) -> None:
    wanted = node.put("1f.1", b"bytes")
    expect_fetched(wanted, b"bytes")
    node.server.stop()
    expect_refused(wanted, "Connection refused")


def test_object_is_fetched_by_tls(tmp_path: Path) -> None:
    """The peer's certificate must be of our authority; ours is needed."""
    right, other = authority(tmp_path / "right"), authority(tmp_path / "other")
    node = Node(tmp_path / "node", right)
    try:
        data = bytes(range(256)) * 4096 * 3
        wanted = node.put("1f.1", data)
        expect_fetched(wanted, data)
        node.server.stop()
        node.start()
        expect_fetched(wanted, data)
        expect_refused(
            wanted._replace(source=wanted.source._replace(tls=str(other))), "CERTIFICATE_VERIFY"
        )
        expect_refused(wanted._replace(source=wanted.source._replace(tls="")), "status 400")
        with pytest.raises(ConfigError, match=r"expected ca\.pem"):
            fetch(wanted._replace(source=wanted.source._replace(tls=str(tmp_path))))
    finally:
        node.server.stop()


def expect_refused(wanted: FetchJob, text: str = "") -> None:
    """The fetch is the peer's fault, within bounded time, and leaves no file."""
    folder = Path(wanted.destination).parent
    before = sorted(os.listdir(folder))
    began = time.monotonic()
    with pytest.raises(PeerError) as refused:
        fetch(wanted)
    assert text in str(refused.value)
    assert time.monotonic() - began < LIMIT_S
    assert sorted(os.listdir(folder)) == before
    assert (wanted.source.address, wanted.source.tls) not in peer_file._connections


DATA = b"d" * 100_000


def header(*lines: str, status: str = "200 OK", length: int | None = len(DATA)) -> bytes:
    told = [f"HTTP/1.1 {status}", "Server: nginx", *lines]
    if length is not None:
        told.append(f"Content-Length: {length}")
    return "\r\n".join([*told, "", ""]).encode()


def drip(one: socket.socket, data: bytes) -> None:
    """Send a byte at a time, always in time, for ever."""
    one.settimeout(0.05)
    for byte in data:
        one.sendall(bytes([byte]))
        with contextlib.suppress(TimeoutError):
            if not one.recv(1):
                return


def forever(one: socket.socket, data: bytes) -> None:
    while True:
        one.sendall(data)


def hang(one: socket.socket) -> None:
    one.recv(1)


def reset(one: socket.socket) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def sends(
    data: bytes, then: Callable[[socket.socket], None] | None = None
) -> Callable[[socket.socket], None]:
    def serve(one: socket.socket) -> None:
        one.sendall(data)
        if then is not None:
            then(one)

    return serve


BEGIN = header() + DATA[:9]
CHUNKS = b"5\r\nddddd\r\n0\r\n\r\n"
HOSTILE: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "wrong bytes": (sends(header() + b"x" * len(DATA)), "digest"),
    "short body": (sends(header() + DATA[:-1]), "99999 of 100000 bytes"),
    "longer body": (
        sends(header(length=len(DATA) + 1) + DATA + b"x"),
        "status 200 with 100001, expected 200 with 100000",
    ),
    "two lengths": (sends(header("Content-Length: 5") + DATA), "status 200 with"),
    "drip of a body": (sends(header(), partial(drip, data=DATA)), "of 100000 bytes in"),
    "drip of a header": (partial(drip, data=header(*["X: y"] * 1000)), "timed out"),
    "hang at once": (hang, "timed out"),
    "hang in a body": (sends(BEGIN, hang), "timed out"),
    "reset at once": (reset, ""),
    "reset in a body": (sends(BEGIN, reset), ""),
    "close at once": (sends(b""), "closed the connection"),
    "wrong status": (sends(header(status="403 No") + DATA), "status 403"),
    "no status": (sends(b"hello\r\n\r\n"), "is no answer of an HTTP server"),
    "old protocol": (
        sends(header().replace(b"/1.1", b"/0.9") + DATA),
        "is no answer of an HTTP server",
    ),
    "redirection": (sends(header("Location: http://[::1]/", status="302 Found")), "status 302"),
    "chunks": (
        sends(header("Transfer-Encoding: chunked", length=None) + CHUNKS),
        "with no length",
    ),
    "chunks and a length": (
        sends(header("Transfer-Encoding: chunked") + DATA),
        "status 200 with",
    ),
    "no length": (sends(header(length=None) + DATA), "with no length"),
    "huge header": (sends(header("X: " + "y" * 10_000) + DATA), "a header of more than 8192"),
    "header without end": (partial(forever, data=b"X: y\r\n" * 99), "a header of more than"),
    "continue without end": (
        partial(forever, data=b"HTTP/1.1 100 Continue\r\n\r\n"),
        "status 100",
    ),
    "ranges": (sends(header(status="206 Partial Content") + DATA), "status 206"),
}


@pytest.mark.parametrize(("serve", "text"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_peer_is_a_peer_error(
    tmp_path: Path, serve: Callable[[socket.socket], None], text: str
) -> None:
    def answer(one: socket.socket) -> None:
        one.recv(1 << 16)
        serve(one)

    with peer(answer) as port:
        expect_refused(job(port, tmp_path / "got", DATA), text)


def test_peer_that_fails_on_a_kept_connection_is_asked_once_more(tmp_path: Path) -> None:
    asked = []

    def answer(one: socket.socket) -> None:
        asked.append(one.recv(1 << 16))
        one.sendall(header() + DATA)

    with peer(answer) as port:
        for _ in range(3):
            expect_fetched(job(port, tmp_path / "got", DATA), DATA)
    assert len(asked) == 3
    assert b"\r\nHost: 127.0.0.1:" in asked[0]


def test_last_answer_on_a_connection_is_taken(tmp_path: Path) -> None:
    def answer(one: socket.socket) -> None:
        one.recv(1 << 16)
        one.sendall(header("Connection: close") + DATA)

    with peer(answer) as port:
        expect_fetched(job(port, tmp_path / "got", DATA), DATA)
    assert not peer_file._connections


def test_bytes_behind_the_file_do_not_come_into_the_next(tmp_path: Path) -> None:
    def answer(one: socket.socket) -> None:
        while one.recv(1 << 16):
            one.sendall(header() + DATA + b"x" * 500)

    with peer(answer) as port:
        wanted = job(port, tmp_path / "got", DATA)
        with contextlib.suppress(PeerError):
            expect_fetched(wanted, DATA)
        with contextlib.suppress(PeerError):
            expect_fetched(wanted, DATA)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "address",
    ["", "localhost:80", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "[::1:80", "1.2:x", "@:1"],
)
def test_address_that_is_no_number_is_not_resolved(tmp_path: Path, address: str) -> None:
    expect_refused(FetchJob(PeerFile(address, "/ram/1f/1f.1"), str(tmp_path / "a"), 1, b"", 0))


@pytest.mark.parametrize("path", ["", "ram", "/a b", "/a\r\nX: y", "/\0", "/\u00e4"])
def test_path_that_would_change_the_request_is_not_sent(tmp_path: Path, path: str) -> None:
    wanted = FetchJob(PeerFile("127.0.0.1:1", path), str(tmp_path / "a"), 1, b"", 0)
    expect_refused(wanted, "is no path")


def test_no_more_connections_are_kept_than_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_file, "PEERS", 2)

    def answer(one: socket.socket) -> None:
        while one.recv(1 << 16):
            one.sendall(header() + DATA)

    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(peer(answer)) for _ in range(3)]
        for port in (ports[0], ports[1], ports[0], ports[2]):
            expect_fetched(job(port, tmp_path / "got", DATA), DATA)
        kept = [address for address, _ in peer_file._connections]
        assert kept == [f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[2]}"]
        while peer_file._connections:
            peer_file._connections.popitem()[1].close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_full_local_disk_is_no_fault_of_the_peer(node: Node, tmp_path: Path) -> None:
    """The connection is not used again, because the rest of the object is on its way."""
    small = tmp_path / "small"
    small.mkdir()
    data = bytes(4 * MiB)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        wanted = node.put("1f.1", data)._replace(destination=str(small / "got"))
        with pytest.raises(OSError, match="No space left"):
            fetch(wanted)
        assert os.listdir(small) == []
        assert not peer_file._connections
        expect_fetched(node.put("1f.2", b"bytes"), b"bytes")
    finally:
        subprocess.run(["umount", small], check=True)


def test_slow_local_disk_is_no_fault_of_the_peer(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a write does not count."""
    data = bytes(4 * MiB)
    passed = [0.0]

    def write(out: int, some: memoryview, at: int) -> None:
        passed[0] += 100
        os.pwrite(out, some, at)

    monkeypatch.setattr(fetching, "_write", write)
    monkeypatch.setattr(
        peer_file, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    )
    expect_fetched(node.put("1f.1", data), data)


def test_folder_that_is_gone_is_no_fault_of_the_peer(node: Node, tmp_path: Path) -> None:
    wanted = node.put("1f.1", b"bytes")._replace(destination=str(tmp_path / "none" / "got"))
    with pytest.raises(FileNotFoundError):
        fetch(wanted)


def test_nginx_sends_what_the_fetch_expects(node: Node) -> None:
    """So a stricter reader of the answer refuses nothing that nginx sends."""
    node.put("1f.1", b"bytes")
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", node.port)) as connection:
        connection.request("GET", "/ram/1f/1f.1")
        answer = connection.getresponse()
        assert (answer.status, answer.version) == (200, 11)
        assert answer.headers["Content-Length"] == "5"
        assert "Transfer-Encoding" not in answer.headers
        assert answer.read() == b"bytes"
