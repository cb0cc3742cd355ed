"""`kvfs pool`: the nodes of a pool, and this node's part in it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType

from kvfs.cli import give, human, json_option, kvfs_mount, mounted_argument
from kvfs.cli.screen import duration, pairs, screen, table
from kvfs.control import request

COLUMNS = ("node", "reads from it at", "state", "objects", "bytes", "room", "announced after")
CONFLICTS = ("in conflict", "the name is of")
LEFT = {"node", "reads from it at", "state"}


@click.command
@mounted_argument
@click.option(
    "--conflicts", is_flag=True, help="List the objects here whose names other nodes have."
)
@json_option
def command(mountpoint: Path, *, conflicts: bool, as_json: bool) -> None:
    """Show the nodes of the pool, and the state of its index.

    The mount needs the option pool.
    """
    kvfs_mount(mountpoint)
    asked = {"conflicts": True} if conflicts else {}  # an earlier daemon does not list them
    give(request(mountpoint, "pool", **asked), _show, as_json=as_json)


def _show(found: dict[str, Any]) -> None:
    screen().print(*shown(found))


def facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield this node's part in a pool."""
    index, counters = found["index"], found["counters"]
    asked = index.get("asked", True)  # an earlier daemon does not tell it
    down = f"down: {index['why']}" if asked else "not asked yet"
    answers = f"full: {index['why']}" if index.get("full") else "answers"
    yield "index", answers if index["up"] else down
    if "nodes_live" in found:  # an earlier daemon does not count them
        before = ", before the index was down" if asked and not index["up"] else ""
        yield "live nodes", f"{found['nodes_live']}{before}"
    yield "serves", found["address"] if found["serves"] else f"nobody: {found['why_not']}"
    if found.get("certificate"):  # an earlier daemon does not look at it
        yield "certificate", _certificate(found["certificate"])
        if problem := found["certificate"]["problem"]:
            yield "new certificate", f"not used: {problem}"
    if problem := found.get("password_problem"):
        yield "new password", f"not used: {problem}"
    yield "announced", f"{found['objects']} objects, {human(found['bytes'])}"
    yield "waits for the index", f"{found['lag_s']:.1f} s" if found["lag_s"] else "nothing"
    yield "found by lookups", f"{counters['found']} objects"
    yield "fetched", f"{counters['fetched']} objects, {human(counters['fetched_bytes'])}"
    if "served" in counters:
        yield "served", f"{counters['served']} reads, {human(counters['served_bytes'])}"
    if "handed_over" in counters:
        yield "handed over", f"{counters['handed_over']} objects"
        yield "taken over", f"{counters['taken_over']} objects"
    if "hits" in found:
        yield "opens by a fetch", str(found["hits"])
    yield "failed requests", str(counters["failed"])
    for one in found.get("failing", ()):  # an earlier daemon does not tell them
        when = f"at the last request to it, {duration(one['last_s'])} ago"
        yield "gave no object", f"{one['name']} {when}: {one['why']}"
    now = f"{found['in_conflict']} now, " if "in_conflict" in found else ""  # as `nodes_live`
    yield "conflicts", f"{now}{counters['conflicts']} since the daemon began"


def _certificate(found: dict[str, Any]) -> str:
    if found["until"] is None:
        return "none"
    left = found["until"] - time.time()
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found["until"]))
    text = f"valid until {until}, for {duration(left)}" if left > 0 else f"ended at {until}"
    return f"{text}: renew it" if found["ends_soon"] else text


def shown(found: dict[str, Any]) -> list[RenderableType]:
    """Return this node's part, and a row for each node, or why the nodes are not known."""
    own: list[RenderableType] = [pairs([("pool", found["place"]), *facts(found)])]
    if "conflicts" in found:
        named = [(one["path"], ", ".join(one["nodes"]) or "-") for one in found["conflicts"]]
        none = "no object of this node is in conflict"
        own.append(table(CONFLICTS, named, fold=CONFLICTS) if named else none)
    if not found["nodes"] and not found["index"]["up"]:
        asked = found["index"].get("asked", True)  # an earlier daemon does not tell it
        why = "does not answer" if asked else "was not asked yet"
        return [*own, f"the nodes are not known: the index {why}"]
    rows = [
        (
            _name(one) + (" (this)" if one["node"] == found["node"] else ""),
            _address(one),
            "live" if one["live"] else f"gone for {duration(one['seen_s'])}",
            str(one["objects"]),
            human(one["bytes"]),
            human(one["room"]),
            f"{one['lag_s']:.1f} s",
        )
        for one in found["nodes"]
    ]
    return [*own, table(COLUMNS, rows, left=LEFT)]


def _name(node: dict[str, Any]) -> str:
    """Return the host and mount point of a node, or its number if the index does not know them."""
    return f"{node['host']}:{node['mountpoint']}" if node["mountpoint"] else str(node["node"])


def _address(node: dict[str, Any]) -> str:
    if not node["address"]:
        return "nowhere"
    return f"{node['address']}, TLS" if node["tls"] else str(node["address"])
