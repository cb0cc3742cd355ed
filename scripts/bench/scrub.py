"""What does a pass of the scrubber cost, and what share of a core is that with `scrub=7d`?

    .venv/bin/python -m scripts.bench.scrub [--small 20000] [--large 128] [--rounds 3] [--json FILE]

Small objects first, then large ones beside them, all in RAM and on NVMe. Each pass is made as fast
as the scrubber does it, and costs the same processor time as a slow one. The processor time is that
of the daemon and of its movers, from /proc, less what the idle mount takes in as many seconds.
The share for 2 TiB in 1,000,000 objects is computed from the cost of a copy and of a byte.
"""

import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import click

from scripts.bench.mounted import Failed, Mounted, command, cpu_seconds, kvfs, scratch
from scripts.bench.report import Report

SMALL, LARGE = 4096, 8 << 20
IN_DIRECTORY = 1000
WEEK = 7 * 86400
IDLE_S = 10.0
PERIOD = "10s"
PATIENCE_S = 600.0
NODE = (2 << 40, 1_000_000)  # bytes and objects of a usual node, each with one copy


def fill(mounted: Mounted, name: str, count: int, size: int) -> None:
    """So many objects in a namespace of their own, each in RAM and on NVMe."""
    top = mounted.path / name
    command("ns", "create", str(top), "write=through")
    for number in range(count):
        folder = top / str(number // IN_DIRECTORY)
        folder.mkdir(exist_ok=True)
        (folder / str(number)).write_bytes(os.urandom(size))
    mounted.settle()


def processes(pid: int) -> list[int]:
    """A process, and those that it has begun."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in processes(int(child)))]


def spent(mounted: Mounted) -> float:
    """Processor seconds of the daemon and of what it has begun."""
    return sum(cpu_seconds(pid) for pid in processes(mounted.pid))


def tell(mounted: Mounted, period: str) -> None:
    """How long a pass is to take."""
    command("set", str(mounted.path), f"scrub={period}")


def wait(mounted: Mounted, seconds: float, *, after: float) -> dict[str, Any] | None:
    """The first pass that ends after a moment; None if there is none in so many seconds.

    The mount is asked once a second, with a pass under way and without: that costs the same.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(1.0)
        found: dict[str, Any] | None = mounted.status()["scrub"]["last"]
        if found is not None and found["ended"] > after:
            return found
    return None


def idle_share(mounted: Mounted) -> float:
    """Of a core that the mount takes without the scrubber, asked once a second."""
    before, begun = spent(mounted), time.monotonic()
    wait(mounted, IDLE_S, after=math.inf)
    return (spent(mounted) - before) / (time.monotonic() - begun)


def one_pass(mounted: Mounted, idle: float) -> dict[str, Any]:
    """Run a whole pass, and return the bytes that it read and its cost."""
    begun = time.time()
    before = spent(mounted)
    tell(mounted, PERIOD)
    found = wait(mounted, PATIENCE_S, after=begun)
    tell(mounted, "off")
    if found is None:
        raise Failed(f"no pass ended within {PATIENCE_S:.0f} s")
    if found["rotten"] or found["unread"]:
        raise Failed(f"the scrubber found damage: {found}")
    used = spent(mounted) - before - idle * (time.time() - begun)
    return {"objects": found["objects"], "bytes": found["bytes"], "cpu_s": used}


def median(passes: list[dict[str, Any]]) -> float:
    """Of the processor seconds of some passes."""
    return float(statistics.median(one["cpu_s"] for one in passes))


@click.command()
@click.option("--small", default=20_000, show_default=True)
@click.option("--large", default=128, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--nvme", type=click.Path(exists=True, path_type=Path), default=Path("/var/tmp"))  # noqa: S108 (a fresh folder)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, small: int, large: int, rounds: int, nvme: Path, output: Path | None) -> None:
    """Processor time of passes over small objects, and over large ones as well."""
    report = Report("scrub", small=small, large=large, rounds=rounds)
    results: list[dict[str, Any]] = []
    costs: list[float] = []
    counts: list[tuple[int, int]] = []
    options = "ram=3G,nvme={}/kvfs,nvme_size=8G,scrub=off"
    with (
        scratch() as folder,
        scratch(nvme) as disk,
        kvfs(folder / "kv", options.format(disk)) as mounted,
    ):
        for name, count, size in (("small", small, SMALL), ("large", large, LARGE)):
            fill(mounted, name, count, size)
            idle = idle_share(mounted)
            one_pass(mounted, idle)  # the worker starts, which no later pass pays for
            passes = [one_pass(mounted, idle) for _ in range(rounds)]
            costs.append(median(passes))
            counts.append((passes[0]["objects"], passes[0]["bytes"]))
            results.append({"holds": name, "idle": idle, "passes": passes})
    copy_s = costs[0] / counts[0][0]
    byte_s = (costs[1] - costs[0]) / (counts[1][1] - counts[0][1])
    share = (NODE[0] * byte_s + NODE[1] * copy_s) / WEEK
    report.document["results"] = results
    report.document["computed"] = {"copy_s": copy_s, "byte_s": byte_s, "share_of_node": share}
    report.table(
        f"passes of the scrubber, medians of {rounds}",
        ["the mount holds", "copies", "MiB", "CPU seconds", "% of a core with scrub=7d"],
        [
            [
                holds,
                str(objects),
                f"{size >> 20}",
                f"{cost:.2f}",
                f"{100 * cost / WEEK:.5f}",
            ]
            for holds, (objects, size), cost in zip(
                ("small", "small and large"), counts, costs, strict=True
            )
        ],
    )
    report.table(
        "computed for 2 TiB in 1,000,000 copies",
        ["us a copy", "CPU seconds a GB", "% of a core with scrub=7d"],
        [[f"{copy_s * 1e6:.0f}", f"{byte_s * 1e9:.3f}", f"{100 * share:.3f}"]],
    )
    report.write(output)


if __name__ == "__main__":
    main()
