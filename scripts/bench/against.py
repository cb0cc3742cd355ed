"""This checkout beside another one: both mounted, each operation in turns, the median of pairs.

    .venv/bin/python -m scripts.bench.against CHECKOUT [--objects N] [--rounds N] [--json FILE]

CHECKOUT has a kvfs of its own, in .venv/bin. Each round makes the same calls on both mounts, one
right after the other; the round after it begins with the other mount. A ratio compares two
neighbours, so that a machine that becomes slower or faster does not count. Above 1 this checkout
is the faster one. With CHECKOUT "." the ratios show how much the machine itself scatters.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import click

from scripts.bench.clients import Clients
from scripts.bench.measure import Bar, Series, size, turns
from scripts.bench.mounted import KVFS, kvfs, scratch
from scripts.bench.places import OPS, Place, Settings, fill, run
from scripts.bench.report import Report, note, number
from scripts.bench.transfers import Content, Target, Work

BOUND = 0.95
SIDES = ("this", "other")

Rates = dict[tuple[str, str], tuple[list[float], list[float]]]  # of both, by operation and detail


def program(checkout: Path) -> list[str]:
    """The command of a checkout. Raises click.UsageError."""
    if checkout.resolve() == Path.cwd():
        return KVFS
    found = checkout.resolve() / ".venv" / "bin" / "kvfs"
    if not found.exists():
        raise click.UsageError(
            f"{checkout}: {found} is not there: run scripts/install.sh in that checkout"
        )
    return [str(found)]


@contextlib.contextmanager
def places(settings: Settings, programs: list[list[str]]) -> Iterator[list[Place]]:
    """One mount of each program, with the same options."""
    with contextlib.ExitStack() as stack:
        folder, disk = stack.enter_context(scratch()), stack.enter_context(scratch(settings.nvme))
        found = []
        for label, one in zip(SIDES, programs, strict=True):
            options = settings.options(label, settings.objects, disk)
            mounted = stack.enter_context(kvfs(folder / label, options, one))
            mounted.require("passthrough", on=True)
            (mounted.path / "bench").mkdir()
            found.append(Place(label, mounted.path / "bench", mounted=mounted))
        yield found


def operations(found: list[Place], group: Clients, settings: Settings, rates: Rates) -> None:
    """Each operation on both places, round for round; round 0 warms up."""
    detail = f"{group.number} clients"
    for round_ in range(settings.rounds + 1):
        for op in OPS:
            outcomes = {
                index: run(found[index], op, group, round_, settings)
                for index in turns(len(found), round_)
            }
            if round_:
                for index, outcome in outcomes.items():
                    rates.setdefault((op, detail), ([], []))[index].append(outcome.rate)
        for place in found:
            if place.mounted is not None:
                place.mounted.settle()


def bandwidth(found: list[Place], bytes_each: int, total: int, rounds: int, rates: Rates) -> None:
    """Files of one size written, read and unlinked on both places."""
    work = Work(Content(1, min(bytes_each, 1 << 20)), bytes_each, total)
    targets = [Target(place.name, place.folder, place.name) for place in found]
    detail = f"{bytes_each >> 10} KiB"
    for round_ in range(rounds + 1):
        for phase in ("write", "read", "unlink"):
            for index in turns(len(targets), round_):
                target = targets[index]
                if phase == "unlink":
                    start = time.perf_counter()
                    work.unlink(target)
                    rate = work.files / (time.perf_counter() - start)
                else:
                    spent = work.write(target, round_) if phase == "write" else work.read(target)
                    rate = work.amount / spent.whole
                if round_:
                    rates.setdefault((phase, detail), ([], []))[index].append(rate)
        for place in found:
            if place.mounted is not None:
                place.mounted.settle()


@click.command()
@click.argument("checkout", type=click.Path(file_okay=False, exists=True, path_type=Path))
@click.option("--objects", default=1000, show_default=True, help="Objects of each directory.")
@click.option("--clients", multiple=True, type=int, default=(1, 8), show_default=True)
@click.option("--operations", "calls", default=1000, show_default=True, help="Calls of one round.")
@click.option("--rounds", default=15, show_default=True, help="Measured pairs.")
@click.option("--bytes", "bytes_", default="4K", show_default=True, help="Bytes of one object.")
@click.option("--size", "sizes", multiple=True, default=("64K", "1M", "8M"), show_default=True)
@click.option("--total", default="128M", show_default=True, help="Bytes of one size on a mount.")
@click.option(
    "--nvme",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=Path("/var/tmp"),  # noqa: S108  (a fresh folder is made in it)
    show_default=True,
    help="Where the NVMe tiers' folders are made: a disk, not a tmpfs.",
)
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *,
    checkout: Path,
    objects: int,
    clients: tuple[int, ...],
    calls: int,
    rounds: int,
    bytes_: str,
    sizes: tuple[str, ...],
    total: str,
    nvme: Path,
    seed: int,
    output: Path | None,
) -> None:
    """This checkout beside another one, in turns."""
    try:
        bytes_each, bytes_all, each = size(bytes_), size(total), [size(one) for one in sizes]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    settings = Settings(
        few=0,
        objects=objects,
        first=0,
        clients=clients,
        operations=calls,
        rounds=rounds,
        bytes_each=bytes_each,
        seed=seed,
        nvme=nvme,
        ram=size("4G") if bytes_all * 4 < size("4G") else 4 * bytes_all,
    )
    report = Report("against", checkout=str(checkout), objects=objects, rounds=rounds, calls=calls)
    rates: Rates = {}
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(Clients(count)) for count in clients]
        found = stack.enter_context(places(settings, [KVFS, program(checkout)]))
        for place in found:
            fill(place, max(groups, key=lambda group: group.number), objects, settings)
        for group in groups:
            operations(found, group, settings, rates)
        for one in each:
            bandwidth(found, one, bytes_all, rounds, rates)
    rows = []
    for (op, detail), (own, other) in rates.items():
        against = Series(tuple(own)).against(Series(tuple(other)))
        judged = Bar(op, BOUND).judged(against["median"], detail, against["best"])
        rows.append(judged | {"rates": own, "base_rates": other})
    report.document["bars"] = rows
    report.table(
        "median of pairs, this / other",
        ["operation", "at", "pairs", "best rounds", f">= {BOUND}", "this per s", "other per s"],
        [
            [
                str(row["bar"]),
                str(row["at"]),
                number(row["value"]),  # type: ignore[arg-type]
                number(row["paired"]),  # type: ignore[arg-type]
                str(row["holds"]),
                number(Series(tuple(rates[row["bar"], row["at"]][0])).median),  # type: ignore[index]
                number(Series(tuple(rates[row["bar"], row["at"]][1])).median),  # type: ignore[index]
            ]
            for row in rows
        ],
    )
    note("above 1 this checkout is the faster one")
    report.write(output)


if __name__ == "__main__":
    main()
