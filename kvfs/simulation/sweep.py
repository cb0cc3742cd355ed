"""Hit ratios on a trace: several policies at several capacities, and the bound of all policies.

Contract: policies are leaf-first, as those of a mount are. `run` gives results in the order of the
cases, independent of the order in which they end. It starts processes only if there is work for
them, and one that dies is a KvfsError. Not for time: a trace's pauses mean nothing here.
"""

import heapq
import multiprocessing
import os
import re
import signal
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from fractions import Fraction
from typing import NamedTuple

from kvfs import eviction
from kvfs.errors import ConfigError, KvfsError
from kvfs.simulation import pool
from kvfs.simulation.trace import Advance, Hits, Trace, unheard
from kvfs.units import parse_size

POLICIES = eviction.NAMES
_SHARE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)%")
_BLOCKS = re.compile(r"[0-9]{1,15}")
_NEVER = -1
# Lookups, about a second's worth of the slowest policy: to start processes takes as long.
_WORTH_PROCESSES = 200_000

_received: list[Trace] = []  # in a process that simulates: the one trace


def parse_block_size(text: str) -> int:
    """Return the bytes of a block; ConfigError if that is none."""
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"block size {text}: expected {error}") from error
    if not size:
        raise ConfigError(f"block size {text}: expected more than 0 bytes")
    return size


class Capacity(NamedTuple):
    """A capacity as it was given: a share of the blocks of any trace, or a number of them."""

    text: str
    share: Fraction | None
    number: int

    @classmethod
    def parse(cls, text: str, block_size: int) -> "Capacity":
        """Read 5%, 20000 (blocks) or 64G (bytes, divided by `block_size`), or raise ConfigError."""
        share, number = None, 0
        if found := _SHARE.fullmatch(text):
            share = Fraction(found[1]) / 100
        elif _BLOCKS.fullmatch(text):
            number = int(text)
        else:
            try:
                number = parse_size(text) // block_size
            except ValueError as error:
                raise ConfigError(
                    f"capacity {text}: expected a share of the trace's blocks such as 5%, "
                    f"a number of blocks such as 20000, or {error}"
                ) from error
        if not share and not number:
            unit = "" if _BLOCKS.fullmatch(text) or share == 0 else f" of {block_size} bytes"
            raise ConfigError(f"capacity {text}: expected at least one block{unit}")
        return cls(text, share, number)

    def blocks(self, unique: int) -> int:
        """Return it in blocks, rounded down, or raise ConfigError if it is not even one."""
        blocks = self.number if self.share is None else int(self.share * unique)
        if not blocks:
            raise ConfigError(
                f"capacity {self.text} of {unique} unique blocks: expected a block or more"
            )
        return blocks


def simulate(trace: Trace, policy: str, capacity: int, advance: Advance = unheard) -> Hits:
    """Return the hits of a cache of `capacity` blocks, all of one size.

    The simulation looks up the blocks of a prompt from its beginning. It stores each missing block
    immediately, so that the next lookup finds it. A cache library counts objects in this order. For
    tokens it makes no difference when the rest of the prompt is stored. `advance` hears of each
    request done.
    """
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


def bound(trace: Trace, capacity: int, advance: Advance = unheard) -> Hits:
    """Return the most hits of any cache of that many blocks, even one that knows the future.

    An upper bound of object and token hits for any cache that holds at most `capacity` blocks in
    the pause between two requests. It is Belady's MIN (1966) at the grain of requests, and may keep
    none of the blocks that it has seen. Of the blocks in sight it holds those with the soonest next
    use.

    Objects: the bound is exact for such a cache. A block held from one use to the next is an
    interval. If too many intervals overlap, it is optimal to drop the one that ends last. A block
    is never used sooner than its parent. So of two blocks with the same next use, the cache can
    hold the one nearer to its prompt's beginning. Hits in contiguous prefixes alone reach the
    bound.

    Tokens: no policy has more than those hits. So none has more tokens than the same number of
    lookups of blocks seen before, the largest first. That exceeds MIN's own tokens only by the
    partly filled last blocks, 0.1 points at most on the traces of Mooncake.
    """
    next_use = _next_uses(trace)
    held: dict[int, int] = {}  # a block's key: the request of its next use
    order: list[tuple[int, int]] = []  # the next victims; entries outlive their block
    seen: set[int] = set()
    partial: list[int] = []  # tokens of lookups of blocks seen before, for blocks that are not full
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


class Case(NamedTuple):
    """One simulation, of one cache or of several nodes; without a policy, it is the bound."""

    policy: str | None
    capacity: int
    nodes: pool.Nodes | None = None


def run(trace: Trace, cases: Sequence[Case], advance: Advance) -> Iterator[Hits]:
    """Yield the result of each case; `advance` hears the number of further requests simulated."""
    processes = min(len(os.sched_getaffinity(0)), len(cases))
    if processes == 1 or trace.lookups * len(cases) < _WORTH_PROCESSES:
        for case in cases:
            yield _one(trace, case, advance)
        return
    # Not forked: the caller may have threads, which would leave their locks behind.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _begin, (trace,)) as workers:
        try:
            for hits in workers.map(_run, cases):
                advance(len(trace))
                yield hits
        except BrokenProcessPool as error:
            raise KvfsError(
                "a process that simulates was killed: is memory short? Give --limit"
            ) from error
        finally:
            workers.shutdown(cancel_futures=True)


def _one(trace: Trace, case: Case, advance: Advance = unheard) -> Hits:
    if case.policy is None:
        return bound(trace, case.capacity, advance)
    if case.nodes is not None:
        return pool.simulate(trace, case.policy, case.capacity, case.nodes, advance)
    return simulate(trace, case.policy, case.capacity, advance)


def _begin(trace: Trace) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # to die of Ctrl-C without a traceback
    _received.append(trace)


def _run(case: Case) -> Hits:
    return _one(_received[0], case)
