"""`kvfs get`, `set` and `upgrade`: the options of a mount, and other ones while it is used.

Contract: all options of a command change, or none. For an upgrade the keeper starts the new daemon
and lets the old one finish its operations. If the new daemon does not serve, the old one continues.
The commands print each option that changed. Not for the flags of a mount: `kvfs remount`.
"""

import errno
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path

import click

from kvfs import __version__, own_files, runtime
from kvfs.cli import (
    assignments,
    completion,
    excess,
    give,
    human,
    json_option,
    kvfs_mount,
    mounted_argument,
    mountpoint_argument,
    printable,
)
from kvfs.cli.screen import screen, table
from kvfs.config import FLAGS, Config, parse_hot
from kvfs.control import request, request_keeper, unanswered
from kvfs.errors import ConfigError
from kvfs.parsing import Row, hint, kinds_of, rows
from kvfs.templates import Templates

EXPECTED, CURE = "the options of this mount", "unmount, and mount with this kvfs"
PATIENCE = 180.0  # s: the keeper's own bounds come first
FLAGS_ROW = "mount_flags"
_ROWS = {row.name: row for row in rows(Config)}
_KINDS = kinds_of(Config)
_NONE = "none"
UPGRADED = {name: kind for name, kind in _KINDS.items() if _ROWS[name].upgrade}


@click.command
@mountpoint_argument
@click.argument("names", nargs=-1, metavar="[NAME...]", shell_complete=completion.words(_ROWS))
@json_option
def get_command(mountpoint: Path, names: tuple[str, ...], *, as_json: bool) -> None:
    """Show the options of a mount as they are now.

    With one NAME, the command prints its value alone, as `kvfs mount -o` takes it. `default`: the
    option has the value that a mount without it has.
    """
    for name in names:
        if name not in _ROWS:
            raise ConfigError(f"unknown option {name!r}; {hint(name, _ROWS)}")
    kvfs_mount(mountpoint)
    status = request(mountpoint, "status")
    # A daemon of an earlier version does not tell which sizes were fitted to the machine.
    found = _describe(status["options"], status.get("fitted", ()), mountpoint)
    found = {name: found[name] for name in names or found}
    if len(names) == 1 and not as_json:
        click.echo(printable(found[names[0]]["value"] or _NONE))
        return
    give(found, _show, as_json=as_json)


def _describe(
    options: Mapping[str, str], fitted: "list[str] | tuple[str, ...]", mountpoint: Path
) -> dict[str, dict[str, str | None]]:
    """Return value, origin and the command that changes it, of each option."""
    values: dict[str, str | None] = {
        name: options[name].replace("\\,", ",") if name in options else None for name in _ROWS
    }
    values[FLAGS_ROW] = ",".join(flag for flag in FLAGS if flag in options) or None
    found = {}
    for name, value in values.items():
        default = value is None or name in fitted or _is_default(name, value)
        shown = str(runtime.log_path(mountpoint)) if (name, value) == ("log", None) else value
        origin = "default" if default else "set"
        found[name] = {"value": shown, "origin": origin, "change": change_by(_ROWS[name])}
    return found


def _is_default(name: str, text: str) -> bool:
    field = next(one for one in fields(Config) if one.name == name)
    made = field.default_factory
    return bool(_KINDS[name].parse(text) == (field.default if made is MISSING else made()))


def change_by(row: Row) -> str:
    """Return what changes an option: a command for a mount in use, or a new mount."""
    if row.name == FLAGS_ROW:
        return "kvfs remount"
    return "kvfs set" if row.hot else "kvfs upgrade" if row.upgrade else "new mount"


def _show(found: dict[str, dict[str, str]]) -> None:
    cells = (
        (name, one["value"] or _NONE, one["origin"], one["change"]) for name, one in found.items()
    )
    columns = ("option", "value", "origin", "changed by")
    screen().print(table(columns, cells, left=columns, fold=("value",)))


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each option with another value; both have texts as `as_options` has."""
    for name in _ROWS:
        was, became = before.get(name), now.get(name)
        if was != became:
            yield f"{name}: {_shown(name, was)} -> {_shown(name, became)}"


def _shown(name: str, text: str | None) -> str:
    """Return a value as a person reads it; `none` is no value."""
    if not text:
        return _NONE
    text = text.replace("\\,", ",")
    sized = _KINDS[name].unit == "size"
    return human(_KINDS[name].parse(text)) if sized else printable(text)


def say_changes(lines: list[str]) -> None:
    """Print what changed, one line for each option, or that nothing did."""
    for line in lines or ["nothing changed: the options are as before"]:
        click.echo(line)


@click.command
@mountpoint_argument
@click.argument(
    "settings",
    nargs=-1,
    required=True,
    metavar="NAME=VALUE...",
    shell_complete=completion.assignments(
        {row.name: _KINDS[row.name] for row in rows(Config) if row.hot}
    ),
)
def set_command(mountpoint: Path, settings: tuple[str, ...]) -> None:
    """Change options of a mount while it is mounted.

    The new values hold until the unmount. `kvfs mount --help` marks the options that can change,
    and `kvfs get` shows their values.
    """
    wanted = assignments(settings, "option")
    for name, text in wanted.items():
        parse_hot(name, text)
    kvfs_mount(mountpoint)
    change_now(mountpoint, wanted)


def change_now(mountpoint: Path, wanted: Mapping[str, str]) -> None:
    """Have the daemon change hot options, and print what changed."""
    answer = request(mountpoint, "set", **wanted)
    if "now" in answer:  # a daemon of an earlier version does not say it
        say_changes(list(changes(answer["before"], answer["now"])))


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
    shell_complete=completion.options(UPGRADED),
)
def upgrade_command(mountpoint: Path, options: tuple[str, ...]) -> None:
    """Serve a mount with this version, without an unmount.

    Programs on the mount wait for less than a second. Some options can change at the same time.
    """
    before = present(mountpoint)
    config = before.upgraded(",".join(options))
    if options:
        change_by_upgrade(mountpoint, before, config)
    else:
        start_daemon(mountpoint, config)


def change_by_upgrade(mountpoint: Path, before: Config, config: Config) -> None:
    """Let a daemon serve with other options. Print what changed, and what must go for it."""
    gone = list(_excess(mountpoint, before, config))
    start_daemon(mountpoint, config)
    say_changes(list(changes(before.as_options(), config.as_options())))
    for line in gone:
        click.echo(line)


def _excess(mountpoint: Path, before: Config, config: Config) -> Iterator[str]:
    """Yield a line for each tier that has more than its new size."""
    sizes = {"ram": (before.ram, config.ram), "nvme": (before.nvme_size, config.nvme_size)}
    smaller = {name: now for name, (was, now) in sizes.items() if now < was}
    tiers = request(mountpoint, "status")["tiers"] if smaller else {}
    names = list(tiers)  # the fastest first
    for name in names:
        if name in smaller:
            below = name != names[-1]
            yield from excess.lines(name, tiers[name], smaller[name], below=below)
    if names == ["ram", "nvme"] and len(smaller) == len(names):
        yield from excess.together(tiers["ram"], tiers["nvme"], sum(smaller.values()))


def present(mountpoint: Path) -> Config:
    """Return the options of a mount, as its keeper has them, for a command that changes them.

    Raises ConfigError, ControlError.
    """
    kvfs_mount(mountpoint)
    path = runtime.runtime_dir(mountpoint) / "config"
    text = own_files.read(path, EXPECTED, CURE)
    if text is None:
        raise unanswered(mountpoint, FileNotFoundError(errno.ENOENT, f"there is no {path}"))
    found = Config.from_json(text)
    if found.mountpoint != mountpoint:
        raise own_files.wrong(path, text, EXPECTED, CURE)
    return found


def start_daemon(mountpoint: Path, config: Config) -> None:
    """Let a daemon of this version serve with these options; print both versions."""
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
