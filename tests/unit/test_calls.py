"""Calls that are given up, and their late results, for which no caller waits any more."""

import errno
import os
import threading
from pathlib import Path

import pytest
import trio

from kvfs.errors import TierError
from kvfs.tiers import TierCall, calls
from kvfs.tiers.calls import HEALTHY_PROBES, THREADS, Calls, Health
from tests.harness import wait_for


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "DEADLINE", 0.05)
    monkeypatch.setattr(calls, "PROBE_DEADLINE", 0.05)


@pytest.fixture
def made() -> Calls:
    return Calls(Health("nvme tier /data", 0.0))


def refuse() -> None:
    raise OSError(errno.EIO, "sick")


def test_answers_and_errors_come_back(made: Calls) -> None:
    async def case() -> None:
        assert await made.call(lambda: 7) == 7
        with pytest.raises(OSError, match="sick"):
            await made.call(TierCall("open", refuse))

    trio.run(case)
    assert made.health.state == "healthy"  # the caller knows what an error means


def test_a_call_without_an_answer_is_given_up_and_taken_back(made: Calls) -> None:
    answers = threading.Event()
    taken: list[int] = []

    def slow() -> int:
        assert answers.wait(60)
        return 7

    async def case() -> None:
        with pytest.raises(TierError, match=r"open has no answer after 0\.1 s"):
            await made.call(TierCall("open", slow, taken.append))
        assert made.health.stuck
        with pytest.raises(TierError, match="create is not tried: open has no answer"):
            await made.call(TierCall("create", pytest.fail))
        assert taken == []
        answers.set()

    trio.run(case)
    wait_for(lambda: taken == [7], "the late answer is taken back")


def test_more_calls_than_threads_are_given_up_as_well(made: Calls) -> None:
    """Those that never got a thread close their descriptor, too."""
    answers = threading.Event()
    ended: list[int] = []
    failures: list[TierError] = []

    async def one(number: int) -> None:
        job = TierCall("read", lambda: answers.wait(60), end=lambda: ended.append(number))
        try:
            await made.call(job)
        except TierError as error:
            failures.append(error)

    async def case() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(2 * THREADS):
                nursery.start_soon(one, number)
        assert len(failures) == 2 * THREADS
        assert len(ended) >= THREADS, "a thread may have had no turn yet"
        answers.set()

    trio.run(case)
    wait_for(lambda: sorted(ended) == list(range(2 * THREADS)), "each ends once")


def test_an_answer_in_the_very_moment_is_not_lost(made: Calls) -> None:
    """In any order, an answer is either returned or taken back, never both."""
    taken: list[int] = []
    returned: list[int] = []

    async def case() -> None:
        for number in range(100):
            made.health.stuck = False
            job = TierCall("open", lambda n=number: n, taken.append)  # type: ignore[misc]
            try:
                returned.append(await made.call(job))
            except TierError:
                continue

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "DEADLINE", 0.0002)
        trio.run(case)
    begun = set(taken) | set(returned)
    assert len(taken) + len(returned) == len(begun)


def test_a_descriptor_is_the_calls_own(made: Calls, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    job = TierCall.on_file("read", fd, lambda own: os.pread(own, 7, 0))
    os.close(fd)

    async def case() -> None:
        assert await made.call(job) == b"content"

    trio.run(case)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) < before, "nothing is left open")


def test_a_probe_is_not_given_up_but_told_of(made: Calls) -> None:
    answers = threading.Event()

    def probe() -> str:
        assert answers.wait(60)
        return ""

    async def case() -> None:
        made.health.failed(0.0, "open: EIO")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.probe, probe)
            await trio.to_thread.run_sync(wait_for, lambda: made.health.stuck, "it is noticed")
            assert made.health.down
            answers.set()
        assert (made.health.state, made.health.stuck) == ("suspect", False)

    trio.run(case)


def test_a_healthy_tier_is_probed_seldom(made: Calls) -> None:
    probes: list[int] = []

    def probe() -> str:
        probes.append(1)
        return "" if len(probes) == 1 else "probe: EIO"

    async def case() -> None:
        for _ in range(2 * HEALTHY_PROBES):
            await made.probe(probe)
        assert len(probes) == 2
        await made.probe(probe)
        assert len(probes) == 3
        assert made.health.down

    trio.run(case)
