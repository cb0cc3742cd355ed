"""Reads of a peer's objects: what a mover does, beside the same bytes without kvfs.

    .venv/bin/python -m scripts.bench.pool --json pool.json

All is on loopback and one tmpfs. Large objects: `fetch` from nginx (digest, file, name) beside a
process with sendfile(2) and a loop of recv_into, alone and with a file. Small objects: a question
to the index and a fetch, beside a PING to the same Redis and a GET by http.client. All are measured
in turns. The first round only warms up. Needs nginx and redis-server.
"""

import contextlib
import http.client
import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import hiredis
import trio
import xxhash

from kvfs.pool.credentials import Credentials
from kvfs.pool.errors import IndexDownError
from kvfs.pool.fetching import FetchJob, fetch
from kvfs.pool.index import Index
from kvfs.pool.nginx import Nginx, Served
from kvfs.pool.peer_file import PeerFile
from kvfs.pool.place import PoolPlace
from kvfs.pool.records import Announcement, Owner
from kvfs.pool.servers import Servers
from kvfs.s3.facts import Facts
from scripts.bench.measure import Series, size_name, turns
from scripts.bench.report import Report, number

LARGE = (8 << 20, 32 << 20)
SMALL = (4 << 10, 16 << 10, 64 << 10, 128 << 10)
CHUNK = 1 << 20
NODE, LIFE = "0" * 36, "0" * 16


class Bench:
    """Objects of one size, of a peer with nginx and of one with sendfile(2) alone."""

    def __init__(self, folder: Path, nginx: int, raw: int, size: int) -> None:
        self.target = folder / "target"
        self.size = size
        data = os.urandom(size)
        self.source = folder / "objects" / "00" / f"{size:x}.1"
        self.source.write_bytes(data)
        self.source.chmod(0o644)
        peer = PeerFile(f"127.0.0.1:{nginx}", f"/ram/00/{self.source.name}")
        self.digest = xxhash.xxh3_128_digest(data)
        self.job = FetchJob(peer, str(self.target), size, self.digest, 1)
        self.http = http.client.HTTPConnection("127.0.0.1", nginx)
        self.raw = socket.create_connection(("127.0.0.1", raw))
        self.buffer = memoryview(bytearray(CHUNK))

    def close(self) -> None:
        self.http.close()
        self.raw.close()

    def fetch(self) -> None:
        fetch(self.job)

    def received(self, out: int = -1) -> None:
        self.raw.sendall(f"{self.source}\n".encode())
        left = self.size
        while left:
            count = self.raw.recv_into(self.buffer[:left])
            if out >= 0:
                os.write(out, self.buffer[:count])
            left -= count

    def received_to_file(self) -> None:
        out = os.open(self.target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self.received(out)
        os.close(out)

    def get(self) -> None:
        self.http.request("GET", self.job.source.path)
        answer = self.http.getresponse()
        while answer.readinto(self.buffer):
            pass


def rate(call: Callable[[], None], seconds: float) -> float:
    """Calls per second."""
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        call()
        count += 1
    return count / spent


def send(listening: socket.socket) -> None:
    """Send the files that are asked for, each by one line, with sendfile(2)."""
    while True:
        taken, _ = listening.accept()
        if os.fork() == 0:
            break
        taken.close()
    lines = taken.makefile("rb")
    for line in lines:
        with Path(line.decode().strip()).open("rb") as file:
            at, size = 0, os.fstat(file.fileno()).st_size
            while at < size:
                at += os.sendfile(taken.fileno(), file.fileno(), at, size - at)
    os._exit(0)


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def redis_server(folder: Path, port: int) -> Iterator[None]:
    """A Redis without a file."""
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[tuple[int, int, int]]:
    """nginx, a process with sendfile(2), and Redis, each at its port."""
    nginx, redis = free_port(), free_port()
    server = Nginx(folder / "server")
    served = Served(f"127.0.0.1:{nginx}", {"ram": folder / "objects"}, ("127.0.0.1",))
    with redis_server(folder, redis), socket.create_server(("127.0.0.1", 0)) as listening:
        raw = multiprocessing.Process(target=send, args=(listening,), daemon=True)
        raw.start()
        try:
            server.start(served)
            yield nginx, listening.getsockname()[1], redis
        finally:
            server.stop()
            raw.kill()
            raw.join()


def in_turns(ways: dict[str, Callable[[], None]], rounds: int, seconds: float) -> dict[str, Series]:
    """Measure each way in each round, after a round that warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for at in turns(len(ways), turn):
            name = list(ways)[at]
            found[name].append(rate(ways[name], seconds))
    return {name: Series(tuple(rates[1:])) for name, rates in found.items()}


def large(bench: Bench, rounds: int, seconds: float) -> list[str]:
    """Measure one size, as a row of the first table."""
    ways = {
        "raw": bench.received,
        "raw to file": bench.received_to_file,
        "http.client": bench.get,
        "fetch": bench.fetch,
    }
    found = in_turns(ways, rounds, seconds)
    rates = [number(found[name].median * bench.size / (1 << 30)) for name in ways]
    ratios = [number(found["fetch"].against(found[name])["median"]) for name in list(ways)[:3]]
    return [size_name(bench.size), *rates, *ratios]


async def small(bench: Bench, index: Index, redis: int, rounds: int, seconds: float) -> list[str]:
    """The same for a question and a read. The loop of trio runs as long as `find` needs it."""
    key = f"@0/{bench.size}"
    facts = Facts(
        size=bench.size,
        digest=bench.digest,
        mtime_ns=1,
        mode=0o644,
        uid=0,
        gid=0,
        stored_size=bench.size,
        stored_digest=bench.digest,
    )
    owner = Owner(NODE, LIFE, "ram", bench.source.name)
    await index.announce([Announcement(key, facts, owner, fresh=True)])
    plain = socket.create_connection(("127.0.0.1", redis))
    ping = hiredis.pack_command(("PING",))
    micros: dict[str, list[float]] = {"ping+get": [], "find+fetch": []}
    for turn in range(rounds + 1):
        for at in turns(2, turn):
            name = list(micros)[at]
            began, count = time.perf_counter(), 0
            while (spent := time.perf_counter() - began) < seconds:
                if name == "find+fetch":
                    with contextlib.suppress(IndexDownError):
                        await index.find([key])
                    bench.fetch()
                else:
                    plain.sendall(ping)
                    plain.recv(100)
                    bench.get()
                count += 1
            micros[name].append(count / spent)
    plain.close()
    found = {name: Series(tuple(rates[1:])) for name, rates in micros.items()}
    spent_us = [number(1e6 / found[name].median) for name in micros]
    ratio = found["find+fetch"].against(found["ping+get"])["median"]
    return [size_name(bench.size), *spent_us, number(ratio)]


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--seconds", default=0.5, show_default=True, help="of each way in each round")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(rounds: int, seconds: float, output: Path | None) -> None:
    """Measure all sizes."""
    report = Report("pool", rounds=rounds, seconds=seconds)
    with TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "objects" / "00").mkdir(parents=True)
        with servers(folder) as (nginx, raw, redis):
            rows = []
            for size in LARGE:
                with contextlib.closing(Bench(folder, nginx, raw, size)) as bench:
                    rows.append(large(bench, rounds, seconds))

            async def ask() -> list[list[str]]:
                place = PoolPlace.parse(f"redis://127.0.0.1:{redis}/bench")
                index = Index(known := Servers(place, Credentials()))
                found = []
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(known.run)
                    while True:
                        with contextlib.suppress(IndexDownError):
                            await index.expect_usable()
                            break
                        await trio.sleep(0.01)
                    for size in SMALL:
                        with contextlib.closing(Bench(folder, nginx, raw, size)) as bench:
                            found.append(await small(bench, index, redis, rounds, seconds))
                    nursery.cancel_scope.cancel()
                return found

            asked = trio.run(ask)
    report.document["large"], report.document["small"] = rows, asked
    report.table(
        "One object from a peer, GiB/s by the median round",
        ["size", "raw", "raw to file", "http.client", "fetch", "/ raw", "/ raw to file", "/ http"],
        rows,
        "fetch also compares the digest, and gives the file its name",
    )
    report.table(
        "A question and a small object, us by the median round",
        ["size", "PING + http.client", "find + fetch", "times as fast"],
        asked,
        "find + fetch has the facts, the digest and a file in the end",
    )
    report.write(output)


if __name__ == "__main__":
    main()
