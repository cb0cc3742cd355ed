"""Calls of an engine while kvfs moves other objects, against the same calls while it is idle.

`engines.py --beside` runs it. The files of the engine-like loop (drivers/loop.py) stay in RAM, in a
namespace with `pin=on`. The loads are real:

- `movers`: two processes write objects into a RAM tier that is too small for them, and open old
  ones twice. So movers demote and promote all the time.
- `s3`: 8 threads read objects that only the bucket has, and 8 write. The server is a real S3
  server on loopback, for this benchmark alone.

The same loop runs on passthrough_hp, beside the same load of kvfs. So the column of passthrough_hp
shows how long a call waits for a processor that the load has. Idle and busy take turns. A load that
moves no bytes during a turn fails the benchmark. Percentiles are of all rounds together.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]

from kvfs.control import request
from scripts.bench.busy import PAUSE, WRITERS
from scripts.bench.busy import SIZE as CHURNED
from scripts.bench.connectors import Entry, Process, process
from scripts.bench.measure import Bar, percentile, turns
from scripts.bench.mounted import Failed, Mounted, command, kvfs, scratch
from scripts.bench.report import Report, note, number
from scripts.bench.s3 import BUCKET, COLD, COLD_SIZE, bucket_options, flush, moving, tier, until
from scripts.bench.sides import FOLDER, KVFS, PEER, Sides, passthrough
from scripts.s3_server import Server

MiB = 1 << 20
MOVERS, S3 = "movers", "s3"
LOADS = (MOVERS, S3)
IDLE, BUSY = "idle", "busy"
CALLS = ("open", "fstat", "open after a copy")
ENTRY = Entry("loop", "loop", "Resident", 8 * MiB, files=32, engine=False, reads=True)
RESIDENT = ENTRY.bytes_each * ENTRY.files
ROOM = 512 * MiB  # of RAM, for the objects of the load
NAMES = 128  # of each writer: with these, RAM has no room for all objects
BOUND = 3.0


@dataclass
class Load:
    """`start` runs it; `moved` says the bytes of each kind so far."""

    name: str
    mounted: Mounted
    start: Callable[[], AbstractContextManager[None]]
    moved: Callable[[], dict[str, int]]


@dataclass
class Found:
    """Seconds of calls by side, state and call; bytes moved while the busy ones ran."""

    load: str
    seconds: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    moved: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, side: str, state: str, seconds: dict[str, list[float]]) -> None:
        for call in CALLS:
            self.seconds.setdefault((side, state, call), []).extend(seconds[call])

    def add_moved(self, side: str, before: dict[str, int], after: dict[str, int]) -> None:
        """Raises Failed if the load has moved nothing of one kind meanwhile."""
        total = self.moved.setdefault(side, dict.fromkeys(before, 0))
        for kind, count in before.items():
            if after[kind] <= count:
                raise Failed(f"{self.load}: no bytes were {kind} while the loop ran on {side}")
            total[kind] += after[kind] - count

    def rows(self, sides: list[str]) -> list[dict[str, Any]]:
        return [self._row(side, call) for call in CALLS for side in sides]

    def _row(self, side: str, call: str) -> dict[str, Any]:
        row: dict[str, Any] = {"beside": self.load, "side": side, "call": call, "unit": "us"}
        for state in (IDLE, BUSY):
            seconds = self.seconds[side, state, call]
            row[state] = {
                "p50": percentile(seconds, 0.5) * 1e6,
                "p99": percentile(seconds, 0.99) * 1e6,
                "calls": len(seconds),
            }
        row["ratio"] = {what: row[BUSY][what] / row[IDLE][what] for what in ("p50", "p99")}
        row["moved_bytes"] = self.moved[side]
        return row


def measure(
    load: Load, driver: Process, folders: dict[str, Path], rounds: int, files: int
) -> Found:
    """Idle and busy in turns, and in each the sides in turns; round 0 warms up."""
    found, sides = Found(load.name), list(folders)
    for folder in folders.values():
        driver.turn(folder, 0, files)
    for round_ in range(rounds + 1):
        for at in turns(2, round_):
            state = (IDLE, BUSY)[at]
            load.mounted.settle()
            with load.start() if state == BUSY else nullcontext():
                for index in turns(len(sides), round_):
                    _turn(load, driver, state, sides[index], folders, files, found, round_)
        note(f"{load.name}: round {round_} of {rounds}")
    return found


def _turn(
    load: Load, driver: Process, state: str, side: str, folders: dict[str, Path], files: int,
    found: Found, round_: int,
) -> None:  # fmt: skip
    before = load.moved()
    seconds = driver.turn(folders[side], 0, files)
    after = load.moved()
    if not round_:
        return
    found.add(side, state, seconds)
    if state == BUSY:
        found.add_moved(side, before, after)


def churn(folder: str, number: int, stop: Event) -> None:
    """One writer: objects of 4 MiB. After each, it opens its oldest one twice."""
    data = os.urandom(CHURNED)
    count = 0
    while not stop.is_set():
        with open(f"{folder}/w{number}.{count % NAMES}.bin", "wb", buffering=0) as file:
            file.write(data)
        count += 1
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(f"{folder}/w{number}.{count % NAMES}.bin", os.O_RDONLY))
        time.sleep(PAUSE)


@contextlib.contextmanager
def churning(mounted: Mounted) -> Iterator[None]:
    """Movers demote and promote."""
    stop = multiprocessing.Event()
    writers = [
        multiprocessing.Process(target=churn, args=(str(mounted.path), number, stop))
        for number in range(WRITERS)
    ]
    before = copied(mounted)
    for writer in writers:
        writer.start()
    try:
        until(lambda: _grown(before, copied(mounted)), "movers copy both ways")
        yield
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def copied(mounted: Mounted) -> dict[str, int]:
    """Bytes that movers have copied; all objects of the load have one size."""
    counters = request(mounted.path, "status")["counters"]
    return {kind: counters[kind] * CHURNED for kind in ("demoted", "promoted")}


@contextlib.contextmanager
def transferring(mounted: Mounted, data: bytes) -> Iterator[None]:
    """Objects go up and come down."""
    before = transferred(mounted)
    with moving(mounted.path, data):
        until(lambda: _grown(before, transferred(mounted)), "objects move both ways")
        yield
    flush(mounted)


def transferred(mounted: Mounted) -> dict[str, int]:
    """Bytes of the bucket's transfers."""
    counters = tier(mounted)
    return {f"{kind}ed": counters[f"{kind}_bytes"] for kind in ("upload", "download")}


def _grown(before: dict[str, int], after: dict[str, int]) -> bool:
    return all(after[kind] > count for kind, count in before.items())


@contextlib.contextmanager
def movers_load(folder: Path, disk: Path, options: list[str]) -> Iterator[Load]:
    """A mount whose RAM tier is too small for the objects of the writers."""
    found = [f"ram={RESIDENT + ROOM}", f"nvme={disk}/nvme", f"nvme_size={4 * ROOM}", *options]
    with kvfs(folder / "movers", ",".join(found)) as mounted:
        yield Load(MOVERS, mounted, lambda: churning(mounted), lambda: copied(mounted))


@contextlib.contextmanager
def s3_load(folder: Path, disk: Path, options: list[str]) -> Iterator[Load]:
    """A mount with a bucket, and objects that only the bucket has."""
    server = Server(disk / "server")
    data = os.urandom(COLD_SIZE)
    try:
        server.start()
        os.environ.update(server.credentials)
        place = server.place(BUCKET)
        boto3.client("s3", endpoint_url=server.endpoint).create_bucket(Bucket=place.bucket)
        found = [f"ram={RESIDENT + ROOM}", "s3_delay=0", "s3_dirty=256M", bucket_options(place)]
        with kvfs(folder / "s3", ",".join([*found, *options])) as mounted:
            for index in range(COLD):
                (mounted.path / f"cold{index}").write_bytes(data)
            flush(mounted)
            yield Load(
                S3, mounted, lambda: transferring(mounted, data), lambda: transferred(mounted)
            )
    finally:
        server.wipe()


STARTS = {MOVERS: movers_load, S3: s3_load}


def beside(name: str, sides: Sides, rounds: int, files: int) -> list[dict[str, Any]]:
    """Rows of one load: kvfs, and passthrough_hp beside the same load."""
    with ExitStack() as stack:
        folder, disk = stack.enter_context(scratch()), stack.enter_context(scratch(sides.disk))
        load = stack.enter_context(STARTS[name](folder, disk, sides.options))
        load.mounted.require("passthrough", on=True)
        folders = {KVFS: load.mounted.path / FOLDER}
        command("ns", "create", str(folders[KVFS]), "pin=on")
        if sides.peer:
            source = stack.enter_context(sides.tmpfs())
            folders[PEER] = stack.enter_context(passthrough(sides.peer, source))[0] / FOLDER
            folders[PEER].mkdir()
        driver = stack.enter_context(process(ENTRY))
        return measure(load, driver, folders, rounds, files).rows(list(folders))


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars on p99, busy against idle, of kvfs."""
    return [
        Bar(f"{row['call']}, p99, beside {row['beside']} / idle", BOUND, at_least=False).judged(
            row["ratio"]["p99"], row["side"]
        )
        for row in rows
        if row["side"] == KVFS
    ]


def show(report: Report, rows: list[dict[str, Any]]) -> None:
    """One table for each load."""
    for load in dict.fromkeys(row["beside"] for row in rows):
        mine = [row for row in rows if row["beside"] == load]
        told = ", ".join(f"{count / MiB:,.0f} MiB {kind}" for kind, count in
                         mine[0]["moved_bytes"].items())  # fmt: skip
        report.table(
            f"Calls of an engine, idle and beside {load}: us",
            ["call", "side", "idle p50", "p99", f"{load} p50", "p99", "p50 / idle", "p99 / idle"],
            [
                [
                    row["call"],
                    row["side"],
                    *(number(row[state][what]) for state in (IDLE, BUSY) for what in row["ratio"]),
                    *(number(value) for value in row["ratio"].values()),
                ]
                for row in mine
            ],
            note=f"beside {KVFS}: {told}",
        )
