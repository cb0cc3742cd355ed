"""`kvfs warm`: bring files and trees to the fastest tier that takes them, before they are used."""

import time
from collections import Counter
from typing import Any

import click

from kvfs.cli import human
from kvfs.cli.jobs import Started, look, start
from kvfs.cli.screen import moving
from kvfs.errors import KvfsError

POLL_S = 0.2


@click.command
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
@click.option("--no-wait", is_flag=True, help="Return when it has begun.")
def command(paths: tuple[str, ...], *, no_wait: bool) -> None:
    """Bring files and all below directories PATH... to their fastest tier.

    What is used meanwhile, or was lately, is not dropped for it. Ctrl-C ends what is not begun.
    """
    jobs = start(paths, "warm")
    if no_wait:
        return
    try:
        found = _wait(jobs)
    except KeyboardInterrupt:
        found = look(jobs, "warmed", cancel=True)
        click.echo(f"ended: {_summary(found)}; what was begun goes on", err=True)
        raise click.exceptions.Exit(130) from None
    click.echo(_summary(found))
    if found["failed"]:
        raise KvfsError(f"{found['failed']} files are not warm: {_reasons(found)}")


def _wait(jobs: Started) -> dict[str, Any]:
    """Poll until all is over; a bar shows how far it is."""
    with moving("warming") as bar:
        task = bar.add_task("", total=None)
        while not (found := look(jobs, "warmed"))["over"]:
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
    return ", ".join(f"{why} ({count})" for why, count in Counter(found["why"]).most_common(3))
