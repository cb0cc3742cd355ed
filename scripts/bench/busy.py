"""Does the daemon answer while movers work? open+close of objects in RAM, idle and under load.

    .venv/bin/python -m scripts.bench.busy [--json FILE]

Under load two processes write objects into a RAM tier that is too small for them, so that movers
copy and hash all the time, in the same mount. They pause between objects: what is asked is whether
the daemon's loop waits for the movers, not what happens when there is no CPU left for it.
"""

import multiprocessing
import os
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import click

from scripts.bench.mounted import Mounted, kvfs, scratch
from scripts.bench.report import Report

MiB = 1 << 20
RESIDENT = 64
SIZE = 4 * MiB
WRITERS = 2
PAUSE = 0.03  # s between two objects of a writer: some 250 MB/s in all


def write(folder: str, number: int, stop: Event) -> None:
    """One writer: objects of 4 MiB, over the same thousand names."""
    data = os.urandom(SIZE)
    count = 0
    while not stop.is_set():
        with open(f"{folder}/w{number}.{count % 1000}.bin", "wb", buffering=0) as file:
            file.write(data)
        count += 1
        time.sleep(PAUSE)


def opens(paths: list[str], seconds: float) -> list[float]:
    """Seconds of each open+close, one after the other, for a while."""
    spent = []
    end = time.perf_counter() + seconds
    count = 0
    while (start := time.perf_counter()) < end:
        os.close(os.open(paths[count % len(paths)], os.O_RDONLY))
        spent.append(time.perf_counter() - start)
        count += 1
    return spent


def under_load(mounted: Mounted, paths: list[str], seconds: float) -> tuple[list[float], int]:
    """The same while movers work; and how many objects they have copied meanwhile."""
    stop = multiprocessing.Event()
    writers = [
        multiprocessing.Process(target=write, args=(str(mounted.path), number, stop))
        for number in range(WRITERS)
    ]
    before = mounted.status()["counters"]["demoted"]
    for writer in writers:
        writer.start()
    try:
        while mounted.status()["counters"]["demoted"] == before:
            opens(paths, 0.1)
        start = mounted.status()["counters"]["demoted"]
        spent = opens(paths, seconds)
        return spent, mounted.status()["counters"]["demoted"] - start
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def quantile(spent: list[float], share: float) -> float:
    """In microseconds."""
    return sorted(spent)[int(len(spent) * share)] * 1e6


@click.command()
@click.option("--seconds", default=4.0, show_default=True, help="Of each turn.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--nvme", type=click.Path(exists=True, path_type=Path), default=Path("/var/tmp"))  # noqa: S108 (a fresh folder)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, seconds: float, rounds: int, nvme: Path, output: Path | None) -> None:
    """Compare p50 and p99 of open+close, idle and while movers work."""
    report = Report("busy", seconds=seconds, rounds=rounds, writers=WRITERS)
    rows: list[dict[str, Any]] = []
    with scratch() as folder, scratch(nvme) as disk:
        options = f"ram=1G,nvme={disk}/kvfs,nvme_size=8G"
        with kvfs(folder / "kv", options) as mounted:
            paths = [f"{mounted.path}/{number}.bin" for number in range(RESIDENT)]
            for path in paths:
                Path(path).write_bytes(os.urandom(SIZE))
            mounted.settle()
            for turn in range(rounds):
                idle = opens(paths, seconds)
                busy, copied = under_load(mounted, paths, seconds)
                mounted.settle()
                for name, spent in (("idle", idle), ("movers at work", busy)):
                    rows.append(
                        {
                            "round": turn,
                            "state": name,
                            "opens": len(spent),
                            "p50_us": quantile(spent, 0.5),
                            "p99_us": quantile(spent, 0.99),
                            "max_us": max(spent) * 1e6,
                            "copied": copied if spent is busy else 0,
                        }
                    )
    report.document["results"] = rows
    report.table(
        "open+close of objects in RAM",
        ["round", "state", "opens", "p50 us", "p99 us", "p99/p50", "max us", "copied meanwhile"],
        [
            [
                str(row["round"]),
                row["state"],
                str(row["opens"]),
                f"{row['p50_us']:.0f}",
                f"{row['p99_us']:.0f}",
                f"{row['p99_us'] / row['p50_us']:.1f}",
                f"{row['max_us']:.0f}",
                str(row["copied"]),
            ]
            for row in rows
        ],
    )
    report.write(output)


if __name__ == "__main__":
    main()
