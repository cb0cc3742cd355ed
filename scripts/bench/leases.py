"""Leases or names: loads of kvfs.client with read leases, and with opens by name, in turns.

    .venv/bin/python -m scripts.bench.leases [--cases 1Mx16,8Mx64] [--rounds N] [--json FILE]

A matrix product comes before each timed call, as in an engine. Both ways have blocks of their own
on one mount with a RAM tier. Every round saves a new prompt in each way, in turns. The ways of a
save are write leases and creates by name. `first` is the load after the save: the kernel does not
know the names. `warm` is the third load. `forgotten` comes after the kernel dropped its names.
"""

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from kvfs.client import PrefixCache, Spec, leased
from scripts.bench.measure import paired_ratio, size, size_name, turns
from scripts.bench.mounted import Failed, kvfs, scratch
from scripts.bench.report import Report, number

TOKENS = 16  # of a block
WAYS = ("leases", "names")
PHASES = ("save", "first", "second", "warm", "forgotten")
CASES = "128Kx16,1Mx16,8Mx16,4392Kx64,8Mx64,128Kx256,1Mx256"
REST_S = 0.15  # after a close: the object is in the table of fast opens by then


def timed(work: Callable[[], int], count: int, matrix: torch.Tensor) -> float:
    """Seconds of a call that must return `count`, after a matrix product."""
    torch.mm(matrix, matrix)
    begin = time.perf_counter()
    found = work()
    spent = time.perf_counter() - begin
    if found != count:
        raise Failed(f"{found} blocks, expected {count}")
    time.sleep(REST_S)
    return spent


def turn(
    cache: PrefixCache, tokens: list[int], source: torch.Tensor, out: torch.Tensor, *, lease: bool
) -> dict[str, float]:
    """Seconds of each phase."""
    count, matrix = len(source), torch.ones(1500, 1500)
    lender = cache._leases._lender  # noqa: SLF001 (it has no switch of its own)

    def load() -> int:
        return cache.load(tokens, out).blocks

    lender.offered = lease
    spent = {"save": timed(lambda: cache.save(tokens, source), count, matrix)}
    lender.offered = True
    if not lease:  # the loads of either way are of blocks that the mount made
        drop(cache, tokens)
        timed(lambda: cache.save(tokens, source), count, matrix)
    leased.BY_NAME = 0 if lease else count
    out.zero_()
    for phase in PHASES[1:]:
        if phase == "forgotten":
            Path("/proc/sys/vm/drop_caches").write_text("2")
        spent[phase] = timed(load, count, matrix)
        if phase == "first" and not torch.equal(out, source):
            raise Failed("other bytes came back")
    drop(cache, tokens)
    return spent


def drop(cache: PrefixCache, tokens: list[int]) -> None:
    """Remove all blocks of a prompt."""
    for above in (cache.spec.root, *cache.spec.keys(tokens)):
        shutil.rmtree(Path(cache.path) / above.hex(), ignore_errors=True)  # some went already


def measure(folder: Path, bytes_each: int, count: int, rounds: int) -> dict[str, Any]:
    """One case; round 0 warms up."""
    axes = {"token": TOKENS, "dim": bytes_each // TOKENS}
    spec = Spec(model="bench", revision="1", dtype=torch.uint8, axes=axes)
    source = torch.randint(0, 255, (count, *spec.shape), dtype=torch.uint8)
    out = torch.zeros_like(source)
    found: dict[str, dict[str, list[float]]] = {way: {p: [] for p in PHASES} for way in WAYS}
    ram = (6 * bytes_each * count >> 20) + 512
    with ExitStack() as stack:
        mounted = stack.enter_context(kvfs(folder / f"{bytes_each}-{count}", f"ram={ram}M"))
        caches = {
            way: stack.enter_context(PrefixCache(mounted.path / way, spec, create=True))
            for way in WAYS
        }
        for round_ in range(rounds + 1):
            tokens = [round_, *range(TOKENS * count - 1)]
            for at in turns(len(WAYS), round_):
                way = WAYS[at]
                spent = turn(caches[way], tokens, source, out, lease=way == "leases")
                if round_:
                    for phase, seconds in spent.items():
                        found[way][phase].append(bytes_each * count / seconds)
    return {"bytes_each": bytes_each, "blocks": count, "rates": found}


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--cases", default=CASES, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, cases: str, rounds: int, output: Path | None) -> None:
    """Compare the ways by medians of pairs."""
    report = Report("leases", rounds=rounds)
    rows = []
    with scratch() as folder:
        for case in cases.split(","):
            bytes_each, count = case.split("x")
            rows.append(measure(folder, size(bytes_each), int(count), rounds))
    report.document["results"] = rows
    table = []
    for row in rows:
        for phase in PHASES:
            of = {way: row["rates"][way][phase] for way in WAYS}
            ratio = paired_ratio(of["names"], of["leases"])
            medians = [number(median(of[way]) / 1e9) for way in WAYS]
            what = f"{row['blocks']} x {size_name(row['bytes_each'])}"
            table.append([what, phase, *medians, number(ratio)])
    report.table("Leases or names, GB/s", ["blocks", "", *WAYS, "names / leases"], table)
    report.write(output)


if __name__ == "__main__":
    main()
