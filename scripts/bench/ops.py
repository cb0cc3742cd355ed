"""Operations a second with few and with many objects, and what the many cost.

    .venv/bin/python -m scripts.bench.ops [--objects N] [--clients N ...] [--peer PATH]

Two mounts are measured in turns: one whose directory holds --few objects and one with --objects.
"open+close" opens different objects; "open+close same" always opens one. The comparison floor
(baseline/) also opens one: it is a third mount, measured in the same turns. The kernel answers
"stat hit". The daemon answers "stat cold", because the kernel's caches were dropped. readdir counts
entries, not listings. `--peer` adds libfuse's passthrough_hp over the same tmpfs (engines.py says
how to build it): it opens --few objects in the same turns.

The benchmark also shows the daemon's memory for each object beyond the first --first, and the time
from the daemon's start until a mount of the large catalog answers. A million objects take a while
to make.
"""

import contextlib
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from scripts.bench.clients import Clients
from scripts.bench.measure import Bar, Series, size
from scripts.bench.mounted import resident_bytes
from scripts.bench.places import (
    COLD,
    FLOOR,
    OPS,
    Place,
    Settings,
    fill,
    measure,
    measure_cold,
    places,
    restart,
)
from scripts.bench.report import Report, note, number
from scripts.bench.sides import PEER

MEMORY = Bar("daemon memory, bytes an object", 400, at_least=False)
AGAINST_PEER = {1: 1.5, 8: 0.9}  # least open+close in comparison with passthrough_hp, by clients
ANSWER = Bar("first answer after the daemon's start, s", 1, at_least=False)


def rows(places: list[Place]) -> list[dict[str, Any]]:
    """One row for each place, operation and number of clients."""
    found = []
    for place in places:
        for (op, clients), outcomes in place.outcomes.items():
            series = Series(tuple(outcome.rate for outcome in outcomes))
            best = max(outcomes, key=lambda outcome: outcome.rate)
            found.append(
                {
                    "place": place.name,
                    "objects": place.objects,
                    "op": op,
                    "clients": clients,
                    "per_s": {"best": series.best, "median": series.median},
                    "rates": list(series.rates),
                    "p50_us": best.p50 * 1e6,
                    "p99_us": best.p99 * 1e6,
                }
            )
    return found


def compare(found: list[Place]) -> list[dict[str, Any]]:
    """The bars on rates: many objects against few, and open+close against floor and peer."""
    few, many = found[:2]
    others = {place.name: place for place in found[2:]}

    def against(
        one: Place, op: str, other: Place, other_op: str, clients: int
    ) -> dict[str, float | None]:
        if (op, clients) not in one.outcomes or (other_op, clients) not in other.outcomes:
            return {"best": None, "median": None}
        own, base = (
            Series(tuple(outcome.rate for outcome in place.outcomes[wanted, clients]))
            for place, wanted in ((one, op), (other, other_op))
        )
        return own.against(base)

    judged = []
    for op, clients in many.outcomes:
        bar = Bar(f"{op}, {many.objects} / {few.objects} objects", 0.9)
        value = against(many, op, few, op, clients)
        judged.append(bar.judged(value["best"], f"{clients} clients", value["median"]))
    if (floor := others.get(FLOOR)) is not None:
        for op in ("open+close same", "open+close"):
            for _, clients in floor.outcomes:
                bar = Bar(f"{op}, mount / comparison floor", 0.9)
                value = against(few, op, floor, "open+close same", clients)
                judged.append(bar.judged(value["best"], f"{clients} clients", value["median"]))
    if (peer := others.get(PEER)) is not None:
        for op, clients in peer.outcomes:
            bar = Bar(f"{op}, mount / {PEER}", AGAINST_PEER.get(clients, 0.9))
            value = against(few, op, peer, op, clients)
            judged.append(bar.judged(value["best"], f"{clients} clients", value["median"]))
    return judged


def show(report: Report, found: list[dict[str, Any]]) -> None:
    """One table for each number of clients."""
    for clients in sorted({row["clients"] for row in found}):
        report.table(
            f"clients: {clients}",
            ["operation", "objects", "per s, best", "median", "p50 us", "p99 us"],
            [
                [
                    row["op"],
                    row["place"] if row["place"] in {FLOOR, PEER} else f"{row['objects']:,}",
                    number(row["per_s"]["best"]),
                    number(row["per_s"]["median"]),
                    number(row["p50_us"]),
                    number(row["p99_us"]),
                ]
                for row in sorted(found, key=lambda row: (*OPS, COLD).index(row["op"]))
                if row["clients"] == clients
            ],
        )


def memory_of(place: Place) -> int:
    """Resident bytes of a mount's daemon once it is quiet."""
    assert place.mounted is not None
    return resident_bytes(int(place.mounted.settle()["daemon_pid"]))


def populate(found: list[Place], group: Clients, settings: Settings) -> dict[str, Any]:
    """Make the objects; what that took and how the daemon's memory grew."""
    few, many = found[:2]
    for place in (few, *(one for one in found if one.name == PEER)):
        fill(place, group, settings.few, settings)
    first = min(settings.first, settings.objects)
    fill(many, group, first, settings)
    memory = {first: memory_of(many)}
    start = time.perf_counter()
    fill(many, group, settings.objects, settings)
    seconds = time.perf_counter() - start
    memory[settings.objects] = memory_of(many)
    beyond = settings.objects - first
    grown = memory[settings.objects] - memory[first]
    return {
        "seconds": seconds,
        "per_s": beyond / seconds,
        "clients": group.number,
        "daemon_rss_bytes": memory,
        "bytes_per_object": grown / beyond if beyond else None,
    }


@click.command()
@click.option("--objects", default=1_000_000, show_default=True, help="Objects of the large one.")
@click.option("--few", default=1000, show_default=True, help="Objects of the small one.")
@click.option("--first", default=10_000, show_default=True, help="Memory is counted beyond these.")
@click.option("--clients", multiple=True, type=int, default=(1, 8), show_default=True)
@click.option("--operations", default=4000, show_default=True, help="Calls of one kind a round.")
@click.option("--rounds", default=3, show_default=True, help="Measured rounds.")
@click.option("--bytes", "bytes_", default="4K", show_default=True, help="Bytes of one object.")
@click.option("--ram", help="RAM tier of each mount; default fits all objects.")
@click.option("--peer", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--nvme",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=Path("/var/tmp"),  # noqa: S108  (a fresh folder is made in it)
    show_default=True,
    help="Where the NVMe tiers' folders are made: a disk, not a tmpfs.",
)
@click.option("--cold/--no-cold", default=True, help="Drop the kernel's caches; needs root.")
@click.option("--restart/--no-restart", "again", default=True, help="Time a second mount.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *,
    bytes_: str,
    ram: str | None,
    cold: bool,
    again: bool,
    output: Path | None,
    **asked: Any,  # noqa: ANN401  (the rest of Settings, typed by click)
) -> None:
    """Operations a second with few and with many objects."""
    try:
        settings = Settings(bytes_each=size(bytes_), ram=size(ram) if ram else None, **asked)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    report = Report("ops", **{key: str(value) for key, value in asdict(settings).items()})
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(Clients(count)) for count in settings.clients]
        found = stack.enter_context(places(settings))
        many = found[1]
        assert many.mounted is not None
        widest = max(groups, key=lambda group: group.number)
        population = populate(found, widest, settings)
        report.document["population"] = population
        for group in groups:
            measure(found, group, settings)
        if cold and os.geteuid() == 0:
            for group in groups:
                measure_cold(found, group, settings)
        results = rows(found)
        report.document["results"] = results
        report.document["status"] = many.mounted.status()
        show(report, results)
        judged = compare(found)
        span = f"{settings.first:,} to {settings.objects:,}"
        judged.append(MEMORY.judged(population["bytes_per_object"], span))
        if again:
            report.document["restart"] = found_again = restart(many)
            judged.append(
                ANSWER.judged(found_again["from_daemon_start_s"], f"{settings.objects:,} objects")
            )
        report.bars(judged)
    note(f"objects made at {population['per_s']:,.0f} per s by {population['clients']} clients")
    report.write(output)


if __name__ == "__main__":
    main()
