"""What does an open cost the daemon for eviction, what-if answers and heat, and what memory?

    .venv/bin/python -m scripts.bench.bookkeeping [--objects 10000 ...] [--json FILE]

There is no mount. The benchmark fills the daemon's accounts with that many objects as if a program
had written them, in prompts of 50 blocks, in a namespace. Then it touches uniformly random objects
as an open does (`Namespaces.read`, `Accounts.touch`). The time is processor time of a call, the
best of several rounds, less an empty loop. Memory is the growth of the process while the objects
come in, with the policies' orders and ghosts. The objects' records are in the catalog, not here.
"""

import gc
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

from kvfs.catalog import Catalog, Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.tiers import Tiers
from kvfs.core.namespaces.namespace import Namespace
from kvfs.settings import Settings
from kvfs.tiers import NvmeTier, RamTier
from scripts.bench.measure import Bar
from scripts.bench.mounted import resident_bytes
from scripts.bench.report import Report, note, number

DEPTH = 50  # blocks of a prompt
SIZE = 2 << 20  # bytes of an object
CALLS = 100_000
PIECE = 200  # records, 80 KB
ROUNDS = 5
PLACES = ("ram", "nvme", "ram+nvme")
NAMESPACE = 2  # an inode number
GOLDEN = 0x9E3779B97F4A7C15
TOUCH = Bar("a touch of an order, us", 2, at_least=False)
MEMORY = Bar("daemon, bytes an object", 400, at_least=False)
processes = multiprocessing.get_context("spawn")


def key(at: int) -> int:
    """As kvfs has them: 63 bits that say nothing."""
    return at * GOLDEN % (1 << 63) or 1


def block(ledger: Ledger, at: int, place: str) -> Inode:
    """The record of an object, as the catalog would give it."""
    inode = Inode(at + 100, 0o100644, 0, 0, size=SIZE, blocks=SIZE // 512, sealed=True)
    inode.links = ((NAMESPACE, at + 100),)
    inode.namespace = NAMESPACE
    inode.key, inode.parent_key = key(at), key(at - 1) if at % DEPTH else 0
    if "ram" in place:
        inode.ram_epoch = ledger.tiers.ram.epoch
    inode.on_nvme = "nvme" in place
    return inode


def each(call: Callable[[Inode], object], inodes: Sequence[Inode]) -> float:
    """Microseconds of processor time for one of these.

    The record has just been read from the catalog when it is touched: it is in the processor's
    cache, as it is here, by pieces that fit there.
    """
    spent = 0
    for start in range(0, len(inodes), PIECE):
        piece = [inode.copy() for inode in inodes[start : start + PIECE]]
        begin = time.thread_time_ns()
        for inode in piece:
            call(inode)
        spent += time.thread_time_ns() - begin
    return spent / len(inodes) / 1000


def run(objects: int, place: str, eviction: str, seed: int) -> dict[str, float]:
    """Fill and touch, in this process: it is a new one, so that its memory says something."""
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-") as folder:
        room = 2 * objects * SIZE
        catalog = Catalog(Path(folder) / "catalog")
        ram = RamTier(Path(folder) / "ram", room, identity="b", epoch=1, huge="never")
        nvme = NvmeTier(Path(folder) / "nvme", room)
        try:
            ledger = Ledger(catalog, Tiers(ram, nvme), session=1, invalidate_name=lambda *_: None)
            ledger.accounts.end_census()
            namespace = Namespace(NAMESPACE, Settings.parse({"eviction": eviction}))
            ledger.namespaces._all[NAMESPACE] = namespace  # noqa: SLF001 (no directory is made)
            return measure(ledger, namespace, objects, place, seed)
        finally:
            catalog.close()
            nvme.close()
            ram.remove()


def measure(
    ledger: Ledger, namespace: Namespace, objects: int, place: str, seed: int
) -> dict[str, float]:
    """The figures of one case."""
    gc.collect()
    before = resident_bytes(os.getpid())
    for at in range(objects):
        inode = block(ledger, at, place)
        ledger.accounts.enter(inode)
        ledger.namespaces.written(inode, 0, 1)
        if not at % 10_000:
            namespace.resize_policies(ledger.tiers.local)  # each second, on a mount
    namespace.resize_policies(ledger.tiers.local)
    grown = resident_bytes(os.getpid()) - before
    tier = ledger.tiers.holders(block(ledger, 0, place))[0]
    rng = random.Random(seed)  # noqa: S311 (reproducible)
    inodes = [block(ledger, rng.randrange(objects), place) for _ in range(CALLS)]

    def opened(inode: Inode) -> None:
        ledger.namespaces.read(inode, tier)
        ledger.accounts.touch(inode)

    calls: dict[str, Callable[[Inode], object]] = {
        "open_us": opened,
        "read_us": lambda inode: ledger.namespaces.read(inode, tier),
        "touch_us": ledger.accounts.touch,
    }
    nothing = min(each(lambda _: None, inodes) for _ in range(ROUNDS))
    found = {name: min(each(call, inodes) for _ in range(ROUNDS)) for name, call in calls.items()}
    return {name: cost - nothing for name, cost in found.items()} | {"bytes": grown / objects}


def _child(sender: Connection, objects: int, place: str, eviction: str, seed: int) -> None:
    sender.send(run(objects, place, eviction, seed))
    sender.close()


def alone(objects: int, place: str, eviction: str, seed: int) -> dict[str, float]:
    """`run` in a process of its own."""
    receiver, sender = processes.Pipe(duplex=False)
    child = processes.Process(target=_child, args=(sender, objects, place, eviction, seed))
    child.start()
    sender.close()
    try:
        found: dict[str, float] = receiver.recv()
    except EOFError:
        raise click.ClickException(f"{objects} objects in {place}: the process died") from None
    finally:
        child.join()
    return found


@click.command()
@click.option("--objects", multiple=True, type=int, default=(10_000, 100_000, 1_000_000))
@click.option("--place", "places", multiple=True, type=click.Choice(PLACES), default=PLACES)
@click.option("--eviction", default="adaptive", show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *,
    objects: tuple[int, ...],
    places: tuple[str, ...],
    eviction: str,
    seed: int,
    output: Path | None,
) -> None:
    """Measure the cost that eviction, what-if figures and heat add to an open."""
    report = Report("bookkeeping", eviction=eviction, calls=CALLS, rounds=ROUNDS, seed=seed)
    rows: list[dict[str, Any]] = []
    for count in objects:
        for place in places:
            note(f"{count:,} objects in {place}")
            rows.append({"objects": count, "place": place} | alone(count, place, eviction, seed))
    report.document["results"] = rows
    report.table(
        "An open, and the memory of an object",
        ["objects", "where", "open us", "Namespaces.read", "Ledger.touch", "bytes an object"],
        [
            [
                f"{row['objects']:,}",
                row["place"],
                *(f"{row[name]:.2f}" for name in ("open_us", "read_us", "touch_us")),
                number(row["bytes"]),
            ]
            for row in rows
        ],
    )
    bars = [
        TOUCH.judged(
            row["touch_us"] / len(row["place"].split("+")), f"{row['objects']:,} in {row['place']}"
        )
        for row in rows
    ]
    most = max(objects)
    bars += [
        MEMORY.judged(row["bytes"], f"{most:,} in {row['place']}")
        for row in rows
        if row["objects"] == most
    ]
    report.bars(bars)
    report.write(output)


if __name__ == "__main__":
    main()
