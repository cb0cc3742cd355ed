"""`kvfs import`: give what the bucket has names on this mount, before anybody asks for them."""

import os
import time
from pathlib import Path

import click

from kvfs import runtime
from kvfs.cli import mountpoint_argument
from kvfs.cli.screen import progress
from kvfs.control import request
from kvfs.errors import ConfigError, ControlError

POLL_S = 0.2


@click.command
@mountpoint_argument
@click.argument("paths", metavar="[PATH]...", nargs=-1)
def command(mountpoint: Path, paths: tuple[str, ...]) -> None:
    """Have the kvfs at MOUNTPOINT know all that is in its bucket, or below some PATHs of it.

    A PATH is below MOUNTPOINT, or relative to it. What is known already is passed over.
    """
    runtime.kvfs_mount(mountpoint)
    request(mountpoint, "import", paths=[_below(mountpoint, path) for path in paths])
    with progress() as bar:
        task = bar.add_task("names", total=None)
        while not (found := request(mountpoint, "imported"))["ended"]:
            bar.update(task, completed=found["names"] + found["known"])
            time.sleep(POLL_S)
    refused = sum(found["refused"].values())
    click.echo(
        f"{found['place']}: {found['names']} names came, {found['known']} were known, "
        f"{refused} were refused"
    )
    for why, count in found["refused"].items():
        click.echo(f"  {count}: {why}")
    if found["missing"]:
        missing = ", ".join(found["missing"])
        raise ControlError(f"{missing}: no such path on {mountpoint}, nor in {found['place']}")
    if found["failed"]:
        raise ControlError(f"the import ended: {found['failed']}; asked for again, it goes on")


def _below(mountpoint: Path, path: str) -> str:
    whole = os.path.normpath(mountpoint / path)
    below = os.path.relpath(whole, mountpoint)
    if below.startswith(".."):
        raise ConfigError(f"path {path}: expected one below {mountpoint}")
    return "" if below == "." else below
