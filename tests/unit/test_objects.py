"""The content of files, on real tiers and without a kernel."""

# ruff: noqa: ASYNC240 - files of a few bytes, in a loop that nobody waits for

import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from kvfs.catalog import ROOT_INO
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.objects.files import BackingFiles
from kvfs.core.objects.mappings import LOOKS
from kvfs.core.objects.objects import SIZE_MAX
from kvfs.errors import (
    CatalogError,
    ExistsError,
    NoSpaceError,
    NotFoundError,
    StaleError,
    TooLargeError,
)
from kvfs.tiers import Reservation, Tier
from tests.unit.world import World, world

T = TypeVar("T")
MISS = (NotFoundError, StaleError)  # the latter makes the kernel look the name up again
BYTES = random.Random(1).randbytes(100_000)
OTHER = random.Random(2).randbytes(100_000)


class Slow(BackingFiles):
    """Between a call and its system call, something may happen."""

    meanwhile: Callable[[], None] | None = None
    after: Callable[[], None] | None = None

    async def io(self, tier: Tier, call: Callable[[], T]) -> T:  # type: ignore[override]
        if not tier.slow:
            return call()
        await trio.lowlevel.checkpoint()
        self._once("meanwhile")
        found = call()
        self._once("after")
        await trio.lowlevel.checkpoint()
        return found

    def _once(self, when: str) -> None:
        happens = getattr(self, when)
        setattr(self, when, None)
        if happens is not None:
            happens()


@pytest.fixture(params=[False, True], ids=["served", "passthrough"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, passthrough=request.param, files=Slow) as one:
        yield one


def run(case: Callable[..., Awaitable[None]], *arguments: object) -> None:
    trio.run(partial(case, *arguments))


def slow(made: World) -> Slow:
    assert isinstance(made.files, Slow)
    return made.files


# From create to seal


def test_a_file_is_sealed_by_the_flush_of_its_only_writer(made: World) -> None:
    async def case() -> None:
        held = await made.create(b"a", BYTES)
        ino = held.inode.ino
        assert made.catalog.unfinished() == [ino]
        assert not held.inode.sealed
        assert held.tier.reserved > 0
        made.objects.sealing.flush(held, writable=True)
        sealed = made.catalog.inode(ino)
        assert sealed is not None
        assert sealed.sealed
        assert sealed.size == len(BYTES)
        assert made.catalog.unfinished() == []
        assert held.tier.used == 0, "what is open for writing is reserved, not used"
        await made.objects.sealing.release(held, writable=True)
        assert held.tier.used == held.tier.cost(held.inode.blocks)
        assert await made.read(ino) == BYTES
        await made.check_at_rest()

    run(case)


def test_a_file_without_a_flush_is_sealed_by_its_release(made: World) -> None:
    async def case() -> None:
        held = await made.create(b"a", BYTES)
        await made.objects.sealing.release(held, writable=True)
        inode = made.find(b"a")
        assert inode.sealed
        assert inode.size == len(BYTES)
        await made.check_at_rest()

    run(case)


def test_a_flush_among_other_writers_seals_nothing(made: World) -> None:
    async def case() -> None:
        first = await made.create(b"a", BYTES)
        second = await made.objects.open(first.inode.ino, writable=True)
        assert second is first
        made.objects.sealing.flush(first, writable=True)
        assert not first.inode.sealed
        await made.objects.sealing.release(first, writable=True)
        made.check()
        await made.close(second, writable=True)
        assert made.find(b"a").sealed
        await made.check_at_rest()

    run(case)


def test_a_readers_flush_seals_nothing(made: World) -> None:
    async def case() -> None:
        held = await made.create(b"a", BYTES)
        await made.objects.open(held.inode.ino, writable=False)
        made.objects.sealing.flush(held, writable=False)
        assert not held.inode.sealed
        await made.close(held, writable=False)
        await made.close(held, writable=True)
        await made.check_at_rest()

    run(case)


def test_write_by_a_duplicate_descriptor_after_a_flush_is_kept(made: World) -> None:
    async def case() -> None:
        held = await made.create(b"a", BYTES)
        made.objects.sealing.flush(held, writable=True)
        made.write(held, b"more", len(BYTES))
        made.objects.sealing.flush(held, writable=True)
        await made.objects.sealing.release(held, writable=True)
        inode = made.find(b"a")
        assert inode.size == len(BYTES) + 4
        assert await made.read(inode.ino) == BYTES + b"more"
        assert made.ledger.counters["sealed"] == 2
        await made.check_at_rest()

    run(case)


def test_an_unchanged_file_is_not_sealed_twice(made: World) -> None:
    async def case() -> None:
        held = await made.create(b"a", BYTES)
        for _ in range(3):
            made.objects.sealing.flush(held, writable=True)
        await made.objects.sealing.release(held, writable=True)
        assert made.ledger.counters["sealed"] == 1

    run(case)


def test_a_file_that_the_kernel_closes_late_is_sealed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(made: World) -> None:
        held = await made.create(b"a", BYTES)
        looks = iter([True] * (LOOKS + 1))
        monkeypatch.setattr(type(held.tier), "is_in_use", lambda *_: next(looks, False))
        await made.close(held, writable=True)
        assert held.mapped
        await made.objects.sealing.mappings.look()
        assert not made.ledger.table.open
        assert made.ledger.counters["sealed"] == 1
        assert await made.read(held.inode.ino) == BYTES
        await made.check_at_rest()

    with world(tmp_path, passthrough=True) as made:
        trio.run(case, made)


def test_a_create_that_is_forbidden_after_the_await_leaves_nothing(made: World) -> None:
    async def case() -> None:
        def rival() -> None:
            made.tree.make(ROOT_INO, b"a", 0o40755, 0, 0)

        slow(made).meanwhile = rival
        with pytest.raises(ExistsError):
            await made.create(b"a", BYTES)
        await made.check_at_rest()
        assert all(not made.on_disk(tier) for tier in made.tiers)

    run(case)


def test_the_room_of_a_create_that_fails_is_given_back(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        def full(_ino: int, _version: int) -> int:
            raise NoSpaceError("full")

        for tier in made.tiers:
            monkeypatch.setattr(tier, "create", full)
        with pytest.raises(NoSpaceError):
            await made.create(b"a")
        await made.check_at_rest()

    run(case)


# Writing again


@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_a_file_that_is_written_again_has_a_new_version(made: World, tier: str) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast if tier == "ram" else made.disk)
        before = made.fast.path(inode.ino, 1), made.disk.path(inode.ino, 1)
        held = await made.objects.open(inode.ino, writable=True)
        assert held.inode.version == 2
        assert not any(map(os.path.exists, before))
        made.write(held, b"new", 10)
        made.check()
        await made.close(held, writable=True)
        assert await made.read(inode.ino) == BYTES[:10] + b"new" + BYTES[13:]
        await made.check_at_rest()

    run(case)


def test_other_copies_go_when_a_file_is_written_again(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        await made.demote(inode.ino)
        assert made.ledger.tiers.holders(made.find(b"a")) == made.tiers
        held = await made.objects.open(inode.ino, writable=True)
        assert made.ledger.tiers.holders(held.inode) == [held.tier]
        assert held.inode.digest == b""
        made.check()
        made.write(held, b"new")
        await made.close(held, writable=True)
        await made.check_at_rest()
        assert not made.on_disk(made.disk)

    run(case)


def test_readers_stay_when_a_writer_comes(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        reader = await made.objects.open(inode.ino, writable=False)
        id_before = reader.backing_id
        writer = await made.objects.open(inode.ino, writable=True)
        assert writer is reader
        assert writer.backing_id == id_before, "another id would be EIO in the kernel"
        made.check()
        made.write(writer, b"new")
        assert made.content(reader) == b"new" + BYTES[3:]
        await made.close(writer, writable=True)
        assert made.find(b"a").sealed
        made.check()
        await made.close(reader, writable=False)
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("kinds", [(1, 0, 1), (0, 1, 1), (1, 1, 0)])
def test_handles_may_go_in_any_order(made: World, kinds: tuple[int, ...]) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES)
        held = [await made.objects.open(inode.ino, writable=bool(kind)) for kind in (0, 1, 1)]
        made.write(held[0], OTHER)
        for kind in kinds:
            await made.close(held[0], writable=bool(kind))
            made.check()
        assert await made.read(inode.ino) == OTHER
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("closed", [True, False])
def test_a_file_that_was_closed_before_its_unlink_is_written(made: World, *, closed: bool) -> None:
    async def case() -> None:
        held = await made.create(b"a", BYTES)
        if closed:
            made.objects.sealing.flush(held, writable=True)
        made.tree.unlink(ROOT_INO, b"a")
        await made.close(held, writable=True)
        counters = made.ledger.namespaces.default.counters
        assert (counters["written"], counters["written_bytes"]) == (closed, closed * len(BYTES))
        made.check()
        await made.check_at_rest()

    run(case)


def test_truncating_at_open_begins_a_new_file(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        made.expect(b"a", 1000)
        held = await made.objects.open(inode.ino, writable=True, truncate=True)
        assert held.tier is made.ram, "its content is new: it begins where a new file would"
        assert held.inode.ino == inode.ino
        made.check()
        made.write(held, b"new")
        await made.close(held, writable=True)
        assert await made.read(inode.ino) == b"new"
        await made.check_at_rest()

    run(case)


def test_truncating_under_a_reader_keeps_the_file(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        reader = await made.objects.open(inode.ino, writable=False)
        writer = await made.objects.open(inode.ino, writable=True, truncate=True)
        assert made.content(reader) == b""
        await made.close(writer, writable=True)
        await made.close(reader, writable=False)
        assert made.find(b"a").size == 0
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("size", [0, 1, 50_000, 300_000])
def test_truncate_cuts_and_grows(made: World, size: int) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES)
        found = await made.objects.truncate(inode.ino, size)
        assert found.size == size
        assert await made.read(inode.ino) == BYTES[:size] + bytes(max(0, size - len(BYTES)))
        await made.check_at_rest()

    run(case)


async def nothing_written(made: World, held: OpenObject) -> None:
    pass


async def touched(made: World, held: OpenObject) -> None:
    await made.objects.touch(held.inode.ino, 10**18)


async def appended(made: World, held: OpenObject) -> None:
    made.write(held, b"new", len(BYTES))


async def touched_and_appended(made: World, held: OpenObject) -> None:
    await touched(made, held)
    await appended(made, held)


async def overwritten(made: World, held: OpenObject) -> None:
    made.write(held, b"new", 10)
    os.utime(held.fd, ns=(1, 1))  # the clock of file systems may not have moved since the seal


async def cut(made: World, held: OpenObject) -> None:
    await made.objects.truncate(held.inode.ino, 10)


async def grown_by_truncate(made: World, held: OpenObject) -> None:
    await made.objects.truncate(held.inode.ino, len(BYTES) + 10)


async def cut_and_written(made: World, held: OpenObject) -> None:
    made.write(held, b"new", 10)
    await cut(made, held)
    made.write(held, b"new", 10)


async def emptied_and_written(made: World, held: OpenObject) -> None:
    await made.objects.truncate(held.inode.ino, 0)
    made.write(held, b"new", 0)


@pytest.mark.parametrize(
    ("do", "objects", "size"),
    [
        (nothing_written, 0, 0),
        (touched, 0, 0),
        (appended, 1, 3),
        (touched_and_appended, 1, 3),
        (overwritten, 1, len(BYTES)),
        (cut, 0, 0),
        (grown_by_truncate, 0, 0),
        (cut_and_written, 1, 3),
        (emptied_and_written, 1, 3),
    ],
)
def test_written_bytes_are_those_that_a_writer_wrote(
    made: World,
    do: Callable[[World, OpenObject], Awaitable[None]],
    objects: int,
    size: int,
) -> None:
    """As far as size and time of the file tell: kvfs does not see the writes."""

    async def case() -> None:
        inode = await made.store(b"a", BYTES)
        counters = made.ledger.namespaces.default.counters
        assert (counters["written"], counters["written_bytes"]) == (1, len(BYTES))
        for times in (1, 2):
            held = await made.objects.open(inode.ino, writable=True)
            if times == 2:
                await nothing_written(made, held)
            else:
                await do(made, held)
            await made.close(held, writable=True)
            written = counters["written"] - 1, counters["written_bytes"] - len(BYTES)
            assert written == (objects, size)
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("size", [0, 3])
def test_a_new_version_counts_as_written(made: World, size: int) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES)
        counters = made.ledger.namespaces.default.counters
        held = await made.objects.open(inode.ino, writable=True, truncate=True)
        made.write(held, b"new"[:size], 0)
        await made.close(held, writable=True)
        assert (counters["written"], counters["written_bytes"]) == (2, len(BYTES) + size)

    run(case)


def test_a_size_beyond_all_bounds_is_refused(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES)
        for size in (SIZE_MAX + 1, SIZE_MAX):  # by kvfs, and by what is below it
            with pytest.raises(TooLargeError):
                await made.objects.truncate(inode.ino, size)
        assert await made.read(inode.ino) == BYTES
        await made.check_at_rest()

    run(case)


# Unlinked while open


def test_an_unlinked_file_lives_until_it_is_closed(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES)
        held = await made.objects.open(inode.ino, writable=False)
        made.tree.unlink(ROOT_INO, b"a")
        made.check()
        again = await made.objects.open(inode.ino, writable=False)
        assert made.content(again) == BYTES
        await made.close(again, writable=False)
        await made.close(held, writable=False)
        for _ in range(2):  # a program that has looked its name up before can still open it
            made.check()
            late = await made.objects.open(inode.ino, writable=False)
            assert made.content(late) == BYTES
            await made.close(late, writable=False)
        made.ledger.removals.purge(inode.ino)  # the kernel forgets it
        with pytest.raises(StaleError):
            await made.objects.open(inode.ino, writable=False)
        await made.check_at_rest()
        assert not made.on_disk(made.disk)

    run(case)


def test_the_size_of_an_unlinked_file_is_right_after_its_writer_went(made: World) -> None:
    async def case() -> None:
        writer = await made.create(b"a")
        reader = await made.objects.open(writer.inode.ino, writable=False)
        made.tree.unlink(ROOT_INO, b"a")
        made.write(writer, BYTES)
        await made.close(writer, writable=True)
        assert made.tree.inode(reader.inode.ino).size == len(BYTES)
        made.check()
        await made.close(reader, writable=False)
        await made.check_at_rest()

    run(case)


def test_an_unlinked_file_can_be_opened_for_writing_again(made: World) -> None:
    """As /proc/self/fd/N allows."""

    async def case() -> None:
        writer = await made.create(b"a")
        reader = await made.objects.open(writer.inode.ino, writable=False)
        made.tree.unlink(ROOT_INO, b"a")
        await made.close(writer, writable=True)
        again = await made.objects.open(writer.inode.ino, writable=True)
        made.check()
        made.write(again, BYTES)
        made.objects.files.measure(again)
        assert made.tree.inode(reader.inode.ino).size == len(BYTES)
        await made.close(again, writable=True)
        await made.close(reader, writable=False)
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("when", ["meanwhile", "after"])
@pytest.mark.parametrize("step", [0, 1])
def test_unlinked_while_a_writer_waits_leaves_no_file(made: World, when: str, step: int) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        reader = await made.objects.open(inode.ino, writable=False)

        def unlink() -> None:
            made.tree.unlink(ROOT_INO, b"a")

        def later() -> None:
            setattr(slow(made), when, unlink)

        setattr(slow(made), when, later if step else unlink)
        writer = await made.objects.open(inode.ino, writable=True)
        made.check()
        await made.close(writer, writable=True)
        await made.close(reader, writable=False)
        await made.check_at_rest()
        if made.catalog.lookup(ROOT_INO, b"a") is None:
            assert not made.on_disk(made.disk)

    run(case)


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("when", ["meanwhile", "after"])
def test_unlinked_while_it_is_opened_leaves_nothing(
    made: World, when: str, *, truncate: bool
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES)
        setattr(slow(made), when, lambda: made.tree.unlink(ROOT_INO, b"a"))
        try:
            held = await made.objects.open(inode.ino, writable=truncate, truncate=truncate)
        except StaleError:  # the kernel looks the name up again
            made.check()
        else:
            made.check()
            assert made.content(held) == (b"" if truncate else BYTES)
            await made.close(held, writable=truncate)
        await made.check_at_rest()
        assert not made.on_disk(made.disk)

    run(case)


def test_many_can_open_at_once(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        opened: list[tuple[OpenObject, bool]] = []

        async def one(*, writable: bool) -> None:
            opened.append((await made.objects.open(inode.ino, writable=writable), writable))

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(partial(one, writable=number % 3 == 0))
        assert len({id(held) for held, _ in opened}) == 1
        held = opened[0][0]
        assert (held.readers, held.writers) == (6, 4)
        made.check()
        for held, writable in opened:
            await made.close(held, writable=writable)
        assert await made.read(inode.ino) == BYTES
        await made.check_at_rest()

    run(case)


# Copies that are not what they should be


def spoil(path: str, mtime_ns: int | None) -> None:
    """Change a byte behind kvfs's back; None: the time of change shows it."""
    with Path(path).open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    found = os.stat(path)
    os.utime(path, ns=(0, found.st_mtime_ns + 10**9 if mtime_ns is None else mtime_ns))


def test_a_changed_copy_with_a_digest_is_a_miss_and_kept_for_a_look(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        await made.settle(inode.ino)
        spoil(made.disk.path(inode.ino, 1), None)
        with pytest.raises(MISS):
            await made.objects.open(inode.ino, writable=False)
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 1
        assert made.gone == [(ROOT_INO, b"a", inode.ino)]
        await made.dispatcher.trash.empty()
        assert os.listdir(made.disk.root / "quarantine") == [f"{inode.ino:x}.1"]
        with pytest.raises(NotFoundError):
            made.find(b"a")
        await made.check_at_rest()

    run(case)


def test_a_touched_copy_is_verified_and_accepted(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        await made.settle(inode.ino)
        os.utime(made.disk.path(inode.ino, 1))
        assert await made.read(inode.ino) == BYTES
        found = made.find(b"a")
        assert found.backing_mtime_ns == os.stat(made.disk.path(inode.ino, 1)).st_mtime_ns
        made.movers.before = _never
        assert await made.read(inode.ino) == BYTES, "once is enough"
        await made.check_at_rest()

    run(case)


async def _never() -> None:
    raise AssertionError("a mover was asked")


@pytest.mark.parametrize("size", [0, 99_999, 100_001])
def test_another_size_is_a_miss(made: World, size: int) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        os.truncate(made.fast.path(inode.ino, 1), size)
        with pytest.raises(MISS):
            await made.objects.open(inode.ino, writable=True)
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 1
        await made.check_at_rest()

    run(case)


def test_a_bad_copy_in_ram_is_replaced_by_the_good_one_below(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        await made.demote(inode.ino)
        spoil(made.fast.path(inode.ino, 1), None)
        assert await made.read(inode.ino) == BYTES
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 1
        assert made.ledger.tiers.holders(made.find(b"a")) == [made.disk]
        await made.check_at_rest()

    run(case)


def test_a_missing_file_is_a_miss_once(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        os.unlink(made.disk.path(inode.ino, 1))
        with pytest.raises(MISS):
            await made.objects.open(inode.ino, writable=False)
        assert made.ledger.counters["missing"] == 1
        with pytest.raises(StaleError):
            await made.objects.open(inode.ino, writable=False)
        await made.check_at_rest()

    run(case)


def test_a_lost_directory_is_a_miss_but_no_name_goes(made: World) -> None:
    """The device may come back; what is on it is not forgotten for that."""

    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        away = made.disk.root.with_suffix(".away")
        made.disk.root.rename(away)
        for _ in range(2):
            with pytest.raises(MISS):
                await made.objects.open(inode.ino, writable=False)
        assert "open" in made.disk.health.why
        away.rename(made.disk.root)
        assert await made.read(inode.ino) == BYTES
        await made.check_at_rest()

    run(case)


def test_an_unreadable_copy_is_a_miss_that_may_pass(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        path = Path(made.disk.path(inode.ino, 1))
        aside = path.with_suffix(".aside")
        path.rename(aside)
        path.symlink_to(aside)  # ELOOP, for lack of a disk that gives EIO
        with pytest.raises(MISS):
            await made.objects.open(inode.ino, writable=False)
        aside.rename(path)
        assert await made.read(inode.ino) == BYTES
        await made.check_at_rest()

    run(case)


# After a restart


@pytest.mark.parametrize("crash", [False, True])
def test_without_a_reboot_everything_sealed_is_there(made: World, *, crash: bool) -> None:
    async def case() -> None:
        await made.store(b"ram", BYTES, made.fast)
        await made.store(b"nvme", OTHER, made.disk)
        made.restart(crash=crash)
        made.movers.before = _never
        assert await made.read(made.find(b"ram").ino) == BYTES
        assert await made.read(made.find(b"nvme").ino) == OTHER
        await made.census()
        await made.check_at_rest()

    run(case)


def test_file_being_written_at_a_crash_is_a_miss(made: World) -> None:
    async def case() -> None:
        await made.create(b"new", BYTES)
        again = await made.store(b"again", BYTES)
        await made.objects.open(again.ino, writable=True)
        kept = await made.store(b"kept", OTHER)
        made.restart(crash=True)
        for name in (b"new", b"again"):
            with pytest.raises(NotFoundError):
                made.find(name)
        await made.census()
        assert await made.read(kept.ino) == OTHER
        assert made.ledger.counters["dropped_unfinished"] == 2
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("readable", [False, True])
def test_open_without_a_name_at_a_crash_is_gone(made: World, *, readable: bool) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES)
        held = await made.objects.open(inode.ino, writable=not readable)
        made.tree.unlink(ROOT_INO, b"a")
        if not readable:
            made.objects.sealing.flush(held, writable=True)
        made.restart(crash=True)
        await made.census()
        assert made.catalog.inode(inode.ino) is None
        await made.check_at_rest()
        assert not made.on_disk(made.disk)

    run(case)


def test_after_a_reboot_without_a_proper_end_only_digests_are_trusted(made: World) -> None:
    async def case() -> None:
        settled = await made.store(b"settled", BYTES, made.disk)
        await made.settle(settled.ino)
        torn = await made.store(b"torn", BYTES, made.disk)
        await made.settle(torn.ino)
        fresh = await made.store(b"fresh", OTHER, made.disk)
        made.restart(crash=True, reboot=True)
        spoil(made.disk.path(torn.ino, 1), torn.backing_mtime_ns)
        await made.census()
        assert await made.read(settled.ino) == BYTES
        for ino in (torn.ino, fresh.ino):
            with pytest.raises(MISS):
                await made.objects.open(ino, writable=False)
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 2
        made.movers.before = _never
        assert await made.read(settled.ino) == BYTES, "once is enough"
        await made.check_at_rest()

    run(case)


def test_after_a_reboot_with_a_proper_end_all_is_trusted(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        made.restart(reboot=True)
        made.movers.before = _never
        await made.census()
        assert await made.read(inode.ino) == BYTES

    run(case)


def test_a_second_crash_does_not_make_an_untrusted_copy_trusted(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        made.restart(crash=True, reboot=True)
        made.restart(crash=True)
        made.restart()
        await made.census()
        with pytest.raises(MISS):
            await made.objects.open(inode.ino, writable=False)
        await made.check_at_rest()

    run(case)


def test_names_of_lost_bytes_are_gone_whoever_looks_first(made: World) -> None:
    async def case() -> None:
        names = [b"%d" % number for number in range(6)]
        for name in names:
            inode = await made.store(name, BYTES, made.fast)
        await made.store(b"kept", OTHER, made.disk)
        made.restart(lose_ram=True)
        with pytest.raises(NotFoundError):
            made.find(names[0])
        with pytest.raises(MISS):
            await made.objects.open(inode.ino, writable=False)
        made.renames.rename(ROOT_INO, b"kept", ROOT_INO, names[1], 1)  # NOREPLACE: there is nothing
        assert [name for name, _, _ in made.tree.list_entries(ROOT_INO, 2, 100).entries] == [
            names[1]
        ]
        await made.census()
        await made.check_at_rest()
        assert made.ledger.counters["dropped_lost"] == 6

    run(case)


def test_blocks_that_the_disk_allocates_after_the_seal_are_in_the_record(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accounts go by what the record says, when the object comes and when it goes."""

    async def case() -> None:
        held = await made.create(b"a", BYTES)
        made.objects.sealing.flush(held, writable=True)
        measure = made.objects.files.measure

        def late(held: OpenObject) -> None:
            measure(held)
            held.inode.blocks += 8

        monkeypatch.setattr(made.objects.files, "measure", late)
        await made.objects.sealing.release(held, writable=True)
        monkeypatch.undo()
        made.check()
        made.tree.unlink(ROOT_INO, b"a")
        await made.check_at_rest()
        assert sum(tier.used for tier in made.tiers) == 0

    run(case)


def test_a_directory_that_goes_while_room_is_made(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reservation for the new file is returned."""

    async def scenario() -> None:
        before = [tier.reserved for tier in made.ledger.tiers.local]
        folder = made.tree.make(ROOT_INO, b"folder", 0o40755, 0, 0)
        choose = made.placement.choose

        async def meanwhile(*given: object, **named: object) -> Reservation:
            found = await choose(*given, **named)  # type: ignore[arg-type]
            made.tree.rmdir(ROOT_INO, b"folder")
            made.ledger.removals.purge(folder.ino)
            return found

        monkeypatch.setattr(made.placement, "choose", meanwhile)
        with pytest.raises(NotFoundError):
            await made.create(b"a", parent=folder.ino)
        assert [tier.reserved for tier in made.ledger.tiers.local] == before

    trio.run(scenario)


# Times of access


def refuse(*_: object, **__: object) -> None:
    raise CatalogError("no room")


@pytest.mark.parametrize("how", ["later", "closed", "unlinked", "refused"])
def test_a_time_of_access_is_committed_after_the_open(
    made: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """At the last close at the latest, and never for a record that is gone."""

    async def case() -> None:
        ino = (await made.store(b"a", BYTES)).ino
        held = await made.objects.open(ino, writable=False)
        before, now = held.inode.atime_ns, time.time_ns()
        made.ledger.uses.note([held.inode], now)
        assert made.find(b"a").atime_ns == now
        stored = made.catalog.inode(ino)
        assert stored is not None
        assert stored.atime_ns == before
        if how == "later":
            made.ledger.uses.commit()
            stored = made.catalog.inode(ino)
            assert stored is not None
            assert stored.atime_ns == now
        elif how == "unlinked":
            made.tree.unlink(ROOT_INO, b"a")
        elif how == "refused":
            with monkeypatch.context() as failing:
                failing.setattr(made.catalog, "commit", refuse)
                made.ledger.uses.commit()
            assert held.inode.atime_ns == before
        await made.close(held, writable=False)
        if how != "unlinked":
            assert made.find(b"a").atime_ns == (before if how == "refused" else now)
        await made.check_at_rest()

    run(case)


def test_times_of_access_share_a_commit(made: World) -> None:
    async def case() -> None:
        inodes = [await made.store(name, BYTES) for name in (b"a", b"b")]
        opened = [await made.objects.open(inode.ino, writable=False) for inode in inodes]
        for held in opened:
            made.ledger.uses.note([held.inode], time.time_ns())
        _, number = made.catalog.database.state
        for held in opened:
            await made.close(held, writable=False)
        assert made.catalog.database.state[1] == number + 1
        assert all(made.find(name).atime_ns > made.find(name).mtime_ns for name in (b"a", b"b"))

    run(case)
