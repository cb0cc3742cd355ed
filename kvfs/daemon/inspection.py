"""All known facts of one file or directory: the verb `stat` behind `kvfs stat` and the web page.

Contract: `describe` changes nothing, and waits for nothing. `elsewhere` asks the index of the pool,
for `pool_wait` at most. `describe` reads at most LOOKED entries of an
order of eviction, and names at most NAMED files of a group or a path. Plain values, texts as file
systems have them (undecodable bytes are surrogates). docs/commands.md explains each of them.
"""

import stat
from collections.abc import Iterable
from itertools import islice
from typing import Any

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.fetching.fetch import tiers_for
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.order import key_of
from kvfs.daemon.mount import Mount
from kvfs.errors import NotFoundError
from kvfs.tiers import Tier

LOOKED = 2000  # entries of an order, about 1 ms
NAMED = 64  # files of a group that are named
SECOND = 10**9
_DIRTY = {"0": "no", "1": "yes", "conflict": "conflict"}
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def find(mount: Mount, path: str) -> Inode:
    """Return the inode at a path below the mount point, as far as this node knows it.

    Raises NotFoundError.
    """
    inode = mount.lifecycle.tree.directory(ROOT_INO)
    for name in path.encode("utf-8", "surrogateescape").split(b"/"):
        if name not in {b"", b"."}:
            inode = mount.lifecycle.tree.lookup(inode.ino, name)
    return inode


def describe(mount: Mount, ino: int) -> dict[str, Any]:
    """Return the facts of an inode. Raises NotFoundError."""
    inode = mount.ledger.table.inode(ino)
    if inode is None or mount.ledger.removals.is_gone(inode):
        raise NotFoundError(f"{mount.ledger.catalog.named(ino)}: it does not exist any more")
    held = mount.ledger.table.staging.get(ino)
    if held is not None:
        mount.operations.objects.files.measure(held)
    space = mount.ledger.namespaces.of(inode)
    found = {
        "path": mount.ledger.catalog.path_of(ino),
        "ino": ino,
        "kind": _KINDS.get(stat.S_IFMT(inode.mode), "other"),
        "mode": inode.mode,
        "uid": inode.uid,
        "gid": inode.gid,
        "size": inode.size,
        "nlink": inode.nlink,
        "atime": inode.atime_ns / SECOND,
        "mtime": inode.mtime_ns / SECOND,
        "ctime": inode.ctime_ns / SECOND,
        "namespace": {
            "name": mount.ledger.namespaces.name(space.ino),
            "eviction": space.settings.eviction,
            "pin": space.settings.pin,
            "ttl_s": space.settings.ttl,
            "bytes": space.bytes,
            "objects": space.objects,
        },
        "warming": mount.dispatcher.warm.is_wanted(inode),
    }
    return found | _file(mount, inode, space) if inode.is_file else found


async def elsewhere(mount: Mount, ino: int) -> dict[str, Any]:
    """Return `pool` for a file: the nodes that have it; None without a pool.

    It waits for the index, at most `pool_wait`.
    """
    pool, inode = mount.dispatcher.pool, mount.ledger.table.inode(ino)
    if inode is None or not inode.is_file:
        return {}
    if pool is None:
        return {"pool": None}
    only_there = inode.in_pool
    return {"pool": {"remote": only_there, **await pool.owners(inode)}}


def _file(mount: Mount, inode: Inode, space: Namespace) -> dict[str, Any]:
    held = mount.ledger.table.open.get(inode.ino)
    waits = mount.ledger.dirty.marked_and_due(inode.ino)
    kept, holds = _kept(mount, inode, space), _holds(mount, inode, space)
    heat = _heat(mount, inode, space)
    return {
        "state": _state(mount, inode),
        "version": inode.version,
        "session": inode.session,
        "sealed_at": (waits[0] if waits else inode.mtime_ns) / SECOND if inode.sealed else None,
        "digest": ("s" * inode.sparse + inode.digest[-16:].hex()) if inode.digest else None,
        "tiers": _tiers(mount, inode),
        "dirty": _dirty(mount, inode, space, waits),
        "open": held
        and {
            "readers": held.readers,
            "writers": held.writers,
            "tier": held.tier.name,
            "passthrough": held.backing_id != 0,
            "mapped": held.mapped,
        },
        "group": _group(mount, inode, space),
        "before": {
            "key": f"{inode.parent_key:x}" if inode.parent_key else "",
            "files": _paths(mount, space.members_of(inode.parent_key) if inode.parent_key else ()),
        },
        "after": _paths(mount, mount.ledger.accounts.followers.after(space.ino, key_of(inode))),
        "begins": _begins(mount, inode, space),
        "heat": heat,
        "kept": kept,
        "holds": holds,
        "next": _next(mount, inode, space, kept or holds, heat["orders"]),
    }


def _state(mount: Mount, inode: Inode) -> str:
    if inode.ino in mount.ledger.table.staging or not inode.sealed:
        return "staging"
    return "sealed" if inode.links else "unlinked"


def _paths(mount: Mount, inos: Iterable[int]) -> list[str]:
    """Return paths of some of these inodes, in order."""
    found = (mount.ledger.catalog.path_of(ino) for ino in islice(inos, NAMED))
    return sorted(path for path in found if path)


def _tiers(mount: Mount, inode: Inode) -> dict[str, dict[str, Any]]:
    ledger = mount.ledger
    found: dict[str, dict[str, Any]] = {}
    for tier in ledger.tiers.holders(inode):
        packed = inode.packed if ledger.tiers.is_packed_in(inode, tier) else None
        found[tier.name] = {
            "bytes": ledger.tiers.cost(inode, tier),
            "packed": packed and {"codec": packed.codec, "size": packed.size},
        }
    dirty = ledger.dirty
    stored = dirty.stored(inode.ino)
    if stored is not None:
        packed_there = {"codec": stored.codec, "size": stored.size}
        found["s3"] = {
            "bytes": stored.size,
            "packed": None if stored.codec == "none" else packed_there,
            "key": stored.key,
            "current": dirty.is_current_in_bucket(inode, stored, dirty.key(inode)),
        }
    return found


def _dirty(
    mount: Mount, inode: Inode, space: Namespace, waits: tuple[int, int] | None
) -> dict[str, Any]:
    ledger, tiers = mount.ledger, mount.ledger.tiers
    lacks = mount.lifecycle.attribute(inode, b"user.kvfs.dirty") or b"0"
    stays = lacks == b"1" and waits is None and not ledger.dirty.wanted(inode)
    only_memory = tiers.holders(inode) == [tiers.ram] and not inode.in_bucket
    return {
        "s3": ("holes" if stays else _DIRTY[lacks.decode()]) if tiers.bucket.mounted else "no",
        "since": waits[0] / SECOND if waits else None,
        "due": waits[1] / SECOND if waits and waits[1] else None,
        "nvme": only_memory and space.takes(tiers.nvme),
    }


def _group(mount: Mount, inode: Inode, space: Namespace) -> dict[str, Any]:
    block = mount.ledger.namespaces.places.block(inode)
    named = ("engine", "layout", "model", "block", "rank")
    return {
        "key": f"{key_of(inode):x}",
        **{name: getattr(block, name) if block else None for name in named},
        "files": _paths(mount, {inode.ino} | space.members(inode)),
    }


def _begins(mount: Mount, inode: Inode, space: Namespace) -> dict[str, Any] | None:
    """Return where a new file of this name would begin, and by which rule; None without a name."""
    placement = mount.operations.objects.creation.placement
    expected = placement.expect_version(inode)
    if not expected.kind:
        return None
    first, *rest = expected.kind
    rule = ("extension" if isinstance(rest[0], str) else "directory") if not first else "pool"
    tier = placement.first_choice(expected, space)
    return {
        "tier": tier and tier.name,
        "rule": "block" if expected.block else rule,
        "layout": first or None,
        "extension": rest[0] if rule == "extension" else None,
        "expected": expected.size,
    }


def _heat(mount: Mount, inode: Inode, space: Namespace) -> dict[str, Any]:
    ledger, orders = mount.ledger, []
    holders = ledger.tiers.holders(inode) if inode.ino not in ledger.table.staging else []
    for tier in holders:
        order = space.order(inode, tier, holders)
        names = ("ram_only", "ram_clean", "ram_spare", "on_nvme", "ram_kept", "nvme_kept")
        looked = enumerate(islice(order, LOOKED)) if order.evictable else ()
        orders.append(
            {
                "tier": tier.name,
                "name": next(name for name in names if getattr(space, name) is order),
                "policy": space.winner or space.settings.eviction,
                "goes": order.evictable,
                "place": next((place for place, ino in looked if ino == inode.ino), None),
                "of": len(order),
            }
        )
    return {
        "opens": ledger.namespaces.hot.opens(inode.ino),
        "nvme_opens": mount.dispatcher.promotion.opens(inode.ino),
        "promote_after": mount.dispatcher.promotion.after,
        "orders": orders,
    }


def _kept(mount: Mount, inode: Inode, space: Namespace) -> list[str]:
    """Return the reasons why it is never dropped to make room.

    If the bucket has it, local copies may still be evicted.
    """
    name = mount.ledger.namespaces.name(space.ino)
    found = []
    if space.settings.pin:
        found.append(f"namespace {name} has pin=on")
    if space.settings.eviction == "never":
        found.append(f"namespace {name} has eviction=never")
    if mount.ledger.namespaces.places.is_pinned(inode):
        found.append("it was pinned (kvfs pin)")
    if inode.unevictable and mount.ledger.namespaces.places.keeps(inode):
        block = mount.ledger.namespaces.places.block(inode)
        whose = f"{block.engine} ({block.layout})" if block else "its connector"
        found.append(f"{whose} keeps an index of such files in its memory")
    return found


def _holds(mount: Mount, inode: Inode, space: Namespace) -> list[str]:
    ledger, found = mount.ledger, []
    if inode.ino in ledger.table.staging:
        found.append("it is being written")
    elif inode.ino in ledger.table.open:
        found.append("it is open")
    elif inode.ino in ledger.table.busy:
        found.append("it is being opened or moved")
    if any(ino in ledger.table.open for ino in space.members(inode) - {inode.ino}):
        found.append("another file of its group is open")
    if inode.ino in ledger.dirty and not inode.in_bucket:
        found.append("the bucket is to have it first")
    return found


def _next(
    mount: Mount, inode: Inode, space: Namespace, stays: list[str], orders: list[dict[str, Any]]
) -> str:
    ledger = mount.ledger
    what = "its copies here" if inode.in_bucket else "all of it"
    if inode.ino in ledger.table.staging:
        return "nothing: it is being written"
    if inode.in_pool:
        if not tiers_for(mount.room, space, Tier.cost(inode.blocks)):
            return "nothing is here of it, and no tier here can hold it: an open is a miss"
        return "nothing is here of it: an open fetches it from another node"
    if not ledger.tiers.holders(inode):
        return "nothing is here of it" if inode.in_bucket else "it is lost"
    ends = ""
    if space.settings.ttl:
        ends = f"its ttl, in {max(0.0, space.ttl_remaining(inode, float('inf'))):.0f} s"
    if not any(order["goes"] for order in orders):
        return ends or f"only an unlink: {stays[0]}"
    first = orders[0]
    where = f"place {first['place']} of {first['of']}" if first["place"] is not None else "late"
    then = {
        "ram_only": "copied to nvme" if ledger.tiers.nvme.mounted else f"{what} goes",
        "ram_spare": f"{what} goes",
        "ram_clean": "its copy in RAM goes",
    }.get(first["name"], f"{what} goes")
    room = f"room for others in {first['tier']}: {then} ({where})"
    return f"{room}; {ends}" if ends else room
