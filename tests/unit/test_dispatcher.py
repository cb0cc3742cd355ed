"""Copies in the background: what they do, and what they must not."""

# ruff: noqa: ASYNC230, ASYNC240 - files of a few bytes, in a loop that nobody waits for

import errno
import math
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import xxhash
from trio.testing import MockClock

from kvfs import failpoints
from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.capacity import watch
from kvfs.core.dispatcher import Dispatcher
from kvfs.core.ledger import census
from kvfs.core.moves import breaker
from kvfs.core.moves.movement import Movement
from kvfs.errors import CatalogError, NotFoundError
from kvfs.movement.movers import LostError, MoverPool
from kvfs.tiers import Tier, TierCall
from tests.unit.world import MIB, World, digest, world

BYTES = random.Random(1).randbytes(300_000)
OTHER = random.Random(2).randbytes(200_000)
Case = Callable[[World], Awaitable[None]]


def run(case: Case, tmp_path: Path, **options: int) -> None:
    with world(tmp_path, **options) as made:
        trio.run(case, made, clock=MockClock(autojump_threshold=0.002))


async def working(made: World, case: Case) -> None:
    """With the whole background at work."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.dispatcher.run)
        await case(made)
        nursery.cancel_scope.cancel()


# One job


def test_a_demoted_object_is_in_both_tiers_and_has_a_digest(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        await made.demote(inode.ino)
        found = made.find(b"a")
        assert made.ledger.tiers.holders(found) == made.tiers
        assert found.digest == digest(BYTES)
        for tier in made.tiers:
            assert Path(tier.path(found.ino, found.version)).read_bytes() == BYTES
        assert made.ledger.counters["demoted"] == 1
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_promoted_object_is_in_both_tiers(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        await made.promote(inode.ino)
        assert made.ledger.tiers.holders(made.find(b"a")) == made.tiers
        assert await made.read(inode.ino) == BYTES
        assert made.fast.hits == 1
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_sparse_object_stays_sparse_and_is_accounted_so(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.expect(b"a", 4096)
        held = await made.create(b"a")
        made.write(held, b"end", 8 * MIB)
        await made.close(held, writable=True)
        await made.demote(held.inode.ino)
        assert made.disk.used < MIB
        assert len(await made.read(held.inode.ino)) == 8 * MIB + 3
        await made.check_at_rest()

    run(case, tmp_path)


@pytest.mark.parametrize("known", [False, True])
def test_a_digest_stays_of_its_kind_whatever_holes_there_are(
    tmp_path: Path, *, known: bool
) -> None:
    """A catalog of an earlier kvfs has digests of all bytes of such files."""
    content = bytes(8 * MIB) + b"end"
    whole = xxhash.xxh3_128_digest(content)

    async def case(made: World) -> None:
        made.expect(b"a", 4096)
        held = await made.create(b"a")
        made.write(held, b"end", 8 * MIB)
        await made.close(held, writable=True)
        inode = made.ledger.table.inode(held.inode.ino)
        assert inode is not None
        assert inode.sparse
        if known:
            inode.digest = whole
            with made.ledger.catalog.batch() as batch:
                batch.put(inode)
        await made.demote(inode.ino)
        inode = made.ledger.table.inode(inode.ino)
        assert inode is not None
        assert (inode.on_nvme, inode.sparse) == (True, not known)
        assert (inode.digest == whole) == known
        assert await made.dispatcher.verification.matches(made.disk, inode)
        backing = Path(made.disk.path(inode.ino, inode.version))
        with backing.open("r+b") as file:
            file.write(b"x")
        assert not await made.dispatcher.verification.matches(made.disk, inode)

    run(case, tmp_path)


def test_copy_too_large_for_nvme_is_not_retried(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        large = await made.store(b"a", BYTES, made.fast)
        await made.store(b"b", OTHER, made.fast)
        assert made.dispatcher.write_back.start()[1] == 2
        failpoints.arm("movement.copy=raise:EFBIG")
        try:
            await made.demote(large.ino)
        finally:
            failpoints.arm("")
        assert made.dispatcher.write_back.start()[1] == made.dispatcher.write_back.too_large == 1
        assert large.ino not in made.dispatcher.demotion.next()
        assert (made.dispatcher.breaker.failures, made.ledger.counters["job_failures"]) == (0, 0)
        assert made.disk.health.state == "healthy"
        await made.check_at_rest()
        await rewrite(made, made.find(b"a"))
        assert made.dispatcher.write_back.too_large == 0
        assert made.dispatcher.write_back.start()[1] == 2

    run(case, tmp_path)


async def rewrite(made: World, inode: Inode) -> None:
    held = await made.objects.open(inode.ino, writable=True)
    made.write(held, b"new")
    await made.close(held, writable=True)


async def replace(made: World, inode: Inode) -> None:
    held = await made.objects.open(inode.ino, writable=True, truncate=True)
    made.write(held, OTHER)
    await made.close(held, writable=True)


async def begin_writing(made: World, inode: Inode) -> None:
    made.left_open = await made.objects.open(inode.ino, writable=True)  # type: ignore[attr-defined]


async def unlink(made: World, inode: Inode) -> None:
    del inode
    made.tree.unlink(ROOT_INO, b"a")


async def unlink_and_purge(made: World, inode: Inode) -> None:
    made.tree.unlink(ROOT_INO, b"a")
    made.ledger.removals.purge(inode.ino)
    await made.dispatcher.trash.empty()


async def rename_over(made: World, inode: Inode) -> None:
    del inode
    await made.store(b"b", OTHER)
    made.renames.rename(ROOT_INO, b"b", ROOT_INO, b"a", 0)


async def drop(made: World, inode: Inode) -> None:
    made.ledger.removals.drop(made.tree.inode(inode.ino), "evicted")


CHANGES = [rewrite, replace, begin_writing, unlink, unlink_and_purge, rename_over, drop]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("job", ["demote", "promote", "settle"])
def test_job_of_a_changed_object_changes_nothing(
    tmp_path: Path, job: str, when: str, change: Callable[[World, Inode], Awaitable[None]]
) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.fast if job == "demote" else made.disk)

        async def happens() -> None:
            made.movers.before = made.movers.after = _nothing
            await change(made, inode)

        setattr(made.movers, when, happens)
        await getattr(made, job)(inode.ino)
        made.check()
        counters = made.ledger.counters
        assert not counters["demoted"] + counters["promoted"] + counters["settled"]
        assert counters["job_failures"] == 0, "it is no failure either"
        held = getattr(made, "left_open", None)
        if held is not None:
            await made.close(held, writable=True)
        await made.check_at_rest()

    run(case, tmp_path)


async def _nothing() -> None:
    pass


@pytest.mark.parametrize("job", ["promote", "settle"])
def test_job_fails_quietly_while_a_writer_renames_the_file(tmp_path: Path, job: str) -> None:
    """The file has the next version's name already, and the record does not."""

    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        files, calm = made.objects.files, made.objects.files.io
        renamed, recorded = trio.Event(), trio.Event()

        async def io(tier: Tier, call: TierCall[object]) -> object:
            done = await calm(tier, call)
            if getattr(call, "what", "") == "rename":
                renamed.set()
                await recorded.wait()
            return done

        async def write() -> None:
            held = await made.objects.open(inode.ino, writable=True)
            await made.close(held, writable=True)

        async with trio.open_nursery() as nursery:

            async def happens() -> None:
                made.movers.before = _nothing
                nursery.start_soon(write)
                await renamed.wait()

            files.io, made.movers.before = io, happens  # type: ignore[method-assign, assignment]
            await getattr(made, job)(inode.ino)
            recorded.set()
        assert renamed.is_set()
        assert made.ledger.counters["job_failures"] == 0
        assert await made.read(inode.ino) == BYTES
        await made.check_at_rest()

    run(case, tmp_path)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("job", ["demote", "promote", "settle"])
def test_a_job_does_not_mind_readers_and_names(tmp_path: Path, job: str, when: str) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.fast if job == "demote" else made.disk)
        held = []

        async def happens() -> None:
            made.movers.before = made.movers.after = _nothing
            held.append(await made.objects.open(inode.ino, writable=False))
            made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
            made.tree.link(inode.ino, ROOT_INO, b"c")
            made.attributes.change(inode.ino, mode=0o600)

        setattr(made.movers, when, happens)
        await getattr(made, job)(inode.ino)
        made.check()
        assert made.ledger.counters[f"{job}d"] == 1
        found = made.find(b"b")
        assert (found.mode & 0o777, len(found.links)) == (0o600, 2)
        await made.close(held[0], writable=False)
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_promotion_of_bytes_that_are_not_their_digest_ends_the_object(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        await made.settle(inode.ino)
        path = made.disk.path(inode.ino, 1)
        before = os.stat(path)
        with Path(path).open("r+b") as file:
            file.write(b"rot")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        await made.promote(inode.ino)
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 1
        assert "do not match their digest" in caplog.text
        assert made.catalog.inode(inode.ino) is None
        await made.check_at_rest()
        assert not made.on_disk(made.fast)
        assert not made.on_disk(made.disk)

    run(case, tmp_path)


def test_a_failure_leaves_everything_and_pauses_demotions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.fast)

        async def fail() -> None:
            raise OSError(28, "no space")

        made.movers.before = fail
        await made.demote(inode.ino)
        made.dispatcher.write_back._until = math.inf
        assert made.dispatcher._next_job() is None, "not at once"
        made.movers.before = _nothing
        await trio.sleep(breaker.PAUSE)
        assert made.dispatcher._next_job() is not None
        await made.check_at_rest()
        assert "demote of '" in caplog.text

    run(case, tmp_path)


def test_a_promotion_that_does_not_fit_is_skipped(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        for number in range(7):
            await made.store(b"x%d" % number, BYTES, made.fast)
        inode = await made.store(b"a", BYTES, made.disk)
        await made.promote(inode.ino)
        assert made.ledger.counters["promotions_skipped"] == 1
        assert made.ledger.counters["job_failures"] == 0
        await made.check_at_rest()

    run(case, tmp_path, ram=2 * MIB + 200_000)


# All of it at work


def test_ram_is_kept_reclaimable(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        for number in range(60):
            made.expect(b"a", len(BYTES))
            held = await made.create(b"%d" % number, BYTES)
            assert held.tier is made.ram, "there is always room"
            await made.close(held, writable=True)
            await trio.testing.wait_all_tasks_blocked()
        assert made.room.reclaimable >= made.fast.capacity // 4
        assert made.ledger.counters["dropped"] == 0
        made.check()
        for number in range(60):
            assert await made.read(made.find(b"%d" % number).ino) == BYTES

    run(lambda made: working(made, case), tmp_path, ram=4 * MIB)


def test_object_opened_twice_is_promoted(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        await made.read(inode.ino)
        await trio.testing.wait_all_tasks_blocked()
        assert made.ledger.tiers.holders(made.find(b"a")) == [made.nvme]
        await made.read(inode.ino)
        await trio.testing.wait_all_tasks_blocked()
        assert made.ledger.tiers.holders(made.find(b"a")) == made.tiers
        made.dispatcher.promotion.after = 0
        other = await made.store(b"b", BYTES, made.disk)
        for _ in range(5):
            await made.read(other.ino)
        await trio.testing.wait_all_tasks_blocked()
        assert made.ledger.tiers.holders(made.find(b"b")) == [made.nvme]

    run(lambda made: working(made, case), tmp_path)


def test_object_written_to_nvme_gets_a_digest(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await made.store(b"a", BYTES, made.disk)
        await trio.testing.wait_all_tasks_blocked()
        assert made.find(b"a").digest == digest(BYTES)
        assert made.ledger.counters["settled"] == 1

    run(lambda made: working(made, case), tmp_path)


def test_write_back_ends_when_its_client_hears_that_nothing_is_left(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        assert made.dispatcher.write_back.start()[1] == 1
        assert made.dispatcher.write_back.wanted
        await made.demote(inode.ino)
        assert made.dispatcher.write_back.wanted, "nobody has asked"
        assert made.dispatcher.write_back.start() == (0, 0)
        assert not made.dispatcher.write_back.wanted, "what comes now stays in RAM"

    run(case, tmp_path)


def test_draining_writes_all_of_ram_back(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        for number in range(10):
            await made.store(b"%d" % number, BYTES, made.fast)
        size, objects = made.dispatcher.write_back.start()
        assert objects == 10
        assert size >= 10 * len(BYTES)
        await made.dispatcher.write_back.drain()
        assert made.dispatcher.write_back.start() == (0, 0)
        made.restart(reboot=True)
        await made.census()
        for number in range(10):
            assert await made.read(made.find(b"%d" % number).ino) == BYTES

    run(lambda made: working(made, case), tmp_path)


def test_draining_ends_when_nvme_takes_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"y", bytes(900_000), made.disk)
        await made.objects.open(inode.ino, writable=False)  # and so it cannot go
        for number in range(4):
            await made.store(b"%d" % number, BYTES, made.fast)
        await made.dispatcher.write_back.drain()
        assert made.dispatcher.write_back.start()[1] == 4
        assert "could not be written back" in caplog.text
        made.dispatcher.write_back._until = 0.0

    run(lambda made: working(made, case), tmp_path, ram=16 * MIB, nvme=MIB)


def limit_jobs(made: World, most: int) -> None:
    """Fail rather than go round and round."""
    real, left = made.dispatcher._job, [most]

    async def counted(movement: Movement, inos: list[int]) -> None:
        left[0] -= 1
        assert left[0] > 0, f"more than {most} jobs"
        await real(movement, inos)

    made.dispatcher._job = counted  # type: ignore[method-assign]


def test_draining_into_less_room_ends(tmp_path: Path) -> None:
    """More in RAM than NVMe can hold: the oldest is lost, and it comes to an end."""

    async def case(made: World) -> None:
        limit_jobs(made, 200)
        for number in range(30):
            await made.store(b"%d" % number, BYTES, made.fast)
        await made.dispatcher.write_back.drain()
        made.check_accounts()

    run(lambda made: working(made, case), tmp_path, ram=16 * MIB, nvme=2 * MIB)


def test_a_small_nvme_tier_is_not_copied_to_for_ever(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        limit_jobs(made, 200)
        for number in range(49):
            await made.store(b"%d" % number, BYTES, made.fast)
        for _ in range(50):
            await trio.sleep(0.1)
        made.check_accounts()

    run(lambda made: working(made, case), tmp_path, ram=16 * MIB, nvme=2 * MIB)


def test_unlinked_open_file_makes_no_work(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        limit_jobs(made, 50)
        inode = await made.store(b"a", BYTES, made.fast)
        held = await made.objects.open(inode.ino, writable=False)
        made.tree.unlink(ROOT_INO, b"a")
        await made.dispatcher.write_back.drain()
        assert made.dispatcher.write_back.start() == (0, 0)
        await made.close(held, writable=False)

    run(lambda made: working(made, case), tmp_path)


def test_reservations_follow_files_that_grow(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.expect(b"a", 4096)
        held = await made.create(b"a", bytes(3 * MIB))
        made.objects.sealing.bounds.look()
        assert held.reserved >= 3 * MIB
        assert held.tier.reserved == held.reserved
        await made.close(held, writable=True)
        assert made.fast.reserved == 0
        made.check()

    run(lambda made: working(made, case), tmp_path)


# Looking after the tiers


def test_half_done_files_of_a_crash_are_swept(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        kept = await made.store(b"kept", OTHER, made.disk)
        litter = [
            made.disk.path(inode.ino, 1),  # a demotion that was not committed
            made.disk.path(kept.ino, 2),  # a writer's new version
            made.disk.path(12, 1),  # of no program
            f"{made.disk.path(inode.ino, 1)}.part",
            made.fast.path(kept.ino, 1),
        ]
        made.restart(crash=True)
        for path in litter:
            Path(path).write_bytes(b"left over")
        made.dispatcher.census._started += 3600  # the files are from before
        await made.census()
        assert not any(map(os.path.exists, litter))
        assert made.ledger.counters["swept"] == len(litter)
        assert await made.read(inode.ino) == BYTES
        assert await made.read(kept.ino) == OTHER
        await made.check_at_rest()

    run(case, tmp_path)


def test_sweep_keeps_a_file_made_anew_under_a_swept_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash left the new version of a file; it is made again while a thread unlinks that."""

    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        path = Path(made.disk.path(inode.ino, 2))
        made.restart(crash=True)
        path.write_bytes(b"left over")
        unlink = census._unlink

        def late(swept: str) -> None:
            path.write_bytes(b"made anew")
            unlink(swept)

        monkeypatch.setattr(census, "_unlink", late)
        await made.census()
        assert made.ledger.counters["swept"] == 1
        assert path.read_bytes() == b"made anew"
        path.unlink()
        await made.check_at_rest()

    run(case, tmp_path)


def test_the_sweep_leaves_half_made_files_of_this_session(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.restart()
        fresh = Path(f"{made.disk.path(1000, 1)}.part")
        fresh.write_bytes(b"being copied")
        made.dispatcher.census._started -= 3600
        await made.census()
        assert fresh.exists()
        fresh.unlink()

    run(case, tmp_path)


def test_a_full_device_makes_the_tier_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(made: World) -> None:
        for number in range(4):
            await made.store(b"%d" % number, BYTES, made.disk)
        real = os.statvfs(made.disk.root)
        full = os.statvfs_result((*real[:3], 0, 0, *real[5:]))
        monkeypatch.setattr(os, "statvfs", lambda _path: full)
        with trio.fail_after(60):
            while made.disk.capacity != made.disk.used:  # noqa: ASYNC110 (a tier tells nobody)
                await trio.sleep(watch.SPACE_PERIOD)
            monkeypatch.undo()
            while made.disk.capacity != made.disk.configured_capacity:  # noqa: ASYNC110 (as above)
                await trio.sleep(watch.SPACE_PERIOD)

    run(lambda made: working(made, case), tmp_path)


def test_refused_commits_are_retried_when_the_catalog_works(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        held = await made.create(b"a", BYTES)
        failpoints.arm(";".join(f"catalog.commit=raise:EIO@{number}" for number in range(1, 100)))
        try:
            with pytest.raises(CatalogError):
                await made.close(held, writable=True)
        finally:
            failpoints.arm("")
        made.check()
        assert made.ledger.table.staging
        while made.ledger.table.open:  # noqa: ASYNC110 (the clock goes on while everybody sleeps)
            await trio.sleep(watch.SPACE_PERIOD)
        made.check()
        assert await made.read(held.inode.ino) == BYTES

    run(lambda made: working(made, case), tmp_path)


@pytest.mark.parametrize("in_use", [False, True])
def test_object_with_a_failed_sync_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_use: bool
) -> None:
    """The page cache has it still, and the next sync would say that all is well."""

    async def lost(*_: object, **__: object) -> None:
        raise LostError(errno.EIO, "Input/output error")

    async def case(made: World) -> None:
        monkeypatch.setattr(made.dispatcher.verification.movers, "read_through", lost)
        made.expect(b"a", None)
        held = await made.create(b"a", BYTES)
        assert held.tier is made.disk
        if in_use:
            reader = await made.objects.open(held.inode.ino, writable=False)
            await made.close(held, writable=True)
            await trio.sleep(3 * watch.SPACE_PERIOD)
            assert made.find(b"a").ino == held.inode.ino
            await made.close(reader, writable=False)
        else:
            await made.close(held, writable=True)
        with trio.fail_after(1000 * watch.SPACE_PERIOD):  # the clock jumps while a thread works
            while not made.ledger.counters["dropped_lost"]:  # noqa: ASYNC110 (no event)
                await trio.sleep(watch.SPACE_PERIOD)
        with pytest.raises(NotFoundError):
            made.find(b"a")
        assert made.ledger.counters["dropped_lost"] == 1

    run(lambda made: working(made, case), tmp_path)


def test_file_with_a_failed_sync_is_dropped_at_its_close(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.expect(b"a", None)
        held = await made.create(b"a", BYTES)
        await made.dispatcher.verification.lose(held.inode.ino, held.inode.version)
        await trio.sleep(3 * watch.SPACE_PERIOD)
        await made.close(held, writable=True)
        await trio.sleep(3 * watch.SPACE_PERIOD)
        with pytest.raises(NotFoundError):
            made.find(b"a")

    run(lambda made: working(made, case), tmp_path)


def test_a_vanished_directory_stops_nothing(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        made.disk.root.rename(tmp_path / "away")
        with trio.fail_after(1000 * watch.SPACE_PERIOD):  # the clock jumps while a thread works
            while not made.disk.health.why:  # noqa: ASYNC110 (no event)
                await trio.sleep(watch.SPACE_PERIOD)
        assert await made.read(inode.ino) == BYTES
        (tmp_path / "away").rename(made.disk.root)

    run(lambda made: working(made, case), tmp_path)


async def settled(made: World) -> None:
    while made.dispatcher.jobs:
        await trio.lowlevel.checkpoint()


@pytest.mark.slow
def test_real_movers_do_the_same(tmp_path: Path) -> None:
    """With worker processes in place of this one."""

    async def case(made: World) -> None:
        async with MoverPool.open(2, made.ledger.counters) as movers:
            made.dispatcher = Dispatcher(*(made.ledger, made.room, made.quota, movers, made.live))
            made.dispatcher.promotion.after = 1
            made.objects.promote = made.dispatcher.promotion.opened
            made.objects.sealing.verify = made.dispatcher.verification.written
            made.objects.copies.verifier = made.dispatcher.verification
            async with trio.open_nursery() as nursery:
                nursery.start_soon(made.dispatcher.run)
                ram = await made.store(b"ram", BYTES, made.fast)
                disk = await made.store(b"disk", OTHER, made.disk)
                await made.dispatcher.write_back.drain()
                await settled(made)
                await made.read(disk.ino)
                await settled(made)
                nursery.cancel_scope.cancel()
            for inode in (ram, disk):
                assert made.ledger.tiers.holders(made.tree.inode(inode.ino)) == made.tiers
            os.utime(made.disk.path(disk.ino, 1))
            made.ledger.records.remove_copy(made.tree.inode(disk.ino), made.fast)
            assert await made.read(disk.ino) == OTHER
            with Path(made.disk.path(disk.ino, 1)).open("r+b") as file:
                file.write(b"x")
            with pytest.raises(NotFoundError):
                await made.read(disk.ino)
            await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)
