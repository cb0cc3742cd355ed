"""Bandwidth through the mount, beside the file systems below it, in turns.

    .venv/bin/python -m scripts.bench.io [--size 32M ...] [--rounds N] [--json FILE]

- ram: through a mount with a RAM tier only
- tmpfs: the same tmpfs directly (a scratch folder in the tier's own)
- shm: /dev/shm
- nvme: through a mount with an NVMe tier only
- nvme direct: a folder beside that tier, on the same file system
- daemon: through a mount with passthrough=off, where every byte passes the daemon

The phases are write (fresh files), cold (page cache dropped, for targets with a page cache), warm
(read again) and mmap (mapped, copied out, unmapped). The column "transfer" has the time of the
calls that carry bytes; "whole" also has open and close. One call carries --call bytes. Each write
is rehearsed natively right before, so that no target pays for memory that the machine must first
get from its host.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from scripts.bench.measure import Bar, Series, size, size_name, turns
from scripts.bench.mounted import Failed, kvfs, scratch
from scripts.bench.report import Report, note, number
from scripts.bench.transfers import Content, Spent, Target, Work, drop_page_cache

PHASES = ("write", "cold", "warm", "mmap")
MiB = 1 << 20
SCATTER = 2.0  # best round / median round


def settle(found: list[Target], work: Work | None) -> None:
    """Wait until the mounts are quiet; what was written must lie in the tier that is measured."""
    for target in found:
        if target.mounted is None:
            continue
        tiers = target.mounted.settle()["tiers"]
        objects = {name: tier["objects"] for name, tier in tiers.items()}
        if work is not None and objects.get(target.tier, 0) < work.files:
            message = f"{target.name}: {work.files} objects expected in {target.tier}: {objects}"
            raise Failed(message)


@contextlib.contextmanager
def targets(total: int, nvme: Path, ram: int) -> Iterator[list[Target]]:
    """Three mounts and what they are compared with, all gone afterwards."""
    sizes = f"nvme_size={max(4 * total, 1 << 30)}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        disk = stack.enter_context(scratch(nvme))
        shm = stack.enter_context(scratch(Path("/dev/shm")))  # noqa: S108  (what is compared)
        in_ram = stack.enter_context(kvfs(folder / "ram", f"ram={ram}"))
        in_ram.require("passthrough", on=True)
        on_disk = stack.enter_context(kvfs(folder / "nvme", f"ram=0,nvme={disk}/kvfs,{sizes}"))
        on_disk.require("passthrough", on=True)
        daemon = stack.enter_context(kvfs(folder / "daemon", f"ram={ram},passthrough=off"))
        daemon.require("passthrough", on=False)
        tier = Path(in_ram.status()["tiers"]["ram"]["path"])
        tmpfs = stack.enter_context(scratch(tier))
        (disk / "direct").mkdir()
        for mounted in (in_ram, on_disk, daemon):
            (mounted.path / "bench").mkdir()
        yield [
            Target("tmpfs", tmpfs, "tmpfs"),
            Target("ram", in_ram.path / "bench", "tmpfs", mounted=in_ram, tier="ram"),
            Target("shm", shm, "tmpfs"),
            Target(
                "daemon",
                daemon.path / "bench",
                "tmpfs",
                cold=(daemon.path / "bench",),
                mounted=daemon,
                tier="ram",
            ),
            Target("nvme direct", disk / "direct", "nvme direct", cold=(disk / "direct",)),
            Target(
                "nvme",
                on_disk.path / "bench",
                "nvme direct",
                cold=(disk / "kvfs", on_disk.path / "bench"),
                mounted=on_disk,
                tier="nvme",
            ),
        ]


def timed(phase: str, work: Work, target: Target, base: Target, round_: int) -> Spent:
    """One phase on one target."""
    if phase == "write":
        work.rehearse(base)
        return work.write(target, round_)
    if phase == "mmap":
        return work.map(target)
    if phase == "cold":
        drop_page_cache(target.cold)
    return work.read(target)


def measure(found: list[Target], work: Work, count: int) -> None:
    """Fills the targets' rates of one size: (transfer, whole) in bytes a second, one a round."""
    bases = {target.name: target for target in found}
    for target in found:
        target.rates = {phase: [] for phase in PHASES if phase != "cold" or target.cold}
    for round_ in range(count + 1):
        for phase in PHASES:
            settle(found, None if phase == "write" else work)
            for index in turns(len(found), round_):
                target = found[index]
                if phase not in target.rates:
                    continue
                spent = timed(phase, work, target, bases[target.base], round_)
                rates = work.amount / spent.transfer, work.amount / spent.whole
                target.rates[phase] += [rates] if round_ else []  # round 0 warms up
        for target in found:
            work.verify(target, round_)
            work.unlink(target)


def results(found: list[Target], work: Work) -> list[dict[str, Any]]:
    """One row for each target and phase."""

    def series(target: Target, phase: str, column: int) -> Series:
        return Series(tuple(rates[column] for rates in target.rates[phase]))

    named = {target.name: target for target in found}
    rows = []
    for phase in PHASES:
        for target in found:
            if phase not in target.rates:
                continue
            row: dict[str, Any] = {
                "size": work.size,
                "files": work.files,
                "phase": phase,
                "target": target.name,
                "base": target.base if phase in named[target.base].rates else None,
            }
            for column, name in enumerate(("transfer", "whole")):
                own = series(target, phase, column)
                row[f"{name}_GBps"] = {"best": own.best / 1e9, "median": own.median / 1e9}
                row[f"{name}_ratio"] = (
                    own.against(series(named[row["base"]], phase, column)) if row["base"] else None
                )
            rows.append(row)
    return rows


BARS = (
    (Bar("read, mount / tmpfs", 0.95), "warm", "ram", "tmpfs"),
    (Bar("write, mount / tmpfs", 0.90), "write", "ram", "tmpfs"),
    (Bar("read, mount / /dev/shm", 2), "warm", "ram", "shm"),
    (Bar("write, mount / /dev/shm", 4), "write", "ram", "shm"),
    (Bar("warm read, NVMe tier / directly", 0.95), "warm", "nvme", "nvme direct"),
)


def judged(found: list[Target], work: Work) -> list[dict[str, Any]]:
    """The bars on bandwidth of one size, by the best rounds."""
    if work.size < MiB:
        return []
    series = {
        (target.name, phase): Series(tuple(transfer for transfer, _ in rates))
        for target in found
        for phase, rates in target.rates.items()
    }
    rows = []
    for bar, phase, target, base in BARS:
        against = series[target, phase].against(series[base, phase])
        rows.append(bar.judged(against["best"], size_name(work.size), against["median"]))
    return rows


def scattered(found: list[Target]) -> list[str]:
    """Return the targets that were so slow in half of their rounds that another cause is likely."""
    return [
        f"{target.name} {phase}"
        for target in found
        for phase, rates in target.rates.items()
        if Series(tuple(transfer for transfer, _ in rates)).scatter > SCATTER
    ]


def show(report: Report, rows: list[dict[str, Any]], bytes_each: int) -> None:
    """One table for one size."""

    def cells(row: dict[str, Any]) -> list[str]:
        transfer, whole = row["transfer_GBps"], row["whole_GBps"]
        ratio = row["transfer_ratio"] or {"best": None, "median": None}
        return [
            row["phase"],
            row["target"],
            number(transfer["best"]),
            number(transfer["median"]),
            number(ratio["best"]),
            number(ratio["median"]),
            row["base"] or "-",
            number(whole["best"]),
        ]

    report.table(
        f"{size_name(bytes_each)}, {rows[0]['files']} files",
        ["phase", "target", "GB/s best", "median", "ratio best", "paired", "to", "with open+close"],
        [cells(row) for row in rows],
    )


@click.command()
@click.option("--size", "sizes", multiple=True, default=("64K", "1M", "8M", "32M", "64M"))
@click.option("--total", default="256M", show_default=True, help="Bytes of one size on a target.")
@click.option("--rounds", default=5, show_default=True, help="Measured rounds.")
@click.option("--call", "call_", default="1M", show_default=True, help="Bytes of one call.")
@click.option("--ram", help="RAM tier of each mount; default 8 times --total, 1G at least.")
@click.option(
    "--nvme",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=Path("/var/tmp"),  # noqa: S108  (a fresh folder is made in it)
    show_default=True,
    help="Where the NVMe tier's folder is made: a disk, not a tmpfs.",
)
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *,
    sizes: tuple[str, ...],
    total: str,
    rounds: int,
    call_: str,
    ram: str | None,
    nvme: Path,
    seed: int,
    output: Path | None,
) -> None:
    """Bandwidth through the mount, beside what it stands on."""
    try:
        bytes_all, call = size(total), size(call_)
        each = [size(text) for text in sizes]
        tier = size(ram) if ram else max(8 * bytes_all, 1 << 30)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    report = Report(
        "io", seed=seed, rounds=rounds, call=size_name(call), total=size_name(bytes_all)
    )
    rows: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    content = Content(seed, call)
    with targets(max(bytes_all, *each), nvme, tier) as found:
        report.document["status"] = {
            target.name: target.mounted.status() for target in found if target.mounted
        }
        for bytes_each in each:
            work = Work(content, bytes_each, bytes_all)
            measure(found, work, rounds)
            new = results(found, work)
            rows += new
            bars += judged(found, work)
            show(report, new, bytes_each)
            if wild := scattered(found):
                note(f"unsteady: {', '.join(wild)}; the machine does something else as well")
    report.document["results"] = rows
    report.bars(bars)
    report.write(output)


if __name__ == "__main__":
    main()
