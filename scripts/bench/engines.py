"""Puts and gets of every real connector, from the first file on, and the calls of an engine.

    .venv/bin/python -m scripts.bench.engines --peer PATH [--only NAME ...] [--json FILE]
    .venv/bin/python -m scripts.bench.engines --peer PATH --beside movers --beside s3

Four sides, in turns within each round; each turn has a fresh directory, and a fresh mount:

- kvfs: a mount as a user makes it, with a RAM tier that holds the data, and NVMe behind
- passthrough_hp: libfuse's example over a tmpfs as that of kvfs's RAM tier; FUSE's own limit
- tmpfs: that tmpfs itself; it shows what FUSE costs
- disk: a directory beside the NVMe tier, without kvfs

The connectors are the engines' own storage classes, from .venv-clients (scripts/install-clients.sh)
and run on a CPU; drivers/ calls them. All bytes are compared outside of the measured time, and a
wrong byte fails the benchmark. A first round only warms up. Ratios are medians of pairs: the ratio
within each round, then the median of these. A p99, and its ratio, is that of all rounds together.

passthrough_hp: fetch the source of libfuse 3.17 or later, then
`meson setup build -Dexamples=true; ninja -C build`, and give `--peer build/example/passthrough_hp`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click

from scripts.bench import beside as loads
from scripts.bench.connectors import Entry, entries, process
from scripts.bench.measure import Bar, paired_ratio, percentile, size, size_name, turns
from scripts.bench.mounted import Failed
from scripts.bench.report import Report, note, number
from scripts.bench.sides import KVFS, PEER, TMPFS, Sides, warm

MiB = 1 << 20
# Pages are not taken from the host in the order in which they were given back: 5/4 of the data left
# one put in five at a tenth of its speed.
WARM, WARM_MORE = 2, 256 * MiB
SHARES = {"p50": 0.5, "p99": 0.99}


@dataclass
class Found:
    """Seconds by phase and side: a list for each measured round, with those of each call.

    `tiers`: the number of objects in each tier of kvfs, after the last round.
    """

    entry: Entry
    count: int
    seconds: dict[tuple[str, str], list[list[float]]] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)

    def add(self, side: str, seconds: dict[str, list[float]]) -> None:
        for phase, calls in seconds.items():
            self.seconds.setdefault((phase, side), []).append(calls)

    def rows(self, sides: list[str]) -> Iterator[dict[str, Any]]:
        """Rates of puts and gets; of the loop, times of calls."""
        for phase in dict.fromkeys(phase for phase, _ in self.seconds):
            rounds = {side: self.seconds[phase, side] for side in sides}
            if self.entry.reads:
                for what, share in SHARES.items():
                    yield self._times(phase, what, share, rounds)
            else:
                yield self._rates(phase, rounds)

    def _row(self, what: str, unit: str, figures: dict[str, Any]) -> dict[str, Any]:
        facts = {"connector": self.entry.name, "what": what, "unit": unit, "tiers": self.tiers}
        return facts | {"bytes_each": self.entry.bytes_each, "objects": self.count} | figures

    def _rates(self, phase: str, rounds: dict[str, list[list[float]]]) -> dict[str, Any]:
        amount = self.entry.bytes_each * self.count / 1e9
        values = {side: [amount / sum(calls) for calls in each] for side, each in rounds.items()}
        return self._row(
            phase,
            "GB/s",
            {
                "rounds": values,
                "value": {side: median(each) for side, each in values.items()},
                "ratio": {side: paired_ratio(values[KVFS], values[side]) for side in values},
            },
        )

    def _times(
        self, phase: str, what: str, share: float, rounds: dict[str, list[list[float]]]
    ) -> dict[str, Any]:
        values = {
            side: [percentile(calls, share) * 1e6 for calls in each]
            for side, each in rounds.items()
        }
        every = {
            side: percentile([one for calls in each for one in calls], share) * 1e6
            for side, each in rounds.items()
        }
        paired = {side: paired_ratio(values[KVFS], values[side]) for side in values}
        pooled = {side: every[KVFS] / every[side] for side in values}
        return self._row(
            f"{phase}, {what}",
            "us",
            {"rounds": values, "value": every, "ratio": paired if what == "p50" else pooled},
        )


def measure(entry: Entry, sides: Sides, rounds: int, total: int) -> Found:
    """One connector on all sides in turns; round 0 warms up."""
    count = entry.count(total)
    found, names = Found(entry, count), sides.names
    with process(entry) as driver, sides.tmpfs() as memory:
        for round_ in range(rounds + 1):
            for place, index in enumerate(turns(len(names), round_)):
                name = names[index]
                first = (round_ * len(names) + place) * count
                with sides.make(name, entry.profile) as (folder, mounted):
                    warm(memory, WARM * entry.bytes_each * count + WARM_MORE)
                    try:
                        seconds = driver.turn(folder, first, count)
                    except Failed as error:
                        raise Failed(f"on {name}: {error.message}") from None
                    if mounted is not None and round_ == rounds:
                        tiers = mounted.status()["tiers"]
                        found.tiers = {tier: told["objects"] for tier, told in tiers.items()}
                        note(f"{entry.name}: kvfs had objects in {found.tiers}")
                if round_:
                    found.add(name, seconds)
    return found


BARS = {
    ("open", "p50"): 1.0,
    ("fstat", "p50"): 1.0,
    ("open", "p99"): 1.5,
    ("fstat", "p99"): 1.5,
    ("open after a copy", "p99"): 1.5,
}


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars against passthrough_hp: at least 0.95 of its rate, and about its times."""
    bars = []
    for row in rows:
        value = row["ratio"].get(PEER)
        if row["unit"] == "GB/s":
            bar = Bar(f"{row['connector']} {row['what']}", 0.95)
        elif (bound := BARS.get(tuple(row["what"].split(", ")))) is not None:
            bar = Bar(f"{row['connector']} {row['what']}", bound, at_least=False)
        else:
            continue
        bars.append(bar.judged(value, size_name(row["bytes_each"])))
    return bars


def show(report: Report, rows: list[dict[str, Any]], sides: Sides) -> None:
    """A table of rates, and one of times."""
    against = [PEER, TMPFS] if sides.peer else [TMPFS]
    for unit, title in (
        ("GB/s", "Connectors: GB/s"),
        ("us", "Calls between an engine's work: us (less is better)"),
    ):
        shown = [row for row in rows if row["unit"] == unit]
        if shown:
            report.table(
                title,
                ["connector", "objects", "", *sides.names, *(f"kvfs / {one}" for one in against)],
                [
                    [
                        row["connector"],
                        f"{row['objects']} x {size_name(row['bytes_each'])}",
                        row["what"],
                        *(number(row["value"][side]) for side in sides.names),
                        *(number(row["ratio"][side]) for side in against),
                    ]
                    for row in shown
                ],
            )


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--only", multiple=True, metavar="NAME", help="Run this connector only (repeatable).")
@click.option(
    "--beside",
    multiple=True,
    type=click.Choice(loads.LOADS),
    help="Instead: the loop, idle and beside this load (repeatable).",
)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--bytes", "total", default="512M", show_default=True, help="Data of a turn.")
@click.option(
    "--page-size", type=click.IntRange(1), default=64, show_default=True, help="SGLang's."
)
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="A mount option.")
@click.option("--ram", default="4G", show_default=True, help="RAM tier of the mount.")
@click.option("--peer", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--nvme",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=Path("/var/tmp"),  # noqa: S108  (a fresh folder is made in it)
    show_default=True,
    help="Where the NVMe tier and the side `disk` are made.",
)
@click.option("--quick", is_flag=True, help="One round of little data: does it run?")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *,
    only: tuple[str, ...],
    beside: tuple[str, ...],
    rounds: int,
    total: str,
    page_size: int,
    options: tuple[str, ...],
    ram: str,
    peer: Path | None,
    nvme: Path,
    quick: bool,
    output: Path | None,
) -> None:
    """Measure connectors on all sides, and print the tables."""
    every = {entry.name: entry for entry in entries(page_size)}
    if unknown := set(only) - set(every):
        raise click.UsageError(f"--only {unknown.pop()}: expected one of {', '.join(every)}")
    try:
        amount, tier = (32 * MiB if quick else size(total)), size(ram)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    rounds = 1 if quick else rounds
    report = Report("engines", rounds=rounds, bytes=size_name(amount), options=",".join(options))
    if peer is None:
        note("without --peer: no passthrough_hp; its docstring says how to build it")
    sides = Sides(nvme, tier, list(options), peer)
    sides.prepare()
    report.document["tmpfs_options"] = sides.tmpfs_options
    report.document["status"] = sides.status
    rows: list[dict[str, Any]] = []
    if beside:
        for load in beside:
            rows += loads.beside(load, sides, rounds, loads.ENTRY.count(amount))
        loads.show(report, rows)
        bars = loads.judged(rows)
    else:
        for entry in every.values():
            if not only or entry.name in only:
                rows += measure(entry, sides, rounds, amount).rows(sides.names)
        show(report, rows, sides)
        bars = judged(rows) if peer else []
    report.document["results"] = rows
    if bars:
        report.bars(bars)
    report.write(output)


if __name__ == "__main__":
    main()
