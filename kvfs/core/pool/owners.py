"""The nodes that have an object, as the index says it now: for people.

Contract: `owners` asks the index at each call, and changes nothing. It returns within `wait`
seconds; without an answer of the index, `why` has the reason and there are no nodes. A node without
a lease, or one that has begun anew since, is no owner. Not for reads, which remember answers
(`lookup`).
"""

from collections.abc import Callable
from typing import Any

import trio

from kvfs.catalog import Inode
from kvfs.core.pool.lookup import PoolLookup
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import GoneEntry, PoolEntry

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
    leases = await lookup.index.leases([one.node for one in entry.owners], patience=wait)
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
        for owner, lease in zip(entry.owners, leases, strict=True)
        if lease is not None and lease.incarnation == owner.incarnation
    ]
    found["nodes"].sort(key=lambda one: (not one["this"], one["host"], one["mountpoint"]))
    return found


def _described(entry: str, why: str = "") -> dict[str, Any]:
    return {"entry": entry, "why": why, "nodes": []}
