"""The scrubber: when it reads, what it passes by, what it remembers, and what it finds."""

# ruff: noqa: ASYNC240 - files of a few bytes, in a loop that nobody waits for

import errno
import itertools
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvfs.catalog import Inode
from kvfs.core.jobs import scrub
from kvfs.core.jobs.scrub import (
    LAST,
    NOTE_PERIOD,
    PASS,
    SHARE,
    SHARE_MOST,
    WEEK,
    Pass,
    Scrub,
    pause,
)
from kvfs.errors import CatalogError
from kvfs.movement import verifying
from kvfs.movement.movers import MoverFailedError
from kvfs.tiers import Tier
from tests.unit.test_packing import numbers
from tests.unit.world import MIB, World, world

BYTES = random.Random(1).randbytes(300_000)
DAY = 86400
EPOCH = 1_800_000_000.0
Case = Callable[[World], Awaitable[None]]


def run(case: Case, tmp_path: Path, **options: int) -> None:
    with world(tmp_path, **options) as made:
        trio.run(case, made, clock=MockClock(autojump_threshold=0.002))


def today() -> float:
    return EPOCH + trio.current_time()


class Watched:
    """A scrubber at work on a world: what it read, and when."""

    def __init__(self, made: World, period: int) -> None:
        self.made = made
        self.read: list[tuple[float, str]] = []
        self.events: list[dict[str, object]] = []
        self.scrub = Scrub(made.dispatcher.transfers, made.movers, period, clock=today)
        self.scrub.on_event = self._told
        self._run = made.movers.run
        made.movers.run = self._note  # type: ignore[method-assign,assignment]

    def _told(self, kind: str, **facts: object) -> None:
        self.events.append({"kind": kind, **facts})

    async def _note(self, job, batch, *more, **options):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN002, ANN003, ANN202
        self.read += [(trio.current_time(), copy.path) for copy in batch.copies]
        return await self._run(job, batch, *more, **options)

    @property
    def paths(self) -> list[str]:
        return [path for _, path in self.read]

    async def work(self, until: Callable[[], object], *, seconds: float = 100 * DAY) -> None:
        """Until something is true, which it must become in the world's time."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.scrub.run)
            with trio.fail_after(seconds):
                while not until():  # noqa: ASYNC110 (no event tells of it)
                    await trio.sleep(max(0.5, self.scrub.period / 200))
            self.scrub.stop()

    async def work_for(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self.scrub.run()

    def passes(self) -> int:
        return sum(event["kind"] == "scrub" for event in self.events)


async def stored(made: World, name: bytes, content: bytes = BYTES) -> Inode:
    """In both tiers, with a digest."""
    inode = await made.store(name, content, made.fast)
    await made.demote(inode.ino)
    return made.find(name)


def rot(tier: Tier, inode: Inode) -> Path:
    """One bit, which neither size nor time tells of."""
    path = Path(tier.path(inode.ino, inode.version))
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


# The pace


def test_reads_are_spread_evenly_over_the_period() -> None:
    tenth = pause(10, 0.0, period=1000, left=1000, passed=10, total=100)
    assert tenth == 100
    assert pause(10, 0.0, period=1000, left=900, passed=20, total=100) == 100


def test_a_pass_that_is_late_catches_up() -> None:
    assert pause(10, 0.0, period=1000, left=80, passed=30, total=100) == 10
    assert pause(10, 0.0, period=1000, left=0, passed=30, total=100) == 0


def test_a_pass_with_more_than_it_expected_goes_on_at_its_pace() -> None:
    assert pause(10, 0.0, period=1000, left=500, passed=200, total=100) == 50
    assert pause(10, 0.0, period=1000, left=500, passed=10, total=0) == 500


@pytest.mark.parametrize(
    ("period", "share"),
    [(WEEK, SHARE), (4 * WEEK, SHARE), (DAY, 7 * SHARE), (3600, SHARE_MOST), (1, SHARE_MOST)],
)
def test_processor_time_is_bounded_however_much_there_is_to_read(period: int, share: float) -> None:
    for left in (0, period):
        waits = pause(1 << 30, 0.5, period=period, left=left, passed=1 << 30, total=1 << 50)
        assert 0.5 / waits <= share * 1.0001


def test_a_pass_takes_the_period_and_the_next_one_begins_a_period_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "BATCH_COPIES", 1)

    async def case(made: World) -> None:
        for number in range(5):
            await stored(made, b"%d" % number)
        watched = Watched(made, WEEK)
        await watched.work(lambda: watched.passes() >= 2)
        assert len(watched.paths) == 20
        times = sorted({moment for moment, _ in watched.read})
        first, second = times[:5], times[5:]
        gaps = [later - sooner for sooner, later in itertools.pairwise(first)]
        assert gaps == pytest.approx([WEEK / 5] * 4, rel=0.01)
        assert second[0] - first[0] == pytest.approx(WEEK, rel=0.01)
        assert first[0] == pytest.approx(scrub.BREATH, abs=5)
        assert set(watched.paths[:10]) == set(watched.paths[10:])

    run(case, tmp_path)


def test_a_short_period_ends_the_breath_and_off_ends_all(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await stored(made, b"a")
        watched = Watched(made, 0)
        await watched.work_for(3 * WEEK)
        assert not watched.read
        assert watched.scrub.describe()["state"] == "off"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watched.scrub.run)
            await trio.sleep(1)
            watched.scrub.period = 100
            await trio.sleep(10)
            assert watched.passes() == 1
            await trio.sleep(100)
            assert watched.passes() == 2
            watched.scrub.period = 0
            await trio.sleep(1000)
            assert watched.passes() == 2
            watched.scrub.stop()

    run(case, tmp_path)


def test_a_clock_that_was_set_back_delays_no_pass_by_more_than_a_period(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await stored(made, b"a")
        watched = Watched(made, DAY)
        await watched.work(lambda: watched.passes() >= 1)
        watched.scrub._clock = lambda: today() - 1000 * DAY
        await watched.work(lambda: watched.passes() == 2, seconds=2 * DAY)

    run(case, tmp_path)


# Findings


def packed_only(made: World, inode: Inode) -> Inode:
    made.ledger.records.remove_copy(inode, made.fast)
    found = made.catalog.inode(inode.ino)
    assert found is not None
    assert found.packed is not None
    return found


@pytest.mark.parametrize("where", ["ram", "nvme", "packed"])
def test_copy_with_a_flipped_bit_is_quarantined_and_others_verified(
    tmp_path: Path, where: str
) -> None:
    async def case(made: World) -> None:
        content = numbers(MIB + 1000)
        if where == "packed":
            made.tell(".", compression="nvme")
        for name in (b"a", b"b", b"c"):
            await stored(made, name, content)
        if where == "packed":
            for name in (b"a", b"b", b"c"):
                packed_only(made, made.find(name))
        bad = made.find(b"b")
        tier = made.fast if where == "ram" else made.disk
        path = rot(tier, bad)
        watched = Watched(made, 100)
        await watched.work(lambda: watched.passes() >= 1)
        await made.dispatcher.trash.empty()
        assert not path.exists()
        assert [kept.name for kept in (tier.root / "quarantine").iterdir()] == [path.name]
        (event,) = [event for event in watched.events if event["kind"] == "rotten"]
        assert (event["tier"], event["inode"], event["file"]) == (tier.name, bad.ino, str(path))
        last = watched.scrub.describe()["last"]
        assert last["rotten"] == 1
        assert last["objects"] == (2 if where == "packed" else 5)
        assert made.ledger.counters["quarantined"] == 1
        left = made.catalog.inode(bad.ino)
        if where == "packed":
            assert left is None, "it was the only copy"
        else:
            assert left is not None
            assert tier not in made.ledger.tiers.holders(left)
        before = len(watched.events)
        await watched.work(lambda: watched.passes() >= 2)
        assert [event["kind"] for event in watched.events[before:]] == ["scrub"]
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_plain_file_where_the_record_says_packed_is_no_rot(tmp_path: Path) -> None:
    """A death came between the file and its record."""

    async def case(made: World) -> None:
        made.tell(".", compression="nvme")
        content = numbers(MIB + 1000)
        inode = packed_only(made, await stored(made, b"a", content))
        path = Path(made.disk.path(inode.ino, inode.version))
        path.write_bytes(content)
        watched = Watched(made, 100)
        await watched.work(lambda: watched.passes() >= 1)
        assert watched.scrub.describe()["last"]["objects"] == 1
        rot(made.disk, inode)
        await watched.work(lambda: watched.passes() >= 2)
        assert watched.scrub.describe()["last"]["rotten"] == 1

    run(case, tmp_path)


def test_a_copy_without_a_digest_is_counted_and_passed_by(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await made.store(b"a", BYTES, made.fast)
        watched = Watched(made, 100)
        await watched.work(lambda: watched.passes() >= 1)
        last = watched.scrub.describe()["last"]
        assert (last["objects"], last["without_digest"], watched.paths) == (0, 1, [])

    run(case, tmp_path)


# Copies that it skips


async def unlink(made: World, name: bytes) -> None:
    made.renames.tree.unlink(made.at(b"").ino, name)


async def write_again(made: World, name: bytes) -> None:
    held = await made.objects.open(made.find(name).ino, writable=True)
    made.write(held, b"other")
    await made.close(held, writable=True)


async def be_written(made: World, name: bytes) -> None:
    await made.objects.open(made.find(name).ino, writable=True)


async def be_evicted(made: World, name: bytes) -> None:
    made.ledger.records.remove_copy(made.find(name), made.disk)


@pytest.mark.parametrize("change", [unlink, write_again, be_written, be_evicted])
def test_copy_changed_during_its_scrub_is_no_rot(
    tmp_path: Path, change: Callable[[World, bytes], Awaitable[None]]
) -> None:
    async def case(made: World) -> None:
        inode = await stored(made, b"a")
        watched = Watched(made, 100)

        async def meanwhile() -> None:
            made.movers.after = nothing
            await change(made, b"a")

        async def nothing() -> None:
            pass

        rot(made.disk, inode)  # as the file looks while a program changes it
        made.movers.after = meanwhile
        await watched.work(lambda: watched.passes() >= 1)
        last = watched.scrub.describe()["last"]
        assert (last["rotten"], made.ledger.counters["quarantined"]) == (0, 0)
        for held in list(made.ledger.table.open.values()):
            await made.close(held, writable=True)

    run(case, tmp_path)


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await stored(made, b"a")
        held = await made.objects.open(made.find(b"a").ino, writable=True)
        made.write(held, b"other")
        watched = Watched(made, 100)
        await watched.work(lambda: watched.passes() >= 1)
        assert watched.paths == []
        await made.close(held, writable=True)

    run(case, tmp_path)


def test_copy_made_during_a_pass_is_left_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "BATCH_COPIES", 1)

    async def case(made: World) -> None:
        first = await stored(made, b"a")
        watched = Watched(made, 100)

        async def meanwhile() -> None:
            made.movers.after = nothing
            await stored(made, b"b")

        async def nothing() -> None:
            pass

        made.movers.after = meanwhile
        await watched.work(lambda: watched.passes() >= 1)
        assert {os.path.basename(path) for path in watched.paths} == {f"{first.ino:x}.1"}
        await watched.work(lambda: watched.passes() >= 2)
        assert len(watched.paths) == 2 + 4

    run(case, tmp_path)


# Its notes


def test_a_pass_goes_on_where_the_daemon_before_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that is replaced each day completes it, and no copy is read twice."""
    monkeypatch.setattr(scrub, "BATCH_COPIES", 1)

    async def case(made: World) -> None:
        for number in range(6):
            await stored(made, b"%d" % number)
        expected = {
            tier.path(inode.ino, inode.version)
            for inode in made.inodes()
            for tier in made.ledger.tiers.holders(inode)
        }
        read: list[str] = []
        lives = 0
        while lives < 12:
            watched = Watched(made, WEEK)
            await watched.work_for(DAY)
            read += watched.paths
            lives += 1
            if watched.scrub.describe()["last"]:
                break
            made.catalog.carried.clear()  # it was killed
            made.restart()
            await made.census()
        assert sorted(read) == sorted(expected)
        assert 3 < lives <= 7
        last = watched.scrub.describe()["last"]
        assert (last["objects"], last["rotten"]) == (12, 0)
        assert 3 * DAY < last["seconds"] <= WEEK
        made.restart()
        await made.census()
        again = Watched(made, WEEK)
        await again.work_for(scrub.BREATH + 10)
        assert again.scrub.describe()["last"] == last
        assert not again.read, "the period is not over"

    run(case, tmp_path)


def test_position_of_a_pass_is_committed_with_other_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "BATCH_COPIES", 1)

    async def case(made: World) -> None:
        for number in range(50):
            await stored(made, b"%d" % number)
        watched = Watched(made, 5000)
        commits = 0
        commit = made.catalog.commit

        def counting(changes, *, sync):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
            nonlocal commits
            commits += 1
            commit(changes, sync=sync)

        made.catalog.commit = counting  # type: ignore[method-assign]
        await watched.work(lambda: watched.passes() >= 1)
        assert 1 <= commits <= 5000 / NOTE_PERIOD + 1
        made.mkdir(b"d")
        noted = Pass.from_fact(made.catalog.fact(LAST))
        assert noted is not None
        assert noted.objects == 100
        assert made.catalog.fact(PASS)

    run(case, tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '{"began": NaN}', "nonsense"])
def test_a_fact_that_makes_no_sense_begins_a_new_pass(tmp_path: Path, text: str) -> None:
    async def case(made: World) -> None:
        await stored(made, b"a")
        with made.catalog.batch() as batch:
            batch.set_fact(PASS, text)
            batch.set_fact(LAST, text)
        watched = Watched(made, 100)
        await watched.work(lambda: watched.passes() >= 1)
        assert watched.scrub.describe()["last"]["objects"] == 2

    run(case, tmp_path)


# Its pauses


def test_a_tier_that_is_not_healthy_pauses_it(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await stored(made, b"a")
        watched = Watched(made, 100)
        made.disk.health.failed(time.monotonic(), "EIO")
        await watched.work_for(500)
        assert not watched.read
        described = watched.scrub.describe()
        assert (described["state"], described["why"]) == ("paused", "nvme tier is suspect")
        for _ in range(3):
            made.disk.health.probed(time.monotonic())
        await watched.work(lambda: watched.passes() >= 1)
        assert watched.scrub.describe()["state"] == "waiting"

    run(case, tmp_path)


def test_a_copy_that_cannot_be_read_is_said_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that fails is no reason to lose a copy."""

    async def case(made: World) -> None:
        inode = await stored(made, b"a")
        await stored(made, b"b")
        bad = made.disk.path(inode.ino, inode.version)
        real = verifying._open

        def fail(copy: verifying.Copy) -> tuple[int, bool]:
            if copy.path == bad:
                raise OSError(errno.EIO, "Input/output error", bad)
            return real(copy)

        monkeypatch.setattr(verifying, "_open", fail)
        watched = Watched(made, 100)
        await watched.work(lambda: watched.passes() >= 1)
        last = watched.scrub.describe()["last"]
        assert (last["objects"], last["unread"], last["rotten"]) == (3, 1, 0)
        assert made.disk.health.state == "suspect"
        assert f"scrub of {bad} failed: EIO" in caplog.text
        assert made.disk in made.ledger.tiers.holders(made.find(b"a"))

    run(case, tmp_path)


def test_a_copy_that_is_not_there_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def case(made: World) -> None:
        inode = await stored(made, b"a")
        path = Path(made.disk.path(inode.ino, inode.version))
        path.unlink()
        watched = Watched(made, 100)
        await watched.work(lambda: watched.passes() >= 1)
        assert f"did not find 1 copies, the first is of 'a', {path}" in caplog.text
        assert watched.scrub.describe()["last"]["unread"] == 1
        assert made.disk.health.state == "healthy"

    run(case, tmp_path)


def test_movers_that_die_over_a_copy_do_not_end_the_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "BATCH_COPIES", 1)

    async def case(made: World) -> None:
        await stored(made, b"a")
        await stored(made, b"b")
        watched = Watched(made, 100)

        async def die() -> None:
            made.movers.before = nothing
            raise MoverFailedError("3 movers died")

        async def nothing() -> None:
            pass

        made.movers.before = die
        await watched.work(lambda: watched.passes() >= 1)
        last = watched.scrub.describe()["last"]
        assert (last["objects"], last["unread"]) == (2, 2)

    run(case, tmp_path)


def test_a_catalog_that_fails_is_asked_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def case(made: World) -> None:
        await stored(made, b"a")
        watched = Watched(made, 100)
        asked: list[float] = []

        def fail(ino: int, limit: int) -> list[Inode]:
            asked.append(trio.current_time())
            raise CatalogError(f"no answer about {ino}, {limit}")

        with monkeypatch.context() as patch:
            patch.setattr(made.catalog, "inodes_after", fail)
            await watched.work_for(2.5 * scrub.RETRY)
        assert len(asked) == 3
        assert "the scrubber goes on in 300 s after: no answer" in caplog.text
        assert watched.scrub.describe()["state"] == "paused"
        await watched.work(lambda: watched.passes() >= 1)
        assert watched.scrub.describe()["last"]["objects"] == 2

    run(case, tmp_path)


# That its steps are short


def test_many_inodes_are_gone_through_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories, and what only a bucket has, cost nothing but the look."""
    monkeypatch.setattr(scrub, "STEP", 4)
    monkeypatch.setattr(scrub, "STEPS", 3)

    async def case(made: World) -> None:
        for number in range(50):
            made.mkdir(b"d%d" % number)
        await stored(made, b"a")
        looked: list[int] = []
        real = made.catalog.inodes_after

        def look(ino: int, limit: int) -> list[Inode]:
            looked.append(limit)
            return real(ino, limit)

        made.catalog.inodes_after = look  # type: ignore[method-assign]
        watched = Watched(made, 100)
        await watched.work(lambda: watched.passes() >= 1)
        assert set(looked) <= {4, 1}
        assert len(looked) >= 50 / 4
        assert len(watched.paths) == 2

    run(case, tmp_path)
