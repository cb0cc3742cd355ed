"""The registry of jobs: numbers, progress, cancellation, and how long a result is remembered."""

import trio
import trio.testing

from kvfs.core.jobs.job import REASONS_MOST, Job, Jobs, Reasons


def test_jobs_come_in_the_order_in_which_they_were_begun() -> None:
    async def case() -> None:
        jobs = Jobs[Job](kept=8)
        assert [jobs.begin(Job([at, at])) for at in (5, 6)] == [1, 2]
        assert [(await jobs.next()).roots for _ in range(2)] == [(5,), (6,)]
        with trio.move_on_after(0.01) as scope:
            await jobs.next()
        assert scope.cancelled_caught
        assert jobs.alive == 2

    trio.run(case)


def test_a_job_that_waits_is_woken_by_the_next_one() -> None:
    async def case() -> None:
        jobs = Jobs[Job](kept=8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(jobs.next)
            await trio.testing.wait_all_tasks_blocked()
            jobs.begin(Job([7]))

    trio.run(case)


def test_cancel_marks_running_jobs() -> None:
    jobs = Jobs[Job](kept=8)
    first, other = Job([1]), Job([2])
    numbers = [jobs.begin(job) for job in (first, other)]
    jobs.end(first)
    jobs.cancel_all()
    jobs.cancel(99)
    assert (first.cancelled, other.cancelled) == (False, True)
    assert [jobs.look(number) for number in numbers] == [
        {"over": over, "files": 0, "bytes": 0} for over in (True, False)
    ]
    assert jobs.look(99) is None


def test_oldest_ended_jobs_are_forgotten() -> None:
    jobs = Jobs[Job](kept=2)
    begun = [Job([at]) for at in range(4)]
    numbers = [jobs.begin(job) for job in begun]
    for job in begun:
        jobs.end(job)
    assert [jobs.look(number) is None for number in numbers] == [True, True, False, False]
    assert jobs.alive == 0


def test_reasons_beyond_the_most_are_counted_together() -> None:
    why = Reasons()
    for at in range(REASONS_MOST + 3):
        why.note(f"reason {at}")
    why.note("reason 0", files=4)
    assert len(why) == REASONS_MOST + 1
    assert (why["reason 0"], why["other reasons"]) == (5, 3)
