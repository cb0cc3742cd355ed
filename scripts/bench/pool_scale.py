"""The cost of an object, a node and a question for the index of a pool: for docs/scale.md.

    .venv/bin/python -m scripts.bench.pool_scale --objects 10000 --objects 100000

A redis-server, and the code with which a node announces, lists, asks and renews its lease. Bytes
are differences of `used_memory`. Times are CPU time of Redis and of this process, because other
processes may use the same cores. `flat` objects are in directories of 1,000. `prefix` objects are
PARENT/KEY, and each parent has one block, as in long prompts. Needs redis-server.
"""

import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click
import redis
import trio

from kvfs.pool.credentials import Credentials
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import LONG, Index
from kvfs.pool.place import PoolPlace
from kvfs.pool.records import Announcement, Lease, Owner
from kvfs.pool.servers import Servers
from kvfs.s3.facts import Facts
from scripts.bench.pool import free_port, redis_server
from scripts.bench.report import Report, number

AT_ONCE = 256  # announcements in one pipeline, as kvfs.core.pool.announcer has
LOOKUPS = (1, 64)  # names in one question: of an open, and of .match
QUESTIONS = 20_000  # names that are looked up
NODES = 1000
SIZE = 2 << 20  # bytes of an object
LAYOUTS = ("flat", "prefix")


class Named(NamedTuple):
    """An object with its names in the listings."""

    key: str
    digest: bytes
    names: list[tuple[str, str]]


@dataclass
class Spent:
    """The cost of some calls."""

    bytes: int = 0
    redis_s: float = 0.0
    client_s: float = 0.0


def objects(layout: str, count: int) -> Iterator[Named]:
    """Yield objects. The name of a directory is listed with its first object."""
    parent = "0" * 32
    for at in range(count):
        digest = hashlib.shake_128(f"{layout}{at}".encode()).digest(16)
        name, top = digest.hex(), f"@0/{layout}/"
        folder = f"{top}{at // 1000:08d}/" if layout == "flat" else f"{top}{parent}/"
        names = [(folder, name)]
        if layout == "prefix" or at % 1000 == 0:
            names.append((top, folder.removeprefix(top)))
        yield Named(f"{folder}{name}", digest, names)
        parent = name


def node(at: int) -> str:
    """Return the id of a node."""
    return f"00000000-0000-4000-8000-{at:012x}"


def announcement(one: Named, owner: int) -> Announcement:
    """Return the announcement of an object by the node of this number."""
    facts = Facts(
        size=SIZE,
        digest=one.digest,
        mtime_ns=1_700_000_000_123_456_789,
        mode=0o644,
        uid=1000,
        gid=1000,
        key=int.from_bytes(one.digest[:8], "big") >> 1,
        parent_key=int.from_bytes(one.digest[8:], "big") >> 1,
        model="meta-llama/Llama-3.1-8B",
        stored_size=SIZE,
        stored_digest=one.digest,
    )
    file = f"{one.digest[:3].hex()}.1"
    return Announcement(one.key, facts, Owner(node(owner), "0" * 16, "nvme", file), fresh=False)


class Bench:
    """The index, and the server behind it."""

    def __init__(self, index: Index, port: int) -> None:
        self.index = index
        self.server = redis.Redis(port=port)

    def now(self) -> Spent:
        cpu: dict[str, Any] = self.server.info("cpu")
        used = cpu["used_cpu_user"] + cpu["used_cpu_sys"]
        memory = self.server.info("memory")["used_memory"]
        return Spent(memory, used, time.process_time())

    @contextlib.contextmanager
    def counted(self) -> Iterator[Spent]:
        spent, before = Spent(), self.now()
        yield spent
        after = self.now()
        spent.bytes = after.bytes - before.bytes
        spent.redis_s = after.redis_s - before.redis_s
        spent.client_s = after.client_s - before.client_s

    async def announce(self, layout: str, count: int, owner: int) -> tuple[Spent, Spent]:
        """Announce and list objects; return the cost of each of the two."""
        keys, names = Spent(), Spent()
        batch: list[Named] = []
        for at, one in enumerate(objects(layout, count), 1):
            batch.append(one)
            if len(batch) < AT_ONCE and at < count:
                continue
            wanted = [announcement(one, owner) for one in batch]
            with self.counted() as spent:
                answers = await self.index.announce(wanted)
            _add(keys, spent)
            assert set(answers) == {"here"}, answers
            with self.counted() as spent:
                await self.index.list_names(name for one in batch for name in one.names)
            _add(names, spent)
            batch = []
        return keys, names

    async def find(self, keys: Sequence[str], at_once: int) -> Spent:
        with self.counted() as spent:
            for start in range(0, len(keys), at_once):
                found = await self.index.find(keys[start : start + at_once], patience=LONG)
                assert all(found), keys[start]
        return spent

    async def renew(self) -> Spent:
        with self.counted() as spent:
            for at in range(NODES):
                lease = Lease(node(at), "0" * 16, "10.10.100.100:7373", host=f"gpu{at:04d}")
                await self.index.renew(lease, "1" * 16, time.time())
        return spent


def _add(total: Spent, more: Spent) -> None:
    total.bytes += more.bytes
    total.redis_s += more.redis_s
    total.client_s += more.client_s


async def measure(bench: Bench, counts: Sequence[int], report: Report) -> None:
    """Measure all, and add the tables."""
    rows = []
    for layout in LAYOUTS:
        for count in counts:
            bench.server.flushall()
            keys, names = await bench.announce(layout, count, 0)
            second, _ = await bench.announce(layout, count, 1)
            rows.append(
                [
                    f"{layout}, {count}",
                    *(number(one.bytes / count) for one in (keys, names, second)),
                    *(number(1e6 * one.redis_s / count) for one in (keys, names, second)),
                    number(1e6 * (keys.client_s + names.client_s) / count),
                ]
            )
    report.document["objects"] = rows
    report.table(
        "One object in the index",
        ["objects", "key, B", "names, B", "2nd owner, B", "us", "names, us", "2nd, us", "node, us"],
        rows,
        "us: CPU time of Redis; the last column is that of the node which announces",
    )
    keys_asked = [one.key for one in objects("prefix", min(QUESTIONS, counts[-1]))]
    asked = []
    for at_once in LOOKUPS:
        spent = await bench.find(keys_asked, at_once)
        per_name = [1e6 * spent.redis_s / len(keys_asked), 1e6 * spent.client_s / len(keys_asked)]
        asked.append([f"{at_once} names", *map(number, per_name)])
    spent = await bench.renew()
    asked.append(
        [
            "a lease renewed",
            number(1e6 * spent.redis_s / NODES),
            number(1e6 * spent.client_s / NODES),
        ]
    )
    report.document["questions"] = asked
    report.document["lease_bytes"] = spent.bytes / NODES
    report.table(
        "One name in a question, and one lease",
        ["question", "Redis, us", "node, us"],
        asked,
        f"a lease takes {number(spent.bytes / NODES)} bytes",
    )


@click.command(help=__doc__)
@click.option("--objects", "counts", multiple=True, default=(10_000, 100_000), show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(counts: tuple[int, ...], output: Path | None) -> None:
    """Measure all counts."""
    report = Report("pool_scale", counts=counts)
    port = free_port()

    async def run() -> None:
        place = PoolPlace.parse(f"redis://127.0.0.1:{port}/bench")
        index = Index(known := Servers(place, Credentials()))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(known.run)
            while True:
                with contextlib.suppress(IndexDownError):
                    await index.expect_usable()
                    break
                await trio.sleep(0.01)
            await measure(Bench(index, port), counts, report)
            nursery.cancel_scope.cancel()

    with TemporaryDirectory(dir="/dev/shm") as folder, redis_server(Path(folder), port):
        trio.run(run)
    report.write(output)


if __name__ == "__main__":
    main()
