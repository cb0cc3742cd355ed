"""The mounts of a Debian package at its upgrade and removal: `python3 -m kvfs.cli.package`.

    upgraded DIRECTORY   this version serves the mounts whose daemons run from DIRECTORY
    removing DIRECTORY   unmount them, and those whose keepers run from DIRECTORY

Contract: a mount with another program's daemon is left alone. The exit code is 1 if a mount is not
upgraded or not unmounted; a line on stderr names it, with the cure. The maintainer scripts in
mount/debian call this; it is no command of users.
"""

import os
import subprocess
import sys
from collections.abc import Collection, Iterator
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
    parts = ["daemon_pid"] if command == "upgrade" else ["daemon_pid", "keeper_pid"]
    for mountpoint in _served_from(Path(words[1]), parts):
        done = subprocess.run(
            [sys.executable, "-m", "kvfs", command, "--", mountpoint],
            env=os.environ | {"TERM": "dumb"},  # apt keeps the output in a log: no moving bars
            check=False,
        )
        if done.returncode:
            failed = True
            named = printable(mountpoint)
            again = f"kvfs {command} {named}"
            click.echo(f"kvfs: {named} is as before; end the cause, then run: {again}", err=True)
    sys.exit(failed)


def _served_from(directory: Path, parts: Collection[str]) -> Iterator[str]:
    """The mount points of which one of these processes runs a program below the directory."""
    for mountpoint in kvfs_mounts():
        try:
            status = request_within(Path(mountpoint), PATIENCE, "status")
            programs = [_program(status[part]) for part in parts if status[part]]
        except (ControlError, FileNotFoundError) as error:
            # A dead daemon, or one that ends now, is nobody's.
            click.echo(f"kvfs: {printable(mountpoint)} is left alone: {error}", err=True)
            continue
        if any(program.is_relative_to(directory) for program in programs):
            yield mountpoint


def _program(process: int) -> Path:
    """The program of a process. Raises FileNotFoundError if it has ended."""
    words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    return Path(os.fsdecode(words[0]))


if __name__ == "__main__":
    main()
