"""Fair queueing: who begins next, and how much of the whole each one gets."""

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.fairness.fair_queue import BULK_SHARE, PIECE, FairQueue, Shares, StartTimeFair
from kvfs.fairness.token_bucket import LATE, TokenBucket

MIB = 1 << 20


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await case()

    trio.run(main, clock=MockClock(autojump_threshold=0))


class Order:
    """Requests that all wait before the first of them begins, and the order in which they do."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.begun: list[tuple[str, float]] = []
        self._requests: list[tuple[str, float, float, bool]] = []

    def add(self, namespace: str, cost: float, weight: float = 100, *, bulk: bool = False) -> None:
        self._requests.append((namespace, cost, weight, bulk))

    async def _one(self, namespace: str, cost: float, weight: float, bulk: bool) -> None:  # noqa: FBT001 (start_soon)
        async with self.queue.turn(namespace, cost, weight=weight, bulk=bulk):
            self.begun.append((namespace, cost))
            await trio.sleep(cost)

    async def run(self) -> list[tuple[str, float]]:
        async with trio.open_nursery() as nursery, self.queue.turn("holder", 0):
            for request in self._requests:
                nursery.start_soon(self._one, *request)
                await wait_all_tasks_blocked()
        assert (self.queue.running, self.queue.waiting) == (0, 0)
        return self.begun


REQUESTS = st.lists(st.floats(1, 100), min_size=1, max_size=15)
WEIGHTS = st.integers(1, 1000)


@given(REQUESTS, REQUESTS, WEIGHTS, WEIGHTS)
def test_two_namespaces_never_differ_by_more_than_their_largest_requests(
    mine: list[float], others: list[float], weight: int, other: int
) -> None:
    """Theorem 1 of the paper, over every interval in which both have something waiting."""

    async def case() -> None:
        order = Order(FairQueue(1))
        for cost in mine:
            order.add("mine", cost, weight)
        for cost in others:
            order.add("others", cost, other)
        begun = await order.run()
        bound = max(mine) / weight + max(others) / other
        left = Counter(name for name, _ in begun)
        ahead, least, most = 0.0, 0.0, 0.0
        for name, cost in begun:
            ahead += cost / weight if name == "mine" else -cost / other
            least, most = min(least, ahead), max(most, ahead)
            assert most - least <= bound * (1 + 1e-9)
            left[name] -= 1
            if not left[name]:
                break

    run(case)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100)), max_size=20))
def test_within_a_namespace_requests_begin_in_the_order_of_arrival(
    requests: list[tuple[str, float]],
) -> None:
    async def case() -> None:
        order = Order(FairQueue(1))
        for name, cost in requests:
            order.add(name, cost)
        begun = await order.run()
        for name in "abc":
            assert [one for one in begun if one[0] == name] == [
                one for one in requests if one[0] == name
            ]

    run(case)


def test_idle_namespace_saves_up_no_share() -> None:
    async def case() -> None:
        order = Order(FairQueue(1))
        for _ in range(50):
            order.add("busy", 1)
        await order.run()
        order = Order(order.queue)
        for name in ["busy", "idle"] * 4:
            order.add(name, 1)
        assert [name for name, _ in await order.run()] == ["busy", "idle"] * 4

    run(case)


def test_late_namespace_saves_up_no_share() -> None:
    queue = StartTimeFair()
    for _ in range(50):
        queue.add("busy", 1, 100, bulk=False)
    for _ in range(25):
        assert queue.begin() is not None
    late = [queue.add("late", 1, 100, bulk=False) for _ in range(10)]
    pieces = [queue.begin() for _ in range(20)]
    turns = [number for number, piece in enumerate(pieces) if piece and piece.request in late]
    assert [later - sooner for sooner, later in pairwise(turns)] == [2] * 9


def test_a_large_request_begins_in_pieces_between_those_of_others() -> None:
    queue = StartTimeFair()
    large = queue.add("large", 10, 100, bulk=False)
    small = [queue.add("small", 4, 100, bulk=False) for _ in range(2)]
    pieces = [queue.begin(most=4) for _ in range(5)]
    assert pieces == [(large, 4), (small[0], 4), (large, 4), (small[1], 4), (large, 2)]
    assert queue.begin() is None
    assert queue.waiting == 0


def test_without_bulk_only_normal_requests_begin() -> None:
    queue = StartTimeFair()
    queue.add("weights", 1, 100, bulk=True)
    assert queue.begin(bulk=False) is None
    assert queue.begin() is not None


def test_no_more_are_in_flight_than_there_are_places() -> None:
    async def case() -> None:
        queue = FairQueue(3)
        running = []

        async def one() -> None:
            async with queue.turn("a", 1):
                running.append(queue.running)
                await trio.sleep(1)

        begin = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(one)
        assert max(running) == 3
        assert trio.current_time() - begin == 3

    run(case)


@pytest.mark.parametrize("seed", range(5))
def test_cancellation_anywhere_loses_no_place(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def one(queue: FairQueue, begun: list[str], name: str) -> None:
        with trio.move_on_after(rng.choice([0.5, 3, 1000])):
            async with queue.turn(name, rng.randrange(5), bulk=name == "c"):
                begun.append(name)
                assert queue.running <= 2
                await trio.sleep(rng.choice([0, 0.5, 1]))

    async def case() -> None:
        queue = FairQueue(2)
        begun: list[str] = []
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(one, queue, begun, rng.choice("abc"))
                await trio.sleep(rng.choice([0, 0.2]))
        assert (queue.running, queue.waiting) == (0, 0)
        assert set(begun) == set("abc")
        assert len(begun) < 200  # some were cancelled while they waited

    run(case)


def test_an_error_in_a_turn_gives_the_place_back() -> None:
    async def case() -> None:
        queue = FairQueue(1)
        with pytest.raises(OSError, match="no"):
            async with queue.turn("a", 1):
                raise OSError("no")
        async with queue.turn("a", 1):
            assert queue.running == 1

    run(case)


# Priorities


def test_bulk_gets_its_share_and_no_more_while_normal_waits() -> None:
    async def case() -> None:
        order = Order(FairQueue(1))
        for _ in range(400):
            order.add("kv", 1)
        for _ in range(100):
            order.add("weights", 1, 1000, bulk=True)
        begun = [name for name, _ in await order.run()]
        normal_ended = len(begun) - begun[::-1].index("kv")
        assert begun[:normal_ended].count("weights") / normal_ended == pytest.approx(
            BULK_SHARE, abs=0.005
        )
        at = [place for place, name in enumerate(begun[:normal_ended]) if name == "weights"]
        assert max(later - sooner for sooner, later in pairwise(at)) <= 1 / BULK_SHARE + 1

    run(case)


def test_bulk_gets_the_rest_and_keeps_a_place_free() -> None:
    async def case() -> None:
        queue = FairQueue(3)
        bulk_in_flight = []

        async def load() -> None:
            async with queue.turn("weights", 1 << 30, bulk=True):
                bulk_in_flight.append(queue.running)
                await trio.sleep(100)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(load)
            await wait_all_tasks_blocked()
            assert bulk_in_flight == [1, 2]
            begin = trio.current_time()
            async with queue.turn("kv", 1):
                assert trio.current_time() == begin
            nursery.cancel_scope.cancel()
        assert queue.running == 0

    run(case)


def test_after_bulk_alone_normal_goes_first_and_bulk_does_not_starve() -> None:
    async def case() -> None:
        queue = FairQueue(1)
        for _ in range(100):
            async with queue.turn("weights", 1000, bulk=True):
                pass
        order = Order(queue)
        for name in ["weights"] * 3 + ["kv"] * 57:
            order.add(name, 1, bulk=name == "weights")
        begun = [name for name, _ in await order.run()]
        assert begun.index("kv") <= 1
        assert begun.index("weights", 2) <= 2 / BULK_SHARE

    run(case)


# Shares of a bandwidth, measured


async def read(
    acquire: Callable[[int], Awaitable[None]], size: int, passed: Counter[str], name: str
) -> None:
    while True:
        await acquire(size)
        passed[name] += size


async def shares_after(
    readers: dict[str, Callable[[int], Awaitable[None]]], size: int, each: int = 8
) -> Counter[str]:
    """Bytes let in for each reader within 20 s, by so many readers each."""
    passed: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        for name, acquire in readers.items():
            for _ in range(each):
                nursery.start_soon(read, acquire, size, passed, name)
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    return passed


@pytest.mark.parametrize("size", [100_000, 2 * MIB, 8 * MIB])
def test_a_namespace_limited_to_a_tenth_of_the_bandwidth_gets_a_tenth(size: int) -> None:
    async def case() -> None:
        async with trio.open_nursery() as nursery:
            shares = Shares(nursery, rate=100 * MIB)
            own = TokenBucket(10 * MIB)

            async def limited(cost: int) -> None:
                if not own.try_acquire(cost):
                    await own.acquire(cost)
                await shares.acquire("limited", cost)

            async def free(cost: int) -> None:
                await shares.acquire("free", cost)

            passed = await shares_after({"limited": limited, "free": free}, size)
            nursery.cancel_scope.cancel()
        assert passed["limited"] / passed.total() == pytest.approx(0.10, abs=0.02)
        assert passed.total() / 20 == pytest.approx(100 * MIB, rel=0.05)

    run(case)


@pytest.mark.parametrize("sizes", [(2 * MIB, 2 * MIB), (32 * MIB, 200_000), (200_000, 32 * MIB)])
@pytest.mark.parametrize("each", [1, 8])
def test_weights_of_three_to_one_share_three_to_one_under_overload(
    sizes: tuple[int, int], each: int
) -> None:
    async def case() -> None:
        async with trio.open_nursery() as nursery:
            shares = Shares(nursery, rate=100 * MIB)

            async def heavy(_: int) -> None:
                await shares.acquire("heavy", sizes[0], weight=300)
                passed["heavy"] += sizes[0]

            async def light(_: int) -> None:
                await shares.acquire("light", sizes[1], weight=100)
                passed["light"] += sizes[1]

            passed: Counter[str] = Counter()
            await shares_after({"heavy": heavy, "light": light}, 0, each)
            nursery.cancel_scope.cancel()
        assert passed["heavy"] / passed["light"] == pytest.approx(3, rel=0.15)

    run(case)


def test_loading_weights_does_not_starve_reads_nor_they_it() -> None:
    """A model of 4 GiB in shards of 512 MiB, read beside objects of 2 MiB."""

    async def case() -> None:
        waits: list[float] = []
        async with trio.open_nursery() as nursery:
            shares = Shares(nursery, rate=100 * MIB)
            loaded = 0

            async def load() -> None:
                nonlocal loaded
                for _ in range(8):
                    await shares.acquire("weights", 512 << 20, bulk=True)
                    loaded += 512 << 20

            nursery.start_soon(load)
            await wait_all_tasks_blocked()
            for _ in range(1000):
                begin = trio.current_time()
                await shares.acquire("kv", MIB // 4)
                waits.append(trio.current_time() - begin)
                await trio.sleep(0.02)
            assert loaded >= 1512 << 20  # the rest of 20 s
            nursery.cancel_scope.cancel()
        assert max(waits) <= 2 * PIECE / (100 * MIB)

    run(case)


def test_lone_namespace_gets_all_of_the_bandwidth() -> None:
    async def case() -> None:
        async with trio.open_nursery() as nursery:
            shares = Shares(nursery, rate=100 * MIB)

            async def alone(cost: int) -> None:
                await shares.acquire("alone", cost, weight=1)

            passed = await shares_after({"alone": alone}, MIB)
            nursery.cancel_scope.cancel()
        assert passed["alone"] / 20 == pytest.approx(100 * MIB, rel=0.01)

    run(case)


def test_an_open_that_is_cancelled_while_it_waits_is_not_charged() -> None:
    async def case() -> None:
        async with trio.open_nursery() as nursery:
            shares = Shares(nursery, rate=1)
            await shares.acquire("a", 10)
            with trio.move_on_after(1):
                await shares.acquire("a", 1000)
            assert shares._queue.waiting == 0
            begin = trio.current_time()
            await shares.acquire("b", 1)
            assert trio.current_time() - begin == pytest.approx(9 - LATE)

    run(case)


def test_shares_without_a_rate_wait_for_nothing() -> None:
    async def case() -> None:
        async with trio.open_nursery() as nursery:
            shares = Shares(nursery)
            await shares.acquire("a", 1 << 40)
            shares.total.rate = 1
            await shares.acquire("a", 1 << 40)
            with trio.move_on_after(5) as too_long:
                await shares.acquire("a", 1)
            assert too_long.cancelled_caught
            shares.total.rate = 0
            await shares.acquire("a", 1)
            await wait_all_tasks_blocked()
            assert shares._queue.waiting == 0

    run(case)


def test_a_queue_has_a_place() -> None:
    with pytest.raises(ValueError, match="places: expected 1"):
        FairQueue(0)


@pytest.mark.parametrize(("cost", "weight"), [(-1, 1), (1, 0)])
def test_costs_and_weights_are_positive(cost: float, weight: float) -> None:
    async def case() -> None:
        queue = FairQueue(1)
        with pytest.raises(ValueError, match="expected 0 or more, more than 0"):
            async with queue.turn("a", cost, weight=weight):
                pass
        assert (queue.running, queue.waiting) == (0, 0)

    run(case)
