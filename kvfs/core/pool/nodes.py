"""The live nodes of the pool: how many there are, and which of them come and go.

Contract: `run` looks at the index as long as the mount. A node lives while it renews its lease: the
index has the time of the last renewal by the node's clock, so kvfs asks only whether that time
changes, and looks at the lease if it does not: an index whose memory is full takes no times. A node
without a lease has *left* if the index does not list it any more, and else has *died*. While the
index does not answer, or has lost its data, no node goes. A look reads one key; with more than 300
nodes kvfs looks less often, at most 100 times a second in the whole pool. Not for
reads, which ask for the leases of owners (`peers`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import trio

from kvfs.core.pool.peers import RENEW_S
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import LEASE_S, Index

LOOKS = 100  # a second, of all nodes together
MISSED_S = 3 * RENEW_S  # s without a renewal after which an unlisted node has left

FEW = 8  # nodes whose fields of an entry are asked for by name
NAMED = 8  # nodes that one event names

Changed = Callable[[str, list[str]], None]  # what has happened to nodes, and their names


@dataclass(slots=True)
class _Node:
    name: str  # for people
    renewed: float  # s, by the clock of the node
    at: float  # s, trio's: when this daemon saw that time first


class Nodes:
    """The nodes of one pool, without the node `me`."""

    def __init__(self, index: Index, me: str, changed: Changed) -> None:
        """changed: learns at a look that nodes have `joined`, `left` or `died`."""
        self.index = index
        self.me = me
        self.changed = changed
        self._nodes: dict[str, _Node] = {}
        self._dead: dict[str, float] = {}  # renewals of nodes that do not live
        self._blind = True  # the last look did not see this node
        self._first = True

    def few(self) -> list[str] | None:
        """The live nodes, if they are known and at most FEW."""
        known = not (self._first or self._blind) and len(self._nodes) <= FEW
        return list(self._nodes) if known else None

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def live(self) -> list[str]:
        """The live nodes."""
        return list(self._nodes)

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            await self.look()
            await trio.sleep(max(RENEW_S, len(self) / LOOKS))

    async def look(self) -> None:
        """Look once."""
        try:
            seen = await self.index.nodes()
            new = [one for one in seen if self._is_new(one, seen[one])]
            late = self._late(seen)
            leases = await self.index.leases([*new, *late])
        except IndexDownError:  # `peers` says so
            self._blind = True
            return
        now, first, self._first = trio.current_time(), self._first, False
        self._blind = self.me not in seen
        told: dict[str, list[str]] = {"joined": [], "left": [], "died": []}
        for node, lease in zip([*new, *late], leases, strict=True):
            known = self._nodes.get(node)
            if lease is not None:
                self._dead.pop(node, None)
                self._nodes[node] = _Node(lease.name, seen.get(node, 0.0), now)
                told["joined"] += [] if known or first else [lease.name]
                continue
            if node in seen:
                self._dead[node] = seen[node]
            if known is not None:
                del self._nodes[node]
                told["died" if node in seen else "left"].append(known.name)
        for node in [one for one in self._dead if one not in seen]:
            del self._dead[node]
        for how, names in told.items():
            if names:
                self.changed(how, names)

    def _is_new(self, node: str, renewed: float) -> bool:
        return node not in self._nodes and node != self.me and self._dead.get(node) != renewed

    def _late(self, seen: dict[str, float]) -> list[str]:
        """Note the renewals. Return the nodes that have had none for too long."""
        now, late = trio.current_time(), list[str]()
        for node, known in self._nodes.items():
            renewed = seen.get(node)
            if self._blind or self.me not in seen:
                known.at = now
            elif renewed is not None and renewed != known.renewed:
                known.renewed, known.at = renewed, now
            elif now - known.at > (MISSED_S if renewed is None else LEASE_S):
                late.append(node)
        return late


def named(names: list[str]) -> str:
    """Return a text with some of these names."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
