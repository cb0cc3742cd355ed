"""The hit ratio of one eviction policy on a trace.

Contract: a cache of `capacity` blocks, all of one size. The blocks of a prompt are looked up from
its begin; each one that is missing is stored at once, so that the next lookup finds a cache that
has it. That is the order in which a cache library counts objects, and for tokens it makes no
difference when the rest of the prompt is stored. Policies are leaf-first, as those of a mount are.
Not for time: a trace's pauses mean nothing here.
"""

from kvfs import eviction
from kvfs.simulation.hits import Hits
from kvfs.simulation.trace import Advance, Trace, unheard

POLICIES = eviction.NAMES


def simulate(trace: Trace, policy: str, capacity: int, advance: Advance = unheard) -> Hits:
    """Return what a cache of that many blocks finds; `advance` hears of each request done."""
    cache = eviction.make(policy, capacity, leaf_first=True)
    hits = Hits()
    for request in trace:
        parent, found = 0, []
        for key in request.keys:
            hit = key in cache
            found.append(hit)
            if hit:
                cache.touch(key)
            else:
                _store(cache, capacity, key, parent)
            parent = key
        hits = hits.and_request(request, found)
        advance(1)
    return hits


def _store(cache: eviction.Policy, capacity: int, key: int, parent: int) -> None:
    while len(cache) >= capacity:
        if cache.take(key) is None:
            return  # nothing may be dropped, so this one is not stored
    cache.add(key, 0, parent)
