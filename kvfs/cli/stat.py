"""`kvfs stat`: the places of a file or directory, why it is kept, and what would drop it next."""

import stat
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import click

from kvfs.cli import PathOnMount, give, human, json_option, on_mount
from kvfs.cli.screen import pairs, screen
from kvfs.control import request

FEW = 8  # names in a line


@click.command
@click.argument("path", metavar="PATH", type=PathOnMount(readable=False))
@json_option
def command(path: str, *, as_json: bool) -> None:
    """Show where a file is and when kvfs will evict it.

    Each tier has an order of eviction for the objects of a namespace. Place 0 goes next there.
    """
    place = on_mount(path, follow=False)
    found = request(place.mountpoint, "stat", ino=place.ino)
    give(found, lambda _: screen().print(pairs(_rows(found))), as_json=as_json)


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "path", found["path"] or "."
    yield "what", f"{found['kind']} {stat.filemode(found['mode'])}, inode {found['ino']}"
    yield "owner", f"uid {found['uid']}, gid {found['gid']}"
    space = found["namespace"]
    holds = f"{human(space['bytes'])} in {space['objects']} objects"
    yield "namespace", f"{space['name']}: {holds}, eviction={space['eviction']}"
    for name, what in (("mtime", "written"), ("atime", "used")):
        yield what, _when(found[name])
    if found["kind"] == "file":
        yield from _file(found)
    if found["warming"]:
        yield "warming", "on its way to its fastest tier"


def _file(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "size", f"{human(found['size'])} ({found['size']} bytes)"
    sealed = f", {_when(found['sealed_at'])}" if found["sealed_at"] else ""
    yield "state", f"{found['state']}{sealed}, version {found['version']}"
    yield "xxh3-128", found["digest"] or "not computed yet"
    pool = found.get("pool")  # an earlier daemon has none
    remote = pool is not None and pool["remote"]
    for name, tier in found["tiers"].items():
        yield name, _copy(tier)
    if not found["tiers"]:
        yield "tiers", "no tier has it" + (": only other nodes have it" if remote else "")
    if pool is not None:
        yield "pool", _nodes(pool)
    yield "to upload", _dirty(found["dirty"])
    held = found["open"]
    yield "open", _open(held) if held else "no"
    yield "group", _group(found["group"])
    if found["before"]["key"]:
        yield "block before", _some(found["before"]["files"]) or "not here"
    if found["after"]:
        yield "blocks after", _some(found["after"])
    if found["begins"]:
        yield "a new one begins", _begins(found["begins"])
    heat = found["heat"]
    goes_up = heat["promote_after"] and "ram" not in found["tiers"]
    of = f" of {heat['promote_after']} for its promotion" if goes_up else ""
    yield "opened", f"{heat['opens']} times recently"
    yield "opened on nvme", f"{heat['nvme_opens']} times{of}"
    for order in heat["orders"]:
        place = "late" if order["place"] is None else f"place {order['place']}"
        place = place if order["goes"] else "never goes"
        yield f"order in {order['tier']}", f"{order['policy']}, {place} of {order['of']}"
    yield "kept", "; ".join(found["kept"]) or "no: it may be dropped"
    if found["holds"]:
        yield "cannot be evicted", "; ".join(found["holds"])
    yield "next step", found["next"]


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _copy(tier: dict[str, Any]) -> str:
    packed = tier["packed"]
    text = human(tier["bytes"])
    if packed:
        text += f", packed by {packed['codec']} to {packed['size']} bytes"
    if "key" in tier:
        text += f", {tier['key']}" + ("" if tier["current"] else " (not the present object)")
    return text


def _nodes(pool: dict[str, Any]) -> str:
    """Say which nodes of the pool have a file, or why they are not known."""
    if pool["entry"] == "unknown":
        return f"the index does not answer: {pool['why']}"
    if pool["entry"] == "same":
        return ", ".join(map(_node, pool["nodes"])) or "no live node has it"
    return {
        "other": "another object has its name there: this node keeps its own to itself",
        "gone": "another node has unlinked or replaced it",
        "none": pool["why"] or "not announced yet",
    }[pool["entry"]]


def _node(node: dict[str, Any]) -> str:
    this = ", this node" if node["this"] else ""
    return f"{node['host']}:{node['mountpoint']} ({node['tier']}{this})"


def _dirty(dirty: dict[str, Any]) -> str:
    if dirty["s3"] == "conflict":
        return "no: another object has its name in s3"
    if dirty["s3"] == "holes":
        return "no: it is mostly holes, and s3 would store them as bytes"
    if dirty["s3"] == "yes":
        due = f", due {_when(dirty['due'])}" if dirty["due"] else ""
        return f"yes{due}"
    return "nothing in s3; only RAM has it so far" if dirty["nvme"] else "nothing"


def _open(held: dict[str, Any]) -> str:
    how = "passthrough" if held["passthrough"] else "served by the daemon"
    mapped = ", mapped" if held["mapped"] else ""
    return f"{held['readers']} readers, {held['writers']} writers in {held['tier']}, {how}{mapped}"


def _group(group: dict[str, Any]) -> str:
    about = [f"{name} {group[name]}" for name in ("engine", "model", "block") if group[name]]
    return ", ".join([*about, f"{len(group['files'])} files: {_some(group['files'])}"])


def _begins(begins: dict[str, Any]) -> str:
    rule = {
        "block": f"the name is that of a block of {begins['layout']}",
        "pool": f"the name is that of a pool of blocks of {begins['layout']}",
        "extension": f"no layout has the name; its kind is .{begins['extension']} in its namespace",
        "directory": "no layout has the name, and it lacks an extension; its kind is its directory",
    }[begins["rule"]]
    size = "no file of this kind is known"
    if begins["expected"] is not None:
        size = f"{human(begins['expected'])} expected, learned from files of this kind"
    elif begins["rule"] == "block" and begins["tier"] == "nvme":
        size += ", and RAM takes no more blocks of unknown size"
    return f"in {begins['tier'] or 'no tier'}: {rule}; {size}"


def _some(files: list[str]) -> str:
    more = f" and {len(files) - FEW} more" if len(files) > FEW else ""
    return ", ".join(files[:FEW]) + more
