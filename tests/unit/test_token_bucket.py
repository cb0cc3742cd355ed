"""Limits on a rate, on a clock that jumps."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.fairness.token_bucket import TokenBucket

MIB = 1 << 20


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await case()

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def seconds_of(waiting: Awaitable[None]) -> float:
    begin = trio.current_time()
    await waiting
    return trio.current_time() - begin


def test_an_object_larger_than_the_limit_passes_and_the_next_one_waits() -> None:
    async def case() -> None:
        bucket = TokenBucket(10 * MIB)
        assert await seconds_of(bucket.acquire(64 * MIB)) == 0
        assert not bucket.try_acquire(1)
        assert await seconds_of(bucket.acquire(MIB)) == pytest.approx(6.4)
        assert await seconds_of(bucket.wait()) == pytest.approx(0.1)

    run(case)


def test_idle_time_saves_up_one_burst_at_most() -> None:
    async def case() -> None:
        bucket = TokenBucket(10, burst=0.5)
        assert [bucket.try_acquire(5), bucket.try_acquire(5), bucket.try_acquire(1)] == [
            True,
            True,
            False,
        ]
        await trio.sleep(1000)
        assert [bucket.try_acquire(5), bucket.try_acquire(5), bucket.try_acquire(1)] == [
            True,
            True,
            False,
        ]

    run(case)


def test_unlimited_bucket_waits_for_nothing() -> None:
    async def case() -> None:
        bucket = TokenBucket(0)
        for _ in range(10):
            assert bucket.try_acquire(1 << 60)
            assert await seconds_of(bucket.acquire(1 << 60)) == 0

    run(case)


def test_a_charge_is_not_put_off() -> None:
    async def case() -> None:
        bucket = TokenBucket(10)
        bucket.charge(10)
        bucket.charge(10)
        assert await seconds_of(bucket.wait()) == pytest.approx(2)

    run(case)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(1, 1e6), st.floats(0, 10))
def test_no_more_passes_than_the_rate_a_burst_and_one_object(
    costs: list[float], rate: float, burst: float
) -> None:
    async def case() -> None:
        bucket = TokenBucket(rate, burst)
        begin = trio.current_time()
        passed = 0.0
        for cost in costs:
            await bucket.acquire(cost)
            allowed = rate * (burst + trio.current_time() - begin)
            assert passed <= allowed * (1 + 1e-9) + 1e-6
            passed += cost

    run(case)


def test_waiting_tasks_pass_in_the_order_of_arrival() -> None:
    async def case() -> None:
        bucket = TokenBucket(1)
        bucket.charge(1)
        passed = []

        async def waiter(number: int) -> None:
            await bucket.acquire(2)
            passed.append((number, trio.current_time() - begin))

        begin = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(waiter, number)
                await wait_all_tasks_blocked()
        assert passed == [(0, 1.0), (1, 3.0), (2, 5.0)]

    run(case)


def test_waiting_task_is_not_overtaken() -> None:
    async def case() -> None:
        bucket = TokenBucket(1)
        bucket.charge(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bucket.acquire, 1)
            await trio.sleep(0.5)
            bucket.rate = 1e300  # the debt is paid, but the waiting task has not gone on yet
            assert not bucket.try_acquire(1)
        assert bucket.try_acquire(1)

    run(case)


def test_a_cancelled_waiter_is_not_charged() -> None:
    async def case() -> None:
        bucket = TokenBucket(1)
        bucket.charge(5)
        with trio.move_on_after(1):
            await bucket.acquire(100)
        assert await seconds_of(bucket.acquire(1)) == pytest.approx(4)

    run(case)


@pytest.mark.parametrize(("rate", "then"), [(20, 1 + 0.5), (5, 1 + 2), (0, 1)])
def test_new_rate_holds_for_waiting_tasks(rate: float, then: float) -> None:
    async def case() -> None:
        bucket = TokenBucket(10)
        bucket.charge(20)
        waited = []

        async def waiter() -> None:
            waited.append(await seconds_of(bucket.acquire(1)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiter)
            await trio.sleep(1)
            bucket.rate = rate
        assert waited == [pytest.approx(then)]
        assert bucket.rate == rate

    run(case)


def test_new_rate_keeps_the_saved_up_burst() -> None:
    async def case() -> None:
        bucket = TokenBucket(1, burst=10)
        bucket.charge(0)
        await trio.sleep(4)
        bucket.charge(6)  # leaves 4 of 10
        bucket.rate = 100
        bucket.charge(5)
        assert await seconds_of(bucket.wait()) == pytest.approx(0.01)

    run(case)


def test_a_limit_that_is_lifted_and_set_again_forgets_the_debt() -> None:
    async def case() -> None:
        bucket = TokenBucket(1)
        bucket.charge(100)
        bucket.rate = 0
        bucket.charge(100)
        bucket.rate = 1
        assert bucket.try_acquire(1)

    run(case)


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan")])
def test_no_rate_and_no_burst_is_negative(value: float) -> None:
    with pytest.raises(ValueError, match=r"rate .*expected 0 or more"):
        TokenBucket(value)
    with pytest.raises(ValueError, match=r"burst .*expected 0 or more"):
        TokenBucket(1, value)
    with pytest.raises(ValueError, match="rate"):
        TokenBucket(1).rate = value
