"""Hit ratios of several nodes on a trace: a pool, or caches that know nothing of each other.

In a pool, a node that lacks a block reads it from the node of its owners that has served the fewest
reads, and keeps a copy, as `kvfs.core.pool` does. A block that no node has is a miss.

Contract: all nodes have the same policy and as much room, at most a block more or less. `COPIES`
says which copies a node evicts first. Not for time: each lookup sees all blocks that were stored
before it, so that an index that lags behind costs nothing here.
"""

from typing import NamedTuple

from kvfs import eviction
from kvfs.errors import ConfigError
from kvfs.simulation.routing import members, route
from kvfs.simulation.trace import Advance, Hits, Trace, unheard

# keep-all: the policy alone chooses the next victim. A node does not learn that
#   another node has read one of its blocks.
# drop: as kvfs does. Copies of other nodes' blocks go first, the oldest first, until this node
#   uses them again. A read by another node is a use: else the blocks that are read most go too
#   early (1.6 to 1.9 points with the conversation trace of Mooncake). No node asks whether the
#   other copy is still there: to ask changed no ratio by 0.01 points.
COPIES = ("keep-all", "drop")
SEPARATE = "separate"


class Nodes(NamedTuple):
    """Several nodes. `copies` is one of COPIES, or SEPARATE for nodes without a pool."""

    number: int
    routing: str
    seed: int
    copies: str


class _Node:
    """The cache of one node."""

    def __init__(self, policy: str, room: int, copies: str) -> None:
        self.blocks = eviction.make(policy, room, leaf_first=True)
        self.reads = 0  # by other nodes
        self._room = room
        self._copies: dict[int, None] = {}  # those that go first, the next victim first
        self._drops = copies == "drop"
        self._copies_first = self._drops and policy != "never"

    def use(self, key: int) -> None:
        self.blocks.touch(key)
        self._copies.pop(key, None)

    def give(self, key: int) -> None:
        """Note that another node reads a block. A copy that goes first still does."""
        self.reads += 1
        if self._drops:
            self.blocks.touch(key)

    def store(self, key: int, parent: int, *, is_copy: bool) -> tuple[bool, list[int]]:
        """Store a block; return whether there was room, and the victims."""
        victims: list[int] = []
        while len(self.blocks) >= self._room:
            if (victim := self._take(key)) is None:
                return False, victims
            victims.append(victim)
        self.blocks.add(key, 0, parent)
        if is_copy and self._copies_first:
            self._copies[key] = None
        return True, victims

    def _take(self, incoming: int) -> int | None:
        if self._copies:
            oldest = next(iter(self._copies))
            del self._copies[oldest]
            self.blocks.discard(oldest)
            return oldest
        taken = self.blocks.take(incoming)
        return None if taken is None else taken[0]


def check_room(capacity: int, nodes: int) -> None:
    """Raise ConfigError if there is not a block for each node."""
    if capacity < nodes:
        raise ConfigError(
            f"capacity of {capacity} blocks for {nodes} nodes: expected a block or more for each"
        )


def simulate(
    trace: Trace, policy: str, capacity: int, nodes: Nodes, advance: Advance = unheard
) -> Hits:
    """Return the hits of nodes that have `capacity` blocks together. Raises ConfigError.

    `advance` hears of each request done.
    """
    check_room(capacity, nodes.number)
    share, rest = divmod(capacity, nodes.number)
    caches = [
        _Node(policy, share + (number < rest), nodes.copies) for number in range(nodes.number)
    ]
    owners: dict[int, int] = {}  # a block's key: the nodes that have it, one bit for each
    hits = Hits()
    routes = route(trace, nodes.routing, nodes.number, nodes.seed)
    for request, number in zip(trace, routes, strict=True):
        node, bit = caches[number], 1 << number
        parent, found, from_peers = 0, [], 0
        for key in request.keys:
            holders = owners.get(key, 0)
            if nodes.copies == SEPARATE:
                holders &= bit
            found.append(holders > 0)
            if holders & bit:
                node.use(key)
                parent = key
                continue
            if holders:
                from_peers += 1
                owner = min((caches[one] for one in members(holders)), key=_reads)
                owner.give(key)
            stored, victims = node.store(key, parent, is_copy=holders > 0)
            for victim in victims:
                owners[victim] ^= bit
            if stored:
                owners[key] = owners.get(key, 0) | bit
            parent = key
        hits = hits.and_request(request, found, from_peers)
        advance(1)
    return hits


def _reads(node: _Node) -> int:
    return node.reads
