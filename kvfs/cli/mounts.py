"""`kvfs mounts`: all kvfs mounts of this machine that are visible from here."""

from pathlib import Path
from typing import Any

import click

from kvfs.cli import give, human, json_option, kvfs_mounts, printable
from kvfs.cli.detached import detached
from kvfs.cli.screen import duration, screen, table
from kvfs.control.client import request_within
from kvfs.errors import KvfsError
from kvfs.rates import reserved_of

PATIENCE = 2.0  # s for each daemon: one that hangs must not hide the others


@click.command
@json_option
def command(*, as_json: bool) -> None:
    """List all mounts of kvfs, and what each daemon answers.

    A detached mount is listed as long as its daemon serves open files. A dead mount has no daemon
    and no keeper: unmount it.
    """
    found = [_about(path) for path in kvfs_mounts()]
    found += [_about(str(one.mountpoint), str(one.refusal())) for one in detached()]
    give(found, _show, as_json=as_json)


def _about(path: str, detached: str = "") -> dict[str, Any]:
    """Return the answer of a daemon. detached: why it serves a mount that is not there any more."""
    state = {"state": "detached" if detached else "mounted", "why": detached}
    try:
        status = request_within(Path(path), PATIENCE, "status")
    except KvfsError as error:
        if isinstance(
            error.__cause__, ConnectionRefusedError
        ):  # its socket is there, and no process
            state["state"] = "dead"
        return {"mountpoint": path, **state, "problem": str(error)}
    return {
        "mountpoint": path,
        **state,
        "problem": "",
        "version": status["version"],
        "daemon_pid": status["daemon_pid"],
        "uptime_s": status["uptime_s"],
        "objects": status["objects"],
        "tiers": {
            name: {
                "used_bytes": tier["used_bytes"],
                "reserved_bytes": reserved_of(tier),
                "state": tier["state"],
            }
            for name, tier in status["tiers"].items()
        },
    }


def _used(tier: dict[str, Any]) -> str:
    reserved = tier["reserved_bytes"]
    return human(tier["used_bytes"]) + (f" + {human(reserved)} reserved" if reserved else "")


def _row(one: dict[str, Any]) -> list[str]:
    first = [printable(one["mountpoint"]), one["state"]]
    if one["problem"]:
        return [*first, *["-"] * 5]
    return [
        *(*first, str(one["daemon_pid"]), one["version"]),
        *(duration(one["uptime_s"]), str(one["objects"])),
        ", ".join(f"{name} {_used(tier)}" for name, tier in one["tiers"].items()),
    ]


def _show(found: list[dict[str, Any]]) -> None:
    if not found:
        click.echo("no kvfs is mounted")
        return
    columns = ("mount point", "state", "daemon", "version", "up", "objects", "used")
    screen().print(table(columns, map(_row, found), left=("mount point", "state", "used")))
    for one in found:
        if one["why"]:
            click.echo(printable(one["why"]))
        if one["problem"]:
            click.echo(f"{printable(one['mountpoint'])}: {printable(one['problem'])}")
