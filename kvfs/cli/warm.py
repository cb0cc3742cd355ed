"""`kvfs warm`: bring files and trees to the fastest tier that takes them, before they are used."""

import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvfs.cli import human
from kvfs.cli.arguments import on_mount
from kvfs.control import request
from kvfs.errors import KvfsError

POLL_S = 0.2
AT_ONCE = 1000  # paths of one job; a request has room for 3000


class _Job(NamedTuple):
    mountpoint: Path
    number: int


@click.command
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
@click.option("--no-wait", is_flag=True, help="Return when it has begun.")
def command(paths: tuple[str, ...], *, no_wait: bool) -> None:
    """Bring files and all below directories PATH... to their fastest tier.

    What is used meanwhile, or was lately, is not dropped for it. Ctrl-C ends what is not begun.
    """
    wanted: dict[Path, list[int]] = {}
    for path in paths:
        mountpoint, ino = on_mount(path)
        wanted.setdefault(mountpoint, []).append(ino)
    jobs = [
        _Job(mountpoint, request(mountpoint, "warm", inos=some)["job"])
        for mountpoint, inos in wanted.items()
        for some in _parts(inos)
    ]
    if no_wait:
        return
    try:
        found = _wait(jobs)
    except KeyboardInterrupt:
        found = _look(jobs, cancel=True)
        click.echo(f"ended: {_summary(found)}; what was begun goes on", err=True)
        raise click.exceptions.Exit(130) from None
    click.echo(_summary(found))
    if found["failed"]:
        raise KvfsError(f"{found['failed']} files are not warm: {_reasons(found)}")


def _parts(inos: list[int]) -> Iterator[list[int]]:
    left = iter(inos)
    while some := list(islice(left, AT_ONCE)):
        yield some


def _look(jobs: list[_Job], *, cancel: bool = False) -> dict[str, Any]:
    """How far all of them are together."""
    found = [request(job.mountpoint, "warmed", job=job.number, cancel=cancel) for job in jobs]
    numbers = ("files", "bytes", "done", "done_bytes", "failed")
    why: Counter[str] = Counter()
    for one in found:
        why.update(one["why"])
    return {
        **{name: sum(one[name] for one in found) for name in numbers},
        "listed": all(one["listed"] for one in found),
        "over": all(one["over"] for one in found),
        "why": why,
    }


def _wait(jobs: list[_Job]) -> dict[str, Any]:
    """Poll until all is over; a bar shows how far it is."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("warming"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)
        while not (found := _look(jobs))["over"]:
            failed = f", {found['failed']} failed" if found["failed"] else ""
            bar.update(
                task,
                total=found["bytes"] if found["listed"] else None,
                completed=found["done_bytes"],
                description=f"{found['done']} of {found['files']} files{failed}",
            )
            time.sleep(POLL_S)
    return found


def _summary(found: dict[str, Any]) -> str:
    files = f"{found['done']} of {found['files']} files"
    return f"{files} are warm, {human(found['done_bytes'])} of {human(found['bytes'])}"


def _reasons(found: dict[str, Any]) -> str:
    return ", ".join(f"{why} ({count})" for why, count in found["why"].most_common(3))
