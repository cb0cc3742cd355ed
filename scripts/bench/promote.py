"""How eagerly should an object that is read on NVMe come back to RAM?

    .venv/bin/python -m scripts.bench.promote [--json FILE]

Zipf-distributed reads of whole objects that lie on NVMe, of which RAM holds a part. Before each
read the page cache loses the object's NVMe file: working sets are larger than memory, else there
would be no question. Each policy runs on a mount of its own over the same bytes, in turns.
"""

import os
import random
import time
from pathlib import Path
from typing import Any

import click

from scripts.bench.mounted import Mounted, kvfs, scratch
from scripts.bench.report import Report

MiB = 1 << 20
OBJECTS = 96
SIZE = 8 * MiB
RAM = 256 * MiB
POLICIES = (0, 1, 2, 3, 4)


def populate(mounted: Mounted, seed: int) -> None:
    """All objects, on NVMe only."""
    rng = random.Random(seed)  # noqa: S311 (reproducible bytes)
    for number in range(OBJECTS):
        (mounted.path / f"{number}.bin").write_bytes(rng.randbytes(SIZE))
    mounted.settle()
    mounted.umount()  # everything is on NVMe now
    mounted.mount()


def backing(mounted: Mounted, ino: int) -> list[Path]:
    """The file on NVMe behind an inode."""
    root = Path(mounted.status()["tiers"]["nvme"]["path"], "objects", f"{ino % 256:02x}")
    return list(root.glob(f"{ino:x}.*"))


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def read(path: Path, buffer: memoryview) -> float:
    """Seconds that opening and reading one object take."""
    start = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    try:
        position = 0
        while got := os.preadv(fd, [buffer], position):
            position += got
    finally:
        os.close(fd)
    if position != SIZE:
        raise click.ClickException(f"{path}: {position} bytes, expected {SIZE}")
    return time.perf_counter() - start


def run(mounted: Mounted, reads: int, seed: int) -> dict[str, Any]:
    """Reads, and what they cost."""
    rng = random.Random(seed)  # noqa: S311 (the same sequence for each policy)
    weights = [1 / (rank + 1) for rank in range(OBJECTS)]
    order = rng.choices(range(OBJECTS), weights, k=reads)
    names = [mounted.path / f"{number}.bin" for number in range(OBJECTS)]
    files = [backing(mounted, name.stat().st_ino) for name in names]
    buffer = memoryview(bytearray(MiB))
    spent = []
    for number in order:
        for file in files[number]:
            forget(file)
        spent.append(read(names[number], buffer))
    status = mounted.settle()
    return {
        "seconds": sum(spent),
        "GB_s": reads * SIZE / sum(spent) / 1e9,
        "ram_hits": status["tiers"]["ram"]["hits"] / reads,
        "copied": status["counters"]["promoted"],
    }


@click.command()
@click.option("--reads", default=600, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--nvme", type=click.Path(exists=True, path_type=Path), default=Path("/var/tmp"))  # noqa: S108 (a fresh folder)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, reads: int, rounds: int, seed: int, nvme: Path, output: Path | None) -> None:
    """Compare promote_after=0 (never), 1, 2, 3 and 4."""
    report = Report("promote", seed=seed, rounds=rounds, reads=reads, objects=OBJECTS, ram=RAM)
    found: dict[int, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for turn in range(rounds):
        for policy in POLICIES:
            with scratch() as folder, scratch(nvme) as disk:
                options = f"ram={RAM},nvme={disk}/kvfs,nvme_size=4G,promote_after={policy}"
                with kvfs(folder / "kv", options) as mounted:
                    populate(mounted, seed)
                    found[policy].append(run(mounted, reads, seed + turn))
    rows = []
    for policy, runs in found.items():
        best = max(runs, key=lambda one: float(one["GB_s"]))
        median = sorted(float(one["GB_s"]) for one in runs)[len(runs) // 2]
        rows.append({"promote_after": policy, "median_GB_s": median, **best})
    report.document["results"] = rows
    report.table(
        "Zipf reads of objects on NVMe",
        ["promote_after", "GB/s best", "median", "hits in RAM", "copies made"],
        [
            [
                str(row["promote_after"]) if row["promote_after"] else "never",
                f"{row['GB_s']:.2f}",
                f"{row['median_GB_s']:.2f}",
                f"{row['ram_hits']:.2f}",
                str(row["copied"]),
            ]
            for row in rows
        ],
    )
    report.write(output)


if __name__ == "__main__":
    main()
