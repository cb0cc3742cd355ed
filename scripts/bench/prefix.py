"""Cached prefixes as tensors: match, load and save, beside VUA's design, torch and safetensors.

    .venv/bin/python -m scripts.bench.prefix [--rounds N] [--processes 1,8] [--shapes 8B] [--json F]

A prompt has --blocks blocks (64) of 64 tokens. The blocks have the shapes of three models: Llama
3.1 8B (128 KiB a token), Llama 3.1 70B (320 KiB), DeepSeek V3, MLA (68.6 KiB). With several
processes, each has a prompt of its own and its share of the blocks. All is in memory: a mount with
a RAM tier only, and the same tmpfs directly. `--peer` adds libfuse's passthrough_hp over this tmpfs
(engines.py says how to build it). `--plain` leaves out VUA, torch and safetensors.

The figures are GB/s of tensors, from the first process's beginning to the last one's end. In every
round each way saves, loads and drops in its turn. The tables show the best round and the median of
the rounds' ratios. Each write is rehearsed on the tmpfs right before.

- memcpy: memory to memory, in one call
- memcpy by 4: the same block by block, by as many threads as kvfs.client has
- raw: one write or read for each file, by as many threads
- kvfs: kvfs.client saves, and loads into a tensor that is there; also mapped and then copied
- VUA: VUA's design (scripts/bench/ways.py), with our blocks as its groups
- torch, safetensors: a file for each block, one after the other

`first load` comes right after the save, when the kernel asks anew about names and directories.
`load` comes after that. `map` is the time until a block is a tensor over its file; it reads no
bytes. `match` is of a prompt of 4,000 cached blocks, without its hashing. It is one call where the
mount answers such calls, and a bisection, whose calls of stat are counted.
"""

import contextlib
import os
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch

from kvfs.client import PrefixCache, Spec
from kvfs.client import match as matching
from scripts.bench.clients import processes
from scripts.bench.measure import Bar, Series, paired_ratio, turns
from scripts.bench.mounted import Failed, kvfs, scratch
from scripts.bench.report import Report, note, number
from scripts.bench.sides import PEER, check_peer, passthrough
from scripts.bench.ways import (
    THREADS,
    Client,
    Memory,
    Raw,
    Safetensors,
    Threaded,
    Torch,
    Vua,
    Way,
)

TOKENS = 64  # of a block
SHAPES: dict[str, dict[str, int]] = {
    "8B": {"kv": 2, "layer": 32, "token": TOKENS, "head": 8, "dim": 128},
    "70B": {"kv": 2, "layer": 80, "token": TOKENS, "head": 8, "dim": 128},
    "MLA": {"layer": 61, "token": TOKENS, "dim": 576},
}
WAYS: dict[str, type[Way]] = {
    "memcpy": Memory,
    f"memcpy by {THREADS}": Threaded,
    "raw": Raw,
    "kvfs": Client,
    "VUA": Vua,
    "torch": Torch,
    "safetensors": Safetensors,
}
# Which way where; the first are what the others are held against.
RACE = (
    *(
        ("memcpy", "memory"),
        (f"memcpy by {THREADS}", "memory"),
        ("raw", "mount"),
        ("kvfs", "mount"),
        ("raw", "tmpfs"),
        ("kvfs", "tmpfs"),
        ("raw", PEER),
        ("kvfs", PEER),
    ),
    *(("VUA", "mount"), ("VUA", "tmpfs"), ("torch", "mount"), ("torch", "tmpfs")),
    *(("safetensors", "mount"), ("safetensors", "tmpfs")),
)
PLAIN = ("memcpy", f"memcpy by {THREADS}", "raw", "kvfs")
PHASES = ("save", "first load", "load", "map and copy")
MATCHED = 4000  # blocks
LOAD = Bar("load / memcpy", 0.9)
AGAINST_PEER = Bar(f"load, mount / {PEER}", 0.95)
SAVE = Bar("save / raw write", 0.85)
MAP = Bar("map, us a block", 100, at_least=False)
ASK = Bar("match in one call, ms", 2, at_least=False)
STATS = Bar("match by bisection, stats", 20, at_least=False)
PATIENCE = 300.0  # s for a process's answer


def spec_of(shape: str) -> Spec:
    """Of bfloat16."""
    return Spec(model=f"bench-{shape}", revision="1", dtype=torch.bfloat16, axes=SHAPES[shape])


@dataclass(frozen=True, slots=True)
class Order:
    """The next work of a process: `phase` of `way` in `folder`."""

    phase: str
    way: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Took:
    """When it began and ended, by the clock that all processes have in common."""

    begin: float
    end: float


# A process


def work(wire: Connection, shape: str, blocks: int, seed: int, scratch_: Path) -> None:
    """Obey orders until there are no more."""
    spec = spec_of(shape)
    made = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-(1 << 15), 1 << 15, (blocks, *spec.shape), generator=made)
    source = numbers.to(torch.int16).view(spec.torch_dtype)
    del numbers
    out = torch.zeros_like(source)
    tokens = torch.randint(128000, (blocks * TOKENS,), generator=made).tolist()
    ways: dict[tuple[str, Path], Way] = {}
    wire.send(Took(0, 0))
    while (order := wire.recv()) is not None:
        key = order.way, order.folder
        if key not in ways:
            ways[key] = WAYS[order.way](order.folder / f"{shape}-{seed}-{order.way}", spec, tokens)
        way = ways[key]
        if order.phase == "rehearse":
            _rehearse(scratch_ / str(seed), source)
            took = Took(0, 0)
        elif order.phase == "check":
            if not torch.equal(out.view(torch.int16), source.view(torch.int16)):
                raise AssertionError(f"{order.way} in {order.folder}: other bytes came back")
            out.zero_()
            took = Took(0, 0)
        else:
            took = _timed(way, order.phase, source, out)
        wire.send(took)
    for way in ways.values():
        way.close()


def _timed(way: Way, phase: str, source: torch.Tensor, out: torch.Tensor) -> Took:
    begin = time.perf_counter()
    if phase == "save":
        way.save(source)
    elif phase == "load":
        way.load(out)
    elif phase == "drop":
        way.drop()
    else:
        mapped = way.map(len(out))
        if phase == "map":
            took = Took(begin, time.perf_counter())
            assert [one.shape for one in mapped] == [block.shape for block in out]
            return took
        for target, block in zip(out, mapped, strict=True):
            target.copy_(block)
    return Took(begin, time.perf_counter())


def _rehearse(path: Path, source: torch.Tensor) -> None:
    """Have the machine get the memory from its host, if it has to, before the clock runs."""
    with path.open("wb", buffering=0) as file:
        for block in source:
            file.write(block.view(torch.uint8).flatten().numpy())
    path.unlink()


class Team:
    """Processes that do the same at the same time."""

    def __init__(self, count: int, shape: str, blocks: int, scratch_: Path) -> None:
        self._wires = []
        self._members = []
        for member in range(count):
            ours, theirs = processes.Pipe()
            process = processes.Process(
                target=work, args=(theirs, shape, blocks, member + 1, scratch_), daemon=True
            )
            process.start()
            theirs.close()
            self._wires.append(ours)
            self._members.append(process)
        self._answers()

    def do(self, phase: str, way: str, folder: Path) -> float:
        """Seconds from the first beginning to the last end."""
        for wire in self._wires:
            wire.send(Order(phase, way, folder))
        found = self._answers()
        return max(one.end for one in found) - min(one.begin for one in found)

    def close(self) -> None:
        for wire in self._wires:
            with contextlib.suppress(BrokenPipeError):
                wire.send(None)
        for member in self._members:
            member.join(PATIENCE)

    def _answers(self) -> list[Took]:
        found = []
        for wire in self._wires:
            if not wire.poll(PATIENCE):
                raise Failed(f"a process did not answer within {PATIENCE:.0f} s")
            try:
                found.append(wire.recv())
            except EOFError:
                raise Failed("a process has ended: see above") from None
        return found


@contextlib.contextmanager
def team(count: int, shape: str, blocks: int, scratch_: Path) -> Iterator[Team]:
    """Gone afterwards."""
    found = Team(count, shape, blocks, scratch_)
    try:
        yield found
    finally:
        found.close()


# The race


def race(
    members: Team, places: dict[str, Path], rounds: int, ways: Sequence[tuple[str, str]]
) -> dict[tuple[str, str, str], list[float]]:
    """Seconds of each (way, place, phase), one a round. `ways`: each with its place."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for round_ in range(rounds + 1):  # the first warms up
        for at in turns(len(ways), round_):
            way, place = ways[at]
            folder = places[place]

            def do(phase: str, way: str = way, folder: Path = folder) -> float:
                return members.do(phase, way, folder)

            do("rehearse")
            spent = {"save": do("save")}
            spent["first load"] = do("load")
            do("check")
            spent["load"] = do("load")
            do("check")
            if WAYS[way].maps:
                spent["map"] = do("map")
                spent["map and copy"] = do("map and copy")
                do("check")
            do("drop")
            if round_:
                for phase, seconds in spent.items():
                    found.setdefault((way, place, phase), []).append(seconds)
    return found


def rows_of(
    shape: str, count: int, blocks: int, found: dict[tuple[str, str, str], list[float]]
) -> list[dict[str, Any]]:
    """One row for each way, place and phase; rates are of all processes together."""
    amount = count * blocks * spec_of(shape).block_bytes
    rows = []
    for (way, place, phase), seconds in found.items():
        row: dict[str, Any] = {
            "shape": shape,
            "processes": count,
            "way": way,
            "place": place,
            "phase": phase,
            "seconds": seconds,
        }
        if phase == "map":
            row["us_a_block"] = [1e6 * one / blocks for one in seconds]
        else:
            row["rates"] = [amount / one for one in seconds]
        rows.append(row)
    return rows


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of one process: several compete for what one has alone, the daemon above all."""
    bars = []
    by = {
        (row["shape"], row["processes"], row["way"], row["place"], row["phase"]): row
        for row in rows
    }
    for shape, count in dict.fromkeys((row["shape"], row["processes"]) for row in rows):
        if count > 1:
            continue

        def series(
            way: str, place: str, phase: str, shape: str = shape, count: int = count
        ) -> Series:
            return Series(tuple(by[shape, count, way, place, phase]["rates"]))

        for bar, phase, base in (
            (LOAD, "load", series("memcpy", "memory", "load")),
            (SAVE, "save", series("raw", "mount", "save")),
        ):
            ratios = series("kvfs", "mount", phase).against(base)
            bars.append(bar.judged(ratios["best"], shape, ratios["median"]))
        if (shape, count, "kvfs", PEER, "load") in by:
            ratios = series("kvfs", "mount", "load").against(series("kvfs", PEER, "load"))
            bars.append(AGAINST_PEER.judged(ratios["best"], shape, ratios["median"]))
        mapped = by[shape, count, "kvfs", "mount", "map"]["us_a_block"]
        bars.append(MAP.judged(min(mapped), shape, statistics.median(mapped)))
    return bars


def show(report: Report, rows: list[dict[str, Any]]) -> None:
    """Best rounds, GB/s."""
    for shape, count in dict.fromkeys((row["shape"], row["processes"]) for row in rows):
        here = [row for row in rows if (row["shape"], row["processes"]) == (shape, count)]
        here_memcpy = next(
            row["rates"] for row in here if (row["way"], row["phase"]) == ("memcpy", "load")
        )
        table = []
        for way, place in dict.fromkeys((row["way"], row["place"]) for row in here):
            mine = {row["phase"]: row for row in here if (row["way"], row["place"]) == (way, place)}
            cells = [
                number(max(mine[phase]["rates"]) / 1e9) if phase in mine else "-"
                for phase in PHASES
            ]
            medians = [
                number(statistics.median(mine[phase]["rates"]) / 1e9) if phase in mine else "-"
                for phase in ("save", "load")
            ]
            ratio = paired_ratio(mine["load"]["rates"], here_memcpy)
            table.append(
                [way if place == "memory" else f"{way}, {place}", *cells, *medians, number(ratio)]
            )
        size = spec_of(shape).block_bytes / TOKENS / 1024
        report.table(
            f"{shape}: {size:.1f} KiB a token, {count} process{'es' if count > 1 else ''}; GB/s",
            ["", *PHASES, "save, median", "load, median", "load / memcpy, pairs"],
            table,
        )


# Match


def matches(folder: Path, blocks: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a question about `blocks` cached blocks, by either way."""
    spec = Spec(
        model="bench-match", revision="1", dtype=torch.bfloat16, axes={"token": TOKENS, "dim": 8}
    )
    tokens = array("i", (at * 7919 % 128000 for at in range(TOKENS * (blocks + 1))))
    with PrefixCache(folder, spec, create=True) as cache:
        saved = cache.save(tokens, torch.zeros(blocks, *spec.shape, dtype=spec.torch_dtype))
        keys = spec.keys(tokens)
        if saved != blocks:
            raise Failed(f"{folder}: {saved} of {blocks} blocks saved: {cache.stats}")
        shards, size = spec.shard_names, spec.stored_bytes
        question = matching.Question(str(folder))
        bisection = matching.Bisection(str(folder), size)
        asked, walked = [], []
        for _ in range(rounds):
            begin = time.perf_counter()
            found = question.ask(spec.root, keys, shards, size)
            middle = time.perf_counter()
            bisected = bisection.ask(spec.root, keys, shards)
            walked.append(1e3 * (time.perf_counter() - middle))
            if found is not None:
                asked.append(1e3 * (middle - begin))
                _expect(found, blocks)
            _expect(bisected, blocks)
        question.close()
        stats = 0
        # Any number of them may be there: the longest search counts.
        for cached in range(1, blocks + 1, max(1, blocks // 50)):
            asked_for = [*keys[:cached], *(bytes(16) for _ in range(blocks - cached))]
            with counted() as calls:
                _expect(bisection.ask(spec.root, asked_for, shards), cached)
            stats = max(stats, len(calls))
        begin = time.perf_counter()
        spec.keys(tokens)
        hashing = 1e3 * (time.perf_counter() - begin)
    return {"blocks": blocks, "asked": asked, "bisected": walked, "stats": stats, "hash": hashing}


def _expect(found: matching.MatchResult, blocks: int) -> None:
    if found.blocks != blocks:
        raise Failed(f"{found.blocks} blocks matched: expected {blocks}")


@contextlib.contextmanager
def counted() -> Iterator[list[object]]:
    """Collect the paths of all calls of stat."""
    calls: list[object] = []
    stat = os.stat

    def noted(path: Any, **how: Any) -> os.stat_result:  # noqa: ANN401 (of os.stat)
        calls.append(path)
        return stat(path, **how)

    os.stat = noted
    try:
        yield calls
    finally:
        os.stat = stat


def numbers_of(_context: click.Context, _option: click.Parameter, text: str) -> list[int]:
    """1,2,8"""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text}: expected numbers as 1,2,8") from None


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--shapes", default="8B,70B,MLA", show_default=True)
@click.option("--processes", "counts", default="1,2,4,8", show_default=True, callback=numbers_of)
@click.option("--blocks", type=click.IntRange(1), default=64, show_default=True, help="In all.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--ram", default="6G", show_default=True, help="Of the mount's RAM tier.")
@click.option("--peer", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--plain", is_flag=True, help="Without VUA, torch and safetensors.")
@click.option("--quick", is_flag=True, help="Small and short: does it run?")
@click.option("--json", "output", type=click.Path(path_type=Path), help="All that was measured.")
def main(
    shapes: str,
    counts: list[int],
    blocks: int,
    rounds: int,
    ram: str,
    output: Path | None,
    *,
    peer: Path | None,
    plain: bool,
    quick: bool,
) -> None:
    """Cached prefixes as tensors: match, load and save."""
    names = shapes.split(",")
    matched = MATCHED
    if quick:
        names, counts, blocks, rounds, ram, matched = ["MLA"], [1, 2], 4, 1, "256M", 40
    if unknown := set(names) - set(SHAPES):
        raise click.UsageError(f"--shapes: {unknown}: expected some of {', '.join(SHAPES)}")
    report = Report("prefix", rounds=rounds, blocks=blocks)
    rows: list[dict[str, Any]] = []
    with scratch() as folder, kvfs(folder / "kv", f"ram={ram}") as mounted:
        mounted.require("passthrough", on=True)
        tier = Path(mounted.status()["tiers"]["ram"]["path"])
        with contextlib.ExitStack() as stack:
            beside = stack.enter_context(scratch(tier))
            places = {"mount": mounted.path, "tmpfs": beside, "memory": beside}
            if peer:
                source = stack.enter_context(scratch(tier))
                check_peer(peer, source)
                places[PEER] = stack.enter_context(passthrough(peer, source))[0]
            ways = [
                (way, place)
                for way, place in RACE
                if place in places and (way in PLAIN or not plain)
            ]
            for shape in names:
                for count in counts:
                    share = max(1, blocks // count)
                    with team(count, shape, share, beside) as members:
                        found = race(members, places, rounds, ways)
                    rows += rows_of(shape, count, share, found)
                    mounted.settle()
            note("match")
            asked = matches(mounted.path / "match", matched, 20 * rounds)
        report.document["status"] = mounted.status()
    show(report, rows)
    bars = judged(rows)
    detail = f"{asked['blocks']} blocks"
    once = statistics.median(asked["asked"]) if asked["asked"] else None
    bars.append(ASK.judged(once, detail))
    bars.append(STATS.judged(asked["stats"], detail))
    note(
        f"{detail}: bisection {statistics.median(asked['bisected']):.2f} ms, "
        f"hashing of an array of tokens {asked['hash']:.2f} ms"
    )
    report.document["results"], report.document["match"] = rows, asked
    report.bars(bars)
    report.write(output)


if __name__ == "__main__":
    main()
