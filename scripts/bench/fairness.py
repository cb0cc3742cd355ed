"""The cost of fairness for the daemon: CPU time of each call, in the loop that runs all opens.

    .venv/bin/python -m scripts.bench.fairness [--json FILE]

The figure is the median of the rounds, less an empty loop. There is no mount: this is the code
alone.
"""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import trio

from kvfs.fairness.admission import Admission
from kvfs.fairness.fair_queue import FairQueue, Shares
from kvfs.fairness.hot_objects import HotObjects
from kvfs.fairness.token_bucket import TokenBucket
from scripts.bench.measure import Bar
from scripts.bench.report import Report

CALLS = 100_000
TURNS = 5_000
KEYS = 1_000_000
NOON = 20_000.5 * 86400  # Unix time


def each(calls: int, call: Callable[[int], object]) -> float:
    """Nanoseconds of a call, less those of the loop and a function without anything in it."""

    def nothing(_: int) -> None:
        pass

    spent = []
    for one in (nothing, call):
        begin = time.thread_time_ns()
        for number in range(calls):
            one(number)
        spent.append(time.thread_time_ns() - begin)
    return (spent[1] - spent[0]) / calls


async def turns(queue: FairQueue, namespaces: int) -> float:
    """Nanoseconds of a turn, with so many namespaces that always wait."""

    async def take_turns(namespace: int) -> None:
        for _ in range(TURNS // namespaces):
            async with queue.turn(namespace, 1 << 20):
                await trio.lowlevel.checkpoint()

    begin = time.thread_time_ns()
    async with trio.open_nursery() as nursery:
        for namespace in range(namespaces):
            nursery.start_soon(take_turns, namespace)
    return (time.thread_time_ns() - begin) / TURNS


async def opens(rate: float) -> float:
    """Nanoseconds of an open of one byte that passes the shares of so many bytes/s."""
    async with trio.open_nursery() as nursery:
        shares = Shares(nursery, rate)
        begin = time.thread_time_ns()
        for _ in range(TURNS):
            await shares.acquire("kv", 1)
        return (time.thread_time_ns() - begin) / TURNS


async def run(seed: int) -> dict[str, float]:
    """One round."""
    rng = random.Random(seed)  # noqa: S311 (reproducible keys)
    weights = [1 / (rank + 1) for rank in range(KEYS)]
    zipf = rng.choices(range(KEYS), weights, k=CALLS)
    bucket, limited = TokenBucket(0), TokenBucket(1e15)
    skewed, flat = HotObjects(), HotObjects()
    admission = Admission(CALLS)
    return {
        "token bucket without a limit": each(CALLS, lambda _: bucket.try_acquire(1)),
        "token bucket with a limit": each(CALLS, lambda _: limited.try_acquire(1)),
        "hot objects, opens by Zipf": each(CALLS, lambda number: skewed.touch(zipf[number])),
        "hot objects, each opened once": each(CALLS, flat.touch),
        "admission, all refused": each(
            CALLS, lambda number: admission.decide(number, CALLS + 1, NOON, touched=False)
        ),
        "shares without a limit": await opens(0),
        "shares with a limit nobody reaches": await opens(1e15),
        "shares with a limit, all wait": await opens(1e6),
        "turn of 1 namespace": await turns(FairQueue(4), 1),
        "turn of 1000 namespaces": await turns(FairQueue(4), 1000),
    }


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, rounds: int, seed: int, output: Path | None) -> None:
    """Print what each call costs."""
    report = Report("fairness", seed=seed, rounds=rounds, counters=1024, keys=KEYS)
    found = [trio.run(run, seed + turn) for turn in range(rounds)]
    rows = {name: statistics.median(one[name] for one in found) for name in found[0]}
    report.document["results"] = rows
    report.table(
        "Cost of a call",
        ["call", "ns", "worst round"],
        [
            [name, f"{cost:,.0f}", f"{max(one[name] for one in found):,.0f}"]
            for name, cost in rows.items()
        ],
    )
    limit = Bar("no limit, ns", 300, at_least=False)
    touch = Bar("hot objects, ns", 1000, at_least=False)
    report.bars(
        [
            limit.judged(rows["token bucket without a limit"]),
            *(touch.judged(rows[name], name) for name in rows if name.startswith("hot")),
        ]
    )
    report.write(output)


if __name__ == "__main__":
    main()
