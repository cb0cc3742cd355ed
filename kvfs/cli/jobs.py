"""Jobs of a daemon about trees, begun by one request and looked at by others, with a bar.

Not for what a job does, nor for the bar of `warm`, which knows before how much is to come.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import click

from kvfs.cli.arguments import on_mount
from kvfs.cli.screen import counting
from kvfs.control import request
from kvfs.errors import KvfsError

POLL_S = 0.1
AT_ONCE = 1000  # paths of one job; a request has room for 3000

Started = list[tuple[Path, int]]


def start(paths: Iterable[str], verb: str, **arguments: object) -> Started:
    """Return the jobs for these files and directories. Raises ConfigError, ControlError."""
    wanted: dict[Path, list[int]] = {}
    for path in paths:
        place = on_mount(path)
        wanted.setdefault(place.mountpoint, []).append(place.ino)
    return [
        (mountpoint, request(mountpoint, verb, inos=some, **arguments)["job"])
        for mountpoint, inos in wanted.items()
        for some in _parts(inos)
    ]


def _parts(inos: list[int]) -> Iterator[list[int]]:
    left = iter(inos)
    while some := list(islice(left, AT_ONCE)):
        yield some


def follow(jobs: Started, what: str) -> dict[str, Any]:
    """Return what they found together, once all are over. Raises KvfsError; Ctrl-C ends them."""
    try:
        with counting() as bar:
            task = bar.add_task(what, total=None)
            while not (found := look(jobs, "swept"))["over"]:
                bar.update(task, completed=found["files"])
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        look(jobs, "swept", cancel=True)
        click.echo("ended; what was begun goes on", err=True)
        raise click.exceptions.Exit(130) from None
    if found["problem"]:
        raise KvfsError(f"{what} ended after {found['files']} files: {found['problem']}")
    return found


def look(jobs: Started, verb: str, *, cancel: bool = False) -> dict[str, Any]:
    """Ask each job by `verb` how far it is, and return the sum."""
    found = [request(mountpoint, verb, job=job, cancel=cancel) for mountpoint, job in jobs]
    merged = found[0]
    for one in found[1:]:
        merged = _merge(merged, one)
    return merged


def _merge(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers are added, also those within; what is over is so if both are."""
    merged = dict(one)
    for name, value in other.items():
        if name not in merged:
            merged[name] = value
        elif isinstance(value, bool):
            merged[name] = merged[name] and value
        elif isinstance(value, int):
            merged[name] += value
        elif isinstance(value, dict):
            merged[name] = _merge(merged[name], value)
        else:
            merged[name] = merged[name] or value
    return merged
