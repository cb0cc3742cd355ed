"""`kvfs set`: change options of a mounted kvfs, all of them or none."""

from pathlib import Path

import click

from kvfs import runtime
from kvfs.cli import mountpoint_argument
from kvfs.cli.arguments import assignments
from kvfs.config import parse_hot
from kvfs.control import request


@click.command
@mountpoint_argument
@click.argument("settings", nargs=-1, required=True, metavar="NAME=VALUE...")
def command(mountpoint: Path, settings: tuple[str, ...]) -> None:
    """Change options of the kvfs at MOUNTPOINT while it is mounted.

    They hold until it is unmounted; `kvfs mount --help` marks those that can change.
    """
    wanted = assignments(settings, "option")
    for name, text in wanted.items():
        parse_hot(name, text)
    runtime.kvfs_mount(mountpoint)
    request(mountpoint, "set", **wanted)
