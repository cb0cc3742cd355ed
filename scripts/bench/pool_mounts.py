"""Two mounts of one pool: cold opens and reads of the other's objects, and their announcement.

    .venv/bin/python -m scripts.bench.pool_mounts --json pool.json
    .venv/bin/python -m scripts.bench.pool_mounts --bucket

All is on loopback; both mounts have RAM only. Beside each kind is its limit in the same run: one
PING of the index and one GET by http.client for an open, sendfile(2) to a loop of recv_into for a
read, a match of blocks that are here, opens of a node that serves nobody. Each object is opened
once. With --bucket, cold reads from another node are compared with those from a real Ceph. Needs
nginx and redis-server, and for --bucket the packages of Ceph.
"""

import contextlib
import http.client
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import boto3  # type: ignore[import-untyped]
import click
import redis

from kvfs import matching, prefix
from kvfs.control import request
from scripts.bench.measure import percentile, size_name
from scripts.bench.mounted import Mounted
from scripts.bench.pool import Bench, free_port, redis_server, servers
from scripts.bench.report import Report, number
from scripts.bench.s3 import bucket_options, flush
from scripts.s3_server import Server

SMALL = (4 << 10, 32 << 10, 128 << 10)
LARGE = (8 << 20, 32 << 20)
BLOCKS, BLOCK = 200, 4096
ROOT = prefix.root_key("bench")
CLOSES = 50
RATE, TURNS, TURN = 1e9, 4, 4.0  # bytes/s of a client; turns, and s of each
WARM = 4  # reads of each large size before those that count: they touch the memory first
CHUNK = 4 << 20
PACE = 256 << 10  # bytes between two pauses of that client


@contextlib.contextmanager
def nodes(folder: Path, index: int) -> Iterator[tuple[Mounted, Mounted]]:
    """Two nodes of a pool."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in "ab":
            path = folder / name
            path.mkdir()
            where = f"redis://127.0.0.1:{index}/bench"
            options = f"ram=4G,pool={where},pool_address=127.0.0.1:{free_port()},log={path}.log"
            one = Mounted(path, options)
            one.mount()
            stack.callback(one.umount, now=True)
            made.append(one)
        yield made[0], made[1]


def announced(node: Mounted) -> int:
    """Objects of a node that the index has."""
    found: int = request(node.path, "status")["pool"]["objects"]
    return found


def write(node: Mounted, names: list[str], data: bytes) -> None:
    """Write files, and wait until all are announced."""
    before = announced(node)
    for name in names:
        (node.path / name).write_bytes(data)
    while announced(node) < before + len(names):
        time.sleep(0.01)


def timed(call: Callable[[], None]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def read(path: Path, buffer: memoryview) -> None:
    """Read a file to its end."""
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def forget(node: Mounted, name: str) -> None:
    """Drop a node's copy, so that the next one gets its memory.

    A virtual machine may give free memory back to its host, and pay 10 us for the first touch of
    each 4 KiB again. A full RAM tier never does, and the limits use the same memory each time.
    """
    ino, tiers = (node.path / name).stat().st_ino, request(node.path, "status")["tiers"].values()
    of_it = f"objects/{ino % 256:02x}/{ino:x}.*"
    files = [file for tier in tiers for file in Path(tier["path"]).glob(of_it)]
    request(node.path, "evict", inos=[ino], drop=True)
    while any(file.exists() for file in files):  # a thread removes them
        time.sleep(0.002)


def beside_bucket(folder: Path, index: int, count: int) -> list[list[str]]:
    """Cold reads of one object from another node and from a bucket (a real Ceph), in turns."""
    server, rows = Server(folder / "ceph"), []
    buffer = memoryview(bytearray(CHUNK))
    with contextlib.ExitStack() as stack:
        stack.callback(server.wipe)
        server.start()
        os.environ.update(server.credentials)
        place = server.place("bench")
        boto3.client("s3", endpoint_url=server.endpoint).create_bucket(Bucket=place.bucket)
        below, found = f"ram=2G,{bucket_options(place)},s3_delay=0", []
        for name in "abc":
            path = folder / f"with-{name}"
            path.mkdir()
            there = f"pool=redis://127.0.0.1:{index}/both,pool_address=127.0.0.1:{free_port()}"
            options = below if name == "c" else f"{below},{there}"
            found.append(Mounted(path, f"{options},log={path}.log"))
            found[-1].mount()
            stack.callback(found[-1].umount, now=True)
        a, b, c = found
        for size in LARGE:
            names = [f"{size}-{number_}" for number_ in range(WARM + count)]
            write(a, names, os.urandom(size))
            flush(a)
            spent: dict[str, list[float]] = {"pool": [], "bucket": []}
            for name in names:
                for source, node in (("pool", b), ("bucket", c)):
                    spent[source].append(
                        timed(lambda node=node, name=name: read(node.path / name, buffer))  # type: ignore[misc]
                    )
                    forget(node, name)
            rates = [size / percentile(spent[one][WARM:], 0.5) / (1 << 30) for one in spent]
            rows.append([size_name(size), *map(number, (*rates, rates[0] / rates[1]))])
    return rows


def opened(path: Path) -> None:
    """Open a file, and close it."""
    os.close(os.open(path, os.O_RDONLY))


def small(a: Mounted, b: Mounted, bench: Bench, index: redis.Redis, count: int) -> list[str]:
    """Cold opens of one size, in turns with PING and GET."""
    names = [f"{bench.size}-{number_}" for number_ in range(count)]
    write(a, names, os.urandom(bench.size))

    def limit() -> None:
        index.ping()
        bench.get()

    limits, opens = [], []
    for name in names:
        limits.append(timed(limit))
        with contextlib.suppress(FileNotFoundError):  # a miss: the index was too slow
            opens.append(timed(lambda name=name: opened(b.path / name)))  # type: ignore[misc]
    shown = [percentile(limits, 0.5), percentile(opens, 0.5), percentile(opens, 0.99)]
    return [
        size_name(bench.size),
        *(number(seconds * 1e6) for seconds in shown),
        number(shown[1] / shown[0]),
        str(count - len(opens)),
    ]


def large(a: Mounted, b: Mounted, bench: Bench, count: int) -> list[str]:
    """Cold reads of one size, in turns with sendfile(2) and recv_into."""
    names = [f"{bench.size}-{number_}" for number_ in range(WARM + count)]
    write(a, names, os.urandom(bench.size))
    buffer = memoryview(bytearray(CHUNK))
    limits, to_file, reads = [], [], []
    for name in names[:WARM]:
        with contextlib.suppress(FileNotFoundError):
            read(b.path / name, buffer)
            forget(b, name)
    for name in names[WARM:]:
        limits.append(timed(bench.received))
        to_file.append(timed(bench.received_to_file))
        with contextlib.suppress(FileNotFoundError):
            reads.append(timed(lambda name=name: read(b.path / name, buffer)))  # type: ignore[misc]
            forget(b, name)
    rates = [bench.size / percentile(one, 0.5) / (1 << 30) for one in (limits, to_file, reads)]
    ratios = [rates[2] / rates[0], rates[2] / rates[1]]
    return [size_name(bench.size), *map(number, (*rates, *ratios))]


def closes(a: Mounted, b: Mounted) -> list[str]:
    """The time from a close of 8 MiB to the first open at the other node that finds it."""
    data, spent = os.urandom(8 << 20), []
    for number_ in range(CLOSES):
        (a.path / f"close-{number_}").write_bytes(data)
        began = time.perf_counter()
        while True:
            try:
                opened(b.path / f"close-{number_}")
                break
            except FileNotFoundError:
                time.sleep(0.002)
        spent.append(time.perf_counter() - began)
    return [number(percentile(spent, share) * 1e3) for share in (0.5, 0.99)]


def matches(a: Mounted, b: Mounted) -> list[str]:
    """A match of a prompt that is here, and of one that only the other node has."""
    keys = prefix.block_keys(ROOT, list(range(BLOCKS)), 1)
    for node in (a, b):
        request(node.path, "ns_create", name="m", settings={"prefix": "on"}, uid=0, gid=0)
        (node.path / "m" / ROOT.hex()).mkdir()
    before = announced(a)
    for above, key in pairwise([ROOT, *keys]):
        path = a.path / "m" / prefix.path(above, key)
        unfinished = path.with_name(f"{path.name}.0x.tmp")
        unfinished.write_bytes(key * (BLOCK // len(key)))
        unfinished.rename(path)
    while announced(a) < before + BLOCKS:
        time.sleep(0.01)
    found = []
    for node in (a, b):
        spent = []
        with open(node.path / "m" / ".match", "r+b", buffering=0) as file:
            for _ in range(50):
                began = time.perf_counter()
                os.pwrite(file.fileno(), matching.pack_request(ROOT, keys), 0)
                answer = matching.unpack_answer(os.pread(file.fileno(), 1 << 16, 0))
                if answer.blocks == BLOCKS:  # else the index was too slow
                    spent.append(time.perf_counter() - began)
        found.append(percentile(spent, 0.5) * 1e3)
    return [number(one) for one in (*found, found[1] - found[0])]


def pull(address: str, path: str, rate: float, told: Connection) -> None:
    """Read a file of a node again and again, at most `rate` bytes/s, until `told` closes.

    As the client of another machine, it takes no processor from the node, and the network lets its
    bytes pass at `rate`, not all at once.
    """
    os.nice(19)
    host, _, port = address.rpartition(":")
    server = http.client.HTTPConnection(host, int(port))
    buffer, done, began = memoryview(bytearray(PACE)), 0, time.perf_counter()
    while not told.poll(0):
        server.request("GET", path)
        answer = server.getresponse()
        while got := answer.readinto(buffer):
            done += got
            time.sleep(max(0.0, began + done / rate - time.perf_counter()))
    told.send(done / (time.perf_counter() - began))


def served(a: Mounted) -> list[str]:
    """Opens of resident objects of a node, alone and beside a client that reads RATE from it."""
    write(a, ["served"], os.urandom(LARGE[-1]))
    write(a, ["resident"], os.urandom(SMALL[0]))
    found = request(a.path, "status")
    ram, ino = Path(found["tiers"]["ram"]["path"]), (a.path / "served").stat().st_ino
    (file,) = ram.glob(f"objects/{ino % 256:02x}/{ino:x}.*")
    path = f"/ram/{file.relative_to(ram / 'objects')}"
    spent: dict[bool, list[float]] = {False: [], True: []}
    rates: list[float] = []
    for beside in [False, True] * TURNS:
        with contextlib.ExitStack() as stack:
            if beside:
                here, there = Pipe()
                address = found["pool"]["address"]
                reader = Process(target=pull, args=(address, path, RATE, there), daemon=True)
                reader.start()
                stack.callback(reader.join)
                stack.callback(lambda here=here: rates.append(here.recv()))  # type: ignore[misc]
                stack.callback(here.send, None)
                time.sleep(TURN / 4)
            until = time.perf_counter() + TURN
            while time.perf_counter() < until:
                spent[beside].append(timed(lambda: opened(a.path / "resident")))
                time.sleep(0.001)
    p99 = [percentile(spent[beside], 0.99) * 1e6 for beside in (False, True)]
    return [number(one) for one in (*p99, p99[1] / p99[0], percentile(rates, 0.5) / 1e9)]


@click.command(help=__doc__)
@click.option("--count", default=200, show_default=True, help="small objects of each size")
@click.option("--bucket", is_flag=True, help="Compare with a bucket only.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(*, count: int, bucket: bool, output: Path | None) -> None:
    """Measure all."""
    report = Report("pool_mounts", count=count)
    if bucket:
        with TemporaryDirectory(dir="/var/tmp") as name:
            folder, port = Path(name), free_port()
            folder.chmod(0o755)
            with redis_server(folder, port):
                rows = beside_bucket(folder, port, max(4, count // 10))
        report.document.update(bucket=rows)
        report.table(
            "Cold reads, GiB/s by the median", ["size", "node", "bucket", "times the bucket"], rows
        )
        report.write(output)
        return
    with TemporaryDirectory(dir="/dev/shm") as name, TemporaryDirectory() as mounts:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "objects" / "00").mkdir(parents=True)
        with servers(folder) as (nginx, raw, port), nodes(Path(mounts), port) as (a, b):
            index = redis.Redis(port=port)

            def of(size: int) -> "contextlib.closing[Bench]":
                return contextlib.closing(Bench(folder, nginx, raw, size))

            opens, reads = [], []
            for size in SMALL:
                with of(size) as bench:
                    opens.append(small(a, b, bench, index, count))
            for size in LARGE:
                with of(size) as bench:
                    reads.append(large(a, b, bench, max(4, count // 10)))
            late, matched, beside = closes(a, b), matches(a, b), served(a)
    report.document.update(opens=opens, reads=reads, closes=late, matches=matched, served=beside)
    report.table(
        "Cold opens of another node's objects, us",
        ["size", "PING + GET p50", "open p50", "open p99", "times the limit", "misses"],
        opens,
    )
    report.table(
        "Cold reads of another node's objects, GiB/s by the median",
        ["size", "raw", "raw to file", "open and read", "/ raw", "/ raw to file"],
        reads,
    )
    report.table("From close to open at the other node, ms", ["p50", "p99"], [late])
    report.table(
        "A match of 200 blocks, ms", ["here", "at the other node", "difference"], [matched]
    )
    report.table(
        "Opens of resident objects of a node that serves others, us",
        ["p99 alone", "p99 beside", "ratio", "GB/s served"],
        [beside],
    )
    report.write(output)


if __name__ == "__main__":
    main()
