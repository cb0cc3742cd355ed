"""`kvfs ns`: make, change, show, list and drop namespaces, the top-level directories of a mount."""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table
from rich.text import Text

from kvfs import profiles, runtime
from kvfs.cli import (
    Group,
    assignments,
    completion,
    disregard_lookups,
    give,
    human,
    json_option,
    kvfs_mount,
    kvfs_mounts,
    mounted_argument,
    printable,
)
from kvfs.cli.screen import line, pairs, progress, screen, table
from kvfs.control import request
from kvfs.errors import ConfigError
from kvfs.parsing import kinds_of, rows
from kvfs.rates import eviction_of, opens_of, quota_share, sample_of, staging_of
from kvfs.settings import Settings

Command = TypeVar("Command", bound=Callable[..., Any])

MODELS_SHOWN = 10  # rows
NOTED = {"compression", "eviction", "media", "quota_hard", "quota_soft"}  # settings with notes
# Columns of estimated hit ratios, and the multiple of today's room that each is for.
TIMES = {"at x1": "1", "x0.5": "0.5", "x2": "2", "x4": "4"}
STEP = 0.1  # s between two looks at the rest of a dropped namespace


class Named:
    """A namespace on the command line: PATH on a mount, or NAME if only one kvfs is mounted.

    A word without a slash is a PATH if a kvfs is mounted there. If several kvfs are mounted, it is
    also a PATH in the working directory, if that is the mount point of one.
    """

    def __init__(self, text: str) -> None:
        disregard_lookups(text)
        mounted, path = kvfs_mounts(), runtime.canonical(text)
        here = str(path) in mounted or (len(mounted) > 1 and str(path.parent) in mounted)
        if os.sep in text or here:
            parent, last = os.path.split(text.rstrip(os.sep))
            if last not in {"", ".", ".."}:
                plain = Path(os.path.realpath(parent), last)
                if plain != path and not runtime.mount_at(path):
                    raise ConfigError(
                        f"namespace {text}: expected a directory, found a symbolic link to {path}"
                    )
            elif last == ".." and not runtime.mount_at(path):
                raise ConfigError(f"namespace {text}: .. is no name, expected MOUNTPOINT/NAME")
            at = path if runtime.mount_at(path) else path.parent
            if (around := runtime.kvfs_holding(at)) and around.path != str(at):
                raise ConfigError(
                    f"namespace {text}: expected a directory right below {around.path}, or "
                    f"{around.path} itself"
                )
            kvfs_mount(at)
            self.mountpoint = at
            self.name = "." if at == path else path.name
            return
        if not mounted:
            raise ConfigError(f"namespace {text}: no kvfs is mounted; run kvfs mount first")
        if len(mounted) > 1:
            raise ConfigError(
                f"namespace {text}: {len(mounted)} kvfs are mounted; give the whole path: "
                f"MOUNTPOINT/{text}, on one of {', '.join(map(printable, mounted))}"
            )
        self.mountpoint, self.name = Path(mounted[0]), text

    def ask(self, verb: str, **arguments: object) -> dict[str, Any]:
        """Have the daemon do it. Raises ControlError with its reason."""
        return request(self.mountpoint, verb, name=self.name, **arguments)


def _named(_ctx: click.Context, _param: click.Parameter, value: str) -> Named:
    if not value:
        raise click.BadParameter("the namespace is empty: expected a name or a path")
    return Named(value)


namespace_argument = click.argument(
    "namespace",
    metavar="NAMESPACE",
    type=click.UNPROCESSED,
    callback=_named,
    shell_complete=completion.namespaces,
)
_complete_settings = completion.assignments(kinds_of(Settings))


def _for(meaning: str) -> Callable[[Command], Command]:
    return click.option("--for", "connector", type=click.Choice(profiles.NAMES), help=meaning)


def _describe_settings() -> str:
    described = (
        f"  {row.name:<14} {row.unit}; default {row.default}\n{'':17}{row.meaning}"
        for row in rows(Settings)
    )
    return "\b\nSettings:\n" + "\n".join(described)


@click.group(name="ns", cls=Group, epilog=_describe_settings())
def command() -> None:
    """Create, change and list namespaces.

    A namespace is a top-level directory with settings of its own. NAMESPACE is its path, or its
    name if one kvfs is mounted. The mount point itself stands for all objects outside of other
    namespaces.
    """


@command.command()
@namespace_argument
@click.argument("settings", nargs=-1, metavar="NAME=VALUE...", shell_complete=_complete_settings)
@_for("Set the settings that this connector needs, and print its configuration.")
def create(namespace: Named, settings: tuple[str, ...], connector: str | None) -> None:
    """Create NAMESPACE with these settings. `kvfs ns --help` explains them."""
    before = profiles.settings(connector) if connector else {}
    texts = {**before, **assignments(settings, "setting")}
    wanted = Settings.parse(texts)
    if connector is not None:  # find all mistakes in it before anything is made
        configuration(namespace, connector, wanted)
    made = namespace.ask("ns_create", settings=texts, uid=os.geteuid(), gid=os.getegid())
    _say_note(namespace, made)
    found = Settings.parse(made["settings"])  # a template may have given it a quota
    if connector is not None:
        click.echo(configuration(namespace, connector, found))
        return
    default = Settings().to_text()
    own = (f"{name}={text}" for name, text in found.to_text().items() if text != default[name])
    _say(namespace, f"created with {', '.join(own) or 'the default settings'}")


def configuration(namespace: Named, connector: str, settings: Settings) -> str:
    """Return the configuration to paste into the engine. Raises ConfigError."""
    mountpoint, quota = namespace.mountpoint, settings.quota_hard or None
    mount = os.statvfs(mountpoint)
    room = mount.f_blocks * mount.f_frsize
    found = profiles.configuration(connector, str(mountpoint), namespace.name, quota, room)
    return found.rstrip("\n")


@command.command(name="set")
@namespace_argument
@click.argument(
    "settings",
    nargs=-1,
    required=True,
    metavar="NAME=VALUE...",
    shell_complete=_complete_settings,
)
def change(namespace: Named, settings: tuple[str, ...]) -> None:
    """Change settings of NAMESPACE while it is in use: all of them or none.

    Another version drops all its objects at once. Their space becomes free in the background.
    """
    texts = assignments(settings, "setting")
    answer = namespace.ask("ns_set", settings=texts)
    if texts.keys() & NOTED:
        _say_note(namespace, answer)
    if "changed" in answer:  # a daemon of an earlier version does not say it
        changed = (f"{name} {was} -> {now}" for name, (was, now) in answer["changed"].items())
        _say(namespace, ", ".join(changed) or "nothing changed: the settings are as before")


def _say(namespace: Named, text: str) -> None:
    """Print what the command did, in one line."""
    click.echo(f"namespace {printable(namespace.name)}: {printable(text)}")


def _say_note(namespace: Named, answer: dict[str, Any]) -> None:
    """Print the cost of a setting on stderr, beside the text to paste."""
    if note := answer.get("note"):  # a daemon of an earlier version has none
        click.echo(f"kvfs: namespace {printable(namespace.name)}: {note}", err=True)


@command.command()
@namespace_argument
@_for("Print only the configuration of this connector's engine.")
@json_option
def show(namespace: Named, connector: str | None, *, as_json: bool) -> None:
    """Show the settings and contents of NAMESPACE, and its what-if hit ratios."""
    found = namespace.ask("ns_show")
    if connector is not None:
        expect_own(namespace, found)
        click.echo(configuration(namespace, connector, Settings.parse(found["settings"])))
        say_misfits(namespace, connector, found["settings"])
        return
    give(found, partial(_show, namespace), as_json=as_json)


def _show(namespace: Named, found: dict[str, Any]) -> None:
    console, told = screen(), Settings.parse(found["settings"])
    if not found["own"]:
        console.print(
            line(
                f"namespace {namespace.name}: the directory has no settings of its own: this is "
                "the mount's own namespace, which has its files; kvfs ns set gives it settings"
            )
        )
    for text in filter(None, (found["problem"], found.get("note"))):
        console.print(line(f"namespace {namespace.name}: {text}"))
    opens, sample = opens_of(found), sample_of(found)

    def shown(ratio: float) -> str:
        """Return a hit ratio; in a pool also with the opens that other nodes serve."""
        nodes = f", with other nodes {opens.with_other_nodes(ratio):.1%}" if opens.nodes else ""
        return f"{ratio:.1%}{nodes}"

    console.print(
        pairs([("namespace", found["name"]), *found["settings"].items()]),
        pairs(
            [
                ("objects", _of(found["objects"], told.quota_objects, str)),
                ("bytes", _of(found["bytes"], told.quota_hard, human)),
                *((name, human(held["bytes"])) for name, held in found["tiers"].items()),
                *((name.replace("_", " "), str(n)) for name, n in found["counters"].items()),
                ("follows", found["following"] or found["settings"]["eviction"]),
                *([] if opens.ratio is None else [("hit ratio", shown(opens.ratio))]),
                *(
                    (f"estimated at {at} x {found['capacity_objects']} objects", shown(share))
                    for at, share in found["hit_ratio_at"].items()
                ),
                *([("estimates after", f"{sample} accesses")] if sample else []),
            ]
        ),
        *models(found["models"]),
    )


def _of(found: int, quota: int, text: Callable[[int], str]) -> str:
    """Return a count with its share of the quota, if there is one."""
    return f"{text(found)} of {text(quota)}, {found / quota:.0%}" if quota else text(found)


def expect_own(namespace: Named, found: dict[str, Any]) -> None:
    """Raises ConfigError if the directory has no settings of its own.

    Settings for one engine do not belong to the mount's own namespace.
    """
    if not found["own"]:
        raise ConfigError(
            f"namespace {namespace.name}: the directory has no settings of its own; kvfs ns set "
            "gives it settings"
        )


def say_misfits(namespace: Named, connector: str, told: dict[str, str]) -> None:
    """Warn on stderr if the settings differ from the connector's needs."""
    for name, needed in profiles.misfits(connector, told).items():
        has = f"{name}={told.get(name, 'off')}"
        click.echo(
            f"kvfs: namespace {namespace.name} has {has}, {connector} needs {name}={needed}",
            err=True,
        )


@command.command(name="list")
@mounted_argument
@json_option
def list_(mountpoint: Path, *, as_json: bool) -> None:
    """List the namespaces of the mount, and the rest of dropped ones."""
    kvfs_mount(mountpoint)
    found = request(mountpoint, "ns_list")
    give(found, _list, as_json=as_json)


def _list(found: dict[str, Any]) -> None:
    console = screen()
    console.print(overview(found["namespaces"]), *problems(found["namespaces"]))
    for one in found["dropped"]:
        what = "was dropped"
        if one.get("reason") == "version":  # an earlier daemon has no reason
            what = "has a new version"
        console.print(
            line(
                f"namespace {one['name'] or one['ino']} {what}: kvfs has yet to free "
                f"{one['objects']} objects, {human(one['bytes'])}"
            )
        )
    console.print(*models(found["models"]))


def overview(namespaces: list[dict[str, Any]]) -> Table:
    """Return a row for each namespace."""
    columns = ("namespace", "objects", "bytes", "writing", "quota", "hits", "misses", "hit ratio")
    rows = []
    for one in namespaces:
        ratios, opens = one["hit_ratio_at"], opens_of(one)
        # Before there are estimates, the first column shows how many accesses they lack.
        estimated = zip_longest(TIMES.values(), [sample_of(one)], fillvalue="")
        cells = [
            one["name"],
            str(one["objects"]),
            human(one["bytes"]),
            human(staging_of(one)),
            _quota(one),
            str(int(opens.hits)),
            str(int(opens.misses)),
            "" if opens.ratio is None else f"{opens.ratio:.1%}",
            *(f"{ratios[at]:.1%}" if at in ratios else before for at, before in estimated),
            eviction_of(one),
        ]
        rows.append(cells)
    return table((*columns, *TIMES, "eviction"), rows, left=("namespace", "eviction"))


def _quota(one: dict[str, Any]) -> str:
    """Return the quotas and the used share, such as 12.5% of 4G, 1000 objects."""
    size, objects = (one["settings"][f"quota_{what}"] for what in ("hard", "objects"))
    quotas = [*([size] if size != "0" else []), *([f"{objects} objects"] if objects != "0" else [])]
    return f"{quota_share(one):.1%} of {', '.join(quotas)}" if quotas else "none"


def models(found: list[dict[str, Any]]) -> list[Table | Text]:
    """Return a table of the models with most bytes, at most MODELS_SHOWN; nothing for none."""
    if not found:
        return []
    rows = (
        [one["engine"], one["model"], str(one["objects"]), human(one["bytes"])]
        for one in found[:MODELS_SHOWN]
    )
    made = table(("engine", "model", "objects", "bytes"), rows, fold=("engine", "model"))
    more = len(found) - MODELS_SHOWN
    return [made, *([line(f"and {more} more models: see --json")] if more > 0 else [])]


def problems(namespaces: list[dict[str, Any]]) -> list[Text]:
    """Return a line for each namespace that accepts no new objects."""
    return [
        line(f"namespace {one['name']}: {one['problem']}") for one in namespaces if one["problem"]
    ]


@command.command()
@namespace_argument
@click.option("--wait", is_flag=True, help="Return when its space is free.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask, on a terminal either.")
def drop(namespace: Named, *, wait: bool, yes: bool) -> None:
    """Drop NAMESPACE with all its objects. Its space becomes free in the background."""
    if not yes and sys.stdin.isatty():
        found = namespace.ask("ns_show")
        what = f"{found['objects']} objects, {human(found['bytes'])}"
        click.confirm(f"Drop namespace {printable(namespace.name)} with {what}?", abort=True)
    answer = namespace.ask("ns_drop")
    ino = answer["dropped"]
    if answer["before"]:
        click.echo(
            f"namespace {printable(namespace.name)} does not exist any more: the daemon that died "
            "meanwhile has dropped it, or it never existed"
        )
    else:
        _say(namespace, "dropped, its space becomes free in the background")
    if not wait:
        return
    with progress() as bar:
        task = bar.add_task("dropping", total=None)
        most = 0
        while left := _left(namespace, ino):
            most = max(most, left["objects"])
            bar.update(task, total=most, completed=most - left["objects"])
            time.sleep(STEP)


def _left(namespace: Named, ino: int) -> dict[str, Any] | None:
    """Return the counts of a dropped namespace that is not yet deleted, or None."""
    found = request(namespace.mountpoint, "ns_list")["dropped"]
    return next((one for one in found if one["ino"] == ino), None)
