"""How long does a reader wait for a large object that only the bucket has?

    .venv/bin/python -m scripts.bench.stream [--size 512M] [--rounds 5]

A real S3 server of its own on loopback, one mount, one object, read in turns while it comes
(`s3_stream=1`) and after it has come (`s3_stream=0`). To the first byte: open and the first read;
to the last byte: reading all of it. The server takes most of the CPUs, so the ratio is what counts.
"""

import os
import random
import tempfile
import time
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import click

from scripts.bench.measure import Series, size, size_name, turns
from scripts.bench.mounted import Failed, Mounted, command, cpu_seconds, kvfs
from scripts.bench.report import note, number
from scripts.s3_server import Server

BUCKET = "bench"
CALL = 1 << 20  # bytes of a read
PIECE = 64 << 20  # bytes made at once
WAYS = ("whole", "streamed")


def _spilled(mounted: Mounted, path: Path) -> None:
    """A mount that begins anew has lost what only RAM and the bucket had."""
    mounted.umount()
    mounted.mount()
    if os.getxattr(path, "user.kvfs.tier") != b"s3":
        raise Failed(f"{path} is in {os.getxattr(path, 'user.kvfs.tier').decode()}, not in s3 only")


def _read(path: Path, bytes_: int) -> tuple[float, float]:
    """Seconds to the first byte and to the last."""
    began = time.perf_counter()
    buffer = memoryview(bytearray(CALL))
    fd = os.open(path, os.O_RDONLY)
    try:
        got = os.preadv(fd, [buffer], 0)
        first = time.perf_counter() - began
        while more := os.preadv(fd, [buffer], got):
            got += more
    finally:
        os.close(fd)
    if got != bytes_:
        raise Failed(f"{path} has {got} bytes, expected {bytes_}")
    return first, time.perf_counter() - began


@click.command()
@click.option("--size", "text", default="512M", show_default=True, help="of the object")
@click.option("--rounds", default=5, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(text: str, rounds: int, seed: int) -> None:
    """Measure and print."""
    bytes_ = size(text)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "server")
        try:
            server.start()
            os.environ.update(server.credentials)
            client = boto3.session.Session().client("s3", endpoint_url=server.endpoint)
            client.create_bucket(Bucket=BUCKET)
            mountpoint = Path(folder) / "kv"
            options = (
                f"ram={3 * bytes_},nvme={folder}/nvme,nvme_size={bytes_},s3=s3://{BUCKET}/p,"
                f"s3_endpoint={server.endpoint},s3_region=us-east-1"
            )
            with kvfs(mountpoint, options) as mounted:
                _measure(mounted, bytes_, rounds, seed)
        finally:
            server.wipe()


def _measure(mounted: Mounted, bytes_: int, rounds: int, seed: int) -> None:
    space = mounted.path / "space"
    space.mkdir()
    os.setxattr(space, "user.kvfs.media", b"ram+s3")
    path = space / "object"
    dice = random.Random(seed)  # noqa: S311 (reproducible bytes)
    with path.open("wb") as file:
        for start in range(0, bytes_, PIECE):
            file.write(dice.randbytes(min(PIECE, bytes_ - start)))
    command("flush", str(mounted.path), "--wait")
    first: dict[str, list[float]] = {way: [] for way in WAYS}
    last: dict[str, list[float]] = {way: [] for way in WAYS}
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(rounds):
        for turn in turns(len(WAYS), round_):
            way = WAYS[turn]
            _spilled(mounted, path)
            command("set", str(mounted.path), f"s3_stream={int(way == 'streamed')}")
            pid = mounted.pid
            before = cpu_seconds(pid)
            to_first, to_last = _read(path, bytes_)
            spent[way].append(cpu_seconds(pid) - before)
            first[way].append(to_first)
            last[way].append(to_last)
            note(f"round {round_ + 1}, {way}: {to_first:.3f} s, {to_last:.3f} s")
    for what, found in (("first byte", first), ("last byte", last), ("daemon's CPU", spent)):
        series = {way: Series(tuple(found[way])) for way in WAYS}
        print(
            f"{size_name(bytes_)}, {what}: "
            + ", ".join(f"{way} {number(series[way].median)} s" for way in WAYS)
            + f", streamed/whole {series['streamed'].median / series['whole'].median:.3f}"
        )


if __name__ == "__main__":
    main()
