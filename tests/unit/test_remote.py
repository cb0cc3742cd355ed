"""Calls that share a worker: none is forgotten, and each has its own end."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio
import trio.testing

from kvfs.errors import TierError
from kvfs.movement.movers import MoverPool
from kvfs.movement.remote import GROUP, Remote
from kvfs.movement.stores import StoreCall
from kvfs.s3.errors import NoObjectError
from kvfs.s3.place import BucketPlace
from kvfs.s3.transfer import Terms
from kvfs.tiers import Bucket

MIB = 1 << 20


class Workers(MoverPool):
    """They wait for `go`, then answer with each job's arguments; `groups` are what they got."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.counters = Counter()
        self.go = trio.Event()
        self.groups: list[list[Any]] = []

    async def run(  # type: ignore[override]
        self,
        job: Callable[..., object],
        place: BucketPlace,
        terms: Terms,
        jobs: Sequence[StoreCall],
        *,
        limiter: trio.CapacityLimiter,
        patience: float,
        destinations: Sequence[str] = (),
    ) -> object:
        del job, place, terms, patience, destinations
        async with limiter:
            self.groups.append([one.arguments[0] for one in jobs])
            await self.go.wait()
            return [one.do(None, *one.arguments) for one in jobs]


def same(_transfers: object, value: object) -> object:
    return value


def made(workers: int = 1) -> tuple[Remote, Workers]:
    movers = Workers(workers)
    bucket = Bucket(BucketPlace("b", "p/"), Terms(part=8 * MIB), most=1, delay=0, wait=1)
    return Remote(movers, bucket), movers


async def ask(remote: Remote, found: dict[object, object], value: object, size: int) -> None:
    try:
        found[value] = await remote.call("up", size, (), same, value)
    except TierError as error:
        found[value] = error


@pytest.mark.parametrize("seed", range(8))
def test_each_call_ends_whoever_is_first(seed: int) -> None:
    """Trio lets tasks go on in any order: a call may have its turn before those that came first."""
    sizes = [70 * MIB, 300_000, 1, 40 * MIB, 5, 8 * MIB, MIB, 9 * MIB][seed % 2 :]

    async def case() -> None:
        remote, movers = made(2)
        movers.go.set()
        found: dict[object, object] = {}
        async with trio.open_nursery() as nursery:
            for index, size in enumerate(sizes):
                nursery.start_soon(ask, remote, found, index, size)
        assert found == {index: index for index in range(len(sizes))}

    for _ in range(20):
        trio.run(case)


def test_small_calls_share_a_worker_that_is_awaited() -> None:
    async def case() -> None:
        remote, movers = made()
        found: dict[object, object] = {}
        async with trio.open_nursery() as nursery:
            for index in range(2 + GROUP):
                nursery.start_soon(ask, remote, found, index, 1)
                await trio.testing.wait_all_tasks_blocked()
            movers.go.set()
        assert movers.groups[0] == [0]
        assert movers.groups[1] == [1]
        assert sorted(movers.groups[2]) == list(range(2, 2 + GROUP))  # two turns came at once
        assert len(found) == 2 + GROUP

    trio.run(case)


def test_large_calls_share_none() -> None:
    async def case() -> None:
        remote, movers = made()
        found: dict[object, object] = {}
        async with trio.open_nursery() as nursery:
            for index in range(6):
                nursery.start_soon(ask, remote, found, index, GROUP * 8 * MIB)
                await trio.testing.wait_all_tasks_blocked()
            movers.go.set()
        assert sorted(map(len, movers.groups)) == [1] * 6

    trio.run(case)


def test_failure_of_one_call_reaches_its_caller_only() -> None:
    async def case() -> None:
        remote, movers = made()
        found: dict[object, object] = {}
        missing = NoObjectError("b/k")
        async with trio.open_nursery() as nursery:
            for value in (1, 2, missing, 3):
                nursery.start_soon(ask, remote, found, value, 1)
                await trio.testing.wait_all_tasks_blocked()
            movers.go.set()
        assert found == {1: 1, 2: 2, 3: 3, missing: missing}

    trio.run(case)


def test_a_cancelled_call_that_waits_is_not_made() -> None:
    async def case() -> None:
        remote, movers = made()
        found: dict[object, object] = {}
        async with trio.open_nursery() as nursery:
            for index in range(2):
                nursery.start_soon(ask, remote, found, index, 1)
                await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0):
                await ask(remote, found, "cancelled", 1)
            movers.go.set()
        assert found == {0: 0, 1: 1}
        assert movers.groups == [[0], [1]]

    trio.run(case)
