"""`kvfs set` and `kvfs upgrade`: other options for a mount, or another kvfs, while it is used.

Contract: all options of a command change, or none. For an upgrade the keeper starts the new daemon
and lets the old one finish its operations. If the new daemon does not serve, the old one continues.
Not for options that only a mount can change.
"""

import json
import sys
from pathlib import Path

import click

from kvfs import __version__, own_files, runtime
from kvfs.cli import assignments, mounted_argument, mountpoint_argument, printable
from kvfs.config import Config, parse_hot
from kvfs.control import request, request_keeper
from kvfs.errors import ConfigError
from kvfs.parsing import rows
from kvfs.templates import Templates

EXPECTED, CURE = "the options of this mount", "unmount, and mount with this kvfs"
PATIENCE = 180.0  # s: the keeper's own bounds come first


@click.command
@mountpoint_argument
@click.argument("settings", nargs=-1, required=True, metavar="NAME=VALUE...")
def set_command(mountpoint: Path, settings: tuple[str, ...]) -> None:
    """Change options of a mount while it is mounted.

    The new values hold until the unmount. `kvfs mount --help` marks the options that can change.
    """
    wanted = assignments(settings, "option")
    for name, text in wanted.items():
        parse_hot(name, text)
    runtime.kvfs_mount(mountpoint)
    request(mountpoint, "set", **wanted)


def _options_help() -> str:
    alone = ", ".join(row.name for row in rows(Config) if row.upgrade and not row.hot)
    hot = ", ".join(row.name for row in rows(Config) if row.hot)
    return f"Options that can change with it: {alone}; and what kvfs set can change: {hot}."


@click.command(epilog=_options_help())
@mounted_argument
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="OPTION=VALUE,...",
    help="Options to change at the same time.",
)
def upgrade_command(mountpoint: Path, options: tuple[str, ...]) -> None:
    """Serve a mount with this version, without an unmount.

    Programs on the mount wait for less than a second. Some options can change at the same time.
    """
    mount = runtime.kvfs_mount(mountpoint)
    path = runtime.runtime_dir(mountpoint) / "config"
    text = own_files.read(path, EXPECTED, CURE)
    if text is None:
        why = f"there is no {path}"
        raise ConfigError(
            f"{mountpoint} has no keeper here to upgrade it ({why}): run this as the mounting user "
            f"({mount.owner}) in the same container, or unmount, and mount with this kvfs"
        )
    before = Config.from_json(text)
    if before.mountpoint != mountpoint:
        raise own_files.wrong(path, text, EXPECTED, CURE)
    config = before.upgraded(",".join(options))
    if config.namespaces is not None:  # the new daemon would go on without them
        Templates.read(config.namespaces, config.tiers)
    done = request_keeper(
        mountpoint,
        "upgrade",
        patience=PATIENCE,
        command=[sys.executable, "-m", "kvfs.daemon"],
        config=json.loads(config.to_json()),
    )
    click.echo(
        f"{printable(mountpoint)}: kvfs {done['from']} -> {done['to']}, "
        f"{done['seconds']:.2f} s (this command: {__version__})"
    )
