"""How long does a check take, and what do opens feel of it?

    .venv/bin/python -m scripts.bench.fsck [--objects 100000] [--json FILE]

Small objects on NVMe, in directories of a thousand, none with hashes. One process opens and closes
64 of them, held in RAM, before and during a check beside the mount; then it is unmounted and
checked again.
"""

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import click

from scripts.bench.busy import RESIDENT, opens, quantile
from scripts.bench.mounted import KVFS, Failed, Mounted, cpu_seconds, kvfs, scratch
from scripts.bench.report import Report

SIZE = 4096
IN_DIRECTORY = 1000


def fill(mounted: Mounted, objects: int) -> list[str]:
    """The objects; returns the paths of the last ones."""
    data = os.urandom(SIZE)
    paths = []
    for number in range(objects):
        folder = f"{mounted.path}/{number // IN_DIRECTORY}"
        if number % IN_DIRECTORY == 0:
            os.mkdir(folder)
        path = f"{folder}/{number}.bin"
        with open(path, "wb", buffering=0) as file:
            file.write(data)
        paths.append(path)
    return paths[-RESIDENT:]


def fsck(target: Path) -> float:
    """Seconds that a dry run takes, with the start of the command."""
    start = time.perf_counter()
    done = subprocess.run([*KVFS, "fsck", str(target)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"fsck {target} exited {done.returncode}: {done.stderr or done.stdout}")
    return time.perf_counter() - start


def beside(target: Path, paths: list[str]) -> tuple[float, list[float]]:
    """The same, and the seconds of each open+close meanwhile."""
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.append(fsck(target)))
    thread.start()
    spent: list[float] = []
    while thread.is_alive():
        spent += opens(paths, 0.2)
    thread.join()
    if not took:
        raise Failed("the check failed; its reason is above")
    return took[0], spent


def row(state: str, seconds: float, spent: list[float]) -> dict[str, Any]:
    """One line of the report."""
    return {
        "state": state,
        "seconds": seconds,
        "opens": len(spent),
        "p50_us": quantile(spent, 0.5),
        "p99_us": quantile(spent, 0.99),
        "max_us": max(spent) * 1e6,
    }


@click.command()
@click.option("--objects", default=100_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--nvme", type=click.Path(exists=True, path_type=Path), default=Path("/var/tmp"))  # noqa: S108 (a fresh folder)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, objects: int, rounds: int, nvme: Path, output: Path | None) -> None:
    """Time a dry run beside a mount and without one; p50 and p99 of open+close meanwhile."""
    report = Report("fsck", objects=objects, rounds=rounds)
    rows: list[dict[str, Any]] = []
    with scratch() as folder, scratch(nvme) as disk:
        with kvfs(folder / "kv", f"ram=4G,nvme={disk}/kvfs,nvme_size=8G") as mounted:
            paths = fill(mounted, objects)
            mounted.settle()
            for _ in range(rounds):
                rows.append(row("no check", 5.0, opens(paths, 5.0)))
                rows.append(row("beside a check", *beside(mounted.path, paths)))
                used = cpu_seconds(mounted.pid)
                rows.append({"state": "idle mount", "seconds": fsck(mounted.path)})
                rows[-1]["cpu_s"] = cpu_seconds(mounted.pid) - used
            mounted.umount()
        rows += [{"state": "unmounted", "seconds": fsck(disk / "kvfs")} for _ in range(rounds)]
    report.document["results"] = rows
    report.table(
        f"dry run of kvfs fsck, {objects} objects of {SIZE} bytes",
        ["state", "seconds", "daemon's cpu s", "opens", "p50 us", "p99 us", "max us"],
        [
            [
                row["state"],
                f"{row['seconds']:.1f}",
                *(
                    f"{row[name]:.{digits}f}" if name in row else ""
                    for name, digits in (
                        ("cpu_s", 1),
                        ("opens", 0),
                        ("p50_us", 0),
                        ("p99_us", 0),
                        ("max_us", 0),
                    )
                ),
            ]
            for row in rows
        ],
    )
    report.write(output)


if __name__ == "__main__":
    main()
