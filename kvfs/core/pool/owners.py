"""The nodes that have an object, as the index says it now: for people.

Contract: `owners` and `conflicts` ask the index at each call, and change nothing. `owners` returns
within `wait` seconds; without an answer of the index, `why` has the reason and there are no nodes.
A node without a lease, or one that has begun anew since, is no owner. Not for reads, which remember
answers (`lookup`).
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import trio

from kvfs.catalog import Inode
from kvfs.core.pool.lookup import PoolLookup
from kvfs.pool.errors import IndexDownError
from kvfs.pool.records import GoneEntry, Lease, Owner, PoolEntry, Unlinked

LISTED = 1000  # objects in conflict in one answer
AT_ONCE = 64  # objects in one question

Leaves = Callable[[Inode, GoneEntry], bool]


async def owners(lookup: PoolLookup, leaves: Leaves, inode: Inode, wait: float) -> dict[str, Any]:
    """Describe the entry of a file: its kind, and the live nodes that have the file.

    entry: `same`, `other` (another object has the name), `gone` (a node has unlinked the object),
    `none`, or `unknown`. leaves: whether this node lets a file go. wait: seconds.
    """
    if not lookup.entries.is_shared(inode):
        return _described("none", why="its namespace has pool=off on this node")
    key = lookup.entries.key(inode)
    if key is None:
        return _described("none", why="its name is of this node only")
    if inode.sparse:
        return _described("none", why="not announced: mostly holes")
    with trio.move_on_after(wait):
        try:
            return await _ask(lookup, leaves, inode, key, wait)
        except IndexDownError as error:
            return _described("unknown", why=str(error))
    return _described("unknown", why=f"no answer of the index within {wait:g} s")


async def _ask(
    lookup: PoolLookup, leaves: Leaves, inode: Inode, key: str, wait: float
) -> dict[str, Any]:
    (entry,) = await lookup.index.find([key], patience=wait)
    if entry is None:
        return _described("none")
    if not isinstance(entry, PoolEntry):
        return _described("gone" if leaves(inode, entry) else "none")
    if entry.facts.digest != inode.digest:
        return _described("other")
    found = _described("same")
    mine = lookup.peers.me().node
    found["nodes"] = [
        {
            "node": owner.node,
            "host": lease.host,
            "mountpoint": lease.mountpoint,
            "address": lease.address,
            "tier": owner.tier,
            "this": owner.node == mine,
        }
        for owner, lease in await _live(lookup, entry, wait)
    ]
    found["nodes"].sort(key=lambda one: (not one["this"], one["host"], one["mountpoint"]))
    return found


async def _live(lookup: PoolLookup, entry: PoolEntry, wait: float) -> list[tuple[Owner, Lease]]:
    """The live nodes that have an object. Raises IndexDownError."""
    leases = await lookup.index.leases([one.node for one in entry.owners], patience=wait)
    return [
        (owner, lease)
        for owner, lease in zip(entry.owners, leases, strict=True)
        if lease is not None and lease.incarnation == owner.incarnation
    ]


async def conflicts(
    lookup: PoolLookup, others: Mapping[int, Unlinked], wait: float
) -> list[dict[str, Any]]:
    """Describe objects of this node whose names other nodes have, LISTED at most.

    others: by inode. wait: seconds for a question. Without an answer, `nodes` is empty.
    """
    listed, found = list(others.items())[:LISTED], list[dict[str, Any]]()
    for start in range(0, len(listed), AT_ONCE):
        some = listed[start : start + AT_ONCE]
        entries: list[PoolEntry | GoneEntry | None] = [None] * len(some)
        with suppress(IndexDownError):
            entries = await lookup.index.find([other.key for _, other in some], patience=wait)
        for (ino, _), entry in zip(some, entries, strict=True):
            nodes: list[str] = []
            if isinstance(entry, PoolEntry):
                with suppress(IndexDownError):
                    nodes = [lease.name for _, lease in await _live(lookup, entry, wait)]
            found.append({"path": lookup.entries.catalog.path_of(ino), "nodes": sorted(nodes)})
    return sorted((one for one in found if one["path"]), key=lambda one: str(one["path"]))


def _described(entry: str, why: str = "") -> dict[str, Any]:
    return {"entry": entry, "why": why, "nodes": []}
