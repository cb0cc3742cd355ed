"""How fast are the transfers alone, of all that `scripts.bench.s3` measures?

    .venv/bin/python -m scripts.bench.s3transfers [--size 64M ...] [--at-once 8 ...] [--json FILE]

A real S3 server of its own on loopback, files in /dev/shm, one process for all clients; each moves
the same files in turns. The server takes most of the CPUs, so the ratios are what counts. Uploads
are held against who lets the server check what arrives, as all of boto3 does over plain HTTP but
the CRT, whose checksums this server refuses.
"""

import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import click

from kvfs.s3.boto import BotoStore
from kvfs.s3.keys import Keys
from kvfs.s3.place import BucketPlace
from kvfs.s3.probe import probe
from kvfs.s3.transfer import Terms
from scripts.bench.measure import Bar, Series, size, size_name, turns
from scripts.bench.mounted import Failed, cpu_seconds
from scripts.bench.report import Report, note, number
from scripts.bench.s3clients import Client, Kvfs, classic, crt
from scripts.s3_server import Server

BUCKET = "bench"
CONNECTIONS = 8  # of kvfs, over all objects
BYTES = 256 << 20  # moved by each client in a round, about
MOST = 64  # objects in a round
BARS = {
    "up": Bar("upload / best of boto3 that is checked", 0.9),
    "down": Bar("download / best of boto3", 0.9),
}


class Field:
    """The files, the objects and the clients of one size of objects."""

    def __init__(self, folder: Path, place: BucketPlace, bytes_each: int, seed: int) -> None:
        self.bytes_each = bytes_each
        self.count = max(8, min(MOST, BYTES // bytes_each))
        self.store = BotoStore(place)
        rng = random.Random(seed)  # noqa: S311 (reproducible bytes)
        self.sources = []
        for number_ in range(min(8, self.count)):
            path = folder / f"source-{number_}"
            path.write_bytes(rng.randbytes(bytes_each))
            self.sources.append(str(path))
        self.sums = [self.sum(path) for path in self.sources]
        self.folder = folder

    @staticmethod
    def sum(path: str) -> bytes:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).digest()

    def source(self, index: int) -> str:
        return self.sources[index % len(self.sources)]

    def up(self, client: Client, at_once: int, prefix: str) -> tuple[float, float]:
        """Bytes a second of uploads, and CPU seconds of this process for each GB."""
        return self._timed(
            lambda index: client.upload(self.source(index), f"{prefix}/{index}"), at_once
        )

    def down(self, client: Client, at_once: int, prefix: str) -> tuple[float, float]:
        """The same of downloads; what arrived is compared afterwards."""
        paths = [str(self.folder / f"arrived-{index}") for index in range(self.count)]
        found = self._timed(
            lambda index: client.download(f"{prefix}/{index}", paths[index]), at_once
        )
        for index, path in enumerate(paths):
            if self.sum(path) != self.sums[index % len(self.sums)]:
                raise Failed(f"{client.name}: other bytes came down than went up")
            os.unlink(path)
        return found

    def _timed(self, move: Callable[[int], None], at_once: int) -> tuple[float, float]:
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(len, [""] * at_once))  # threads start before the clock does
            before = cpu_seconds(os.getpid())
            start = time.perf_counter()
            for done in [threads.submit(move, index) for index in range(self.count)]:
                done.result()
            spent = time.perf_counter() - start
        moved = self.count * self.bytes_each
        return moved / spent, (cpu_seconds(os.getpid()) - before) / moved * 1e9

    def remove(self, prefix: str) -> None:
        self.store.delete_many([f"{prefix}/{index}" for index in range(self.count)])


def measure(
    field: Field, clients: list[Client], at_once: int, rounds: int
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Figures of each direction and client, a pair for each round; round 0 warms up."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for round_ in range(rounds + 1):
        for direction in ("up", "down"):
            for index in turns(len(clients), round_):
                client = clients[index]
                prefix = client.name.replace(" ", "-")
                if direction == "up":
                    field.remove(prefix)
                    figures = field.up(client, at_once, prefix)
                else:
                    if isinstance(client, Kvfs):
                        for number_ in range(field.count):
                            client.learn(field.source(number_), f"{prefix}/{number_}")
                    figures = field.down(client, at_once, prefix)
                if round_:
                    found.setdefault((direction, client.name), []).append(figures)
    for client in clients:
        field.remove(client.name.replace(" ", "-"))
    return found


@click.command()
@click.option("--size", "sizes", multiple=True, default=["1M", "8M", "32M", "64M"])
@click.option("--at-once", "at_onces", multiple=True, type=int, default=[1, 8])
@click.option("--rounds", default=5, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--single", default="64M", show_default=True, help="kvfs: largest single put")
@click.option("--part", default="8M", show_default=True, help="kvfs: size of a part")
@click.option("--parallel", default=4, show_default=True, help="kvfs: most requests for one object")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *,
    sizes: tuple[str, ...],
    at_onces: tuple[int, ...],
    rounds: int,
    seed: int,
    single: str,
    part: str,
    parallel: int,
    output: Path | None,
) -> None:
    """Compare kvfs with boto3's transfer manager, without and with the CRT."""
    terms = Terms(single=size(single), part=size(part), parallel=parallel)
    report = Report(
        "s3transfers", rounds=rounds, seed=seed, single=single, part=part, parallel=parallel
    )
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(dir="/var/tmp") as disk,
    ):
        server = Server(Path(disk) / "server")
        try:
            server.start()
            os.environ.update(server.credentials)
            place = server.place(BUCKET)
            boto3.client("s3", endpoint_url=place.endpoint).create_bucket(Bucket=BUCKET)
            terms = probe(BotoStore(place), Keys(""), terms)
            others = [client for client in (classic(place), crt(place)) if client is not None]
            if len(others) == 1:
                note("awscrt is not installed: no column for the CRT")
            for text in sizes:
                field = Field(Path(memory), place, size(text), seed)
                for at_once in at_onces:
                    # 32 connections at once, 4 for each of 8 objects: 0.75 of the CRT; 8: 0.98
                    shared = replace(terms, parallel=max(1, min(parallel, CONNECTIONS // at_once)))
                    ours = Kvfs(place, shared, at_once)
                    for path in field.sources:
                        ours.learn(path, "")
                    note(f"{field.count} x {size_name(field.bytes_each)}, {at_once} at once")
                    found = measure(field, [ours, *others], at_once, rounds)
                    rows += judged(found, [ours, *others], field, at_once)
        finally:
            server.wipe()
    report.document["results"] = rows
    names = ["kvfs", *(client.name for client in others)]
    for direction, title in (("up", "Upload, MB/s"), ("down", "Download, MB/s")):
        report.table(
            title,
            ["objects", "at once", *names, "CPU s/GB: " + ", ".join(names), "ratio", "paired"],
            [
                [
                    row["objects"],
                    str(row["at_once"]),
                    *(number(row["MB_s"][name]) for name in names),
                    ", ".join(number(row["cpu_s_GB"][name]) for name in names),
                    number(row["ratio"]),
                    number(row["paired"]),
                ]
                for row in rows
                if row["direction"] == direction
            ],
            note="best round; ratio: of kvfs to the best of boto3; paired: median over rounds",
        )
    report.bars(
        [
            BARS[row["direction"]].judged(
                row["ratio"], f"{row['objects']}, {row['at_once']} at once", row["paired"]
            )
            for row in rows
        ]
    )
    report.write(output)


def judged(
    found: dict[tuple[str, str], list[tuple[float, float]]],
    clients: list[Client],
    field: Field,
    at_once: int,
) -> list[dict[str, Any]]:
    """A row for each direction."""
    rows = []
    for direction in ("up", "down"):
        series = {
            name: Series(tuple(rate for rate, _ in figures))
            for (which, name), figures in found.items()
            if which == direction
        }
        ours = series["kvfs"]
        rivals = [one for one in clients if one.name != "kvfs"]
        fair = [one for one in rivals if one.checked or direction == "down"]
        best = max((series[one.name] for one in fair), key=lambda one: one.best)
        rows.append(
            {
                "direction": direction,
                "objects": size_name(field.bytes_each),
                "at_once": at_once,
                "MB_s": {name: one.best / 1e6 for name, one in series.items()},
                "cpu_s_GB": {
                    name: min(cpu for _, cpu in found[direction, name]) for name in series
                },
                "ratio": ours.against(best)["best"],
                "paired": ours.against(best)["median"],
            }
        )
    return rows


if __name__ == "__main__":
    main()
