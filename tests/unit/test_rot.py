"""Copies with wrong bytes: once any part of kvfs finds one, it serves no open again.

Files rot here as on a disk: one byte changes, and nothing else shows it.
"""

import errno
import fcntl
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs import mounts
from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.check import Finding, Survey, check
from kvfs.core.ledger import doubts, verified
from kvfs.core.ledger.verified import DAY
from kvfs.core.objects import copies, takeover
from kvfs.errors import CatalogError, ConfigError, InUseError, NotFoundError, StaleError
from kvfs.movement.movers import LostError
from kvfs.tiers import Tier
from tests.s3.memory import MemoryStore
from tests.unit.world import MIB, World, digest, world

BYTES = random.Random(1).randbytes(300_000)
NUMBERS = bytes(2 * MIB) + random.Random(2).randbytes(MIB)  # smaller when compressed
Case = Callable[[], Awaitable[None]]
GONE = (NotFoundError, StaleError)


def run(case: Case) -> None:
    trio.run(case, clock=MockClock(autojump_threshold=0.002))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as one:
        yield one


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[World]:
    """With a bucket."""
    with world(tmp_path, store=MemoryStore()) as one:
        yield one


def rot(tier: Tier, inode: Inode, at: int | None = None) -> bytes:
    """Change a byte, as a disk that fails silently. Returns the bytes that a small file has now."""
    path = Path(tier.path(inode.ino, inode.version))
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(times.st_size // 2 if at is None else at)
        wrong = bytes([file.read(1)[0] ^ 1])
        file.seek(-1, os.SEEK_CUR)
        file.write(wrong)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return path.read_bytes() if times.st_size < MIB else wrong


def overwrite(tier: Tier, inode: Inode) -> None:
    """Overwrite a copy, as a program with access to the directory can."""
    Path(tier.path(inode.ino, inode.version)).write_bytes(BYTES[::-1])


def kept(tier: Tier) -> list[str]:
    return sorted(os.listdir(tier.root / "quarantine"))


async def on_nvme(made: World, name: bytes = b"a") -> Inode:
    """An object that only NVMe has, with its digest."""
    inode = await made.store(name, BYTES, made.disk)
    await made.settle(inode.ino)
    settled = made.catalog.inode(inode.ino)
    assert settled is not None
    assert settled.digest == digest(BYTES)
    return settled


# The finders, while a program has the object open


async def by_promotion(made: World, ino: int) -> None:
    await made.promote(ino)


async def by_settlement(made: World, ino: int) -> None:
    """Asked for once more: it had its digest before."""
    await made.settle(ino)


async def by_check(made: World, ino: int) -> None:
    del ino
    found: list[Finding] = []

    async def tell(finding: Finding) -> None:
        found.append(finding)

    jobs = made.dispatcher._jobs
    survey = Survey(made.ledger, made.movers, jobs, tell, repair=True, hashes=True, live=True)
    await check(survey)
    assert [(one.kind, one.state) for one in found] == [("damaged", "repaired")]


async def by_scrub(made: World, ino: int) -> None:
    inode = made.ledger.table.inode(ino)
    assert inode is not None
    made.dispatcher.transfers.lose_rotten(inode, made.disk)


FINDERS = [by_promotion, by_settlement, by_check, by_scrub]


@pytest.mark.parametrize("find", FINDERS)
def test_rotten_copy_that_is_open_is_opened_by_no_other(
    made: World, find: Callable[[World, int], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    async def case() -> None:
        inode = await on_nvme(made)
        reader = await made.objects.open(inode.ino, writable=False)
        wrong = rot(made.disk, inode)
        await find(made, inode.ino)
        made.check_accounts()
        for _ in range(3):
            assert made.objects.open_at_once(inode.ino) is None
            with pytest.raises(GONE):
                await made.objects.open(inode.ino, writable=False)
            with pytest.raises(StaleError):  # the kernel looks its name up, which is free
                await made.objects.open(inode.ino, writable=True)
        with pytest.raises(NotFoundError):
            made.find(b"a")
        assert made.gone == [(ROOT_INO, b"a", inode.ino)]
        assert os.pread(reader.fd, len(wrong), 0) == wrong, "who has it reads on"
        await made.dispatcher.trash.empty()
        assert kept(made.disk) == [f"{inode.ino:x}.1"]
        assert made.ledger.counters["quarantined"] == 1
        assert caplog.text.count("is quarantined") == (find is not by_check)
        await made.close(reader, writable=False)
        assert made.catalog.inode(inode.ino) is None
        await made.store(b"a", BYTES)
        assert made.find(b"a").ino > inode.ino, "it is computed again, as what was lost"
        await made.check_at_rest()

    run(case)


def test_a_promotion_finds_it_while_the_object_is_being_opened(made: World) -> None:
    """That made it busy, and the copy was served on."""

    async def case() -> None:
        inode = await on_nvme(made)
        rot(made.disk, inode)
        await made.ledger.table._lock(inode.ino)
        await made.promote(inode.ino)
        made.ledger.table._unlock(inode.ino)
        with pytest.raises(GONE):
            await made.objects.open(inode.ino, writable=False)
        await made.dispatcher.trash.empty()
        assert kept(made.disk) == [f"{inode.ino:x}.1"]
        await made.check_at_rest()

    run(case)


def test_open_under_way_is_not_served_from_a_copy_given_up(made: World) -> None:
    async def case() -> None:
        inode = await on_nvme(made)
        rot(made.disk, inode)
        opened: list[object] = []

        async def do(number: int) -> None:
            with pytest.raises(GONE):
                opened.append(await made.objects.open(inode.ino, writable=number % 2 > 0))

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(do, number)
            nursery.start_soon(made.promote, inode.ino)
        assert not opened
        await made.dispatcher.trash.empty()
        assert kept(made.disk) == [f"{inode.ino:x}.1"]
        await made.check_at_rest()

    # The opens wait for the disk while the promotion gives the copy up, in any order of the tasks.
    for _ in range(8):
        run(case)
        made.restart()
        (made.disk.root / "quarantine").rename(made.tmp / f"kept{_}")
        (made.disk.root / "quarantine").mkdir()
        made.swept = False
        trio.run(made.census)


def test_a_writer_about_to_begin_does_not_make_new_bytes_of_rotten_ones(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has its next name already, and gets the old one back."""

    async def case() -> None:
        inode = await on_nvme(made)
        reader = await made.objects.open(inode.ino, writable=False)
        rot(made.disk, inode)
        rename = made.disk.rename

        def renamed(ino: int, version: int, new: int) -> None:
            rename(ino, version, new)
            if new > version:
                made.dispatcher.transfers.lose_rotten(inode, made.disk)
                made.ledger.trash.files.pop().remove()  # looks for it in vain

        monkeypatch.setattr(made.disk, "rename", renamed)
        with pytest.raises(InUseError):
            await made.objects.open(inode.ino, writable=True)
        assert not made.ledger.table.staging
        await made.dispatcher.trash.empty()
        assert kept(made.disk) == [f"{inode.ino:x}.1"]
        assert made.ledger.counters["quarantined"] == 1
        await made.close(reader, writable=False)
        await made.check_at_rest()

    run(case)


# Another copy is left


def test_copy_in_ram_is_opened_after_the_rotten_one_is_closed(made: World) -> None:
    async def case() -> None:
        inode = await on_nvme(made)
        reader = await made.objects.open(inode.ino, writable=False)
        await made.promote(inode.ino)
        assert made.ledger.tiers.holders(reader.inode) == made.tiers
        rot(made.disk, inode)
        made.dispatcher.transfers.lose_rotten(reader.inode, made.disk)
        made.check_accounts()
        assert made.find(b"a").links, "its name stays"
        with pytest.raises(NotFoundError):
            await made.objects.open(inode.ino, writable=False)
        assert made.ledger.counters["opens_unreadable"] == 1
        await made.close(reader, writable=False)
        assert await made.read(inode.ino) == BYTES
        await made.check_at_rest()

    run(case)


def test_reader_of_a_sound_copy_is_not_disturbed(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        await made.demote(inode.ino)
        reader = await made.objects.open(inode.ino, writable=False)
        rot(made.disk, inode)
        await by_check(made, inode.ino)
        assert await made.read(inode.ino) == BYTES
        assert made.ledger.tiers.holders(reader.inode) == [made.fast]
        await made.close(reader, writable=False)
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 1
        await made.check_at_rest()

    run(case)


def test_object_is_hydrated_after_its_rotten_copy_is_closed(stored: World) -> None:
    async def case() -> None:
        inode = await on_nvme(stored)
        await stored.upload_all()
        reader = await stored.objects.open(inode.ino, writable=False)
        wrong = rot(stored.disk, inode)
        stored.dispatcher.transfers.lose_rotten(reader.inode, stored.disk)
        with pytest.raises(NotFoundError):
            await stored.objects.open(inode.ino, writable=False)
        assert stored.dispatcher.transfers.still_current(inode.ino) is None, (
            "nor while that is open"
        )
        assert os.pread(reader.fd, len(wrong), 0) == wrong
        await stored.dispatcher.trash.empty()
        await stored.close(reader, writable=False)
        assert await stored.read(inode.ino) == BYTES
        assert kept(stored.disk) == [f"{inode.ino:x}.1"]
        await stored.check_at_rest()

    run(case)


def test_a_rotten_copy_that_goes_up_is_given_up_while_it_is_open(stored: World) -> None:
    async def case() -> None:
        inode = await on_nvme(stored)
        reader = await stored.objects.open(inode.ino, writable=False)
        rot(stored.disk, inode)
        await stored.upload(inode.ino)
        with pytest.raises(GONE):
            await stored.objects.open(inode.ino, writable=False)
        await stored.dispatcher.trash.empty()
        assert kept(stored.disk) == [f"{inode.ino:x}.1"]
        await stored.close(reader, writable=False)
        await stored.check_at_rest()

    run(case)


def test_the_only_copy_in_ram_that_rots_is_given_up_by_its_demotion(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        inode = made.find(b"a")
        inode.digest = digest(BYTES)
        with made.catalog.batch() as batch:
            batch.put(inode)
        reader = await made.objects.open(inode.ino, writable=False)
        lent = made.objects.lend(reader.inode)
        assert lent is not None
        rot(made.fast, inode)
        await made.demote(inode.ino)
        assert kept(made.fast) == [f"{inode.ino:x}.1"]
        assert made.ledger.counters["quarantined"] == 1
        assert made.objects.lend(reader.inode) is None
        with pytest.raises(GONE):
            await made.objects.open(inode.ino, writable=False)
        lent.leases -= 1
        await made.close(lent, writable=False)
        await made.close(reader, writable=False)
        await made.check_at_rest()

    run(case)


def test_a_packed_copy_that_rots_is_given_up_each_time_it_is_unpacked(made: World) -> None:
    async def case() -> None:
        space = made.namespace("n", compression="nvme")
        inode = await made.store(b"n/a", NUMBERS, made.fast)
        await made.demote(inode.ino)
        found = made.find(b"a", space.ino)
        assert found.packed is not None
        made.ledger.records.remove_copy(found, made.fast)
        assert await made.read(inode.ino) == NUMBERS
        made.ledger.records.remove_copy(made.find(b"a", space.ino), made.fast)
        rot(made.disk, inode)
        with pytest.raises(GONE):
            await made.objects.open(inode.ino, writable=False)
        await made.dispatcher.trash.empty()
        assert kept(made.disk) == [f"{inode.ino:x}.1"]
        assert made.ledger.counters["quarantined"] == 1
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("tier", ["ram", "nvme"])
@pytest.mark.parametrize("after", [0.0, DAY])
def test_copy_reported_by_a_check_is_verified_by_the_next_open(
    made: World, tier: str, after: float
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        await made.demote(inode.ino)
        made.ledger.verified.after = after
        inode, where = made.find(b"a"), made.fast if tier == "ram" else made.disk
        if tier == "nvme":
            made.ledger.records.remove_copy(inode, made.fast)
        reader = await made.objects.open(inode.ino, writable=False)
        rot(where, inode)
        found = []

        async def tell(finding: Finding) -> None:
            found.append((finding.kind, finding.state))

        jobs = made.dispatcher._jobs
        survey = Survey(
            *(made.ledger, made.movers, jobs, tell), repair=False, hashes=True, live=True
        )
        await check(survey)
        assert found == [("damaged", "found")]
        assert made.objects.open_at_once(inode.ino) is None, "it has the copy of who reads"
        await made.close(reader, writable=False)
        assert not kept(where), "nothing is changed"
        if tier == "ram":
            assert await made.read(inode.ino) == BYTES, "NVMe has it, too"
        else:
            with pytest.raises(GONE):
                await made.objects.open(inode.ino, writable=False)
        await made.dispatcher.trash.empty()
        assert kept(where) == [f"{inode.ino:x}.1"]
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("is_open", [False, True])
def test_copy_reported_by_a_check_is_doubted_by_the_next_daemon(
    made: World, *, live: bool, is_open: bool
) -> None:
    """A copy in RAM too, which no open compares else; and beside handles that read it."""

    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        await made.demote(inode.ino)
        rot(made.fast, inode)
        survey = Survey(
            *(made.ledger, made.movers, made.dispatcher._jobs, _any_finding),
            repair=False,
            hashes=True,
            live=live,
        )
        await check(survey)
        made.restart(crash=True)
        await made.census()
        if is_open:
            left = takeover.Left(
                1, inode.ino, 77, writable=False, tier=made.fast.number, ending=False
            )
            held = takeover.adopt(made.objects, [left])[1]
            with pytest.raises(NotFoundError):
                await made.objects.open(inode.ino, writable=False)
            held.backing_id = 0  # which is none of these tests' backings
            await made.close(held, writable=False)
        assert await made.read(inode.ino) == BYTES, "NVMe has it, too"
        await made.dispatcher.trash.empty()
        assert kept(made.fast) == [f"{inode.ino:x}.1"]
        await made.check_at_rest()

    run(case)


def test_a_check_that_repairs_leaves_no_doubt(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        await made.demote(inode.ino)
        rot(made.fast, inode)
        for repair in (False, True):
            survey = Survey(
                *(made.ledger, made.movers, made.dispatcher._jobs, _any_finding),
                repair=repair,
                hashes=True,
                live=True,
            )
            await check(survey)
            assert made.catalog.path.with_name("doubted").exists() is not repair

    run(case)


@pytest.mark.parametrize("text", ["", "{}", '{"copies": [[1, 2]]}', '{"copies": [[-1, 2, "ram"]]}'])
def test_doubts_that_kvfs_has_not_written_are_a_refusal(made: World, text: str) -> None:
    path = made.catalog.path.with_name("doubted")
    path.write_text(text)
    with pytest.raises(ConfigError, match="expected a list of copies that kvfs fsck has found"):
        doubts.load(made.ledger.records)
    assert path.read_text() == text


# The reports are true


def test_quarantine_is_logged_and_counted_after_the_move(
    made: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def case() -> None:
        inode = await on_nvme(made)
        rot(made.disk, inode)
        await made.promote(inode.ino)
        assert made.ledger.counters["quarantined"] == 0
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 1
        assert "is quarantined: its bytes do not match their digest" in caplog.text
        made.dispatcher.transfers.lose_rotten(inode, made.disk)
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 1, "there is nothing more to give up"

    run(case)


def test_missing_file_is_not_counted_as_quarantined(
    made: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def case() -> None:
        inode = await on_nvme(made)
        os.unlink(made.disk.path(inode.ino, 1))
        made.dispatcher.transfers.lose_rotten(inode, made.disk)
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 0
        assert "quarantined" not in caplog.text

    run(case)


def test_only_the_copy_that_is_meant_goes(made: World) -> None:
    """Two may find the same one, and what RAM has is not the one that they found."""

    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        await made.demote(inode.ino)
        found = made.find(b"a")
        for _ in range(2):
            made.dispatcher.transfers.lose_rotten(found.copy(), made.disk)
        assert await made.read(inode.ino) == BYTES
        await made.check_at_rest()

    run(case)


# After a death


async def _open_and_rotten(made: World, *, promoted: bool) -> Inode:
    inode = await on_nvme(made)
    reader = await made.objects.open(inode.ino, writable=False)
    if promoted:
        await made.promote(inode.ino)
    rot(made.disk, inode)
    made.dispatcher.transfers.lose_rotten(reader.inode, made.disk)
    await made.dispatcher.trash.empty()
    os.close(reader.fd)
    made.ledger.table.open.clear()
    return inode


def test_a_daemon_that_takes_over_does_not_serve_it_either(made: World) -> None:
    """Beside the handles that read it; then what RAM has."""

    async def case() -> None:
        inode = await _open_and_rotten(made, promoted=True)
        made.restart(crash=True)
        left = takeover.Left(1, inode.ino, 77, writable=False, tier=made.disk.number, ending=False)
        held = takeover.adopt(made.objects, [left])[1]
        assert made.objects.open_at_once(inode.ino) is None
        with pytest.raises(NotFoundError):
            await made.objects.open(inode.ino, writable=False)
        held.backing_id = 0  # which is none of these tests' backings
        await made.census()
        await made.close(held, writable=False)
        assert await made.read(inode.ino) == BYTES
        await made.check_at_rest()

    run(case)


def test_of_the_last_copy_nothing_is_left_after_a_death(made: World) -> None:
    async def case() -> None:
        inode = await _open_and_rotten(made, promoted=False)
        made.restart(crash=True)
        await made.census()
        assert made.catalog.inode(inode.ino) is None
        assert kept(made.disk) == [f"{inode.ino:x}.1"]
        await made.check_at_rest()

    run(case)


# Silent, until an open compares it


async def _on_nvme_after_a_mount(made: World) -> Inode:
    inode = await on_nvme(made)
    made.restart()
    await made.census()
    return inode


def test_the_first_open_after_a_mount_finds_it(made: World) -> None:
    async def case() -> None:
        inode = await _on_nvme_after_a_mount(made)
        rot(made.disk, inode)
        for writable in (True, False):
            with pytest.raises(GONE):
                await made.objects.open(inode.ino, writable=writable)
        await made.dispatcher.trash.empty()
        assert kept(made.disk) == [f"{inode.ino:x}.1"]
        assert made.ledger.counters["quarantined"] == made.ledger.counters["opens_unreadable"] == 1
        await made.check_at_rest()

    run(case)


def test_an_open_of_a_file_that_is_mostly_holes_compares_its_data(made: World) -> None:
    async def case() -> None:
        made.expect(b"a", None)
        held = await made.create(b"a", BYTES)
        os.ftruncate(held.fd, 1 << 42)
        await made.close(held, writable=True)
        inode = held.inode
        await made.settle(inode.ino)
        made.restart()
        await made.census()
        opened = await made.objects.open(inode.ino, writable=False)
        await made.close(opened, writable=False)
        assert made.ledger.counters["verified"] == 1
        made.ledger.verified.forget(inode.ino)
        rot(made.disk, inode, 1 << 41)
        with pytest.raises(GONE):
            await made.objects.open(inode.ino, writable=False)
        await made.dispatcher.trash.empty()
        assert kept(made.disk) == [f"{inode.ino:x}.1"]
        await made.check_at_rest()

    run(case)


def test_opens_at_the_same_time_share_one_look(made: World) -> None:
    async def case() -> None:
        inode = await _on_nvme_after_a_mount(made)
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(made.read, inode.ino)
        assert await made.read(inode.ino) == BYTES
        assert made.ledger.counters["verified"] == 1

    run(case)


def test_copy_is_verified_again_after_a_day(made: World) -> None:
    async def case() -> None:
        inode = await _on_nvme_after_a_mount(made)
        for seconds, looks in ((0, 1), (DAY - 1, 1), (1, 2), (DAY - 1, 2), (1, 3)):
            clock.jump(seconds)
            assert await made.read(inode.ino) == BYTES
            assert made.ledger.counters["verified"] == looks, seconds
        rot(made.disk, inode)
        assert await made.read(inode.ino) != BYTES, "within that time it is not"
        made.ledger.verified.after = 60
        clock.jump(60)
        with pytest.raises(GONE):
            await made.read(inode.ino)

    clock = MockClock()
    trio.run(case, clock=clock)


def test_with_verify_after_0_no_open_looks(made: World) -> None:
    async def case() -> None:
        inode = await _on_nvme_after_a_mount(made)
        made.ledger.verified.after = 0
        wrong = rot(made.disk, inode)
        assert await made.read(inode.ino) == wrong
        assert made.ledger.counters["verified"] == 0

    run(case)


@pytest.mark.parametrize("by", ["settle", "demote", "promote", "check"])
def test_open_after_a_comparison_or_write_verifies_nothing(made: World, by: str) -> None:
    async def case() -> None:
        if by == "demote":
            inode = await made.store(b"a", BYTES, made.fast)
            await made.demote(inode.ino)
        elif by == "settle":
            inode = await on_nvme(made)
        else:
            inode = await _on_nvme_after_a_mount(made)
        if by == "promote":
            await made.promote(inode.ino)
        if by == "check":
            survey = Survey(
                *(made.ledger, made.movers, made.dispatcher._jobs, _no_finding),
                repair=False,
                hashes=True,
                live=True,
            )
            await check(survey)
        if made.fast in made.ledger.tiers.holders(made.find(b"a")):
            made.ledger.records.remove_copy(made.find(b"a"), made.fast)
        assert await made.read(inode.ino) == BYTES
        assert made.ledger.counters["verified"] == 0

    run(case)


async def _any_finding(_: Finding) -> None:
    """Accept any finding."""


async def _no_finding(finding: Finding) -> None:
    raise AssertionError(finding)


def test_object_without_digest_is_served_unverified(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        made.restart()
        await made.census()
        assert await made.read(inode.ino) == BYTES
        assert made.ledger.counters["verified"] == 0

    run(case)


async def settle_what_was_met(made: World) -> int:
    """Have the dispatcher do what the census has asked for; how much that was."""
    count = 0
    while asked := made.dispatcher.requests.take(()):
        movement, ino = asked
        assert movement is made.dispatcher.verification
        await made.settle(ino)
        count += 1
    return count


def test_a_death_before_the_digest_delays_it_to_the_next_mount(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        await made.store(b"b", BYTES, made.fast)
        for count in (1, 0):
            made.restart(crash=True)
            await made.census()
            assert await settle_what_was_met(made) == count
            assert made.find(b"a").digest == digest(BYTES)
        made.ledger.verified.forget(inode.ino)
        rot(made.disk, inode)
        with pytest.raises(GONE):
            await made.read(inode.ino)
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("by", ["power loss", "write"])
def test_object_of_a_crashed_session_gets_no_digest(made: World, by: str) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        if by == "write":
            overwrite(made.disk, inode)
        made.restart(crash=True, reboot=by == "power loss")
        await made.census()
        await settle_what_was_met(made)
        assert not made.find(b"a").digest
        with pytest.raises(GONE):
            await made.read(inode.ino)
        await made.check_at_rest()

    run(case)


def unwritten(fd: int) -> None:
    """As the kernel says that the disk did not take what it has taken."""
    os.fstat(fd)
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def refuse(*_: object, **__: object) -> None:
    raise CatalogError("its disk takes no writes")


def test_object_with_a_failed_writeback_is_a_miss(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        monkeypatch.setattr(mounts, "expect_written", unwritten)
        with pytest.raises(NotFoundError):
            await made.read(inode.ino)
        with pytest.raises(NotFoundError):
            made.find(b"a")
        await made.check_at_rest()

    run(case)


def test_object_with_a_failed_writeback_is_not_promoted(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        monkeypatch.setattr(mounts, "expect_written", unwritten)
        await made.promote(inode.ino)
        with pytest.raises(NotFoundError):
            made.find(b"a")
        await made.check_at_rest()

    run(case)


def test_object_with_a_failed_writeback_is_not_uploaded(
    stored: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        inode = await stored.store(b"a", BYTES, stored.disk)
        monkeypatch.setattr(mounts, "expect_written", unwritten)
        await stored.upload(inode.ino)
        with pytest.raises(NotFoundError):
            stored.find(b"a")
        await stored.check_at_rest()

    run(case)


@pytest.mark.parametrize("found_by", ["sync", "open", "promotion", "fsync"])
def test_lost_object_is_a_miss_while_the_catalog_fails(
    made: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found_by: str
) -> None:
    """Only one sync reports the error: the next one would succeed."""

    async def lost(*_: object, **__: object) -> None:
        raise LostError(errno.EIO, "Input/output error")

    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        with monkeypatch.context() as patch:
            patch.setattr(made.catalog, "commit", refuse)
            with monkeypatch.context() as once:
                once.setattr(mounts, "expect_written", unwritten)
                once.setattr(made.movers, "read_through", lost)
                if found_by == "sync":
                    await made.settle(inode.ino)
                elif found_by == "open":
                    with pytest.raises(NotFoundError):
                        await made.read(inode.ino)
                elif found_by == "promotion":
                    await made.promote(inode.ino)
                else:
                    with pytest.raises(CatalogError):
                        await made.dispatcher.verification.lose(inode.ino, inode.version)
            for _ in range(3):
                with pytest.raises(NotFoundError):
                    await made.read(inode.ino)
            for _ in range(2):
                with pytest.raises(CatalogError):
                    await made.ledger.retries.run()
            assert len(made.ledger.retries.waiting) == 1
            assert caplog.text.count("no open is served from it") == 1
        await made.settle(inode.ino)
        await made.promote(inode.ino)
        found = made.find(b"a")
        assert (found.digest, made.ledger.tiers.holders(found)) == (b"", [made.disk])
        await made.ledger.retries.run()
        assert not made.ledger.retries.waiting
        with pytest.raises(NotFoundError):
            made.find(b"a")
        await made.check_at_rest()

    run(case)


def test_failed_retry_keeps_the_other_retries(made: World) -> None:
    async def case() -> None:
        done: list[int] = []
        broken = [True]

        async def work(number: int) -> None:
            if number == 1 and broken:
                made.ledger.retries.add(partial(work, 3))  # as any thread may do meanwhile
                raise CatalogError("its disk takes no writes")
            done.append(number)

        made.ledger.retries.waiting.extend(partial(work, number) for number in range(3))
        with pytest.raises(CatalogError):
            await made.ledger.retries.run()
        assert done == [0, 2]
        broken.clear()
        await made.ledger.retries.run()
        assert done == [0, 2, 3, 1]

    run(case)


def test_an_open_from_ram_looks_at_nothing(made: World) -> None:
    async def case() -> None:
        inode = await _on_nvme_after_a_mount(made)
        await made.promote(inode.ino)
        made.ledger.verified.forget(inode.ino)
        held = made.objects.open_at_once(inode.ino)
        assert held is not None
        assert held.tier is made.fast
        await made.close(held, writable=False)
        assert made.ledger.counters["verified"] == 0

    run(case)


def test_a_disk_that_cannot_be_read_loses_no_copy(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        inode = await _on_nvme_after_a_mount(made)

        def fail(fd: int, size: int, *, sparse: bool) -> bytes:
            del fd, size, sparse
            raise OSError(errno.EIO, "no such sector")

        with monkeypatch.context() as patch:
            patch.setattr(copies, "digest_of", fail)
            with pytest.raises(NotFoundError):
                await made.read(inode.ino)
        assert await made.read(inode.ino) == BYTES
        assert made.ledger.counters["quarantined"] == 0
        await made.check_at_rest()

    run(case)


def test_open_of_a_rotten_copy_hydrates_the_object(stored: World) -> None:
    async def case() -> None:
        inode = await on_nvme(stored)
        await stored.upload_all()
        stored.restart()
        await stored.census()
        rot(stored.disk, inode)
        assert await stored.read(inode.ino) == BYTES
        assert stored.ledger.records.stale_in_kernel == {inode.ino}, (
            "the kernel may have read wrong bytes"
        )
        await stored.dispatcher.trash.empty()
        assert kept(stored.disk) == [f"{inode.ino:x}.1"]
        await stored.check_at_rest()

    run(case)


def test_oldest_time_of_verification_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        noted = verified.VerifiedTimes()
        for ino in (1, 2, 3, 1, 4):
            noted.note(ino)
        assert [ino for ino in range(6) if not noted.due(ino)] == [1, 3, 4]
        noted.forget(3)
        assert noted.due(3)

    monkeypatch.setattr(verified, "MOST", 3)
    run(case)


def test_a_version_that_is_written_again_has_no_former_digest_and_no_former_copy(
    made: World,
) -> None:
    """A daemon died when a writer was about to begin; the next one takes the file for mapped."""

    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        await made.demote(inode.ino)
        made.restart(crash=True)
        with made.catalog.batch() as batch:
            batch.mark_unfinished(inode.ino)
        takeover.adopt(made.objects, [])
        await made.census()
        held = await made.objects.open(inode.ino, writable=True)
        os.pwrite(held.fd, BYTES[::-1], 0)
        await made.close(held, writable=True)
        await made.objects.sealing.mappings.end(lambda _: True)
        await made.dispatcher.trash.empty()
        found = made.find(b"a")
        assert found.digest == b""
        assert made.ledger.tiers.holders(found) == [made.fast]
        assert await made.read(inode.ino) == BYTES[::-1]
        await made.demote(inode.ino)
        made.ledger.records.remove_copy(made.find(b"a"), made.fast)
        await made.dispatcher.trash.empty()
        assert await made.read(inode.ino) == BYTES[::-1]
        await made.check_at_rest()

    run(case)


def test_takeover_of_a_file_of_which_a_process_has_a_lease(
    made: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that kvfs lent the file to can take one: only that file cannot be opened."""

    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        made.restart(crash=True)
        with made.catalog.batch() as batch:
            batch.mark_unfinished(inode.ino)
        lent = made.fast.open(inode.ino, inode.version, writable=True)
        before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks for the lease
        fcntl.fcntl(lent, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        try:
            takeover.adopt(made.objects, [])
        finally:
            fcntl.fcntl(lent, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            signal.signal(signal.SIGIO, before)
            os.close(lent)
        assert "its file cannot be opened again: ram tier: a process has a lease" in caplog.text
        assert await made.read(inode.ino) == BYTES

    run(case)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["alone", "elsewhere"])
def test_marked_object_whose_file_is_gone_is_lost_once(
    made: World, caplog: pytest.LogCaptureFixture, *, elsewhere: bool
) -> None:
    """Else each takeover logs the same error, and the record counts for a file that is gone."""

    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        if elsewhere:
            await made.demote(inode.ino)
        made.restart(crash=True)
        os.unlink(made.fast.path(inode.ino, inode.version))
        with made.catalog.batch() as batch:
            batch.mark_unfinished(inode.ino)
        takeover.adopt(made.objects, [])
        assert "was open, and its file cannot be opened again" in caplog.text
        assert made.catalog.unfinished() == []
        made.restart(crash=True)
        caplog.clear()
        takeover.adopt(made.objects, [])
        assert not caplog.text
        await made.census()
        if elsewhere:
            assert made.ledger.tiers.holders(made.find(b"a")) == [made.disk]
            assert await made.read(inode.ino) == BYTES
        else:
            assert made.catalog.inode(inode.ino) is None
        await made.check_at_rest()

    run(case)


# After a power loss a file without a digest may have any bytes


async def _torn(made: World) -> Inode:
    """A file on NVMe that got no digest before the machine went down, with other bytes now."""
    inode = await made.store(b"a", BYTES, made.disk)
    assert not inode.digest
    rot(made.disk, inode)
    made.restart(crash=True, reboot=True)
    assert inode.session in made.ledger.suspect
    await made.census()
    return inode


def test_warming_makes_no_copy_of_a_torn_file(made: World) -> None:
    async def case() -> None:
        inode = await _torn(made)
        found: dict[str, Any] | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.warm.run)
            number = made.dispatcher.warm.start([inode.ino])
            while found is None or not found["over"]:
                await wait_all_tasks_blocked()
                found = made.dispatcher.warm.look(number)
            nursery.cancel_scope.cancel()
        assert found["failed"] == 1
        assert made.fast not in made.ledger.tiers.holders(made.find(b"a"))
        with pytest.raises(GONE):
            await made.read(inode.ino)
        await made.dispatcher.trash.empty()
        await made.check_at_rest()

    run(case)


def test_a_torn_file_does_not_go_up(stored: World) -> None:
    async def case() -> None:
        inode = await _torn(stored)
        assert stored.dispatcher.uploader is not None
        await stored.dispatcher.uploader.dirty.load()
        await stored.upload(inode.ino)
        assert stored.bucket is not None
        assert stored.bucket.counters["uploads"] == 0
        with pytest.raises(GONE):
            await stored.read(inode.ino)
        await stored.dispatcher.trash.empty()
        await stored.check_at_rest()

    run(case)
