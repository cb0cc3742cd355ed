"""The mounts of a Debian package at its upgrade and removal: `python3 -m kvfs.cli.package`.

    upgraded DIRECTORY   this version serves the mounts whose daemons run from DIRECTORY
    removing DIRECTORY   unmount them

Contract: a mount with another program's daemon is left alone. The exit code is 1 if a mount is not
upgraded or not unmounted; a line on stderr names it, with the cure. The maintainer scripts in
mount/debian call this; it is no command of users.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from kvfs.cli import kvfs_mounts, printable
from kvfs.control.client import request_within
from kvfs.errors import ControlError

PATIENCE = 5.0  # s for the answer of a daemon
_COMMANDS = {"upgraded": "upgrade", "removing": "umount"}
_USAGE_ERROR = 2


def main() -> None:
    """Run the command for each mount of the directory."""
    words = sys.argv[1:]
    if len(words) != 2 or words[0] not in _COMMANDS:  # noqa: PLR2004 (the usage)
        click.echo("usage: python3 -m kvfs.cli.package upgraded|removing DIRECTORY", err=True)
        sys.exit(_USAGE_ERROR)
    command, failed = _COMMANDS[words[0]], False
    for mountpoint in _served_from(Path(words[1])):
        done = subprocess.run(
            [sys.executable, "-m", "kvfs", command, "--", mountpoint], check=False
        )
        if done.returncode:
            failed = True
            again = f"kvfs {command} {printable(mountpoint)}"
            click.echo(f"kvfs: {printable(mountpoint)} is as before; then: {again}", err=True)
    sys.exit(failed)


def _served_from(directory: Path) -> Iterator[str]:
    """The mount points whose daemons run a program below the directory."""
    for mountpoint in kvfs_mounts():
        try:
            daemon = request_within(Path(mountpoint), PATIENCE, "status")["daemon_pid"]
            words = Path(f"/proc/{daemon}/cmdline").read_bytes().split(b"\0")
        except (ControlError, FileNotFoundError) as error:
            # A dead daemon, or one that ends now, is nobody's.
            click.echo(f"kvfs: {printable(mountpoint)} is left alone: {error}", err=True)
            continue
        if Path(words[0].decode(errors="surrogateescape")).is_relative_to(directory):
            yield mountpoint


if __name__ == "__main__":
    main()
