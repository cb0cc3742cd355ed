"""Limits of a namespace's opens and bytes a second, on a clock that the test sets."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.core.namespaces.namespace import Limits
from kvfs.settings import Settings


def run(case: Callable[[], Awaitable[None]]) -> None:
    trio.run(case, clock=MockClock(autojump_threshold=0))


async def times(limits: Limits, *opens: tuple[int, bool]) -> list[float]:
    """When each of some objects, one after the other, might pass: bytes, whether written."""
    begun, found = trio.current_time(), []
    for size, written in opens:
        await limits.acquire(size, written=written)
        found.append(round(trio.current_time() - begun, 6))
    return found


def test_no_limit_means_no_wait() -> None:
    async def case() -> None:
        limits = Limits(Settings(weight=7))
        assert not limits.on
        assert await times(limits, (1 << 60, False), (1 << 60, True)) == [0, 0]

    run(case)


def test_opens_are_counted_by_whether_they_write() -> None:
    async def case() -> None:
        limits = Limits(Settings(read_iops=2, write_iops=10))
        assert limits.on
        assert await times(limits, *[(5, False)] * 3) == [0, 0.45, 0.95]  # 50 ms late are made good
        assert await times(limits, *[(5, True)] * 3) == [0, 0.05, 0.15]

    run(case)


def test_reads_and_writes_are_charged_apart() -> None:
    async def case() -> None:
        limits = Limits(Settings(read_bytes=100, write_bytes=100))
        assert await times(limits, (400, False), (400, True)) == [0, 0]
        assert await times(limits, (1, False), (1, True)) == [3.95, 3.95]

    run(case)


@pytest.mark.parametrize("fresh", [Settings(), Settings(read_bytes=10**9)])
def test_waiting_task_follows_a_changed_limit(fresh: Settings) -> None:
    async def case() -> None:
        limits = Limits(Settings(read_bytes=1))
        await limits.acquire(10**6, written=False)
        passed: list[float] = []

        async def second() -> None:
            await limits.acquire(10**6, written=False)
            passed.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(second)
            await wait_all_tasks_blocked()
            limits.change(fresh)
            changed = trio.current_time()
        assert passed[0] - changed < 1
        assert limits.on is (fresh.read_bytes > 0)

    trio.run(case)
