"""How much of RAM should writers find free at once?

    .venv/bin/python -m scripts.bench.demote [--json FILE]

Bursts of new objects of 8 MiB go into a full RAM tier, with a pause after each, on mounts that
differ only in `reclaimable`. Half of each burst is unlinked after the next burst, as engines unlink
blocks that a request does not need any more. Copies of these on NVMe were made in vain. An object
that finds no room in RAM begins on NVMe, at the disk's speed.
"""

import os
import random
import time
from pathlib import Path
from typing import Any

import click

from scripts.bench.mounted import Mounted, kvfs, scratch
from scripts.bench.report import Report, note

MiB = 1 << 20
SIZE = 8 * MiB
RAM = 1024 * MiB
BURSTS = (10, 25, 50)  # percent of RAM
RECLAIMABLE = (5, 10, 25, 50, 75)  # percent of RAM
PAUSE = 1.0  # s


def write(path: Path, payload: bytes) -> float:
    """Seconds that creating, writing and closing one object take."""
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        view = memoryview(payload)
        while view:
            view = view[os.write(fd, view[:MiB]) :]
    finally:
        os.close(fd)
    return time.perf_counter() - start


def run(mounted: Mounted, burst: int, bursts: int, seed: int) -> dict[str, Any]:
    """Bursts, each of so many percent of RAM, and what became of them."""
    payload = random.Random(seed).randbytes(SIZE)  # noqa: S311 (reproducible)
    count = RAM * burst // 100 // SIZE
    for number in range(RAM // SIZE):  # a tier that was in use for a while
        write(mounted.path / f"before-{number}.bin", payload)
    before = mounted.settle()
    spent: list[float] = []
    last: list[Path] = []
    for turn in range(bursts):
        paths = [mounted.path / f"{turn}-{number}.bin" for number in range(count)]
        spent += [write(path, payload) for path in paths]
        for path in last[::2]:
            path.unlink()
        last = paths
        time.sleep(PAUSE)
    after = mounted.settle()
    made = {
        name: after["counters"][name] - before["counters"][name] for name in ("demoted", "settled")
    }
    objects = count * bursts
    ordered = sorted(spent)
    return {
        "GB_s": objects * SIZE / sum(spent) / 1e9,
        "p99_ms": ordered[len(ordered) * 99 // 100] * 1e3,
        "direct": made["settled"] / objects,  # written to NVMe at once
        "copied": made["demoted"] / objects,
    }


@click.command()
@click.option("--bursts", default=8, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--nvme", type=click.Path(exists=True, path_type=Path), default=Path("/var/tmp"))  # noqa: S108 (a fresh folder)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, bursts: int, rounds: int, seed: int, nvme: Path, output: Path | None) -> None:
    """Compare reclaimable=5, 10, 25, 50 and 75 for bursts of 10, 25 and 50 % of RAM."""
    report = Report("demote", seed=seed, rounds=rounds, bursts=bursts, ram=RAM, pause=PAUSE)
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for turn in range(rounds):
        for burst in BURSTS:
            for reclaimable in RECLAIMABLE:
                note(f"round {turn}: bursts of {burst} %, reclaimable={reclaimable}")
                with scratch() as folder, scratch(nvme) as disk:
                    options = f"ram={RAM},nvme={disk}/kvfs,nvme_size=8G,reclaimable={reclaimable}"
                    with kvfs(folder / "kv", options) as mounted:
                        one = run(mounted, burst, bursts, seed + turn)
                        found.setdefault((burst, reclaimable), []).append(one)
    rows = [
        {"burst": burst, "reclaimable": reclaimable}
        | {name: sorted(one[name] for one in runs)[len(runs) // 2] for name in runs[0]}
        for (burst, reclaimable), runs in found.items()
    ]
    report.document["results"] = rows
    report.table(
        "Bursts of writes, medians",
        ["burst, % of RAM", "reclaimable, %", "GB/s", "p99 ms", "begun on NVMe", "copied to NVMe"],
        [
            [
                str(row["burst"]),
                str(row["reclaimable"]),
                f"{row['GB_s']:.2f}",
                f"{row['p99_ms']:.1f}",
                f"{row['direct']:.2f}",
                f"{row['copied']:.2f}",
            ]
            for row in rows
        ],
    )
    report.write(output)


if __name__ == "__main__":
    main()
