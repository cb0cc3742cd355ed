"""Two real nodes: programs read a large object while it comes from the other node."""

import errno
import json
import os
import random
import re
import socket
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from kvfs.pool.index import LEASE_S
from kvfs.s3.chunks import NAME
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.pool.servers import free_port, let_nginx_pass, peer, server

MIB = 1 << 20
CHUNK = 8 * MIB
SEED = 7
LARGE = random.Random(SEED).randbytes(9 * CHUNK + 12345)
LAST = 9 * CHUNK
RAM = "ram=256M"
NVME = "ram=64M,nvme={tmp}/nvme,nvme_size=256M"
KEY = "kvfs:kv:o:@0/large"

_FROM = re.compile(rb"\r\nRange: bytes=(\d+)-")


class Gate:
    """A peer whose bytes come from a real nginx, with delays.

    Bytes up to `most` of the file pass at once. A byte behind them passes each tenth of a second,
    because kvfs gives up a peer that sends nothing for 2 s. A connection ends with an error when
    `breaks` says so of the position in the file.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self.most = len(LARGE)
        self.breaks: Callable[[int], bool] = lambda _at: False
        self.asked: list[int] = []  # where each answer begins
        self._changed = threading.Condition()

    def let(self, most: int = len(LARGE)) -> None:
        """Let bytes pass up to this position."""
        with self._changed:
            self.most = most
            self._changed.notify_all()

    def serve(self, client: socket.socket) -> None:
        """Serve one connection."""
        with socket.create_connection(self._server) as nginx:
            while request := client.recv(1 << 16):
                began = _FROM.search(request)
                at = int(began[1]) if began else 0
                self.asked.append(at)
                nginx.sendall(request)
                header = b""
                while not header.endswith(b"\r\n\r\n"):
                    header += nginx.recv(1)
                client.sendall(header)
                self._pass(nginx, client, at)

    def _pass(self, nginx: socket.socket, client: socket.socket, at: int) -> None:
        while at < len(LARGE):
            with self._changed:
                if self.most <= at:
                    self._changed.wait(0.1)
                count = min(max(self.most - at, 1), 1 << 16)
            data = nginx.recv(count)
            client.sendall(data)
            at += len(data)
            if self.breaks(at):
                raise ConnectionError


@dataclass
class World:
    """Two nodes: only `a` has the object, and `b` gets it through the gate."""

    a: Mounted
    b: Mounted
    gate: Gate
    index: redis.Redis
    path: Path  # at b

    @property
    def chunks(self) -> str:
        """The digests of the chunks, as the index has them; "" for none."""
        found: bytes | None = self.index.hget(KEY, NAME)  # type: ignore[assignment]
        return (found or b"").decode()


Made = Callable[..., World]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[redis.Redis]:
    port = free_port()
    with server(tmp_path / "redis", port):
        found = redis.Redis(port=port)
        yield found
        found.close()


@pytest.fixture
def gates() -> Iterator[tuple[list[Gate], int]]:
    """The gate, once there is one, and its port."""
    found: list[Gate] = []

    def served(client: socket.socket) -> None:
        found[0].serve(client)

    with peer(served) as port:
        yield found, port
        for one in found:
            one.let()


@pytest.fixture
def made(tmp_path: Path, index: redis.Redis, gates: tuple[list[Gate], int], mount: Mount) -> Made:
    """`made(options)` makes the world."""
    let_nginx_pass(tmp_path)
    port = index.connection_pool.connection_kwargs["port"]
    pool = f"pool=redis://127.0.0.1:{port}/kv,pool_stream=16M"

    def make(options: str = RAM, owners: int = 1) -> World:
        a, b = (
            mount(f"{one},{pool},pool_address=127.0.0.1:{free_port()}", name)
            for one, name in ((RAM, "a"), (options, "b"))
        )
        (a.path / "large").write_bytes(LARGE)
        wait_for(lambda: index.hexists(KEY, NAME), "it is announced with its chunks")
        status = a.status()["pool"]
        gates[0].append(Gate(status["address"]))
        own = f"@{status['node']}"
        told = index.hget(KEY, own)
        lease = json.loads(index.get(f"kvfs:kv:n:{status['node']}") or b"")
        for number in range(owners):
            node = str(uuid.UUID(int=number))
            lease["address"] = f"127.0.0.1:{gates[1]}"
            index.set(f"kvfs:kv:n:{node}", json.dumps(lease))
            index.hset(KEY, f"@{node}", told)
        index.hdel(KEY, own)
        return World(a, b, gates[0][0], index, b.path / "large")

    return make


def pool_of(kv: Mounted) -> dict[str, int]:
    found = kv.status()["pool"]
    return {"streaming": found["streaming"], **found["counters"]}


def whole(fd: int) -> bytes:
    found = bytearray()
    while piece := os.pread(fd, MIB, len(found)):
        found += piece
    return bytes(found)


def ended(kv: Mounted) -> None:
    wait_for(lambda: not pool_of(kv)["streaming"], "all of it is here")


@pytest.mark.parametrize("options", [RAM, NVME, f"{RAM},passthrough=off"])
def test_object_is_read_while_it_comes(made: Made, options: str) -> None:
    world = made(options)
    world.gate.let(7 * CHUNK + 1)
    with world.path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 3 * MIB) == LARGE[3 * MIB : 4 * MIB]
        found = pool_of(world.b)
        assert (found["streaming"], found["fetched"]) == (1, 0)
        world.gate.let()
        assert whole(file.fileno()) == LARGE
        ended(world.b)
        assert world.path.read_bytes() == LARGE, "of one that is open still"
        assert os.pread(file.fileno(), 100, LAST - 50) == LARGE[LAST - 50 : LAST + 50]
        assert os.pread(file.fileno(), 100, len(LARGE)) == b""
    found = pool_of(world.b)
    assert (found["fetched"], found["fetched_bytes"]) == (1, len(LARGE))
    assert world.b.status()["pool"]["hits"] == 1
    assert world.gate.asked == [0]
    wait_for(lambda: not world.b.status()["open_handles"], "the next open is one of its own")
    before = world.b.counter("opens_passthrough")
    assert world.path.read_bytes() == LARGE
    after = world.b.counter("opens_passthrough")
    assert after - before == world.b.status()["passthrough"]["on"]
    world.b.check_gauges()
    world.b.check_accounts()
    world.b.idle()


def test_chunk_of_a_waiting_reader_comes_next(made: Made) -> None:
    world = made()
    world.gate.let(6 * CHUNK + 1)
    with world.path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 100, 0) == LARGE[:100]
        found: list[bytes] = []
        reader = threading.Thread(
            target=lambda: found.append(os.pread(file.fileno(), MIB, len(LARGE) - 999))
        )
        reader.start()
        wait_for(lambda: world.b.counter("opens_served") == 1, "it was opened")
        world.gate.let()
        reader.join()
        assert found == [LARGE[-999:]]
        assert whole(file.fileno()) == LARGE
    assert world.gate.asked[0] == 0


def test_writer_waits_for_all_of_it(made: Made) -> None:
    world = made()
    with world.path.open("r+b", buffering=0) as file:
        assert os.pread(file.fileno(), 999, LAST) == LARGE[LAST : LAST + 999]
        os.pwrite(file.fileno(), b"new", 0)
    assert world.path.read_bytes() == b"new" + LARGE[3:]
    assert pool_of(world.b)["fetched"] == 1


@pytest.mark.parametrize("node", ["a", "b"])
def test_object_that_is_unlinked_meanwhile_is_read_to_its_end(made: Made, node: str) -> None:
    world = made()
    world.gate.let(7 * CHUNK + 1)
    with world.path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 100, 0) == LARGE[:100]
        ((world.a if node == "a" else world.b).path / "large").unlink()
        wait_for(lambda: not world.index.hexists(KEY, NAME), "all nodes have lost the name")
        world.gate.let()
        assert os.pread(file.fileno(), 100, LAST) == LARGE[LAST : LAST + 100]
        assert whole(file.fileno()) == LARGE
        ended(world.b)
    wait_for(lambda: not world.path.exists(), "it is gone")
    world.b.idle()
    world.b.check_gauges()
    world.b.check_accounts()


def expect_right(fd: int) -> None:
    for at in range(0, len(LARGE), MIB):
        assert os.pread(fd, MIB, at) == LARGE[at : at + MIB]


@pytest.mark.parametrize("node", ["a", "b"])
def test_unlinked_object_whose_reader_loses_its_daemon_gives_no_other_bytes(
    made: Made, node: str
) -> None:
    world = made()
    world.gate.let(7 * CHUNK + 1)
    with world.path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 0) == LARGE[:MIB]
        ((world.a if node == "a" else world.b).path / "large").unlink()
        wait_for(lambda: not world.index.hexists(KEY, NAME), "all nodes have lost the name")
        world.b.expect_log("a read gets EIO")
        world.b.kill_daemon()
        world.gate.let()
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            expect_right(file.fileno())
    world.b.idle()
    world.b.check_gauges()
    world.b.check_accounts()


def breaks_once(gate: Gate) -> list[int]:
    """Let one connection end in the third chunk. Returns where, once it has."""
    broken: list[int] = []

    def breaks(at: int) -> bool:
        if at < 2 * CHUNK + MIB or broken:
            return False
        broken.append(at)
        return True

    gate.breaks = breaks
    return broken


def test_next_owner_gives_the_rest(made: Made) -> None:
    world = made(owners=2)
    broken = breaks_once(world.gate)
    with world.path.open("rb", buffering=0) as file:
        assert whole(file.fileno()) == LARGE
        ended(world.b)
    assert len(broken) == 1
    assert world.gate.asked[:2] == [0, 0]
    assert (pool_of(world.b)["fetched"], pool_of(world.b)["failed"]) == (1, 1)


def test_reads_fail_if_no_owner_gives_the_rest(made: Made) -> None:
    world = made()
    world.gate.breaks = lambda at: at >= 2 * CHUNK + MIB
    world.b.allow_log("a read gets EIO")
    with world.path.open("rb", buffering=0) as file:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            whole(file.fileno())
        ended(world.b)
        world.gate.breaks = lambda _at: False
        wait_for(lambda: same(file.fileno()), "the descriptor reads on", seconds=60)
    assert world.b.counter("opens_served") == 1
    assert read(world.path) == LARGE


def same(fd: int) -> bool:
    with suppress(OSError):
        return whole(fd) == LARGE
    return False


def test_node_that_is_away_for_a_moment_costs_no_error(made: Made) -> None:
    world = made()
    broken = breaks_once(world.gate)
    with world.path.open("rb", buffering=0) as file:
        assert whole(file.fileno()) == LARGE
    assert len(broken) == 1


def read(path: Path) -> bytes | None:
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def test_wrong_chunks_in_the_index_give_no_byte(made: Made) -> None:
    world = made()
    world.b.allow_log("a read gets EIO")
    size, _, digests = world.chunks.partition(" ")
    world.index.hset(KEY, NAME, f"{size} AAAAAAAA{digests[8:]}")
    with world.path.open("rb", buffering=0) as file:
        wait_for(lambda: same(file.fileno()), "it comes as a whole", seconds=60)
    assert pool_of(world.b)["fetched"] == 1


@pytest.mark.parametrize("options", [RAM, NVME])
def test_streamed_reads_continue_after_a_takeover(made: Made, options: str) -> None:
    world = made(options)
    world.gate.let(7 * CHUNK + 1)
    with world.path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 0) == LARGE[:MIB]
        world.b.kill_daemon()
        assert os.pread(file.fileno(), MIB, MIB) == LARGE[MIB : 2 * MIB]
        world.gate.let()
        assert whole(file.fileno()) == LARGE
        ended(world.b)
        world.b.kill_daemon()
        assert whole(file.fileno()) == LARGE
    assert world.path.read_bytes() == LARGE
    world.b.check_gauges()
    world.b.check_accounts()


def test_index_that_has_lost_its_data_gets_the_chunks_again(made: Made) -> None:
    world = made()
    chunks = world.chunks
    assert read(world.path) == LARGE
    node = world.b.status()["pool"]["node"]
    wait_for(lambda: world.index.hexists(KEY, f"@{node}"), "the copy is announced")
    world.a.umount("--now")
    world.index.flushall()
    wait_for(lambda: world.chunks == chunks, "b knows them", seconds=3 * LEASE_S)


def test_objects_below_the_bound_come_as_a_whole(made: Made) -> None:
    world = made()
    subprocess.run([*KVFS, "set", world.b.path, "pool_stream=0"], check=True)
    assert read(world.path) == LARGE
    assert pool_of(world.b)["fetched"] == 1
    assert world.b.counter("opens_served") == 0
