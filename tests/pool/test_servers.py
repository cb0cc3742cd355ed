"""The servers of an index, against real ones: alone, with a sentinel, and in a cluster."""

import contextlib
import http.server
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis
import trio
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from kvfs.pool import connection
from kvfs.pool.connection import Replies
from kvfs.pool.credentials import Credentials
from kvfs.pool.errors import IndexDownError, IndexFullError
from kvfs.pool.index import LEASE_S, Index
from kvfs.pool.place import PoolPlace
from kvfs.pool.records import Announcement, Lease, Owner, PoolEntry
from kvfs.pool.servers import Servers
from tests.harness import wait_for
from tests.pool.authority import authority
from tests.pool.servers import cluster, command, free_port, peer, seen, sentinel, server, start
from tests.pool.test_index import LIFE, A, B, facts, said
from tests.unit.fuzz import CPU_S, fuzzed, spoiled_bytes

PATIENCE_S = 30


@contextlib.asynccontextmanager
async def running(
    url: str, credentials: Credentials | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Index]:
    """An index whose servers run until the end of the block; then no task is left."""
    servers = Servers(PoolPlace.parse(url), credentials or Credentials(), tls)
    before = trio.lowlevel.current_statistics().tasks_living
    async with trio.open_nursery() as nursery:
        nursery.start_soon(servers.run)
        yield Index(servers)
        nursery.cancel_scope.cancel()
    assert trio.lowlevel.current_statistics().tasks_living == before


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what kvfs finds out has no event for tests
            await trio.sleep(0.01)


async def once_up(ask: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401
    """Ask until there is an answer, and return it. An answer or IndexDownError comes at once."""
    with trio.fail_after(PATIENCE_S):
        while True:
            try:
                return await ask()
            except IndexDownError:
                await trio.sleep(0.02)


async def why_down(ask: Callable[[], Awaitable[Any]], text: str) -> None:
    """Ask until IndexDownError has this text."""
    said_so = ""
    with trio.move_on_after(PATIENCE_S):
        while text not in said_so:
            try:
                await ask()
                said_so = "it answers"
            except IndexDownError as error:
                said_so = str(error)
            await trio.sleep(0.02)
    assert text in said_so


NEVER = "it was not asked yet"


def known(index: Index) -> list[connection.Connection]:
    return list(index.servers._connections.values())


async def why_down_at(url: str, text: str, credentials: Credentials | None = None) -> None:
    async with running(url, credentials) as index:
        await why_down(lambda: index.find(["@0/x"]), text)


# One server


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    folder = tmp_path_factory.mktemp("secured")
    with server(folder, port, password="secret"):  # noqa: S106 (of this test's server)
        for user, may in (("me", "+@all"), ("weak", "+@connection")):
            words = ("ACL", "SETUSER", user, "on", ">mine", "~*", may)
            command(port, *words, password="secret")  # noqa: S106
        yield port


@pytest.mark.parametrize("credentials", [Credentials("", "secret"), Credentials("me", "mine")])
def test_right_password_is_taken(secured: int, credentials: Credentials) -> None:
    async def case() -> None:
        async with running(f"redis://127.0.0.1:{secured}/right", credentials) as index:
            await once_up(index.expect_usable)
            assert await index.announce([said("@0/x", b"x")]) == ["here"]

    trio.run(case)


@pytest.mark.parametrize(
    ("credentials", "text"),
    [
        (Credentials(), "NOAUTH"),
        (Credentials("", "other"), "WRONGPASS"),
        (Credentials("nobody", "secret"), "WRONGPASS"),
        (Credentials("weak", "mine"), "NOPERM"),
    ],
)
def test_wrong_password_is_said_without_it(
    secured: int, credentials: Credentials, text: str
) -> None:
    async def case() -> None:
        async with running(f"redis://127.0.0.1:{secured}/wrong", credentials) as index:
            await why_down(lambda: index.find(["@0/x"]), text)
            with pytest.raises(IndexDownError) as refused:
                await index.find(["@0/x"])
            assert credentials.password not in str(refused.value) or not credentials.password
            cure = "needs the commands" if text == "NOPERM" else "pool_credentials=FILE"
            assert cure in str(refused.value)

    trio.run(case)


def test_index_by_tls(tmp_path: Path) -> None:
    """The certificate must be of the right authority, and TLS is not plain text."""
    port, right, other = free_port(), authority(tmp_path / "right"), authority(tmp_path / "other")
    files = (
        *("--tls-cert-file", str(right / "cert.pem"), "--tls-key-file", str(right / "key.pem")),
        *("--tls-ca-cert-file", str(right / "ca.pem"), "--tls-auth-clients", "no"),
    )
    plain, secure = f"redis://localhost:{port}/kv", f"rediss://localhost:{port}/kv"

    async def case() -> None:
        trusting = ssl.create_default_context(cafile=str(right / "ca.pem"))
        async with running(secure, tls=trusting) as index:
            await once_up(index.expect_usable)
            assert await index.announce([said("@0/x", b"x")]) == ["here"]
        wary = ssl.create_default_context(cafile=str(other / "ca.pem"))
        async with running(secure, tls=wary) as index:
            await why_down(lambda: index.find(["@0/x"]), "kvfs refuses its certificate")
        await why_down_at(plain, f"index localhost:{port}: ")

    process = start(tmp_path / "redis", 0, *files, "--tls-port", str(port))
    try:
        trio.run(case)
    finally:
        process.kill()
        process.wait()


def test_tls_to_a_server_without_it_is_said(secured: int) -> None:
    async def case() -> None:
        context = ssl.create_default_context()
        async with running(f"rediss://127.0.0.1:{secured}/kv", tls=context) as index:
            await why_down(lambda: index.find(["@0/x"]), f"index 127.0.0.1:{secured}: ")

    trio.run(case)


def test_index_that_is_a_web_server_is_said() -> None:
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
    ) as web:
        threading.Thread(target=web.serve_forever, args=(0.01,)).start()
        try:
            url = f"redis://127.0.0.1:{web.server_port}/kv"
            trio.run(why_down_at, url, "it is no Redis server")
        finally:
            web.shutdown()


HOSTILE = [
    (b"", "it does not answer"),
    (None, "the server has closed the connection"),
    (b"+PONG\r\n+PONG\r\n", "more replies than commands"),
    (b"\0" * 100, "it is no Redis server"),
    (b"*-7\r\n", "it is no Redis server"),
    (b"*1\r\n" * 100_000, "it is no Redis server"),
    (b"*2147483647\r\n", "an array of more than 9999999 elements"),
    (b"*1\r\n~2147483647\r\n", "an array of more than 9999999 elements"),
    (b"%1\r\n*0\r\n:1\r\n", "it is no Redis server"),
    (b"$5\r\n\r\n$11xx>2147483647\r\n", "an array of more than 9999999 elements"),
]


@pytest.mark.parametrize(("reply", "text"), HOSTILE)
def test_hostile_index_is_down(
    monkeypatch: pytest.MonkeyPatch, reply: bytes | None, text: str
) -> None:
    monkeypatch.setattr(connection, "DIAL_S", 0.3)

    def serve(one: socket.socket) -> None:
        one.recv(1 << 20)
        if reply is not None:
            one.sendall(reply)
            one.recv(1 << 20)

    with peer(serve) as port:
        trio.run(why_down_at, f"redis://127.0.0.1:{port}/kv", text)


def test_replies_without_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LARGEST", 1 << 20)

    def serve(one: socket.socket) -> None:
        one.recv(1 << 20)
        one.sendall(b"$999999999\r\n")
        while True:
            one.sendall(bytes(1 << 16))

    with peer(serve) as port:
        trio.run(why_down_at, f"redis://127.0.0.1:{port}/kv", "more than 1 MiB of replies")


@pytest.mark.parametrize("step", [1, 2, 7, 1 << 16])
def test_replies_are_read_in_any_pieces(step: int) -> None:
    """Names that look like the heads of long arrays are names."""
    name = b"~2147483647"
    sent = b"*3\r\n$11\r\n%s\r\n$1\r\n*\r\n$3\r\n%%20\r\n+OK\r\n" % name
    replies, found = Replies(), list[Any]()
    for at in range(0, len(sent), step):
        found += replies.feed(sent[at : at + step])
    assert found == [[name, b"*", b"%20"], b"OK"]
    assert not replies.begun


def test_text_of_heads_without_end_takes_no_time() -> None:
    """The reader looks at the whole text for its end at each head in it."""
    replies = Replies()
    replies.feed(b"+x")
    began = time.process_time()
    with pytest.raises(hiredis.ProtocolError, match="look like arrays"):
        replies.feed(b"*12345678" * 1_000_000)
    assert time.process_time() - began < CPU_S


@fuzzed
@given(st.lists(spoiled_bytes(["*1\r\n", "$3\r\nabc\r\n", "%1\r\n", ":1\r\n", "-E\r\n"])))
def test_any_bytes_are_replies_or_none(pieces: list[bytes]) -> None:
    replies = Replies()
    with contextlib.suppress(hiredis.HiredisError):
        for piece in pieces:
            replies.feed(piece)


@pytest.mark.parametrize("kind", ["redis+cluster", "redis+sentinel"])
@pytest.mark.parametrize(
    "reply",
    [b":5\r\n", b"*1\r\n:5\r\n", b"*2\r\n$1\r\nx\r\n$1\r\nx\r\n", b"*-1\r\n", b"+OK\r\n"]
    + [b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$1\r\nx\r\n:1\r\n" % last for last in (-5, 1 << 40)]
    + [b"*1\r\n*3\r\n:0\r\n:9\r\n*2\r\n$1\r\nx\r\n:70000\r\n", b"*2\r\n$1\r\nx\r\n$5\r\n70000\r\n"]
    + [b"*2\r\n" + b"*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\nx\r\n:1\r\n" * 2],
)
def test_hostile_tellers_of_servers_are_down(kind: str, reply: bytes) -> None:
    def serve(one: socket.socket) -> None:
        one.recv(1 << 20)
        one.sendall(b"+PONG\r\n")
        one.recv(1 << 20)
        one.sendall(reply)
        one.recv(1)

    path = "main/kv" if kind == "redis+sentinel" else "kv"
    with peer(serve) as port:
        trio.run(why_down_at, f"{kind}://127.0.0.1:{port}/{path}", f"127.0.0.1:{port}: it ")


@pytest.mark.parametrize("name", [b"a..b", b"a" * 300, b"a\0b", b"\xff", b""])
def test_host_that_a_sentinel_names_wrongly_is_down(name: bytes) -> None:
    def serve(one: socket.socket) -> None:
        one.recv(1 << 20)
        one.sendall(b"+PONG\r\n")
        one.recv(1 << 20)
        one.sendall(b"*2\r\n$%d\r\n%s\r\n$1\r\n1\r\n" % (len(name), name))
        one.recv(1)

    async def case(url: str) -> None:
        async with running(url) as index:
            await until(lambda: "was found yet" not in index.servers.why)
            await until(lambda: all(one.why != NEVER for one in known(index)))
            with pytest.raises(IndexDownError):
                await index.find(["@0/x"])

    with peer(serve) as port:
        trio.run(case, f"redis+sentinel://127.0.0.1:{port}/main/kv")


def test_full_index_refuses_announcements_and_answers(tmp_path: Path) -> None:
    port = free_port()

    async def case() -> None:
        async with running(f"redis://127.0.0.1:{port}/kv") as index:
            await once_up(lambda: index.announce([said("@0/x", b"x")]))
            redis.Redis(port=port).config_set("maxmemory", "1mb")
            told = "the memory of the index is full: raise maxmemory"
            for one in (said("@0/y", b"y"), said("@0/x", b"x", B)):  # a new object, a new owner
                with pytest.raises(IndexFullError, match=told):
                    await index.announce([one])
            (found,) = await once_up(lambda: index.find(["@0/x"]))
            assert isinstance(found, PoolEntry)
            redis.Redis(port=port).config_set("maxmemory", "0")
            assert await index.announce([said("@0/y", b"y")]) == ["here"]

    with server(tmp_path, port, "--maxmemory-policy", "noeviction"):
        trio.run(case)


def test_full_index_keeps_leases_of_live_nodes(tmp_path: Path) -> None:
    port = free_port()
    lease = Lease(A, LIFE, "127.0.0.1:1")

    async def case() -> None:
        async with running(f"redis://127.0.0.1:{port}/kv") as index:
            epoch = await once_up(lambda: index.renew(lease, "e", 1.0))
            client = redis.Redis(port=port)
            client.config_set("maxmemory", "1mb")
            client.expire(f"kvfs:kv:n:{A}", 1000)
            with pytest.raises(IndexFullError):
                await index.renew(replace(lease, objects=5), "e", 2.0)
            assert await index.keep(lease) == epoch
            assert 0 < client.ttl(f"kvfs:kv:n:{A}") <= LEASE_S
            # The entries of an earlier life name files that may be gone.
            client.expire(f"kvfs:kv:n:{A}", 1000)
            assert await index.keep(replace(lease, incarnation="0" * 16)) is None
            assert await index.keep(replace(lease, node=B)) is None
            assert client.ttl(f"kvfs:kv:n:{A}") > LEASE_S
            assert await index.leases([A, B]) == [lease, None]
            client.config_set("maxmemory", "0")
            assert await index.renew(lease, "e", 3.0) == epoch

    with server(tmp_path, port, "--maxmemory-policy", "noeviction"):
        trio.run(case)


def test_replica_refuses_announcements_and_answers(tmp_path: Path) -> None:
    master, replica = free_port(), free_port()

    async def case() -> None:
        async with running(f"redis://127.0.0.1:{replica}/kv") as index:
            await once_up(lambda: index.find(["@0/x"]))
            await why_down(lambda: index.announce([said("@0/x", b"x")]), "READONLY")
            assert await once_up(lambda: index.find(["@0/x"])) == [None]

    with (
        server(tmp_path / "1", master),
        server(tmp_path / "2", replica, "--replicaof", f"127.0.0.1 {master}"),
    ):
        trio.run(case)


def test_abandoned_question_is_not_sent(tmp_path: Path) -> None:
    """A stopped index gets the announcements that are waited for, and no others."""
    port = free_port()

    async def case(process: "subprocess.Popen[bytes]") -> None:
        async with running(f"redis://127.0.0.1:{port}/kv") as index:
            await once_up(lambda: index.find(["@0/x"]))
            process.send_signal(signal.SIGSTOP)
            servers = index.servers
            for number in range(3):
                command = (f"n{number}", ("SET", f"n{number}", "x"))
                with pytest.raises(IndexDownError, match="no answer within"):
                    await servers.ask([command], patience=0.02)
            process.send_signal(signal.SIGCONT)
            await once_up(lambda: index.find(["@0/x"]))
            assert redis.Redis(port=port).exists("n0", "n1", "n2") <= 1, "one was under way"

    with server(tmp_path, port) as process:
        trio.run(case, process)


def test_first_question_waits_for_the_connection(tmp_path: Path) -> None:
    """The daemon that follows another one serves programs at once."""
    port = free_port()

    async def case() -> None:
        async with running(f"redis://127.0.0.1:{port}/kv") as index:
            assert not index.servers.tried
            assert await index.find(["@0/x"], patience=PATIENCE_S) == [None]

    with server(tmp_path, port):
        trio.run(case)


def test_first_question_waits_no_longer_than_the_first_try() -> None:
    async def case(url: str) -> None:
        async with running(url) as index:
            with trio.fail_after(PATIENCE_S / 2), pytest.raises(IndexDownError):
                await index.find(["@0/x"], patience=PATIENCE_S)
            assert index.servers.tried

    for kind in ("redis", "redis+sentinel", "redis+cluster"):
        service = "/mymaster" if kind == "redis+sentinel" else ""
        trio.run(case, f"{kind}://127.0.0.1:{free_port()}{service}/kv")


def test_index_that_ends_while_nobody_asks_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the first question after a restart of the index is answered."""
    monkeypatch.setattr(connection, "IDLE_S", 0.05)
    port = free_port()

    async def case() -> None:
        async with running(f"redis://127.0.0.1:{port}/kv") as index:
            with server(tmp_path / "1", port):
                await once_up(lambda: index.find(["@0/x"]))
            (only,) = index.servers._connections.values()
            await until(lambda: only.why != "")
            with server(tmp_path / "2", port):
                await until(lambda: only.why == "")
                assert await index.find(["@0/x"]) == [None]

    trio.run(case)


# Sentinels


def test_sentinels_name_a_new_master(tmp_path: Path) -> None:
    """After the death of the master the index answers from its replica, with what that has."""
    master, replica, watch = free_port(), free_port(), free_port()
    conf = sentinel(tmp_path / "s", watch, master)
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{watch}/main/kv"

    async def case(first: "subprocess.Popen[bytes]") -> None:
        async with running(url) as index:
            await why_down(lambda: index.find(["@0/x"]), "127.0.0.1:1: ")
            watching.append(start_sentinel())
            await once_up(lambda: index.announce([said("@0/x", b"x")]))
            await trio.to_thread.run_sync(
                lambda: wait_for(lambda: seen(watch, replica), "the sentinel knows the replica")
            )
            redis.Redis(port=master).wait(1, 5000)
            first.kill()
            await why_down(lambda: index.find(["@0/x"]), "index")
            assert await once_up(lambda: index.announce([said("@0/y", b"y")])) == ["here"]
            found = await index.find(["@0/x", "@0/y"])
            assert all(isinstance(one, PoolEntry) for one in found)
            assert redis.Redis(port=replica).role()[0] == b"master"

    def start_sentinel() -> "subprocess.Popen[bytes]":
        words = ["redis-server", str(conf), "--sentinel", "--logfile", str(tmp_path / "s.log")]
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    watching: list[subprocess.Popen[bytes]] = []
    with (
        server(tmp_path / "1", master) as first,
        server(tmp_path / "2", replica, "--replicaof", f"127.0.0.1 {master}"),
    ):
        try:
            trio.run(case, first)
        finally:
            for one in watching:
                one.kill()
                one.wait()


def test_sentinel_with_a_password_and_service_that_it_does_not_know(tmp_path: Path) -> None:
    master, watch = free_port(), free_port()
    conf = sentinel(tmp_path / "s", watch, master, "requirepass secret")
    secret = Credentials("", "secret")

    async def case() -> None:
        base = f"redis+sentinel://127.0.0.1:{watch}"
        async with running(f"{base}/main/kv", secret) as index:
            assert await once_up(lambda: index.announce([said("@0/x", b"x")])) == ["here"]
        await why_down_at(f"{base}/main/kv", "NOAUTH")
        await why_down_at(f"{base}/other/kv", "it knows no master of service other", secret)
        plain = f"redis+sentinel://127.0.0.1:{master}/main/kv"
        await why_down_at(plain, "it is no sentinel: give redis://", secret)

    words = ["redis-server", str(conf), "--sentinel"]
    with server(tmp_path / "1", master, password="secret"):  # noqa: S106 (of this test's server)
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            trio.run(case)
        finally:
            process.kill()
            process.wait()


# Clusters

KEYS = [f"@0/{number}" for number in range(300)]


def named(key: str) -> str:
    return f"kvfs:kv:o:{key}"


def many(keys: list[str]) -> list[Announcement]:
    return [Announcement(k, facts(k.encode()), Owner(A, LIFE, "ram", "1.1"), True) for k in keys]  # noqa: FBT003


def test_cluster_finds_what_it_was_told(tmp_path: Path) -> None:
    """Also while a slot moves to another server, after that, and with one server dead."""
    ports = [free_port() for _ in range(3)]
    url = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in reversed(ports)) + "/kv"

    def expect_all(found: list[Any]) -> None:
        assert [one.facts.digest for one in found] == [facts(k.encode()).digest for k in KEYS]

    async def case(processes: dict[int, "subprocess.Popen[bytes]"]) -> None:
        async with running(url) as index:
            await once_up(index.expect_usable)
            assert await once_up(lambda: index.announce(many(KEYS))) == ["here"] * len(KEYS)
            expect_all(await once_up(lambda: index.find(KEYS)))
            assert all(command(port, "DBSIZE") > 50 for port in ports)
            await moved(index)
            await one_dead(index, processes)

    async def moved(index: Index) -> None:
        slot = key_slot(named(KEYS[0]).encode())
        ids = {port: command(port, "CLUSTER", "MYID").decode() for port in ports}
        source = port_of(index, KEYS[0])
        target = next(port for port in ports if port != source)
        command(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        command(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        expect_all(await index.find(KEYS))
        redis.Redis(port=source).migrate("127.0.0.1", target, named(KEYS[0]), 0, 5000)
        expect_all(await once_up(lambda: index.find(KEYS)))  # ASK names the server that has it
        for port in (target, source):
            command(port, "CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        await until(lambda: port_of(index, KEYS[0]) == target)
        expect_all(await once_up(lambda: index.find(KEYS)))

    async def one_dead(index: Index, processes: dict[int, "subprocess.Popen[bytes]"]) -> None:
        for port in ports:
            command(port, "CONFIG", "SET", "cluster-require-full-coverage", "no")
        dead = ports[2]
        lost = [key for key in KEYS if port_of(index, key) == dead]
        others = [key for key in KEYS if key not in lost]
        processes[dead].kill()
        processes[dead].wait()
        found = await once_up(lambda: index.find(others))
        assert len(found) == len(others) > len(lost) > 0
        for keys in (lost, KEYS):
            with pytest.raises(IndexDownError):
                await index.find(keys)
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        with server(tmp_path / str(dead), dead, *options):
            assert await once_up(lambda: index.find(lost)) == [None] * len(lost)
            assert len(await once_up(lambda: index.find(KEYS))) == len(KEYS)

    with cluster(tmp_path, ports) as processes:
        trio.run(case, processes)


def port_of(index: Index, key: str) -> int:
    found = index.servers._slots[key_slot(named(key).encode())]
    return found.address[1] if found else 0
