"""`kvfs status`: the content of a mount, its active parts, and the reason for each inactive one."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvfs.cli import give, human, json_option, kvfs_mount, mounted_argument, pool
from kvfs.cli.ns import models, overview, problems
from kvfs.cli.screen import duration, pairs, screen, table
from kvfs.control import request
from kvfs.rates import errors_of, reserved_of


@click.command
@mounted_argument
@json_option
def command(mountpoint: Path, *, as_json: bool) -> None:
    """Show tiers, bytes, objects, hits and features."""
    kvfs_mount(mountpoint)
    status = request(mountpoint, "status")
    give(status, _show, as_json=as_json)


def _show(status: dict[str, Any]) -> None:
    console = screen()
    spaces = status["namespaces"]
    facts = [*_facts(status), *_bucket(status["tiers"]), *_compression(status["tiers"])]
    facts += _pool(status.get("pool"))
    facts += _scrub(status.get("scrub"))  # an earlier daemon has none
    console.print(pairs(facts), _tiers(status["tiers"]), overview(spaces), *problems(spaces))
    console.print(*models(status["models"]))
    console.print(pairs((name, str(n)) for name, n in _counted(status)))


def _refused(status: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the errors of programs, if there were any."""
    found = errors_of(status)
    if any(found.values()):
        yield "refused", ", ".join(f"{name} {count}" for name, count in found.items())


def _facts(status: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("mount point", status["mountpoint"]),
        ("version", status["version"]),
        ("daemon", f"pid {status['daemon_pid']}, up {duration(status['uptime_s'])}"),
        ("keeper", _keeper(status)),
    ]
    for name in ("passthrough", "fast_open", "huge_pages"):
        state = status.get(name)
        if state is None:  # an earlier daemon has no fast opens
            continue
        why = f": {state['why']}" if state["why"] else ""
        facts.append((name.replace("_", " "), f"{'on' if state['on'] else 'off'}{why}"))
    for option, state in status.get("shown", {}).items():  # an earlier daemon has none
        told = f"at {status['options'][option]}" if state["on"] else f"off now: {state['why']}"
        facts.append((option, told))
    catalog = status.get("catalog", {"doubt": "", "journal": ""})  # an earlier daemon has none
    if catalog["doubt"]:
        facts.append(("catalog", f"{catalog['doubt']}: kvfs fsck --repair"))
    if catalog["journal"]:
        facts.append(("journal", f"not written: {catalog['journal']}"))
    census = "" if status["census_done"] else " (still counting)"
    facts.append(("objects", f"{status['objects']}{census}"))
    if status["without_bucket"]:
        out_of_reach = f"{status['without_bucket']} objects, which are ENOENT: mount with s3="
        facts.append(("only in s3", out_of_reach))
    facts += [(name.replace("_", " "), str(status[name])) for name in ("open_handles", "writers")]
    return [*facts, *_refused(status)]


def _keeper(status: dict[str, Any]) -> str:
    if not status["keeper_pid"]:
        return "dead: the mount ends with its daemon; unmount, and mount again"
    return f"pid {status['keeper_pid']}, {status['takeovers']} takeovers"


def _bucket(tiers: dict[str, dict[str, Any]]) -> Iterable[tuple[str, str]]:
    """Yield the uploads that wait, and those that were done."""
    bucket = tiers.get("s3")
    if bucket is None:
        return
    waits = f"{bucket['dirty_objects']} objects, {human(bucket['dirty_bytes'])}"
    if bucket["dirty_objects"]:
        waits += f" of at most {human(bucket['dirty_most_bytes'])}"
        waits += f", the oldest for {duration(bucket['oldest_dirty_s'])}"
    yield "not in s3 yet", waits
    if bucket.get("in_conflict"):  # an earlier daemon has none
        yield "only here", f"{bucket['in_conflict']} objects: other nodes have their names in s3"
    counters = {
        "s3": "uploads downloads headers copies deletes spilled conflicts failures",
        "names of other nodes": "lookups absent_cached found imported stale refused",
        "ahead of opens": "prefetched prefetch_used prefetch_wasted warmed",
    }
    for what, names in counters.items():
        counted = (f"{bucket[name]} {name.replace('_', ' ')}" for name in names.split())
        yield what, ", ".join(counted)


def _pool(found: dict[str, Any] | None) -> Iterable[tuple[str, str]]:
    """Yield this node's part in a pool."""
    if found is not None:
        yield "pool", found["place"]
        yield from ((f"pool, {name}", text) for name, text in pool.facts(found))


def _compression(tiers: dict[str, dict[str, Any]]) -> Iterable[tuple[str, str]]:
    """Yield the effect of compression, by tier."""
    for name in ("nvme", "s3"):
        counted = tiers.get(name, {})
        if any(counted.get(key) for key in ("compressed", "not_compressed", "decompressed")):
            yield f"compression, {name}", _compressed(counted)


def _compressed(counted: dict[str, Any]) -> str:
    was, became = counted["compressed_bytes"], counted["compressed_to_bytes"]
    ratio = f", {was / became:.2f} times smaller" if became else ""
    there, back = (counted[f"{name}_cpu_us"] / 1e6 for name in ("compress", "decompress"))
    return (
        f"{counted['compressed']} objects, {human(was)} to {human(became)}{ratio}; "
        f"{counted['not_compressed']} not compressed; {counted['decompressed']} decompressed; "
        f"{there:.1f} s + {back:.1f} s of CPU time"
    )


def _scrub(scrub: dict[str, Any] | None) -> Iterable[tuple[str, str]]:
    """Yield the progress of a pass, and the findings of the last one."""
    if scrub is None:
        return
    current, last = scrub["pass"], scrub["last"]
    state = scrub["state"] + (f": {scrub['why']}" if scrub["why"] else "")
    if scrub["state"] != "off":
        state += f", a pass takes {duration(scrub['period_s'])}"
    if current is not None:
        state += f", {scrub['progress']:.1%} of {human(current['total_bytes'])}"
        state += f" since {_moment(current['began'])}: {_found(current)}"
    yield "scrubber", state
    if last is not None:
        took = duration(last["seconds"])
        yield "last pass", f"{_moment(last['ended'])}, took {took}: {_found(last)}"


def _found(one: dict[str, Any]) -> str:
    return (
        f"{one['objects']} copies of {human(one['bytes'])} verified, {one['rotten']} rotten, "
        f"{one['unread']} unread, {one['without_digest']} without digest"
    )


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _counted(status: dict[str, Any]) -> Iterable[tuple[str, int]]:
    yield "jobs", status["jobs"]
    for name, count in status["counters"].items():
        yield name.replace("_", " "), count
    for one in status["hot"]:
        yield f"opens of {one['path']}", one["opens"]


def _tiers(tiers: dict[str, dict[str, Any]]) -> Table:
    reserved = "reserved for writers"
    columns = ("tier", "capacity", "used", reserved, "objects", "hits", "state", "path")
    rows = []
    for name, tier in tiers.items():
        ill = "" if tier["state"] == "healthy" else f" for {duration(tier['state_s'])}"
        state = tier["state"] + ill + (f": {tier['why']}" if tier["why"] else "")
        sizes = [human(tier[f"{key}_bytes"]) for key in ("capacity", "used")]
        sizes.append(human(reserved_of(tier)))
        if name == "s3":
            sizes[0] = sizes[2] = "-"
        rows.append([name, *sizes, str(tier["objects"]), str(tier["hits"]), state, tier["path"]])
    return table(columns, rows, left=("tier", "state"), fold=("path",))
