"""The memory of a pool's index: bytes of a real redis-server for each object.

    .venv/bin/python -m scripts.bench.pool_index [--objects N ...] [--owners N]

It announces objects as nodes do, with names as LMCache makes them, and prints how much
`used_memory` of the server has grown: with the entries alone, and with the listings as well. Needs
redis-server.
"""

import subprocess
import uuid
from collections.abc import Sequence
from tempfile import TemporaryDirectory

import click
import redis
import trio
import xxhash

from kvfs.pool.credentials import Credentials
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import Announcement, Index, Owner
from kvfs.pool.place import PoolPlace
from kvfs.pool.servers import Servers
from kvfs.s3.facts import Facts
from scripts.bench.pool import free_port

AT_ONCE = 256
FOLDER, MODEL = "lmcache@1/", "meta-llama/Llama-3.1-8B-Instruct"
LIFE = "0" * 16
WAIT_S = 30.0


def announcements(node: str, numbers: Sequence[int]) -> list[Announcement]:
    """Objects of a node: the same at each node."""
    found = []
    for number in numbers:
        digest = xxhash.xxh3_128(number.to_bytes(8, "little"))
        name = f"{MODEL.replace('/', '%2F')}@1@0@{digest.hexdigest()}@bfloat16.pt"
        facts = Facts(
            size=1 << 20,
            digest=digest.digest(),
            mtime_ns=1_790_000_000_123_456_789,
            mode=0o644,
            uid=1000,
            gid=1000,
            key=digest.intdigest() >> 64,
            parent_key=digest.intdigest() % 2**64,
            model=MODEL,
            stored_size=1 << 20,
            stored_digest=digest.digest(),
        )
        owner = Owner(node, LIFE, "ram", f"{(1 << 40) + number:x}.1")
        found.append(Announcement(f"{FOLDER}{name}", facts, owner, fresh=True))
    return found


async def announce(index: Index, server: "redis.Redis", objects: int, owners: int) -> None:
    """Announce objects of one node after the other, and print a line for each."""
    server.flushall()
    empty = server.info("memory")["used_memory"]
    listings = 0
    for number in range(1, owners + 1):
        node = str(uuid.UUID(int=number << 64))
        for first in range(0, objects, AT_ONCE):
            some = announcements(node, range(first, min(first + AT_ONCE, objects)))
            await index.announce(some)
            if number == 1:
                await index.list_names((FOLDER, one.key.removeprefix(FOLDER)) for one in some)
        used = server.info("memory")["used_memory"] - empty
        listings = listings or int(server.memory_usage(f"{index.pool}d:{FOLDER}", samples=0) or 0)
        click.echo(
            f"{objects} objects, nodes that have each: {number}; bytes for each object: "
            f"{(used - listings) / objects:.0f}, with its name in a listing {used / objects:.0f}"
        )


async def measure(port: int, server: "redis.Redis", objects: Sequence[int], owners: int) -> None:
    """Announce each number of objects in a new index."""
    servers = Servers(PoolPlace.parse(f"redis://127.0.0.1:{port}/kv"), Credentials())
    index = Index(servers)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(servers.run)
        with trio.fail_after(WAIT_S):
            while True:
                try:
                    await index.expect_usable()
                    break
                except IndexDownError:
                    await trio.sleep(0.02)
        for count in objects:
            await announce(index, server, count, owners)
        nursery.cancel_scope.cancel()


@click.command(help=__doc__)
@click.option("--objects", multiple=True, default=(10_000, 50_000), show_default=True, type=int)
@click.option("--owners", default=3, show_default=True, type=click.IntRange(min=1))
def main(objects: tuple[int, ...], owners: int) -> None:
    """Start a redis-server, and measure."""
    port = free_port()
    with TemporaryDirectory() as folder:
        options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder)
        process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        try:
            trio.run(measure, port, redis.Redis(port=port), objects, owners)
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
