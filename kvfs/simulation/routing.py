"""Which node of a pool gets each request of a trace.

Contract: `route` depends on the requests, the number of nodes and the seed only, not on the objects
that a node has. So the simulator and the replay send each request to the same node. A router of a
service knows no more: it remembers its own decisions, and does not see the evictions of a node.
Not for the load of a node: a trace does not say how long a request takes.
"""

import random
from collections.abc import Iterable, Iterator
from functools import reduce

from kvfs.simulation.trace import Prompt, Trace

ROUTINGS = ("random", "sticky", "prefix")


def route(trace: Trace, routing: str, nodes: int, seed: int) -> list[int]:
    """Return the number of a node, from 0 on, for each request.

    random: any node.
    sticky: the node of the session, which is drawn at its first request. A trace names no session:
        requests belong to one session if their first block is the same, without the blocks that
        all requests of the trace begin with.
    prefix: the node that got the longest part of the prompt before, if that is half of its blocks
        or more; else, and of several such nodes, the node with the fewest requests.
    """
    if routing == "prefix":
        return list(_longest_prefix(trace, nodes))
    draw = random.Random(seed)  # noqa: S311 (nothing secret)
    if routing == "random":
        return [draw.randrange(nodes) for _ in trace]
    homes: dict[int, int] = {}
    return [homes.setdefault(one, draw.randrange(nodes)) for one in _sessions(trace)]


def _sessions(trace: Trace) -> Iterator[int]:
    """Yield the key of the block that stands for the session of each request; 0 for none."""
    shared = len(reduce(_common, (request.keys for request in trace if request.keys)))
    for request in trace:
        yield next(iter(request.keys[shared:] or request.keys[-1:]), 0)


def _common(one: list[int], other: list[int]) -> list[int]:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _longest_prefix(trace: Iterable[Prompt], nodes: int) -> Iterator[int]:
    everywhere = (1 << nodes) - 1
    sent: dict[int, int] = {}  # a block's key: the nodes that got it, one bit for each
    counts = [0] * nodes
    for request in trace:
        best, depth = everywhere, 0
        for key in request.keys:
            if not best & sent.get(key, 0):
                break
            best &= sent[key]
            depth += 1
        if 2 * depth < len(request.keys):
            best = everywhere
        chosen = min(members(best), key=counts.__getitem__)
        counts[chosen] += 1
        for key in request.keys:
            sent[key] = sent.get(key, 0) | 1 << chosen
        yield chosen


def members(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, the lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
