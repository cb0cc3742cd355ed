"""Visitors of trees: one pins files, the other counts them.

Contract: a pin is the attribute PIN of a file in the catalog, together with `Inode.unevictable`, in
one batch. Earlier versions of kvfs read both, and keep the file until it is renamed. A pinned file
is in the orders of files that only their owner unlinks. So it may leave RAM, and is never dropped
to make room, nor with its group. It stays pinned when a program writes it again or renames it. A
file that is renamed over it is not pinned. The time to live and an unlink still remove a pinned
file. Synchronous. Not for namespaces: their setting `pin` holds objects in RAM as well.
"""

from collections import Counter, defaultdict
from functools import partial
from typing import Any

from kvfs.catalog import Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.namespaces.places import PIN
from kvfs.errors import InvalidError
from kvfs.tiers import Tier


def pin(ledger: Ledger, inode: Inode, *, on: bool) -> bool:
    """Pin a file, or end its pin. True if that changed anything.

    Raises InvalidError if the inode is no file, CatalogError.
    """
    if not inode.is_file:
        named = ledger.catalog.named(inode.ino)
        raise InvalidError(f"{named} is no file: files are pinned, and namespaces")
    if ledger.namespaces.places.is_pinned(inode) == on:
        return False
    with ledger.catalog.batch() as batch:
        before = batch.change(inode)
        inode.unevictable = on or ledger.namespaces.places.keeps(inode)
        if on:
            batch.set_xattr(inode.ino, PIN, b"on")
        else:
            batch.remove_xattr(inode.ino, PIN)
        batch.put(inode)
        batch.answers()
        if inode.unevictable != before.unevictable and ledger.accounts.accounted(inode):
            batch.then(partial(ledger.accounts.dismiss, before))
            batch.then(partial(ledger.accounts.count_anew, inode))
    return True


class Pins:
    """Pins files, or ends their pins: behind `kvfs pin` of a tree."""

    def __init__(self, ledger: Ledger, *, on: bool) -> None:
        self.ledger = ledger
        self.on = on
        self.changed = self.refused = 0
        self.why: dict[str, int] = {}

    def visit(self, inode: Inode) -> None:
        if not self.ledger.removals.is_gone(inode):
            self.changed += pin(self.ledger, inode, on=self.on)

    def failed(self, inode: Inode, error: Exception) -> None:  # noqa: ARG002 (a visitor's)
        self.refused += 1
        self.why[str(error)] = self.why.get(str(error), 0) + 1

    def describe(self) -> dict[str, Any]:
        return {"changed": self.changed, "refused": self.refused, "why": self.why}


class Usage:
    """The space of files by tier, namespace and model: behind `kvfs du` of a tree.

    A visit counts each file once, in its state at that moment, even if it has several names. Bytes
    are physical: those of the copy in its tier. A visit changes nothing, and nothing waits for it.
    Whole namespaces and mounts are counted as they change (`Namespace`, `Accounts`).
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.size = 0
        self.by: dict[str, defaultdict[str, Counter[str]]] = {
            name: defaultdict(Counter) for name in ("tier", "namespace", "model")
        }
        self.total = Counter(bytes=0, objects=0)
        self.packed = Counter(bytes=0, objects=0, size=0)
        self.dirty = Counter(bytes=0, objects=0)
        self.memory_only = Counter(bytes=0, objects=0)
        self.unreadable = 0
        self._linked: set[int] = set()  # visited inodes with several names

    def describe(self) -> dict[str, Any]:
        return {
            **self.total,
            "size": self.size,
            "by": self.by,
            "packed": self.packed,
            "dirty": self.dirty,
            "memory_only": self.memory_only,
            "unreadable": self.unreadable,
        }

    def failed(self, inode: Inode, error: Exception) -> None:  # noqa: ARG002 (a visitor's)
        """Count a file for which the catalog gave no answer."""
        self.unreadable += 1

    def visit(self, inode: Inode) -> None:
        ledger = self.ledger
        if ledger.namespaces.is_dropped(inode) or (len(inode.links) > 1 and self._seen(inode)):
            return
        held = ledger.table.peek(inode.ino)
        cost = Tier.cost(inode.blocks if held is None else max(inode.blocks, held.taken // 512))
        holders = ledger.tiers.holders(inode)
        self.size += inode.size
        _add(self.total, cost if holders else 0)
        for tier in holders:
            packed = ledger.tiers.is_packed_in(inode, tier)
            taken = ledger.tiers.cost(inode, tier) if packed else cost
            _add(self.by["tier"][tier.name], taken)
            if packed:
                self.packed["size"] += inode.size
                _add(self.packed, taken)
        if inode.in_bucket:
            stored = ledger.dirty.stored(inode.ino)
            taken = inode.size if stored is None else stored.size
            _add(self.by["tier"]["s3"], taken)
        if inode.ino in ledger.dirty and not inode.in_bucket:
            _add(self.dirty, inode.size)
        if holders == [ledger.tiers.ram] and not inode.in_bucket:
            _add(self.memory_only, cost)
        self._whose(inode, cost if holders else 0)

    def _whose(self, inode: Inode, cost: int) -> None:
        namespaces = self.ledger.namespaces
        name = namespaces.name(namespaces.of(inode).ino)
        _add(self.by["namespace"][name], cost)
        if inode.model:
            model = " ".join(namespaces.places.models[inode.model])
            _add(self.by["model"][model], cost)

    def _seen(self, inode: Inode) -> bool:
        """Whether another name of the inode was visited before."""
        seen = inode.ino in self._linked
        self._linked.add(inode.ino)
        return seen


def _add(counts: Counter[str], size: int) -> None:
    counts["bytes"] += size
    counts["objects"] += 1
