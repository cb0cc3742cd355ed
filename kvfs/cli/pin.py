"""`kvfs pin`: what is not dropped to make room, until somebody says otherwise."""

import os
from pathlib import Path

import click

from kvfs.cli import printable
from kvfs.cli.arguments import on_mount
from kvfs.cli.jobs import follow, start
from kvfs.control import request
from kvfs.errors import KvfsError


@click.command
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
@click.option("--off", is_flag=True, help="They may be dropped again.")
def command(paths: tuple[str, ...], *, off: bool) -> None:
    """Keep PATH... from being dropped to make room.

    A top-level directory, or the mount itself, gets the setting pin=on of namespaces: all that is
    and will be in it is never dropped, and stays in memory if it is there. Below that, files are
    pinned one by one, those that are there now; they may leave memory for NVMe.
    """
    places = {path: on_mount(path) for path in paths}  # all of them first: nothing is half done
    spaces = {path: name for path in places if (name := _namespace(path, places[path].mountpoint))}
    for path, name in spaces.items():
        settings = {"pin": "off" if off else "on"}
        request(places[path].mountpoint, "ns_set", name=name, settings=settings)
        click.echo(f"namespace {printable(name)}: pin={settings['pin']}")
    files = [path for path in paths if path not in spaces]
    if not files:
        return
    found = follow(start(files, "pin", on=not off), "unpinning" if off else "pinning")
    done = "unpinned" if off else "pinned"
    click.echo(f"{found['changed']} of {found['files']} files are newly {done}")
    if found["refused"]:
        why = ", ".join(f"{why} ({count})" for why, count in found["why"].items())
        raise KvfsError(f"{found['refused']} of {found['files']} files are not {done}: {why}")


def _namespace(path: str, mountpoint: Path) -> str:
    """The namespace whose directory it is, "." for the mount's own; "" if it is none."""
    real = Path(os.path.realpath(path))
    if not real.is_dir():
        return ""
    if real == mountpoint:
        return "."
    return real.name if real.parent == mountpoint else ""
