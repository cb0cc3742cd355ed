"""Worker processes, real ones: they may die, a job may not."""

import os
import pickle
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
import xxhash

from kvfs.errors import TierError
from kvfs.movement import copying
from kvfs.movement import movers as movers_module
from kvfs.movement.copying import Moved
from kvfs.movement.movers import (
    ATTEMPTS,
    MoverFailedError,
    MoverOverdueError,
    MoverPool,
    SourceChangedError,
)
from tests.harness import wait_for

pytestmark = pytest.mark.slow


def dying(source: str, size: int, *, sync: bool, sparse: bool = False) -> Moved:  # noqa: ARG001
    """A job whose worker is killed as often as its source still has bytes, one for each death."""
    left = os.stat(source).st_size
    if left:
        os.truncate(source, left - 1)
        os.kill(os.getpid(), signal.SIGKILL)
    return Moved(os.getpid().to_bytes(4, "little"), size)


def refusing(source: str, size: int, *, sync: bool, sparse: bool = False) -> Moved:  # noqa: ARG001
    raise SourceChangedError(f"{source} {size} {sync}")


def run(case: Callable[[MoverPool], Awaitable[None]], workers: int = 1) -> Counter[str]:
    counters = Counter[str]()

    async def opened() -> None:
        async with MoverPool.open(workers, counters) as movers:
            await case(movers)
            assert movers.running == 0

    trio.run(opened)
    return counters


def test_workers_that_do_not_end_in_time_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movers_module, "GRACE", 0.0)
    (tmp_path / "a").write_bytes(b"content")

    async def case(movers: MoverPool) -> None:
        await movers.read_through(str(tmp_path / "a"), 7, sync=False)

    run(case)


def test_jobs_run_in_other_processes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    digest = xxhash.xxh3_128(b"content").digest()

    async def case(movers: MoverPool) -> None:
        source, target = str(tmp_path / "a"), str(tmp_path / "b")
        moved = await movers.copy(source, target, 7, sync=True, cold=True)
        assert moved.digest == digest
        assert (tmp_path / "b").read_bytes() == b"content"
        found = await movers.read_through(target, 7, sync=False)
        assert found.digest == digest
        ran = await movers.run(dying, str(tmp_path / "empty"), 7, options={"sync": True})
        assert ran.digest != os.getpid().to_bytes(4, "little")

    (tmp_path / "empty").touch()
    assert run(case, workers=2)["mover_failures"] == 0


@pytest.mark.parametrize("deaths", [1, ATTEMPTS - 1])
def test_the_death_of_a_worker_fails_no_job(
    tmp_path: Path, deaths: int, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lives").write_bytes(bytes(deaths))

    async def case(movers: MoverPool) -> None:
        moved = await movers.run(dying, str(tmp_path / "lives"), 7, options={"sync": True})
        assert moved.blocks == 7

    assert run(case)["mover_failures"] == deaths
    assert f"a mover died over dying {tmp_path}/lives (attempt 1 of {ATTEMPTS})" in caplog.text


def test_a_job_that_kills_every_worker_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "lives").write_bytes(bytes(2 * ATTEMPTS))
    (tmp_path / "a").write_bytes(b"content")

    async def case(movers: MoverPool) -> None:
        with pytest.raises(MoverFailedError, match=f"dying {tmp_path}/lives: {ATTEMPTS} movers"):
            await movers.run(dying, str(tmp_path / "lives"), 7, options={"sync": True})
        assert movers.running == 0
        moved = await movers.read_through(str(tmp_path / "a"), 7, sync=False)
        assert moved.digest == xxhash.xxh3_128(b"content").digest()

    assert run(case)["mover_failures"] == ATTEMPTS
    assert issubclass(MoverFailedError, TierError)


def test_a_job_without_an_answer_is_given_up(tmp_path: Path) -> None:
    """Its worker is killed, what it has left half made removed, and another one takes its place."""
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b.part").touch()
    os.mkfifo(tmp_path / "silent")  # opening it waits for a writer

    async def case(movers: MoverPool) -> None:
        with pytest.raises(MoverOverdueError, match="no answer after"):
            await movers.run(
                copying.copy,
                str(tmp_path / "silent"),
                str(tmp_path / "b"),
                7,
                options={"sync": False, "cold": False},
                patience=2.0,
                destinations=[str(tmp_path / "b")],
            )
        moved = await movers.read_through(str(tmp_path / "a"), 7, sync=False)
        assert moved.digest == xxhash.xxh3_128(b"content").digest()
        await trio.to_thread.run_sync(
            wait_for, lambda: not (tmp_path / "b.part").exists(), "no part is left"
        )

    assert run(case)["mover_failures"] == 0


def test_errors_of_a_job_come_back_as_they_are(tmp_path: Path) -> None:
    async def case(movers: MoverPool) -> None:
        with pytest.raises(FileNotFoundError):
            await movers.read_through(str(tmp_path / "none"), 1, sync=False)
        with pytest.raises(SourceChangedError, match="some 5 True"):
            await movers.run(refusing, "some", 5, options={"sync": True})

    assert run(case)["mover_failures"] == 0


def test_no_more_jobs_run_than_there_are_workers(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")

    async def case(movers: MoverPool) -> None:
        async def one() -> None:
            await movers.read_through(str(tmp_path / "a"), 7, sync=False)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(one)
            await trio.testing.wait_all_tasks_blocked()
            assert movers.running == 10
            statistics = movers._limiter.statistics()
            assert (statistics.borrowed_tokens, statistics.total_tokens) == (2, 2)

    run(case, workers=2)


def test_jobs_and_results_can_be_pickled() -> None:
    for job in (copying.copy, copying.read_through):
        assert pickle.loads(pickle.dumps(job)) is job  # noqa: S301
    moved = Moved(b"digest", 8)
    assert pickle.loads(pickle.dumps(moved)) == moved  # noqa: S301
