"""What do directories of blocks cost a create, and how long takes a match?

    .venv/bin/python -m scripts.bench.match [--blocks 4000] [--rounds 5] [--json FILE]

On one mount, chains of blocks (4 KiB each) are made in turns in three ways:

- in a namespace with prefix=on
- in an ordinary namespace, where mkdir makes each block's directory
- there without directories, as connectors with flat names do it

Then a client that keeps the descriptor open asks one question about a whole chain, with details and
without. The figures are the fastest and the median of --asks. The comparison is bisection over
stat. Memory is that of the daemon's index of blocks alone (`core/namespaces/blocks.py`), filled in
this process; for all else see bookkeeping.
"""

import os
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click

from kvfs import matching, prefix
from kvfs.catalog import Inode
from kvfs.core.namespaces.blocks import Blocks
from scripts.bench.measure import Bar, Series
from scripts.bench.mounted import command, kvfs, scratch
from scripts.bench.report import Report, number

SIZE = 4096
CREATES = Bar("creates, prefix=on / ordinary with mkdir", 0.9)
MATCH = Bar("one call, ms", 2, at_least=False)
STATS = Bar("stats of a bisection", 20, at_least=False)
MEMORY = Bar("index, bytes a block", 150, at_least=False)
INDEXED = 100_000
WAYS = ("prefix=on", "mkdir", "flat")


def keys_of(blocks: int) -> tuple[bytes, list[bytes]]:
    """A root of its own, and a chain."""
    root = prefix.root_key(os.urandom(8).hex())
    return root, prefix.block_keys(root, range(blocks), 1)


def make(space: Path, way: str, root: bytes, keys: list[bytes]) -> float:
    """Blocks a second."""
    content = bytes(SIZE)
    (space / root.hex()).mkdir()
    paths = [
        (
            space / (key.hex() if way == "flat" else prefix.path(before, key)),
            space / key.hex() if way == "mkdir" else None,
        )
        for before, key in pairwise([root, *keys])
    ]
    start = time.perf_counter()
    for path, directory in paths:
        if directory is not None:
            os.mkdir(directory)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.write(descriptor, content)
        os.close(descriptor)
    return len(keys) / (time.perf_counter() - start)


def index_bytes(blocks: int) -> float:
    """Of each block in the daemon's index, in chains of 4000."""
    tracemalloc.start()
    index, last = Blocks(lambda _: None), 0
    before, _ = tracemalloc.get_traced_memory()
    for at in range(blocks):
        inode = Inode(at, 0o100644, 0, 0, size=SIZE, model=1)
        inode.key = int.from_bytes(prefix.root_key(str(at))[:8], "big") >> 1
        inode.parent_key = last if at % 4000 else 0
        index.count(inode, ("ram",), 1)
        last = inode.key
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / blocks


def ask(space: Path, root: bytes, keys: list[bytes], asks: int, *, details: bool) -> list[float]:
    """Seconds of each, from the keys to the answer."""
    descriptor = os.open(space / matching.NAME, os.O_RDWR)
    seconds = []
    for _ in range(asks):
        start = time.perf_counter()
        os.pwrite(descriptor, matching.pack_request(root, keys, details=details), 0)
        data = os.pread(descriptor, matching.answer_size(len(keys), details=details), 0)
        answer = matching.unpack_answer(data)
        seconds.append(time.perf_counter() - start)
        assert answer.blocks == len(keys), answer
    os.close(descriptor)
    return seconds


def bisect(space: Path, root: bytes, keys: list[bytes], there: int) -> tuple[int, float]:
    """Stats, and seconds, of a chain of which so many are there."""
    chain = keys[:there] + keys_of(len(keys) - there)[1]
    count, start = 0, time.perf_counter()
    low, high = 0, len(chain)
    while low < high:
        middle = (low + high) // 2
        count += 1
        before = chain[middle - 1] if middle else root
        if os.path.exists(space / prefix.path(before, chain[middle])):
            low = middle + 1
        else:
            high = middle
    assert low == there, (low, there)
    return count, time.perf_counter() - start


@click.command
@click.option("--blocks", default=4000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--asks", default=200, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(blocks: int, rounds: int, asks: int, file: Path | None) -> None:
    """Measure creates and matches of prefix namespaces."""
    report = Report("match", blocks=blocks, rounds=rounds, asks=asks)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    with scratch() as folder, kvfs(folder / "kv", "ram=1G") as kv:
        spaces = {way: kv.path / f"n{at}" for at, way in enumerate(WAYS)}
        for way, space in spaces.items():
            told = ["prefix=on"] if way == "prefix=on" else []
            command("ns", "create", str(space), *told)
        chain = keys_of(0)
        for _ in range(rounds):
            for way in WAYS:
                made = keys_of(blocks)
                rates[way].append(make(spaces[way], way, *made))
                kv.settle()
                chain = made if way == "prefix=on" else chain
        space = spaces["prefix=on"]
        plain = ask(space, *chain, asks, details=False)
        detailed = ask(space, *chain, asks, details=True)
        stats, seconds = bisect(space, *chain, blocks * 2 // 3)
    index = index_bytes(INDEXED)
    report.table(
        "creates, in blocks a second",
        ["", "best", "median"],
        [[way, number(max(found)), number(median(found))] for way, found in rates.items()],
    )
    times: list[tuple[str, Callable[[list[float]], float]]] = [("best", min), ("median", median)]
    rows = [("one call", plain), ("with details", detailed)]
    report.table(
        f"match of {blocks} blocks, ms",
        ["", *(name for name, _ in times)],
        [
            *([name, *(number(of(took) * 1e3) for _, of in times)] for name, took in rows),
            [f"bisection, {stats} stats", number(seconds * 1e3), ""],
        ],
    )
    own, other = (Series(tuple(rates[way])) for way in WAYS[:2])
    against = own.against(other)
    judged: list[dict[str, Any]] = [
        CREATES.judged(against["best"], f"{blocks} blocks", against["median"]),
        MATCH.judged(min(plain) * 1e3, f"{blocks} blocks", median(plain) * 1e3),
        STATS.judged(stats, f"{blocks} blocks"),
        MEMORY.judged(index, f"{INDEXED} blocks"),
    ]
    report.bars(judged)
    report.document["results"] = {
        "creates": rates,
        "match_s": plain,
        "details_s": detailed,
        "index_bytes": index,
        "bars": judged,
    }
    report.write(file)


if __name__ == "__main__":
    main()
