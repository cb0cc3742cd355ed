"""What files take, by tier, namespace and model: the visitor behind `kvfs du` of a tree.

Contract: each file is counted once, as it is when it is visited, though it has several names.
Bytes are physical: what a copy takes in its tier. Nothing is changed and nothing waits. Not for
whole namespaces and mounts, which are counted as they change (`Namespace`, `Ledger`).
"""

from typing import Any

from kvfs.catalog import Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.tiers import Tier

Counts = dict[str, int]


def _nothing() -> Counts:
    return {"bytes": 0, "objects": 0}


class Usage:
    """Of all that was visited."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.size = 0
        self.by: dict[str, dict[str, Counts]] = {"tier": {}, "namespace": {}, "model": {}}
        self.total = _nothing()
        self.packed = {**_nothing(), "size": 0}
        self.dirty = _nothing()
        self.memory_only = _nothing()
        self.unreadable = 0
        self._linked: set[int] = set()  # with several names, that were seen

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
        """The catalog did not say what is to be known of it."""
        self.unreadable += 1

    def visit(self, inode: Inode) -> None:
        ledger = self.ledger
        several = len(inode.links) > 1
        if ledger.namespaces.is_dropped(inode) or (several and inode.ino in self._linked):
            return
        if several:
            self._linked.add(inode.ino)
        held = ledger.table.open.get(inode.ino)
        cost = Tier.cost(inode.blocks if held is None else max(inode.blocks, held.taken // 512))
        holders = ledger.tiers.holders(inode)
        self.size += inode.size
        _add(self.total, cost if holders else 0)
        for tier in holders:
            packed = ledger.tiers.is_packed_in(inode, tier)
            taken = ledger.tiers.cost(inode, tier) if packed else cost
            _add(self.by["tier"].setdefault(tier.name, _nothing()), taken)
            if packed:
                self.packed["size"] += inode.size
                _add(self.packed, taken)
        if inode.in_bucket:
            stored = ledger.dirty.stored(inode.ino)
            taken = inode.size if stored is None else stored.size
            _add(self.by["tier"].setdefault("s3", _nothing()), taken)
        if inode.ino in ledger.dirty and not inode.in_bucket:
            _add(self.dirty, inode.size)
        if holders == [ledger.tiers.ram] and not inode.in_bucket:
            _add(self.memory_only, cost)
        self._whose(inode, cost if holders else 0)

    def _whose(self, inode: Inode, cost: int) -> None:
        namespaces = self.ledger.namespaces
        name = namespaces.name(namespaces.of(inode).ino)
        _add(self.by["namespace"].setdefault(name, _nothing()), cost)
        if inode.model:
            model = " ".join(namespaces.places.models[inode.model])
            _add(self.by["model"].setdefault(model, _nothing()), cost)


def _add(counts: Counts, size: int) -> None:
    counts["bytes"] += size
    counts["objects"] += 1
