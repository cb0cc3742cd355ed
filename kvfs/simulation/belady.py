"""What no policy can exceed, whatever it knew of the future.

Contract: an upper bound of object and token hits for any cache that holds at most `capacity`
blocks in the pause between two requests. It is Belady's MIN (1966) at the grain of requests, and
free to keep nothing of what it has seen: of the blocks in sight those are held whose next use is
soonest.

Objects: exact for such a cache, as a block held from one use to the next is an interval, and to
drop the interval that ends last is optimal where too many overlap. A block is never used sooner
than its parent, so that the one nearer to its prompt's begin can be held of two whose next use is
the same: the bound can be had with hits in contiguous prefixes only.

Tokens: no policy has more than those hits, so no more tokens than the as many largest lookups of
blocks seen before. That exceeds what MIN itself gets by the partly filled last blocks only, 0.1
points at most on the traces of Mooncake.
"""

import heapq
from array import array

from kvfs.simulation.hits import Hits
from kvfs.simulation.trace import Advance, Trace, unheard

_NEVER = -1


def bound(trace: Trace, capacity: int, advance: Advance = unheard) -> Hits:
    """Return the most that a cache of that many blocks can find."""
    next_use = _next_uses(trace)
    held: dict[int, int] = {}  # a block's key: the request of its next use
    order: list[tuple[int, int]] = []  # what goes first; entries outlive their block
    seen: set[int] = set()
    partial: list[int] = []  # tokens of lookups of blocks seen before, where not a full block
    position = repeated = hits = size = 0
    for request in trace:
        size = request.block_tokens  # the same of all
        for depth, key in enumerate(request.keys):
            hits += held.pop(key, None) is not None
            if key in seen:
                tokens = request.prefix(depth + 1) - request.prefix(depth)
                repeated += 1
                if tokens < size:
                    partial.append(tokens)
            use = next_use[position]
            if use != _NEVER:
                held[key] = use
                heapq.heappush(order, (-use, key))
            seen.add(key)
            position += 1
        while len(held) > capacity:
            use, key = heapq.heappop(order)
            if held.get(key) == -use:
                del held[key]
        advance(1)
    full = min(hits, repeated - len(partial))
    rest = heapq.nlargest(hits - full, partial)
    return Hits(trace.tokens, full * size + sum(rest), trace.lookups, hits)


def _next_uses(trace: Trace) -> "array[int]":
    """For each lookup, the number of the request that looks the block up next."""
    uses = array("q", [_NEVER]) * trace.lookups
    last: dict[int, int] = {}  # a block's key: the position of its latest lookup
    position = 0
    for number, request in enumerate(trace):
        for key in request.keys:
            if (before := last.get(key)) is not None:
                uses[before] = number
            last[key] = position
            position += 1
    return uses
