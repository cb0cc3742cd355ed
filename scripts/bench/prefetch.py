"""How fast is a prefix read that only the bucket has, with prefetch and without?

    .venv/bin/python -m scripts.bench.prefetch [--blocks 64] [--size 1M] [--rounds 5]

A real S3 server of its own on loopback and a mount with tiers that have room. The blocks are opened
one after the other, each is read whole, as a connector does; before each time they leave the tiers.
Both take turns within each round. The server shares the CPUs, so the ratio is what counts. Not for
many readers.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import click

from scripts.bench.measure import size
from scripts.bench.mounted import Failed, Mounted
from scripts.s3_server import Server

BUCKET = "bench"
PATIENCE = 120.0  # s


class Prefix:
    """Blocks with names as LMCache's `fs` makes them, in a namespace of a mount."""

    def __init__(self, kv: Mounted, blocks: int, bytes_each: int, seed: int) -> None:
        self.kv = kv
        self.space = kv.path / "prefix"
        self.space.mkdir()
        rng = random.Random(seed)  # noqa: S311 (reproducible bytes)
        self.bytes_each = bytes_each
        self.paths = [
            self.space / f"m@1@0@{rng.getrandbits(64):016x}@bfloat16.data" for _ in range(blocks)
        ]
        for path in self.paths:
            path.write_bytes(rng.randbytes(bytes_each))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise Failed(f"not within {PATIENCE:.0f} s: {what}")
            time.sleep(0.05)

    def spill(self) -> None:
        """Nothing but the bucket has them."""
        self._until(lambda: not self.bucket()["dirty_objects"], "all is uploaded")
        os.setxattr(self.space, "user.kvfs.quota_hard", b"4K")
        self._until(
            lambda: all(os.getxattr(path, "user.kvfs.tier") == b"s3" for path in self.paths),
            "all has left the tiers",
        )
        os.setxattr(self.space, "user.kvfs.quota_hard", b"0")
        self.kv.settle()

    def bucket(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kv.status()["tiers"]["s3"]
        return found

    def read(self, *, ahead: bool) -> tuple[float, int]:
        """Seconds for all of it, and blocks that were fetched ahead and used."""
        os.setxattr(self.space, "user.kvfs.prefetch", b"on" if ahead else b"off")
        before = self.bucket()["prefetch_used"]
        buffer = bytearray(self.bytes_each)
        start = time.perf_counter()
        for path in self.paths:
            with path.open("rb", buffering=0) as file:
                if file.readinto(buffer) != self.bytes_each:
                    raise Failed(f"{path} is shorter than it was")
        return time.perf_counter() - start, self.bucket()["prefetch_used"] - before


@click.command()
@click.option("--blocks", default=64, show_default=True)
@click.option("--size", "size_", default="1M", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(*, blocks: int, size_: str, rounds: int, seed: int) -> None:
    """Print the seconds of both, and their ratio in each round."""
    each = size(size_)
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-") as folder:
        server = Server(Path(folder) / "server")
        try:
            server.start()
            os.environ.update(server.credentials)
            client = boto3.client("s3", endpoint_url=server.endpoint)
            client.create_bucket(Bucket=BUCKET)
            found = _measured(Path(folder), server, blocks, each, rounds, seed)
        finally:
            server.wipe()
    ratios = [off / on for on, off, _ in found]
    rows = [
        ("with prefetch, s", [on for on, _, _ in found]),
        ("without, s", [off for _, off, _ in found]),
        ("without / with", ratios),
    ]
    click.echo(f"{blocks} blocks of {size_}, seed {seed}, {rounds} rounds")
    for name, values in rows:
        click.echo(
            f"{name}: median {statistics.median(values):.3f}, "
            f"{min(values):.3f} to {max(values):.3f}"
        )
    click.echo(f"fetched ahead and used: {[used for *_, used in found]}")


def _measured(
    folder: Path, server: Server, blocks: int, each: int, rounds: int, seed: int
) -> list[tuple[float, float, int]]:
    """Of each round the seconds with and without, and what was used; round 0 warms up."""
    path = folder / "kv"
    path.mkdir()
    room = 4 * blocks * each
    kv = Mounted(
        path,
        f"ram={room},nvme={folder}/nvme,nvme_size={room},s3=s3://{BUCKET}/p,"
        f"s3_endpoint={server.endpoint},s3_region=us-east-1,s3_delay=0.1",
    )
    kv.mount()
    found = []
    try:
        prefix = Prefix(kv, blocks, each, seed)
        for round_ in range(rounds + 1):
            figures = {}
            for ahead in (True, False) if round_ % 2 else (False, True):
                prefix.spill()
                figures[ahead] = prefix.read(ahead=ahead)
            if round_:
                found.append((figures[True][0], figures[False][0], figures[True][1]))
    finally:
        kv.umount(now=True)
    return found


if __name__ == "__main__":
    main()
