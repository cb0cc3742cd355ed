"""`kvfs gc`: find bucket objects that no node references, and delete them.

This process asks the bucket, with the credentials that it finds. It asks the daemon of a mount only
for the content of that mount.
"""

import json
import sys
from pathlib import Path
from typing import Any

import click

from kvfs import runtime
from kvfs.cli import Refusal, completion, human, is_mount, json_option
from kvfs.cli.screen import progress
from kvfs.config import OPTIONS
from kvfs.errors import ConfigError, InUseError
from kvfs.parsing import DURATION, read_value

GARBAGE = {
    "version": "of versions of namespaces that no node uses any more",
    "namespace": "of namespaces that no node uses any more",
    "aside": "left over from an exchange of two names",
    "name": "names of objects that do not exist",
    "probe": "left by mounts that tested the store",
    "upload": "uploads that were not completed",
}
WITHHELD = {
    "recent": "garbage younger than --older-than, or in a namespace with younger objects",
    "aside": "of exchanged names: a node without a sign of life since then may use them",
}
KEPT = {
    "foreign": "not of kvfs: kvfs never changes them",
    "nameless": "at a hash whose name is lost: a program that knows the name finds them",
}

Answer = dict[str, Any]


def _duration(_ctx: click.Context, param: click.Parameter, value: str) -> int:
    found: int = read_value("option", f"--{param.name}".replace("_", "-"), value, DURATION)
    return found


def _target(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Path | None:
    if value == "":  # an unset variable in a script; it would mean the current directory
        raise click.BadParameter("the target is empty: expected a path")
    return None if value is None else runtime.canonical(value)


@click.command
@click.argument(
    "target",
    required=False,
    type=click.UNPROCESSED,
    callback=_target,
    shell_complete=completion.directories,
)
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="s3=...,...",
    help="Bucket, as for a mount: s3, s3_endpoint, s3_region, s3_profile.",
    shell_complete=completion.options({name: OPTIONS[name] for name in completion.BUCKET}),
)
@click.option(
    "--delete",
    is_flag=True,
    help="Delete the garbage. Without --delete the command changes nothing.",
)
@click.option(
    "--older-than",
    default="1d",
    show_default=True,
    callback=_duration,
    metavar="DURATION",
    help="Keep objects that are younger, by the clock of the store.",
)
@click.option(
    "--node-age",
    default="30d",
    show_default=True,
    callback=_duration,
    metavar="DURATION",
    help="Treat a node as stale after this time without a sign of life.",
)
@click.option(
    "--forget-node",
    "forget",
    multiple=True,
    metavar="IDENTITY",
    help="Treat objects that only this stale node references as garbage (repeatable).",
)
@click.option(
    "--all-recorded",
    is_flag=True,
    help=(
        "Also delete objects that no node record explains. Only if every kvfs on this "
        "prefix has a record."
    ),
)
@json_option
def command(
    target: Path | None,
    options: tuple[str, ...],
    *,
    delete: bool,
    older_than: int,
    node_age: int,
    forget: tuple[str, ...],
    all_recorded: bool,
    as_json: bool,
) -> None:
    """Find bucket objects that no node references.

    TARGET is a mount point, or the NVMe directory of an unmounted kvfs. Without TARGET, -o names
    the bucket. --delete deletes what was found.
    """
    from kvfs import gc  # noqa: PLC0415 (it needs the layers below the daemon)

    mounted = target is not None and is_mount(target)
    bar = progress()
    task = bar.add_task("", total=None)

    def tell(what: str, done: int) -> None:
        bar.update(task, description=what, completed=done)

    try:
        with bar:
            found = gc.run(
                *(target, ",".join(options), tell),
                mounted=mounted,
                older_than=older_than,
                node_age=node_age,
                forget=forget,
                delete=delete,
                all_recorded=all_recorded,
            )
    except InUseError as error:
        raise ConfigError(
            f"{target} is in use ({error.holder}): give its mount point instead"
        ) from error
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show(found)
    if found["failures"]:
        why = found["failed"][0]
        if as_json:
            sys.exit(1)
        raise Refusal(f"{found['failures']} objects are not deleted: {why}; run kvfs gc again")


def _show(found: Answer) -> None:
    listed = found["listed"]
    click.echo(
        f"{found['place']}: {listed['objects']} objects ({human(listed['bytes'])}), "
        f"{len(found['nodes'])} nodes"
    )
    for node in found["nodes"]:
        click.echo(_node(node))
    for identity, why in found["unread"].items():
        click.echo(f"node {identity}: {why}")
    for space in found["namespaces"]:
        told = [_amount(space)]
        told += ["written to recently"] * space["recent"]
        told += ["no node record explains it"] * (not space["explained"])
        click.echo(f"{space['name']}: no node uses it: {', '.join(told)}")
    for what, meanings in (("garbage", GARBAGE), ("withheld", WITHHELD), ("kept", KEPT)):
        for kind, tally in found[what].items():
            if kind in meanings:
                click.echo(f"{what}: {_amount(tally)} {meanings[kind]}")
    for key in found["examples"]:
        click.echo(f"  {key if key.isprintable() else ascii(key)}")
    _sum_up(found)


def _node(node: Answer) -> str:
    told = f"node {node['identity']} ({ascii(node['host'])[1:-1]}:"
    told += f"{ascii(node['mountpoint'])[1:-1]}), seen {_age(node['age_s'])} ago"
    if node["namespaces"]:
        told += f", has {', '.join(node['namespaces'])}"
    if node["forgotten"]:
        told += "; forgotten"
    elif node["stale"]:
        told += "; stale: --forget-node if it is gone for good"
    return told


def _age(seconds: float) -> str:
    """Return it in the unit that tells most with a small number: 3 d, 47 h, 5 m."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _sum_up(found: Answer) -> None:
    objects = sum(tally["objects"] for tally in found["garbage"].values())
    size = sum(tally["bytes"] for tally in found["garbage"].values())
    if found["delete"]:
        click.echo(f"deleted: {_amount(found['deleted'])}")
    elif objects:
        click.echo(f"{objects} objects ({human(size)}) are garbage: --delete deletes them")
    else:
        click.echo("there is no garbage")


def _amount(tally: Answer) -> str:
    return f"{tally['objects']} ({human(tally['bytes'])})"
