"""What does it cost that an open compares a copy on NVMe with its digest (`verify_after`)?

    .venv/bin/python -m scripts.bench.verify [--json FILE]

The same files are opened and read, compared and not, with their bytes in the page cache and
without. Each round is a mount of its own; which of the two is first changes from round to round.
"""

import os
import random
import statistics
import time
from pathlib import Path

import click

from scripts.bench.mounted import Mounted, command, kvfs, scratch
from scripts.bench.promote import backing, forget
from scripts.bench.report import Report

MiB = 1 << 20
SIZES = (1, 4, 32, 100)
CACHES = ("warm", "cold")
Found = dict[tuple[tuple[int, str], bool], list[tuple[float, float]]]


def name(mounted: Mounted, size: int, cache: str) -> Path:
    """A file for each size and state of the page cache."""
    return mounted.path / f"{size}.{cache}"


def populate(mounted: Mounted, seed: int) -> None:
    """All files, on NVMe with their digests when they are settled."""
    rng = random.Random(seed)  # noqa: S311 (reproducible bytes)
    for size in SIZES:
        for cache in CACHES:
            with name(mounted, size, cache).open("wb") as file:
                for _ in range(size):
                    file.write(rng.randbytes(MiB))
    mounted.settle()


def read(path: Path, buffer: memoryview) -> tuple[float, float]:
    """Milliseconds until it is open, and until it is read."""
    start = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    opened = time.perf_counter()
    try:
        while os.readv(fd, [buffer]):
            pass
    finally:
        os.close(fd)
    return (opened - start) * 1e3, (time.perf_counter() - start) * 1e3


def run(mounted: Mounted, found: Found, *, compared: bool) -> None:
    """One read of each file."""
    wanted = "1d" if compared else "0"
    command("set", str(mounted.path), f"verify_after={wanted}")
    before = mounted.status()["counters"]["verified"]
    buffer = memoryview(bytearray(MiB))
    for size in SIZES:
        for cache in CACHES:
            path = name(mounted, size, cache)
            [file] = backing(mounted, path.stat().st_ino)
            forget(file)
            if cache == "warm":
                read(file, buffer)
            found.setdefault(((size, cache), compared), []).append(read(path, buffer))
    looks = mounted.status()["counters"]["verified"] - before
    if looks != compared * len(SIZES) * len(CACHES):
        raise click.ClickException(f"{looks} opens compared a copy with its digest")


def median(found: list[tuple[float, float]], which: int) -> str:
    """Of the times until it was open (0), or read (1)."""
    return f"{statistics.median(one[which] for one in found):.2f}"


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--nvme", type=click.Path(exists=True, path_type=Path), default=Path("/var/tmp"))  # noqa: S108 (a fresh folder)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, rounds: int, seed: int, nvme: Path, output: Path | None) -> None:
    """Compare opens that compare a copy with its digest with those that do not."""
    report = Report("verify", seed=seed, rounds=rounds)
    found: Found = {}
    with scratch() as folder, scratch(nvme) as disk:
        options = f"ram=64M,nvme={disk}/kvfs,nvme_size=2G,promote_after=0"
        with kvfs(folder / "kv", options) as mounted:
            populate(mounted, seed)
            for turn in range(rounds):
                mounted.umount()
                mounted.mount()
                # This mount does not compare a copy again: a later open is as without.
                for compared in (True, False) if turn % 2 else (False, True):
                    run(mounted, found, compared=compared)
    keys = [(size, cache) for size in SIZES for cache in CACHES]
    report.document["results"] = [
        {"MiB": key[0], "cache": key[1], "compared": compared, "open_read_ms": found[key, compared]}
        for key in keys
        for compared in (False, True)
    ]
    report.table(
        "First opens on NVMe, ms (medians)",
        ["MiB", "page cache", "open", "compared", "open and read", "compared"],
        [
            [
                *(str(key[0]), key[1]),
                *(median(found[key, which], at) for at in (0, 1) for which in (False, True)),
            ]
            for key in keys
        ],
    )
    report.write(output)


if __name__ == "__main__":
    main()
