"""Long work of a daemon: `kvfs evict`, `warm`, `pin`, `import` and `flush`, with its progress.

Contract: one request begins the work, further requests ask for its progress, and a bar shows it.
The jobs of evict, warm, pin and du have numbers in each daemon. Ctrl-C cancels all that they have
not begun; the exit code is then 130. Not for the work itself, nor for the table of `kvfs du`.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from kvfs.cli import (
    PathOnMount,
    completion,
    give,
    human,
    json_option,
    kvfs_mount,
    mounted_argument,
    mountpoint_argument,
    on_mount,
    printable,
)
from kvfs.cli.screen import counting, moving, progress
from kvfs.control import request
from kvfs.errors import ConfigError, ControlError, KvfsError

POLL_S = 0.1
AT_ONCE = 1000  # paths of one job; a request has room for 3000
STALLED_S = 120.0  # the daemon pauses for up to a minute between two attempts at a bucket

JobProgress = dict[str, Any]


def polled(ask: Callable[[], JobProgress], over: str = "ended") -> Iterator[JobProgress]:
    """Yield the progress of the work at intervals; the last answer says that it is over."""
    while not (found := ask())[over]:
        yield found
        time.sleep(POLL_S)
    yield found


class Jobs:
    """The jobs of one command, in the daemons that have its paths; `asked` asks for progress."""

    def __init__(
        self, paths: Iterable[str], verb: str, asked: str = "swept", **how: object
    ) -> None:
        """Find the daemons of these files and directories. Raises ConfigError, ControlError."""
        self.verb = verb
        self.asked = asked
        self.begun: list[tuple[Path, int]] = []
        self._how = how
        self._wanted: dict[Path, list[int]] = {}
        for path in paths:
            place = on_mount(path)
            self._wanted.setdefault(place.mountpoint, []).append(place.ino)

    def begin(self) -> None:
        """Begin all jobs. Raises ControlError."""
        for mountpoint, inos in self._wanted.items():
            left = iter(inos)
            while some := list(islice(left, AT_ONCE)):
                with _ctrl_c_waits():  # each job that a daemon began can be cancelled
                    job = request(mountpoint, self.verb, inos=some, **self._how)["job"]
                    self.begun.append((mountpoint, job))

    def look(self, *, cancel: bool = False) -> JobProgress:
        """Return the progress of all jobs, as a sum."""
        first, *others = (
            request(mountpoint, self.asked, job=job, cancel=cancel)
            for mountpoint, job in self.begun
        )
        for one in others:
            first = _merge(first, one)
        return first

    def follow(
        self,
        bar: Progress,
        show: Callable[[JobProgress], Mapping[str, Any]],
        told: Callable[..., str],
    ) -> JobProgress:
        """Begin the jobs, and return the result once all are over.

        Ctrl-C ends them and prints `told`'s text.
        """
        try:
            self.begin()
            with bar:
                task = bar.add_task("", total=None)
                for found in polled(self.look, "over"):
                    bar.update(task, **show(found))
        except KeyboardInterrupt:
            if not self.begun:
                raise
            found = self.look(cancel=True)
            if said := told(found):
                click.echo(f"stopped: {said}; transfers that have begun go on", err=True)
            else:
                click.echo("stopped; transfers that have begun go on", err=True)
            raise click.exceptions.Exit(130) from None
        return found

    def counted(self, what: str) -> JobProgress:
        """Follow the jobs with a bar that counts files. KvfsError: they could not see all."""
        found = self.follow(
            counting(), lambda one: {"description": what, "completed": one["files"]}, lambda _: ""
        )
        if found["problem"]:
            raise KvfsError(f"{what} stopped after {found['files']} files: {found['problem']}")
        return found


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Hold SIGINT back until the block has ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _merge(one: Mapping[str, Any], other: Mapping[str, Any]) -> JobProgress:
    """Add the numbers of two answers, also nested ones; the sum is over if both are."""
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


def _reasons(why: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{reason} ({count})" for reason, count in why)


paths_argument = click.argument(
    "paths", metavar="PATH...", nargs=-1, required=True, type=PathOnMount(readable=False)
)


@click.command
@paths_argument
@click.option(
    "--to",
    type=click.Choice(["nvme", "s3"]),
    help=(
        "Fastest tier that may keep a copy: nvme frees RAM (the default with an NVMe "
        "tier), s3 frees RAM and NVMe."
    ),
)
@click.option(
    "--drop",
    is_flag=True,
    help="Free all local tiers, and drop objects that only this machine has.",
)
@click.option("--dry-run", is_flag=True, help="Only list the objects that would be evicted.")
@json_option
def evict_command(
    paths: tuple[str, ...], *, to: str | None, drop: bool, dry_run: bool, as_json: bool
) -> None:
    """Evict the files below PATH... from the faster tiers now.

    kvfs copies an object to NVMe first if no other tier has it, or refuses. Nothing is lost without
    --drop. Objects that are open, pinned or of eviction=never stay. The exit code is 1 if kvfs
    refused any object.
    """
    if drop and to == "nvme":
        raise ConfigError("--to nvme loses nothing: give --drop with --to s3, or alone")
    jobs = Jobs(paths, "evict", to=to or "", drop=drop, dry=dry_run)
    found = jobs.counted("evicting")
    give(found, lambda _: click.echo(_evicted(found, drop=drop, dry=dry_run)), as_json=as_json)
    if found["refused"]:
        why = _reasons(Counter(found["why"]).most_common())
        raise KvfsError(f"{found['refused']} of {found['files']} files stay: {why}")


def _evicted(found: JobProgress, *, drop: bool, dry: bool) -> str:
    files, dropped, to = found["files"], found["dropped"], found["to"]
    went, lost, free = ("would go", "would be", "would be") if dry else ("have gone", "are", "are")
    parts = [f"{found['evicted']} of {files} files {went} to {to}"]
    if drop and found["evicted"]:
        parts.append(f"{dropped} {lost} dropped")
    elif drop:  # perhaps the mount has no bucket
        parts = [f"{dropped} of {files} files {lost} dropped"]
    where = "in memory" if to == "nvme" else "in local tiers"
    if found["already"]:
        tiers = "ram" if to == "nvme" else "local tiers"
        parts.append(f"{found['already']} of {files} files are not in {tiers} already")
    return f"{', '.join(parts)}; {human(found['freed_bytes'])} {free} free {where}"


@click.command
@paths_argument
@click.option("--no-wait", is_flag=True, help="Return when the job has started.")
def warm_command(paths: tuple[str, ...], *, no_wait: bool) -> None:
    """Bring the files below PATH... to their fastest tier.

    kvfs evicts no recently used object for them. Ctrl-C cancels the files that have not started.
    """
    jobs = Jobs(paths, "warm", "warmed")
    if no_wait:
        jobs.begin()
        return

    def show(found: JobProgress) -> JobProgress:
        failed = f", {found['failed']} failed" if found["failed"] else ""
        return {
            "total": found["bytes"] if found["listed"] else None,
            "completed": found["done_bytes"],
            "description": f"{found['done']} of {found['files']} files{failed}",
        }

    found = jobs.follow(moving("warming"), show, _warmed)
    click.echo(_warmed(found))
    if found["failed"]:
        why = _reasons(Counter(found["why"]).most_common(3))
        raise KvfsError(f"{found['failed']} files are not warm: {why}")


def _warmed(found: JobProgress) -> str:
    files = f"{found['done']} of {found['files']} files"
    warm = f"{files} are warm, {human(found['done_bytes'])} of {human(found['bytes'])}"
    if not found.get("no_room"):  # an older daemon does not say
        return warm
    stay = f"{found['no_room']} stay on NVMe, because RAM has no room that is free or long unused"
    return f"{warm}: {found['in_ram']} are in RAM, {stay}"


@click.command
@paths_argument
@click.option("--off", is_flag=True, help="Remove the pin.")
def pin_command(paths: tuple[str, ...], *, off: bool) -> None:
    """Protect PATH... from being dropped to make room.

    A namespace, or the mount itself, gets the setting pin=on: kvfs drops none of its objects, now
    or later, and keeps those in RAM that are there. Below a namespace, kvfs pins the existing files
    one by one; a pinned file may leave RAM for NVMe.
    """
    places = {path: on_mount(path) for path in paths}  # resolve all first: nothing is half done
    spaces = {path: name for path in places if (name := _namespace(path, places[path].mountpoint))}
    for path, name in spaces.items():
        settings = {"pin": "off" if off else "on"}
        request(places[path].mountpoint, "ns_set", name=name, settings=settings)
        click.echo(f"namespace {printable(name)}: pin={settings['pin']}")
    files = [path for path in paths if path not in spaces]
    if not files:
        return
    found = Jobs(files, "pin", on=not off).counted("unpinning" if off else "pinning")
    done = "unpinned" if off else "pinned"
    click.echo(f"{found['changed']} of {found['files']} files are newly {done}")
    if found["refused"]:
        why = _reasons(found["why"].items())
        raise KvfsError(f"{found['refused']} of {found['files']} files are not {done}: {why}")


def _namespace(path: str, mountpoint: Path) -> str:
    """Return the namespace with this directory: "." for the mount's own, "" for none."""
    real = Path(os.path.realpath(path))
    if not real.is_dir():
        return ""
    if real == mountpoint:
        return "."
    return real.name if real.parent == mountpoint else ""


@click.command
@mountpoint_argument
@click.argument("paths", metavar="[PATH]...", nargs=-1, shell_complete=completion.files)
def import_command(mountpoint: Path, paths: tuple[str, ...]) -> None:
    """Add the objects of the bucket to the catalog.

    A PATH below MOUNTPOINT, or relative to it, limits the command. Known objects are skipped.
    """
    kvfs_mount(mountpoint)
    request(mountpoint, "import", paths=[_below(mountpoint, path) for path in paths])
    with progress() as bar:
        task = bar.add_task("names", total=None)
        for found in polled(lambda: request(mountpoint, "imported")):
            bar.update(task, completed=found["names"] + found["known"])
    refused = sum(found["refused"].values())
    click.echo(
        f"{found['place']}: {found['names']} names are new, {found['known']} were known, "
        f"{refused} were refused"
    )
    for why, count in found["refused"].items():
        click.echo(f"  {count}: {why}")
    if found["missing"]:
        missing = ", ".join(found["missing"])
        if len(found["missing"]) < len(paths):  # the others are imported
            raise ControlError(f"{missing}: no such path on {mountpoint} or in {found['place']}")
        raise ConfigError(
            f"{missing}: no such path on {mountpoint} or in {found['place']}: nothing is imported"
        )
    if found["failed"]:
        raise ControlError(f"the import stopped: {found['failed']}; run it again to go on")


def _below(mountpoint: Path, path: str) -> str:
    whole = os.path.normpath(mountpoint / path)
    below = os.path.relpath(whole, mountpoint)
    if below.startswith(".."):
        raise ConfigError(f"path {path}: expected a path below {mountpoint}")
    return "" if below == "." else below


@click.command
@mounted_argument
@click.option("--wait", is_flag=True, help="Return when the bucket has all objects.")
def flush_command(mountpoint: Path, *, wait: bool) -> None:
    """Upload at once all objects that the bucket lacks."""
    kvfs_mount(mountpoint)
    found = request(mountpoint, "flush")
    if not wait:
        click.echo(
            f"{found['place']}: {found['objects_left']} objects "
            f"({human(found['bytes_left'])}) are to be uploaded"
        )
        return
    done, moved, total = -1, time.monotonic(), 0  # others may add to the rest
    with moving("uploading") as bar:
        task = bar.add_task("", total=None)
        while found["objects_left"] or not found["loaded"]:
            left = (found["objects_left"], found["bytes_left"])
            if found["down"]:
                raise KvfsError(
                    f"{left[0]} objects are not yet in {found['place']}, which is down: "
                    f"{found['down']}"
                )
            if found["done"] != done:
                done, moved = found["done"], time.monotonic()
            elif time.monotonic() - moved > STALLED_S:
                raise KvfsError(
                    f"{left[0]} objects are not yet in {found['place']}, and none arrived there in "
                    f"{STALLED_S:.0f} s: see the log"
                )
            total = max(total, left[1])
            bar.update(task, total=total, completed=total - left[1])
            time.sleep(POLL_S)
            found = request(mountpoint, "flush")
