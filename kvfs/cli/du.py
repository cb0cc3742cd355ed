"""`kvfs du`: the bytes of trees, namespaces and models, by tier."""

from pathlib import Path
from typing import Any

import click

from kvfs import runtime
from kvfs.cli import PathOnMount, give, human, json_option, on_mount
from kvfs.cli.jobs import Jobs
from kvfs.cli.screen import pairs, screen, table
from kvfs.control import request

BY = ("tier", "namespace", "model")


@click.command
@click.argument("path", metavar="[PATH]", default=".", type=PathOnMount(readable=False))
@click.option("--by", type=click.Choice(BY), help="Show one table only.")
@click.option("--walk", is_flag=True, help="Look at each file, also for a whole mount.")
@json_option
def command(path: str, *, by: str | None, walk: bool, as_json: bool) -> None:
    """Show bytes and objects by tier, namespace and model.

    The default PATH is the current directory. For a whole mount, the daemon's counters answer
    at once. Below it, and with --walk, kvfs looks at each file, and shows compressed and logical
    sizes.
    """
    mountpoint = on_mount(path).mountpoint
    if walk or str(runtime.canonical(path)) != str(mountpoint):
        found = {"walked": True, **Jobs([path], "usage").counted("counting")}
    else:
        found = {"walked": False, **_counted(mountpoint)}
    give(found, lambda _: _show(found, (by,) if by else BY), as_json=as_json)


def _counted(mountpoint: Path) -> dict[str, Any]:
    """Return the daemon's running counts in the shape of a walk; null is not counted."""
    status = request(mountpoint, "status")
    tiers, spaces = status["tiers"], status["namespaces"]
    s3 = tiers.get("s3")
    return {
        "bytes": sum(space["bytes"] for space in spaces),
        "objects": status["objects"],
        "size": None,
        "by": {
            "tier": {name: _pair(tier, "used_bytes") for name, tier in tiers.items()},
            "namespace": {space["name"]: _space(space) for space in spaces},
            "model": {
                f"{one['engine']} {one['model']}": _pair(one, "bytes") for one in status["models"]
            },
        },
        "packed": None,
        "dirty": s3 and {"bytes": s3["dirty_bytes"], "objects": s3["dirty_objects"]},
        "memory_only": None,
        "unreadable": 0,
    }


def _pair(counted: dict[str, Any], name: str) -> dict[str, int]:
    return {"bytes": counted[name], "objects": counted["objects"]}


def _space(counted: dict[str, Any]) -> dict[str, int]:
    """Add the bytes that only the bucket has; a daemon of an earlier version does not tell them."""
    return {"bytes": counted["bytes"], "objects": counted["objects"] + counted.get("spilled", 0)}


def _show(found: dict[str, Any], by: tuple[str, ...]) -> None:
    console = screen()
    facts = [("in local tiers", human(found["bytes"])), ("objects", str(found["objects"]))]
    if found["size"] is not None:
        facts.append(("size", human(found["size"])))
    if found["packed"] and found["packed"]["objects"]:
        packed = found["packed"]
        facts.append(("packed", f"{human(packed['size'])} to {human(packed['bytes'])}"))
    for name, what in (("dirty", "not in s3 yet"), ("memory_only", "only in memory")):
        if found[name] and found[name]["objects"]:
            facts.append(
                (what, f"{human(found[name]['bytes'])} in {found[name]['objects']} objects")
            )
    if found["unreadable"]:
        facts.append(("unreadable", f"{found['unreadable']} files: the log says why"))
    console.print(pairs(facts))
    for name in by:
        if found["by"][name]:
            # A mount counts the blocks of models that are here; a walk all that have a name.
            here = " here" if name == "model" and not found["walked"] else ""
            counted = sorted(found["by"][name].items(), key=lambda row: -row[1]["bytes"])
            rows = ((what, human(one["bytes"]), str(one["objects"])) for what, one in counted)
            console.print(table((name, "bytes", f"objects{here}"), rows, fold=(name,)))
