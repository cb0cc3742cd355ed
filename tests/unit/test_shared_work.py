"""Work that several callers wait for is done once."""

from functools import partial

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.core.shared_work import SharedWork, WorkByKey, wait_while_up
from kvfs.errors import NotFoundError, StaleError, TierError
from kvfs.tiers.calls import Health


class Case:
    """Callers of one key, whose work waits for `go` and then raises `failure`, if there is one."""

    def __init__(self) -> None:
        self.defects: list[tuple[int, Exception]] = []
        self.works: WorkByKey[int, SharedWork] = WorkByKey(
            lambda key, error: self.defects.append((key, error))
        )
        self.go = trio.Event()
        self.failure: Exception | None = None
        self.done = 0
        self.found: list[SharedWork] = []

    async def ask(self, key: int = 7) -> None:
        shared = self.works.get(key) or self.works.begin(key, SharedWork(), self.work)
        self.found.append(shared)
        await shared.ended.wait()

    async def work(self) -> None:
        self.done += 1
        await self.go.wait()
        if self.failure is not None:
            raise self.failure


def test_the_work_of_a_key_is_done_once_for_all_that_wait() -> None:
    async def run() -> None:
        case = Case()
        async with trio.open_nursery() as nursery:
            for key in (7, 7, 7, 8):
                nursery.start_soon(case.ask, key)
            await wait_all_tasks_blocked()
            assert (case.done, len(case.works)) == (2, 2)
            case.go.set()
        assert len(set(map(id, case.found))) == 2
        assert [shared.problem for shared in case.found] == [None] * 4
        assert not len(case.works)
        await case.ask()
        assert case.done == 3  # ended work is begun anew

    trio.run(run)


@pytest.mark.parametrize("failure", [TierError("no answer"), OSError(5, "EIO")])
def test_a_failure_is_the_problem_of_each_that_waits(failure: Exception) -> None:
    async def run() -> None:
        case = Case()
        case.failure = failure
        async with trio.open_nursery() as nursery:
            nursery.start_soon(case.ask)
            nursery.start_soon(case.ask)
            case.go.set()
        assert [shared.problem for shared in case.found] == [failure] * 2
        with pytest.raises(NotFoundError, match="7: "):
            case.found[0].expect_done(7)
        assert case.defects == []

    trio.run(run)


def test_a_defect_is_told_and_does_not_end_the_daemon() -> None:
    async def run() -> None:
        case = Case()
        case.failure = ZeroDivisionError("1 / 0")
        case.go.set()
        await case.ask()
        assert case.defects == [(7, case.failure)]
        with pytest.raises(NotFoundError, match="a defect of kvfs"):
            case.found[0].expect_done(7)

    trio.run(run)


def test_shared_work_with_a_stale_error_raises_it() -> None:
    shared = SharedWork()
    shared.problem = StaleError("inode 7 has changed")
    with pytest.raises(StaleError, match="inode 7 has changed"):
        shared.expect_done(7)


def test_a_caller_that_is_cancelled_leaves_the_work_to_the_others() -> None:
    async def run() -> None:
        case = Case()
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0.01):
                await case.ask()
            nursery.start_soon(case.ask)
            await wait_all_tasks_blocked()
            case.go.set()
        assert case.done == 1
        assert case.found[1].problem is None

    trio.run(run)


def test_stop_cancels_all_work() -> None:
    async def run() -> None:
        case = Case()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(case.ask)
            await wait_all_tasks_blocked()
            case.works.stop()
        with pytest.raises(NotFoundError, match="it was given up"):
            case.found[0].expect_done(7)

    trio.run(run)


def test_the_caller_can_do_the_work_itself() -> None:
    async def run() -> None:
        case = Case()
        shared = case.works.enter(7, SharedWork())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(case.ask)
            await wait_all_tasks_blocked()
            case.works.end(7)
        assert case.found == [shared]
        assert case.done == 0

    trio.run(run)


@pytest.mark.parametrize(("down", "seconds"), [(None, 30.0), (10.2, 10.5), (0.0, 0.0)])
def test_an_open_does_not_wait_for_a_tier_that_is_down(down: float | None, seconds: float) -> None:
    async def run() -> None:
        health, event = Health("nvme", 0.0), trio.Event()

        async def fall(after: float) -> None:
            await trio.sleep(after)
            health.unanswered(trio.current_time(), "no answer")

        async with trio.open_nursery() as nursery:
            if down is not None:
                nursery.start_soon(partial(fall, down))
                if not down:
                    await wait_all_tasks_blocked()
            began = trio.current_time()
            await wait_while_up(event, began + 30.0, health)
            assert trio.current_time() - began == pytest.approx(seconds)

    trio.run(run, clock=MockClock(autojump_threshold=0))
