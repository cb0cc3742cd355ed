"""Several policies at several capacities, on all processors.

Contract: results come in the order of the cases, whatever ends first. Processes are used only
where there is work for them; a process that dies is a KvfsError.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from kvfs.errors import KvfsError
from kvfs.simulation import belady
from kvfs.simulation.cache import simulate
from kvfs.simulation.hits import Hits
from kvfs.simulation.trace import Advance, Trace, unheard

# Lookups, about a second's worth of the slowest policy: to start processes takes as long.
_WORTH_PROCESSES = 200_000

_received: list[Trace] = []  # in a process that simulates: the one trace


class Case(NamedTuple):
    """One simulation; without a policy, it is the bound."""

    policy: str | None
    capacity: int


def run(trace: Trace, cases: Sequence[Case], advance: Advance) -> Iterator[Hits]:
    """Yield the result of each case; `advance` hears how many requests more are simulated."""
    processes = min(len(os.sched_getaffinity(0)), len(cases))
    if processes == 1 or trace.lookups * len(cases) < _WORTH_PROCESSES:
        for case in cases:
            yield _one(trace, case, advance)
        return
    # Not forked: the caller may have threads, which would leave their locks behind.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _begin, (trace,)) as pool:
        try:
            for hits in pool.map(_run, cases):
                advance(len(trace))
                yield hits
        except BrokenProcessPool as error:
            raise KvfsError("a process that simulates was killed; memory may be short") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _one(trace: Trace, case: Case, advance: Advance = unheard) -> Hits:
    if case.policy is None:
        return belady.bound(trace, case.capacity, advance)
    return simulate(trace, case.policy, case.capacity, advance)


def _begin(trace: Trace) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # to die of Ctrl-C without a traceback
    _received.append(trace)


def _run(case: Case) -> Hits:
    return _one(_received[0], case)
