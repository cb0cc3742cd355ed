"""How many hits do the eviction policies get, and what does their bookkeeping cost?

    .venv/bin/python -m scripts.bench.eviction [--traces DIRECTORY] [--entries 10000] [--json FILE]

Hit ratios are of tokens, in contiguous prefixes: of a request the blocks count up to the first that
is missing, and what is missing is stored. Each single policy runs as in the textbook and
leaf-first, and the better of the two is what `adaptive` is held against. Belady drops what is used
furthest in the future. Traces are Mooncake's: DIRECTORY/*.jsonl.xz, of lines such as
{"input_length": tokens, "hash_ids": [...]}.

Costs are processor time of the calls alone, best round of several: the rest is other processes.
"""

import gc
import heapq
import json
import lzma
import random
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from kvfs.eviction import NAMES, LeafFirst, Policy, make
from kvfs.eviction.adaptive import Adaptive
from scripts.bench.measure import Bar
from scripts.bench.report import Report, note, number

BLOCK = 512  # tokens
SHARES = (0.01, 0.02, 0.05, 0.10, 0.20)  # of the blocks that a trace has
DEPTH = 50  # blocks of a prompt, where costs are measured: 25,000 tokens
ROUNDS = 5
SEED = 4
WITHIN = Bar("behind the best single policy, points", 1, at_least=False)
OF_BELADY = Bar("adaptive of Belady", 0.9)
TOUCH = Bar("a hit of adaptive, us", 2, at_least=False)
GHOSTS = Bar("ghosts of adaptive, bytes for each entry", 200, at_least=False)


@dataclass(frozen=True)
class Request:
    """A prompt, and the keys of its blocks."""

    tokens: int
    blocks: list[int]


def mooncake(path: Path) -> list[Request]:
    """The requests of a trace file."""
    with lzma.open(path, "rt") as lines:
        parsed = [json.loads(line) for line in lines]
    return [
        Request(line["input_length"], [spread(block + 1) for block in line["hash_ids"]])
        for line in parsed
    ]


def spread(number: int) -> int:
    """A key as kvfs has them: 62 bits that say nothing."""
    return number * 0x9E3779B97F4A7C15 % (1 << 62) or 1


def prompts(documents: int, turns: int) -> list[Request]:
    """Prompts of 100 blocks, one after the other, over and over."""
    made = [
        Request(100 * BLOCK, [spread(1000 * document + block) for block in range(1, 101)])
        for document in range(documents)
    ]
    return [made[turn % documents] for turn in range(turns)]


def hit_ratio(policy: Policy, requests: list[Request]) -> float:
    """Tokens found, percent of those asked for."""
    found = asked = 0
    for request in requests:
        contiguous, previous, tokens = True, 0, 0
        for key in request.blocks:
            if key in policy:
                policy.touch(key)
                tokens += BLOCK * contiguous
            else:
                contiguous = False
                while len(policy) >= policy.capacity and policy.take(key) is not None:
                    pass
                if len(policy) < policy.capacity:  # `never` has no more room
                    policy.add(key, parent=previous)
            previous = key
        found += min(tokens, request.tokens)
        asked += request.tokens
    return 100 * found / asked


def belady(requests: list[Request], capacity: int) -> float:
    """The same as `hit_ratio`, for who knows the future."""
    flat = [key for request in requests for key in request.blocks]
    upcoming, seen = [0] * len(flat), dict[int, int]()
    for place in reversed(range(len(flat))):
        upcoming[place] = seen.get(flat[place], len(flat) + 1)
        seen[flat[place]] = place
    here, heap = dict[int, int](), list[tuple[int, int]]()
    place = found = asked = 0
    for request in requests:
        contiguous, tokens = True, 0
        for key in request.blocks:
            contiguous = contiguous and key in here
            tokens += BLOCK * contiguous
            here[key] = upcoming[place]
            heapq.heappush(heap, (-upcoming[place], key))
            while len(here) > capacity:
                use, victim = heapq.heappop(heap)
                if here.get(victim) == -use:
                    del here[victim]
            place += 1
        found += min(tokens, request.tokens)
        asked += request.tokens
    return 100 * found / asked


def cases(traces: Path | None) -> Iterator[tuple[str, list[Request], tuple[float, ...]]]:
    """Name, requests, and the capacities as shares of all blocks."""
    yield "10 documents in turn", prompts(10, 600), (0.8,)
    yield "one prompt", prompts(1, 60), (0.9,)
    for path in sorted(traces.glob("*.jsonl.xz")) if traces else []:
        yield path.name.removesuffix(".jsonl.xz"), mooncake(path), SHARES


def ratios(report: Report, traces: Path | None) -> list[dict[str, object]]:
    """Every policy on every case; the judged bars."""
    judged, rows = [], []
    singles = [name for name in NAMES if name != "adaptive"]
    for name, requests, shares in cases(traces):
        blocks = len({key for request in requests for key in request.blocks})
        for share in shares:
            capacity = int(blocks * share)
            note(f"{name} at {share:.0%}: {capacity} of {blocks} blocks")
            found = {
                single: max(
                    hit_ratio(make(single, capacity, leaf_first=leaf_first), requests)
                    for leaf_first in (False, True)
                )
                for single in singles
            }
            bound = belady(requests, capacity)
            adaptive = hit_ratio(make("adaptive", capacity), requests)
            at = f"{name} {share:.0%}"
            if len(shares) > 1:
                judged.append(WITHIN.judged(max(found.values()) - adaptive, at))
            else:
                judged.append(OF_BELADY.judged(adaptive / bound, at))
            rows.append({"at": at, **found, "adaptive": adaptive, "belady": bound})
    report.document["ratios"] = rows
    columns = [*singles, "adaptive", "belady"]
    report.table(
        "Token hit ratio, percent; the better of textbook and leaf-first",
        ["at", *columns],
        [[str(row["at"]), *(f"{row[column]:.2f}" for column in columns)] for row in rows],
    )
    return judged


def chains(entries: int, first: int) -> list[list[int]]:
    """Prompts of DEPTH blocks each, `entries` blocks in all."""
    return [
        [spread(start + block) for block in range(DEPTH)]
        for start in range(first, first + entries, DEPTH)
    ]


def store(policy: Policy, prompts: list[list[int]]) -> None:
    """Each block after the one before it, none of them there yet."""
    for blocks in prompts:
        previous = 0
        for key in blocks:
            while len(policy) >= policy.capacity:
                policy.take(key)
            policy.add(key, parent=previous)
            previous = key


def touches(policy: Policy, prompts: list[list[int]]) -> None:
    """Each block is a hit."""
    touch = policy.touch
    for blocks in prompts:
        for key in blocks:
            touch(key)


def microseconds(policy: Policy, entries: int) -> tuple[float, float]:
    """Of a hit, and of a miss: one victim and one new entry."""
    first = chains(entries, 1)
    store(policy, first)
    hits, misses = [], []
    count = max(1, min(entries, 100_000) // DEPTH)
    drawn = random.Random(SEED)  # noqa: S311 (it is to be the same again)
    for turn in range(ROUNDS):
        there = [blocks for blocks in drawn.sample(first, count) if blocks[-1] in policy]
        start = time.thread_time()
        touches(policy, there)
        hits.append((time.thread_time() - start) / (len(there) * DEPTH))
        new = chains(count * DEPTH // 10, 10**9 + turn * 10**7)
        start = time.thread_time()
        store(policy, new)
        misses.append((time.thread_time() - start) / (len(new) * DEPTH))
    return min(hits) * 1e6, min(misses) * 1e6


def bytes_each(policy: Policy, entries: int) -> float:
    """Of a full cache, with half as many victims remembered as it has entries."""
    gc.collect()
    tracemalloc.start()
    store(policy, chains(entries, 1))
    touches(policy, chains(entries // 2, 1 + entries // 2 // DEPTH * DEPTH))
    store(policy, chains(entries // 2, 10**9))
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] / len(policy)
    tracemalloc.stop()
    return size


def costs(report: Report, sizes: tuple[int, ...]) -> list[dict[str, object]]:
    """Of adaptive, beside the order alone that its ghosts are added to."""
    judged, rows = [], []
    for entries in sizes:
        note(f"costs with {entries} entries")
        hit, miss = microseconds(Adaptive(entries), entries)
        hit_alone, miss_alone = microseconds(make("lru", entries, leaf_first=True), entries)
        size = bytes_each(Adaptive(entries), entries)
        alone = bytes_each(LeafFirst(make("lru", entries)), entries)
        rows.append((str(entries), hit, hit_alone, miss, miss_alone, size - alone, alone))
        at = f"{entries} entries"
        judged.append(TOUCH.judged(hit, at))
        judged.append(GHOSTS.judged(size - alone, at))
    columns = ["entries", "hit us", "LRU's", "miss us", "LRU's", "ghosts B/entry", "order B/entry"]
    report.document["costs"] = {"columns": columns, "rows": rows}
    report.table(
        "Cost of adaptive, with would-be answers, and of leaf-first LRU alone",
        columns,
        [[row[0], *(number(float(value)) for value in row[1:])] for row in rows],
    )
    return judged


@click.command()
@click.option("--traces", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--entries", multiple=True, type=int, default=(10_000, 100_000, 1_000_000))
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, traces: Path | None, entries: tuple[int, ...], output: Path | None) -> None:
    """Compare hit ratios, and measure microseconds and bytes."""
    report = Report("eviction", traces=str(traces), seed=SEED, rounds=ROUNDS)
    report.bars(costs(report, entries) + ratios(report, traces))
    report.write(output)


if __name__ == "__main__":
    main()
