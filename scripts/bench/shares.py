"""Do namespaces get the shares of the bandwidth that they were promised, on a live mount?

    .venv/bin/python -m scripts.bench.shares [--json FILE]

Reader processes open, read and close objects in RAM, in two namespaces at once:

- at first: both read as fast as they can. A third of that is the mount's bandwidth from then on
  (`kvfs set MOUNTPOINT bandwidth=...`). So there is overload, and the load of the rest of the
  machine, which differs from turn to turn, does not change the bandwidth that is shared
- limit: one is limited to a tenth of the bandwidth (`kvfs ns set MOUNTPOINT/NAME read_bytes=...`)
- weights: their weights are 3 to 1
- bulk: one loads in bulk (`priority=bulk`). The other gets as much as without the bulk load, except
  for the twentieth that bulk is promised

Only bytes read in a window in the middle of each turn count, so the start of the processes does
not.
"""

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Empty

import click

from scripts.bench.measure import Bar, size, size_name
from scripts.bench.mounted import Failed, Mounted, command, kvfs, scratch
from scripts.bench.report import Report, note

MiB = 1 << 20
NAMES = ("one", "other")
PATIENCE = 60.0  # s beyond the turn itself, for processes to start and to end
WARM_UP = 1.0  # s
TENTH, WITHIN = 0.10, 0.02
THREE, TOLERANCE = 3.0, 0.15
BULK = 0.05  # of the bandwidth, for all bulk together while others want it
processes = multiprocessing.get_context("spawn")


def read(
    paths: Sequence[str], seconds: float, start: Barrier, found: "Queue[tuple[str, int]]"
) -> None:
    """One reader process: whole objects, one after the other; reports what it read."""
    buffer = memoryview(bytearray(MiB))
    start.wait(PATIENCE)
    begin = time.monotonic() + WARM_UP
    end = begin + seconds
    count = total = 0
    while (now := time.monotonic()) < end:
        descriptor = os.open(paths[count % len(paths)], os.O_RDONLY)
        try:
            position = 0
            while got := os.preadv(descriptor, [buffer], position):
                position += got
        finally:
            os.close(descriptor)
        count += 1
        total += position if now >= begin else 0
    found.put((os.path.basename(os.path.dirname(paths[0])), total))


def turn(
    mounted: Mounted, objects: int, readers: int, seconds: float, names: Sequence[str] = NAMES
) -> dict[str, float]:
    """Bytes a second that each namespace reads while all of `names` do."""
    start = processes.Barrier(readers * len(names))
    found: Queue[tuple[str, int]] = processes.Queue()
    started = []
    try:
        for name in names:
            paths = [str(mounted.path / name / f"{number}.bin") for number in range(objects)]
            for _ in range(readers):
                reader = processes.Process(target=read, args=(paths, seconds, start, found))
                reader.start()
                started.append(reader)
        rates = dict.fromkeys(NAMES, 0.0)
        limit = WARM_UP + seconds + PATIENCE
        for _ in started:
            try:
                name, total = found.get(timeout=limit)
            except Empty:
                raise Failed(f"a reader of {mounted.path} has no result in {limit:.0f} s") from None
            rates[name] += total / seconds
        return rates
    finally:
        for reader in started:
            reader.join(WARM_UP)  # it has reported, or is late
            reader.terminate()
            reader.join()


def populate(mounted: Mounted, objects: int, bytes_each: int) -> None:
    """Two namespaces with objects in RAM."""
    data = os.urandom(bytes_each)
    for name in NAMES:
        (mounted.path / name).mkdir()
        for number in range(objects):
            (mounted.path / name / f"{number}.bin").write_bytes(data)


@click.command()
@click.option("--seconds", default=5.0, show_default=True, help="Of each turn.")
@click.option("--readers", default=4, show_default=True, help="Processes in each namespace.")
@click.option("--objects", default=16, show_default=True, help="In each namespace.")
@click.option("--size", "text", default="8M", show_default=True, help="Of an object.")
@click.option(
    "--only",
    type=click.Choice(["limit", "weights", "bulk", "none"]),
    help="none: the bandwidth alone.",
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *, seconds: float, readers: int, objects: int, text: str, only: str | None, output: Path | None
) -> None:
    """Measure both promises, and hold them against their bars."""
    bytes_each = size(text)
    report = Report("shares", seconds=seconds, readers=readers, objects=objects, size=text)
    rows: dict[str, dict[str, float]] = {}
    bars = []
    ram = 2 * len(NAMES) * objects * bytes_each + 256 * MiB
    with scratch() as folder, kvfs(folder / "kv", f"ram={ram}") as mounted:
        where, one = str(mounted.path), str(mounted.path / NAMES[0])
        populate(mounted, objects, bytes_each)
        note(f"two namespaces of {objects} objects of {size_name(bytes_each)}")
        rows["without limits"] = turn(mounted, objects, readers, seconds)
        bandwidth = int(sum(rows["without limits"].values()) / 3)
        command("set", where, f"bandwidth={bandwidth}")
        if only in {None, "limit"}:
            command("ns", "set", one, f"read_bytes={int(TENTH * bandwidth)}")
            rows["one limited to 10 %"] = turn(mounted, objects, readers, seconds)
            command("ns", "set", one, "read_bytes=0")
            rates = rows["one limited to 10 %"]
            share = rates["one"] / sum(rates.values())
            of_limit = f"{rates['one'] / (TENTH * bandwidth):.3f} of its limit"
            bars += [
                Bar("share of a namespace with 10 %", TENTH - WITHIN).judged(share, of_limit),
                Bar("the same", TENTH + WITHIN, at_least=False).judged(share, of_limit),
            ]
        if only in {None, "weights"}:
            command("ns", "set", one, "weight=300")
            rows["weights 3:1"] = turn(mounted, objects, readers, seconds)
            rates = rows["weights 3:1"]
            quotient = rates["one"] / rates["other"] if rates["other"] else None
            whole = f"{sum(rates.values()) / bandwidth:.3f} of the bandwidth"
            bars += [
                Bar("weights of 3:1", THREE * (1 - TOLERANCE)).judged(quotient, whole),
                Bar("the same", THREE * (1 + TOLERANCE), at_least=False).judged(quotient, whole),
            ]
        if only in {None, "bulk"}:
            command("ns", "set", one, "weight=100", "priority=bulk")
            rows["other alone"] = turn(mounted, objects, readers, seconds, NAMES[1:])
            rows["one in bulk"] = turn(mounted, objects, readers, seconds)
            alone, rates = (rows[who] for who in ("other alone", "one in bulk"))
            share = rates["one"] / sum(rates.values())
            bars += [
                Bar("normal beside bulk / alone", 1 - 2 * BULK).judged(
                    rates["other"] / alone["other"]
                ),
                Bar("share of bulk beside normal", BULK / 2).judged(share),
            ]
    report.document["results"] = rows
    report.table(
        "Bytes read, MiB/s",
        ["turn", *NAMES, "share of one"],
        [
            [
                name,
                *(f"{rates[one] / MiB:,.0f}" for one in NAMES),
                f"{rates['one'] / sum(rates.values()):.3f}",
            ]
            for name, rates in rows.items()
        ],
    )
    report.bars(bars)
    report.write(output)


if __name__ == "__main__":
    main()
