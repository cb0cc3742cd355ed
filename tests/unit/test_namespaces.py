"""Namespaces: their objects, victims and kept objects, and the meaning of names."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs import layouts
from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.admin import administration
from kvfs.core.capacity.quota import AT_ONCE
from kvfs.core.names import renames
from kvfs.core.names.renames import RENAME_EXCHANGE, RENAME_NOREPLACE
from kvfs.core.names.walks import STEP
from kvfs.core.namespaces.namespace import USES_NOTED
from kvfs.errors import (
    ExistsError,
    NoSpaceError,
    NotFoundError,
    OtherNamespaceError,
    QuotaError,
    StaleError,
    TierError,
)
from kvfs.eviction import make
from kvfs.tiers import Tier
from kvfs.units import format_size, human
from tests.unit.world import MIB, World, world

BYTES = b"k" * 10_000
COST = 12_288
LOCAL_DISK = b"model@1@0@%02x@half.pt"  # LMCache's local_disk, which must find what it wrote


def run(case: Callable[[World], Awaitable[None]], tmp_path: Path, **options: int) -> None:
    with world(tmp_path, **options) as made:
        trio.run(case, made)


def names(made: World, path: bytes) -> list[bytes]:
    entries = made.catalog.entries_after(made.at(path).ino, 0, 1000)
    return [entry.name for entry in entries]


async def fill(made: World, count: int, path: bytes = b"a", first: int = 0) -> list[Inode]:
    return [
        await made.make_file(b"%b/%03d" % (path, n), BYTES) for n in range(first, first + count)
    ]


def in_ram(made: World, path: bytes) -> bytes:
    """A file of this path will begin there: its size is known."""
    above, _, name = path.rpartition(b"/")
    made.learn(made.at(above), name, len(BYTES))
    return path


def kept_name(number: int) -> bytes:
    name = LOCAL_DISK % number
    block = layouts.recognise((), name)
    assert block is not None
    assert not layouts.LIVES[block.layout].droppable
    return name


# Accounts


def test_each_object_is_counted_once_wherever_its_copies_are(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a")
        inode = await made.make_file(in_ram(made, b"a/x"), BYTES)
        assert (space.bytes, space.objects, dict(space.held)) == (COST, 1, {"ram": COST})
        await made.demote(inode.ino)
        assert (space.bytes, space.objects) == (COST, 1)
        assert dict(space.held) == {"ram": COST, "nvme": COST}
        assert (space.doubled_bytes, space.doubled_objects) == (COST, 1)
        made.check()
        made.tree.unlink(made.at(b"a").ino, b"x")
        assert (space.bytes, space.objects, space.doubled_bytes) == (0, 0, 0)
        assert made.ledger.namespaces.default.objects == 0

    run(case, tmp_path)


def test_accounts_are_the_same_after_a_restart(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.namespace("a", quota_hard="1M")

        async def fill_both() -> None:
            await fill(made, 3)
            await made.store(b"x", BYTES)

        trio.run(fill_both)
        for crash in (False, True):
            made.restart(crash=crash)
            trio.run(made.census)
            space = made.ledger.namespaces.own(made.find(b"a").ino)
            assert space is not None
            assert (space.bytes, space.objects) == (3 * COST, 3)
            assert made.ledger.namespaces.default.objects == 1
            made.check()


def test_a_demotion_takes_no_room_from_a_namespace_that_has_less(tmp_path: Path) -> None:
    """A namespace of less gives no name for a copy either, as long as no program lacks room."""

    async def case(made: World) -> None:
        demotion = made.dispatcher.demotion
        made.namespace("small")
        made.namespace("large", eviction="never")
        first = await made.make_file(in_ram(made, b"small/a"), BYTES)
        await made.demote(first.ino)
        made.ledger.records.remove_copy(made.at(b"small/a"), made.fast)
        for number in range(MIB // COST - 1):
            inode = await made.make_file(in_ram(made, b"large/%d" % number), BYTES)
            await made.demote(inode.ino)
        other = await made.make_file(in_ram(made, b"small/b"), BYTES)
        last = await made.make_file(in_ram(made, b"large/last"), BYTES)
        demotion.reclaimable = 100
        assert demotion.next() == [last.ino]
        await made.demote(last.ino)
        assert not made.at(b"large/last").on_nvme
        assert made.at(b"small/a").on_nvme
        assert demotion.next() == [other.ino], "the large one is passed by"
        await made.demote(other.ino)
        assert not made.at(b"small/b").on_nvme
        made.room.note_ram_lacks()
        await made.demote(other.ino)
        assert made.at(b"small/b").on_nvme, "in the place of another one of it"

    run(case, tmp_path, ram=8 * MIB, nvme=MIB)


@pytest.mark.parametrize("end", ["drop", "rmdir"])
def test_open_file_is_accounted_to_its_dropped_namespace(tmp_path: Path, end: str) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a")
        inode = await made.make_file(b"a/x", BYTES)
        held = await made.objects.open(inode.ino, writable=False)
        if end == "drop":
            made.drop("a")
            await made.walk()
        else:
            made.tree.unlink(space.ino, b"x")
            made.tree.rmdir(ROOT_INO, b"a")
        assert space.objects == 1
        assert made.ledger.namespaces.of(held.inode) is space
        assert made.content(held) == BYTES
        made.check()
        await made.close(held, writable=False)
        assert space.objects == 0
        assert made.ledger.namespaces.of(held.inode) is made.ledger.namespaces.default
        await made.check_at_rest()

    run(case, tmp_path)


def test_files_written_during_a_drop_are_dropped(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a")
        held = await made.create(b"x", BYTES, made.at(b"a").ino)
        inode = await made.make_file(b"a/y", BYTES)
        again = await made.objects.open(inode.ino, writable=True)
        made.drop("a")
        await made.walk()
        for one in (held, again):
            made.write(one, BYTES)
            assert made.content(one) == BYTES
            made.check()
            await made.close(one, writable=True)
        await made.check_at_rest()
        assert made.ledger.accounts.objects == 0

    run(case, tmp_path)


# Moves


def test_a_file_is_accounted_to_where_it_moves(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        a, b = made.namespace("a"), made.namespace("b", eviction="fifo")
        await made.make_file(b"a/x", BYTES)
        held = await made.objects.open(made.at(b"a/x").ino, writable=False)
        made.renames.rename(a.ino, b"x", b.ino, b"y", 0)
        assert (a.objects, b.objects) == (0, 1)
        made.check()
        made.renames.rename(b.ino, b"y", ROOT_INO, b"z", 0)
        assert (a.objects, b.objects) == (0, 0)
        assert made.ledger.namespaces.default.objects == 1
        made.check()
        await made.close(held, writable=False)
        await made.check_at_rest()

    run(case, tmp_path)


def test_moved_directory_takes_its_objects_along(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        a, b = made.namespace("a"), made.namespace("b")
        for path in (b"a/d", b"a/d/e", b"a/d/f"):
            made.mkdir(path)
            await fill(made, 20, path)
        made.renames.rename(a.ino, b"d", b.ino, b"d", 0)
        made.check()
        assert b.objects == 0, "in the background"
        await made.walk()
        assert (a.objects, b.objects) == (0, 60)
        assert made.at(b"b/d/e/007").namespace == b.ino
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_file_of_a_moved_directory_can_be_found_before_and_after_its_old_place_is_dropped(
    tmp_path: Path,
) -> None:
    async def case(made: World) -> None:
        a, b = made.namespace("a"), made.namespace("b")
        for path in (b"a/out", b"a/out/deep", b"b/in"):
            made.mkdir(path)
            await made.make_file(path + b"/x", BYTES)
        inner = made.at(b"b/in").ino
        made.renames.rename(a.ino, b"out", b.ino, b"out", 0)
        made.renames.rename(b.ino, b"in", a.ino, b"in", 0)
        made.drop("a")
        assert made.at(b"b/out/deep/x").namespace == a.ino, "accounted to what was dropped"
        assert await made.read(made.at(b"b/out/deep/x").ino) == BYTES
        with pytest.raises(NotFoundError):
            made.tree.lookup(inner, b"x")
        made.check()
        await made.walk()
        assert await made.read(made.at(b"b/out/x").ino) == BYTES
        assert (b.objects, made.ledger.accounts.objects) == (2, 2)
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_directory_that_moves_back_in_the_middle_of_the_walk(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        a, b = made.namespace("a"), made.namespace("b")
        made.mkdir(b"a/d")
        await fill(made, 80, b"a/d")
        made.renames.rename(a.ino, b"d", b.ino, b"d", 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.walks.run)
            while b.objects < 20:
                await trio.lowlevel.checkpoint()
            assert b.objects < 80
            made.renames.rename(b.ino, b"d", a.ino, b"d", 0)
            while made.ledger.namespaces.unaccounted:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert (a.objects, b.objects) == (80, 0)
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_file_with_a_name_elsewhere_outlives_the_namespace(tmp_path: Path) -> None:
    """Links between namespaces cannot be made, but a directory can become one."""

    async def case(made: World) -> None:
        made.mkdir(b"a")
        inode = await made.make_file(b"a/x", BYTES)
        made.tree.link(inode.ino, ROOT_INO, b"outside")
        made.tree.link(inode.ino, made.find(b"a").ino, b"y")
        space = made.namespace("a")
        await made.walk()
        assert space.objects == 1
        made.check()
        made.drop("a")
        assert await made.read(made.find(b"outside").ino) == BYTES
        await made.walk()
        assert await made.read(made.find(b"outside").ino) == BYTES
        assert made.find(b"outside").nlink == 1
        assert made.ledger.namespaces.default.objects == 1
        await made.check_at_rest()

    run(case, tmp_path)


async def moves_and_a_drop(made: World) -> None:
    a, b = made.namespace("a"), made.namespace("b")
    made.namespace("c")
    made.mkdir(b"a/d")
    await fill(made, 40, b"a/d")
    await fill(made, 40, b"c")
    made.renames.rename(a.ino, b"d", b.ino, b"d", 0)
    made.drop("c")


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6])
def test_walks_go_on_after_a_death(tmp_path: Path, steps: int) -> None:
    async def some_steps(made: World) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.walks.run)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    with world(tmp_path) as made:
        trio.run(moves_and_a_drop, made)
        trio.run(some_steps, made)
        made.check()
        assert made.ledger.namespaces.unaccounted
        made.restart(crash=True)
        trio.run(made.census)
        made.check()
        trio.run(made.walk)
        assert made.at(b"b/d/007").namespace == made.find(b"b").ino
        assert made.ledger.accounts.objects == 40
        trio.run(made.check_at_rest)


# Quotas


def test_hard_quota_drops_the_least_recently_used_objects(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", quota_hard=str(5 * COST), eviction="lru", media="nvme")
        await made.store(b"other", BYTES)
        await fill(made, 5)
        assert await made.read(made.at(b"a/000").ino) == BYTES
        await fill(made, 2, first=5)
        assert names(made, b"a") == [b"000", b"003", b"004", b"005", b"006"]
        assert space.bytes <= 5 * COST
        assert names(made, b"") == [b"a", b"other"]
        made.check()

    run(case, tmp_path)


def test_a_quota_of_objects(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", quota_objects="3", eviction="fifo")
        await fill(made, 5)
        assert names(made, b"a") == [b"002", b"003", b"004"]
        made.check()

    run(case, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{"eviction": "never"}, {"pin": "on"}, {"eviction": "lru"}],
    ids=["never", "pin", "open"],
)
def test_full_quota_without_victims_refuses_writers(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    async def case(made: World) -> None:
        made.namespace("a", quota_hard=str(2 * COST), **settings)
        inodes = await fill(made, 2)
        held = []
        if settings == {"eviction": "lru"}:
            held = [await made.objects.open(inode.ino, writable=False) for inode in inodes]
        with pytest.raises(QuotaError) as refused:
            await fill(made, 1, first=2)
        assert str(refused.value) == (
            f"namespace a has 2 objects of {human(2 * COST)}, its quota is "
            f"{format_size(2 * COST)}, and nothing more may be dropped"
        )
        assert names(made, b"a") == [b"000", b"001"]
        for one in held:
            await made.close(one, writable=False)
        await made.check_at_rest()

    run(case, tmp_path)


async def rename(made: World, old: bytes, new: bytes, flags: int = 0) -> None:
    """As the kernel's face does it."""
    (above, name), (above2, name2) = (path.rpartition(b"/")[::2] for path in (old, new))
    move = (made.at(above).ino, name, made.at(above2).ino, name2, flags)
    below = await made.renames.amounts_below(move)
    await made.quota.take_in(partial(made.renames.arrivals, move, below))
    made.renames.rename(*move)


@pytest.mark.parametrize("quota", [{"quota_hard": str(3 * COST)}, {"quota_objects": "3"}])
def test_a_file_that_comes_by_a_rename_makes_older_ones_go(
    tmp_path: Path, quota: dict[str, str]
) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", eviction="lru", media="nvme", **quota)
        made.mkdir(b"b")
        await fill(made, 3)
        await fill(made, 4, b"b", first=3)
        await rename(made, b"b/003", b"a/003")
        assert names(made, b"a") == [b"001", b"002", b"003"]
        await rename(made, b"b/004", b"a/001")
        assert names(made, b"a") == [b"001", b"002", b"003"], "it takes the room of the old one"
        assert made.at(b"a/001").namespace == space.ino
        await rename(made, b"b/005", b"a/002", RENAME_EXCHANGE)
        assert names(made, b"a") == [b"001", b"002", b"003"], "so do those that change places"
        await rename(made, b"a/001", b"a/new")
        assert names(made, b"b") == [b"005", b"006"]
        made.check()
        await rename(made, b"b/005", b"a/005")
        assert (space.objects, space.bytes) == (3, 3 * COST)
        assert b"005" in names(made, b"a")
        await made.check_at_rest()

    run(case, tmp_path)


@pytest.mark.parametrize("flags", [0, RENAME_NOREPLACE])
def test_a_rename_into_a_quota_that_has_nothing_to_give_changes_nothing(
    tmp_path: Path, flags: int
) -> None:
    async def case(made: World) -> None:
        made.namespace("full", eviction="never", quota_objects="2")
        made.namespace("small", eviction="lru", quota_hard=str(2 * COST))
        made.mkdir(b"b")
        await fill(made, 2, b"full")
        await fill(made, 2, b"small")
        await fill(made, 1, b"b", first=7)
        await made.make_file(b"b/large", BYTES * 3)
        before = [inode.copy() for inode in made.inodes()]
        for old, new in ((b"b/007", b"full/007"), (b"b/large", b"small/large")):
            with pytest.raises(QuotaError):
                await rename(made, old, new, flags)
        with pytest.raises(ExistsError):  # nothing goes for what is refused anyway
            await rename(made, b"b/007", b"small/000", RENAME_NOREPLACE)
        with pytest.raises(NotFoundError):
            await rename(made, b"b/008", b"small/008")
        assert list(made.inodes()) == before
        await rename(made, b"b/007", b"full/000")
        assert sorted(names(made, b"full")) == [b"000", b"001"]
        await made.check_at_rest()

    run(case, tmp_path)


@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE])
@pytest.mark.parametrize("quota", [{"quota_hard": str(3 * COST)}, {"quota_objects": "3"}])
def test_a_directory_that_finds_no_room_in_a_quota_stays(
    tmp_path: Path, quota: dict[str, str], flags: int
) -> None:
    async def case(made: World) -> None:
        made.namespace("full", eviction="never", **quota)
        made.namespace("small", eviction="lru", **quota)
        for path in (b"b", b"b/two", b"b/two/deep", b"b/four", b"full/one", b"small/one"):
            made.mkdir(path)
        await fill(made, 2, b"full")
        await fill(made, 1, b"small", first=7)
        await fill(made, 2, b"b/two/deep")
        made.tree.link(made.at(b"b/two/deep/000").ino, made.at(b"b/two").ino, b"again")
        await fill(made, 4, b"b/four")
        before = [inode.copy() for inode in made.inodes()]
        for old, new in ((b"b/two", b"full/one"), (b"b/four", b"small/one")):
            with pytest.raises(QuotaError):
                await rename(made, old, new, flags)
        assert list(made.inodes()) == before
        await rename(made, b"b/two", b"small/one", flags)
        await made.walk()
        assert names(made, b"small/one/deep") == [b"000", b"001"]
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_directory_of_too_many_names_is_to_be_copied_into_a_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renames, "COUNTED_MAX", 40)

    async def case(made: World) -> None:
        made.namespace("a", eviction="lru", quota_objects="100")
        made.namespace("free")
        made.mkdir(b"b")
        made.mkdir(b"b/d")
        await fill(made, 41, b"b/d")
        with pytest.raises(OtherNamespaceError, match="more than 40 names"):
            await rename(made, b"b/d", b"a/d")
        await rename(made, b"b/d", b"free/d")
        await made.walk()
        assert len(names(made, b"free/d")) == 41
        await made.check_at_rest()

    run(case, tmp_path)


def test_many_go_for_a_large_one_in_steps(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", eviction="lru", quota_hard=str(100 * COST))
        made.mkdir(b"b")
        await fill(made, 100)
        await made.make_file(b"b/large", BYTES * 90)
        seen = [space.objects]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rename, made, b"b/large", b"a/large")
            while b"large" not in names(made, b"a"):
                await trio.lowlevel.checkpoint()
                seen.append(space.objects)
        assert max(before - after for before, after in pairwise(seen)) <= 2 * AT_ONCE
        assert space.bytes <= 100 * COST
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_directory_that_comes_is_trimmed_as_it_is_accounted(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", eviction="lru", quota_objects="10")
        made.mkdir(b"b")
        await fill(made, 100, b"b")
        await fill(made, 10)
        most = 0
        made.renames.rename(ROOT_INO, b"b", space.ino, b"b", 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.walks.run)
            while made.ledger.namespaces.unaccounted:
                await trio.lowlevel.checkpoint()
                most = max(most, space.objects)
            nursery.cancel_scope.cancel()
        assert most <= 10 + 2 * STEP
        assert space.objects == 10
        assert made.ledger.namespaces.default.objects == 0
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_rewrite_needs_no_room_beside_the_old_version(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", quota_objects="2", quota_hard=str(2 * COST))
        inodes = await fill(made, 2)
        for inode in inodes:
            held = await made.objects.open(inode.ino, writable=True, truncate=True)
            made.write(held, BYTES)
            await made.close(held, writable=True)
        assert names(made, b"a") == [b"000", b"001"]
        await made.check_at_rest()

    run(case, tmp_path)


def test_reservation_for_an_unknown_size_does_not_use_up_the_quota(tmp_path: Path) -> None:
    """64 MiB are reserved for a file of which nothing is known."""

    async def case(made: World) -> None:
        made.namespace("a", quota_hard="1M")
        parent = made.at(b"a").ino
        held = [await made.create(b"%d" % n, b"", parent) for n in range(3)]
        assert max(one.reserved for one in held) > MIB
        for one in held:
            made.write(one, BYTES)
            await made.close(one, writable=True)
        assert len(names(made, b"a")) == 3

    run(case, tmp_path, nvme=256 * MIB)


def test_an_expectation_beyond_the_quota_drops_nothing(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", quota_hard=str(5 * COST))
        await fill(made, 4)
        made.learn(made.at(b"a"), b"x", 10 * COST)
        await made.make_file(b"a/x", BYTES)
        assert len(names(made, b"a")) == 5
        made.forget_sizes()
        made.learn(made.at(b"a"), b"x", 2 * COST)
        held = await made.create(b"y", b"", space.ino)
        assert len(names(made, b"a")) == 5, "nothing goes before bytes come"
        await made.close(held, writable=True)
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_file_beyond_the_quota_goes_with_its_close_though_it_is_read(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", quota_hard=str(3 * COST))
        await fill(made, 2)
        there = names(made, b"a")
        with pytest.raises(QuotaError):
            await made.make_file(b"a/large", BYTES * 5)
        assert names(made, b"a") == there
        assert space.bytes == 2 * COST
        held = await made.create(b"large", BYTES * 5, space.ino)
        again = await made.objects.open(held.inode.ino, writable=False)
        with pytest.raises(QuotaError):
            await made.close(held, writable=True)
        assert names(made, b"a") == there, "its reader keeps it open, without its name"
        assert space.bytes == 2 * COST
        made.check()
        await made.close(again, writable=False)
        await made.make_file(b"a/small", BYTES)
        assert names(made, b"a") == [*there, b"small"]
        assert space.bytes == 3 * COST
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_smaller_quota_is_kept_in_the_background(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a")
        await fill(made, 100)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.watch.quotas)
            await trio.testing.wait_all_tasks_blocked()
            made.tell("a", quota_objects="7", eviction="lru")
            assert space.objects == 100, "the daemon goes on meanwhile"
            while space.objects > 7:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert names(made, b"a") == [b"%03d" % n for n in range(93, 100)]
        await made.check_at_rest()

    run(case, tmp_path)


def test_namespace_furthest_beyond_its_share_gives_first(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        light, heavy = made.namespace("light"), made.namespace("heavy", weight="1000")
        for path in (b"light", b"heavy"):
            await fill(made, 4, path)
        await fill(made, 2, b"heavy", first=4)
        assert made.room.victims.by_urgency()[0] is light
        made.tell("heavy", quota_soft=str(COST))
        assert made.room.victims.by_urgency()[0] is heavy
        made.tell("heavy", quota_soft="0")
        made.drop("heavy")
        assert made.room.victims.by_urgency()[0] is heavy, "what was dropped goes before all"
        await made.walk()

    run(case, tmp_path)


# Victims


@pytest.mark.parametrize("settings", [{"pin": "on"}, {"eviction": "never"}])
def test_unevictable_objects_stay_when_room_is_needed(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    async def case(made: World) -> None:
        made.namespace("a", **settings)
        paths = [in_ram(made, b"a/%d" % number) for number in range(4)]
        inodes = [await made.make_file(path, bytes(MIB)) for path in paths]
        for inode in inodes[:2]:
            await made.demote(inode.ino)
        for tier in made.tiers:
            while made.room.reserve(tier, MIB):
                pass
        pinned = "pin" in settings
        held = [
            [tier.name for tier in made.ledger.tiers.holders(made.tree.inode(inode.ino))]
            for inode in inodes
        ]
        assert held[2:] == [["ram"], ["ram"]]
        assert held[:2] == [["ram", "nvme"]] * 2 if pinned else [["nvme"]] * 2
        for tier in made.tiers:
            tier.reserved = 0
        await made.check_at_rest()

    run(case, tmp_path, ram=8 * MIB, nvme=8 * MIB)


@pytest.mark.parametrize("before", [["never"], ["lru", "never", "sieve"]])
def test_change_of_policy_keeps_the_members(tmp_path: Path, before: list[str]) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", eviction=before[0])
        await fill(made, 10)
        for eviction in (*before[1:], "fifo"):
            made.tell("a", eviction=eviction)
            made.check()
        made.tree.unlink(space.ino, b"004")
        await made.make_file(b"a/004", BYTES)
        made.check()
        made.tell("a", quota_objects="3")
        made.quota.keep(space, 0)
        assert names(made, b"a") == [b"008", b"009", b"004"]
        await made.check_at_rest()

    run(case, tmp_path)


def test_movers_are_given_nothing_that_is_gone(tmp_path: Path) -> None:
    """The objects unlinked after a change of policy were only in RAM, and waited for a copy."""

    async def case(made: World) -> None:
        space = made.namespace("a", eviction="lru", write="through")
        for number in range(3):
            await made.make_file(in_ram(made, b"a/%d" % number), BYTES)
        made.tell("a", eviction="fifo")
        for number in range(3):
            made.tree.unlink(space.ino, b"%d" % number)
        assert made.dispatcher.demotion.next() == []
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_connectors_own_files_are_kept_unless_an_eviction_is_chosen(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a")
        for number in range(3):
            await made.make_file(b"a/" + kept_name(number), BYTES)
        await made.make_file(b"a/other", BYTES)
        made.tell("a", quota_objects="1")
        with pytest.raises(QuotaError):
            made.quota.keep(space, 0)
        assert names(made, b"a") == [kept_name(number) for number in range(3)]
        made.check()
        made.tell("a", eviction="lru")
        await made.walk()
        made.check()
        made.quota.keep(space, 0)
        assert names(made, b"a") == [kept_name(2)]
        made.tell("a", eviction="adaptive")
        await made.walk()
        with pytest.raises(QuotaError):
            await made.make_file(b"a/other", BYTES)
        assert names(made, b"a") == [kept_name(2)]
        await made.check_at_rest()

    run(case, tmp_path)


def test_kept_files_move_between_tiers_and_stay(tmp_path: Path) -> None:
    with world(tmp_path) as made:

        async def store() -> Inode:
            space = made.namespace("a")
            inode = await made.make_file(in_ram(made, b"a/" + kept_name(1)), BYTES)
            assert list(space.ram_kept) == [inode.ino]
            await made.demote(inode.ino)
            assert list(space.ram_clean) == list(space.nvme_kept) == [inode.ino]
            made.check()
            return inode

        inode = trio.run(store)
        made.restart()
        trio.run(made.census)
        space = made.ledger.namespaces.of(made.tree.inode(inode.ino))
        assert list(space.nvme_kept) == [inode.ino]
        made.check()

        async def full() -> None:
            for tier in made.tiers:
                while made.room.reserve(tier, MIB // 4):
                    pass
            assert names(made, b"a") == [kept_name(1)]
            assert made.ledger.tiers.holders(made.tree.inode(inode.ino)) == [made.nvme]
            for tier in made.tiers:
                tier.reserved = 0
            await made.check_at_rest()

        trio.run(full)


def test_a_group_lives_and_dies_together(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", eviction="lru")
        for rank in range(3):
            await made.make_file(b"a/m@3@%d@ab@half.data" % rank, BYTES)
        await made.make_file(b"a/m@3@0@ac@half.data", BYTES)
        made.tell("a", quota_objects="3")
        space = made.ledger.namespaces.of(made.find(b"a"))
        made.quota.keep(space, 0)
        assert names(made, b"a") == [b"m@3@0@ac@half.data"]
        for rank in range(1, 3):
            await made.make_file(b"a/m@3@%d@ac@half.data" % rank, BYTES)
        held = await made.objects.open(made.at(b"a/m@3@2@ac@half.data").ino, writable=False)
        made.ledger.removals.drop(made.at(b"a/m@3@0@ac@half.data"), "lost")
        assert names(made, b"a") == [b"m@3@2@ac@half.data"], "but for what is in use"
        assert made.ledger.counters["dropped_incomplete"] == 1
        assert made.ledger.counters["dropped_quota"] == 3, "a command takes whole groups"
        await made.close(held, writable=False)
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_group_of_very_many_files(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", eviction="lru")
        for layer in range(1200):
            await made.make_file(b"a/m@1@0@ab@half@%d.data" % layer, b"x")
        made.ledger.removals.drop(made.at(b"a/m@1@0@ab@half@7.data"), "lost")
        assert names(made, b"a") == []
        await made.check_at_rest()

    run(case, tmp_path)


# Tiers


def test_a_namespace_may_be_bound_to_a_tier(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("ram", media="ram")
        made.namespace("nvme", media="nvme")
        for path, tier in ((b"ram", made.ram), (b"nvme", made.nvme)):
            made.forget_sizes()
            for number in range(2):  # of a size that is not known, and of one that is
                inode = await made.make_file(b"%b/%d" % (path, number), BYTES)
                assert made.ledger.tiers.holders(inode) == [tier]
        on_nvme = made.at(b"nvme/1")
        for _ in range(5):
            await made.read(on_nvme.ino)
        assert {what.name for what, _ in made.dispatcher.requests._waiting} == {"settle"}, (
            "it is not promoted"
        )
        made.dispatcher.write_back.start()
        assert made.dispatcher.demotion.next() == [], "nor demoted"
        await made.check_at_rest()

    run(case, tmp_path)


def test_tiers_that_are_not_mounted_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with world(tmp_path) as made:
        made.namespace("a", media="ram")
        made.sizes = (0, made.sizes[1])
        made.restart(lose_ram=True)
        trio.run(made.census)

        async def case() -> None:
            why = (
                "its objects may be in media=ram, and the mount has nvme only: mount with ram=, or "
                "kvfs ns set media=all"
            )
            for _ in range(2):
                with pytest.raises(NoSpaceError) as refused:
                    await made.make_file(b"a/x", BYTES)
                assert str(refused.value) == f"namespace a takes no new file: {why}"
            assert [(record.levelname, record.message) for record in caplog.records] == [
                ("WARNING", str(refused.value))
            ], "once"
            show = administration.handlers(made.lifecycle)["ns_show"]
            assert (await show(name="a"))["problem"] == why
            listed = administration.summary(made.lifecycle)["namespaces"]
            assert {one["name"]: one["problem"] for one in listed} == {".": "", "a": why}
            await made.store(b"x", BYTES)
            made.tell("a", media="all")
            await made.make_file(b"a/x", BYTES)
            assert (await show(name="a"))["problem"] == ""
            await made.check_at_rest()

        trio.run(case)


def test_namespace_with_media_ram_drops_objects_for_room(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", media="ram", eviction="lru")
        for number in range(10):
            await made.make_file(in_ram(made, b"a/%d" % number), bytes(MIB))
            made.room.make_room(made.fast)
        assert names(made, b"a")[-1] == b"9"
        assert 5 < len(names(made, b"a")) < 8
        assert made.disk.objects == 0
        await made.check_at_rest()

    run(case, tmp_path, ram=8 * MIB)


# Time to live


def aged(made: World, inode: Inode, seconds: float) -> Inode:
    then = time.time_ns() - int(seconds * 1e9)
    return made.attributes.change(inode.ino, atime_ns=then, mtime_ns=then)


def test_expired_file_is_enoent(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", ttl="100")
        old, young = await fill(made, 2)
        aged(made, old, 101)
        aged(made, young, 90)
        with pytest.raises(NotFoundError):
            made.at(b"a/000")
        assert names(made, b"a") == [b"001"]
        assert made.ledger.counters["dropped_expired"] == 1
        with pytest.raises(StaleError):
            await made.objects.open(old.ino, writable=False)
        assert await made.read(young.ino) == BYTES
        await made.make_file(b"a/000", BYTES)
        await made.check_at_rest()

    run(case, tmp_path)


def test_expired_open_file_keeps_its_bytes_without_a_name(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", ttl="100")
        (inode,) = await fill(made, 1)
        held = await made.objects.open(inode.ino, writable=False)
        aged(made, inode, 200)
        with pytest.raises(NotFoundError):
            made.at(b"a/000")
        assert made.tree.list_entries(made.at(b"a").ino, 2, 10).entries == []
        assert made.content(held) == BYTES
        made.check()
        await made.close(held, writable=False)
        with pytest.raises(NotFoundError):
            made.at(b"a/000")
        await made.check_at_rest()
        assert made.ledger.accounts.objects == 0

    run(case, tmp_path)


def test_expired_files_are_dropped_in_the_background(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", ttl="100")
        for inode in (await fill(made, 30))[:20]:
            aged(made, inode, 200)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.walks.expire)
            while made.ledger.accounts.objects > 10:
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            assert made.ledger.accounts.objects == 10
            made.tell("a", ttl="0")
            nursery.cancel_scope.cancel()
        await made.check_at_rest()

    run(case, tmp_path)


def use(made: World, path: bytes) -> None:
    """As at an open."""
    inode, now = made.at(path), time.time_ns()
    if made.ledger.namespaces.unused([inode], now):
        inode.atime_ns = now
        with made.catalog.batch() as batch:
            batch.put(inode)


def test_a_life_may_be_counted_from_the_last_use(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", ttl="32", ttl_from="use")
        (inode,) = await fill(made, 1)
        assert space.use_step == 32 * 10**9 // USES_NOTED
        aged(made, inode, 30)
        use(made, b"a/000")
        assert time.time_ns() - made.at(b"a/000").atime_ns < 2 * 10**9
        now = time.time_ns()
        made.attributes.change(inode.ino, atime_ns=now - 3 * 10**9, mtime_ns=now - 100 * 10**9)
        use(made, b"a/000")
        assert made.at(b"a/000").atime_ns >= now, "a use is noted while it matters"
        made.tell("a", ttl_from="write")
        with pytest.raises(NotFoundError):
            made.at(b"a/000")
        await made.check_at_rest()

    run(case, tmp_path)


def test_the_kernel_may_not_know_a_name_for_longer_than_it_lives(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", ttl="100")
        (inode,) = await fill(made, 1)
        assert space.ttl_remaining(inode, 5.0) == 5.0
        assert 90 < space.ttl_remaining(inode, 3600.0) <= 100
        inode = aged(made, inode, 99)
        assert 0 < space.ttl_remaining(inode, 3600.0) <= 1
        assert space.ttl_remaining(made.at(b"a"), 3600.0) == 3600.0
        held = await made.create(b"y", BYTES, space.ino)
        assert space.ttl_remaining(held.inode, 3600.0) == 100, "while it is written, too"
        await made.close(held, writable=True)
        made.tell("a", ttl="0")
        assert space.ttl_remaining(inode, 3600.0) == 3600.0

    run(case, tmp_path)


def test_file_being_written_does_not_expire(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", ttl="100")
        held = await made.create(b"x", BYTES, made.at(b"a").ino)
        held.inode.mtime_ns = 1
        assert made.at(b"a/x").ino == held.inode.ino
        await made.close(held, writable=True)
        await made.check_at_rest()

    run(case, tmp_path)


# Published at close


async def hidden(made: World, name: bytes = b"x", content: bytes = BYTES) -> None:
    held = await made.create(name, content, made.at(b"a").ino)
    await made.close(held, writable=True)


def test_a_file_has_no_name_until_it_is_closed(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", publish="close")
        held = await made.create(b"x", BYTES, space.ino)
        with pytest.raises(NotFoundError):
            made.at(b"a/x")
        assert names(made, b"a") == []
        made.check()
        made.objects.sealing.flush(held, writable=True)
        assert await made.read(made.at(b"a/x").ino) == BYTES
        await made.close(held, writable=True)
        assert made.at(b"a").mtime_ns >= held.inode.ctime_ns
        await made.check_at_rest()

    run(case, tmp_path)


def test_an_empty_file_waits_for_its_release(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", publish="close")
        held = await made.create(b"x", b"", space.ino)
        made.objects.sealing.flush(held, writable=True)  # of a shell's duplicate
        assert names(made, b"a") == []
        await made.close(held, writable=True)
        assert names(made, b"a") == [b"x"]
        assert made.at(b"a/x").size == 0
        await made.check_at_rest()

    run(case, tmp_path)


def test_the_first_complete_file_wins(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", publish="close")
        one = await made.create(b"x", BYTES, space.ino)
        two = await made.create(b"x", BYTES * 2, space.ino)
        await made.close(two, writable=True)
        made.check()
        await made.close(one, writable=True)
        assert await made.read(made.at(b"a/x").ino) == BYTES * 2
        assert made.ledger.counters["outrun"] == 1
        assert space.objects == 1
        await made.check_at_rest()

    run(case, tmp_path)


def test_unpublished_file_of_a_removed_directory_gets_no_name(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        for how in ("drop", "version", "rmdir"):
            space = made.namespace("a", publish="close")
            held = await made.create(b"x", BYTES, space.ino)
            if how == "drop":
                made.drop("a")
            elif how == "version":
                made.tell("a", version="2")
            else:
                made.tree.rmdir(ROOT_INO, b"a")
            await made.walk()
            assert made.content(held) == BYTES
            made.check()
            await made.close(held, writable=True)
            await made.check_at_rest()
            assert made.ledger.accounts.objects == 0
            if how == "version":
                assert names(made, b"a") == []
                made.drop("a")
                await made.walk()

    run(case, tmp_path)


def test_unpublished_file_follows_its_moved_directory(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        a, b = made.namespace("a", publish="close"), made.namespace("b")
        made.mkdir(b"a/d")
        held = await made.create(b"x", BYTES, made.at(b"a/d").ino)
        made.renames.rename(a.ino, b"d", b.ino, b"d", 0)
        await made.walk()
        await made.close(held, writable=True)
        assert (a.objects, b.objects) == (0, 1)
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_hidden_file_is_gone_after_a_death(tmp_path: Path) -> None:
    with world(tmp_path) as made:

        async def begin() -> None:
            space = made.namespace("a", publish="close")
            await made.create(b"x", BYTES, space.ino)

        trio.run(begin)
        assert made.catalog.marks(b"p")
        made.restart(crash=True)
        trio.run(made.census)
        assert names(made, b"a") == []
        assert made.catalog.marks(b"p") == []
        trio.run(made.check_at_rest)


# The meaning of names


def test_a_path_begins_at_the_namespace(tmp_path: Path) -> None:
    """So that a group is the same before and after a directory becomes one, or a restart."""

    async def case(made: World) -> None:
        made.mkdir(b"a")
        made.mkdir(b"a/d")
        name = b"m@1@0@ab@half.data"
        before = (await made.make_file(b"a/d/" + name, BYTES)).key
        made.namespace("a")
        await made.walk()
        key = made.at(b"a/d/" + name).key
        block = layouts.recognise((b"d",), name)
        assert block is not None
        assert key == block.key != before
        await made.make_file(b"a/d/m@2@1@ab@half.data", BYTES)
        made.tree.unlink(made.at(b"a/d").ino, name)
        assert (await made.make_file(b"a/d/" + name, BYTES)).key == key

    run(case, tmp_path)


def test_models_are_known_by_number_and_survive(tmp_path: Path) -> None:
    with world(tmp_path) as made:

        async def case() -> None:
            made.namespace("a")
            for number, model in enumerate((b"m", b"n", b"m")):
                await made.make_file(b"a/%b@1@0@a%x@half.data" % (model, number), BYTES)

        trio.run(case)
        for _ in range(2):
            namespaces = made.ledger.namespaces
            assert namespaces.places.models == {1: ("lmcache", "m"), 2: ("lmcache", "n")}
            assert namespaces.describe_models(namespaces.everything()) == [
                {"engine": "lmcache", "model": "m", "objects": 2, "bytes": 2 * COST},
                {"engine": "lmcache", "model": "n", "objects": 1, "bytes": COST},
            ]
            assert namespaces.describe_models([namespaces.default]) == []
            made.restart()
            trio.run(made.census)


def test_a_temporary_name_says_which_block_it_will_be(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a")
        inode = await made.make_file(b"a/m@1@0@ab@half.tmp", BYTES)
        directory = made.at(b"a").ino
        temporary = inode.key
        made.renames.rename(directory, b"m@1@0@ab@half.tmp", directory, b"m@1@0@ab@half.data", 0)
        block = layouts.recognise((), b"m@1@0@ab@half.data")
        assert block is not None
        inode = made.at(b"a/m@1@0@ab@half.data")
        assert (inode.key, inode.model) == (block.key, 1)
        assert temporary == block.key
        made.check()

    run(case, tmp_path)


# Calls of policies


def test_policies_know_how_much_room_there_is(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", eviction="lru")
        for number in range(4):
            await made.make_file(in_ram(made, b"a/%d" % number), bytes(MIB))
        space.resize_policies(made.tiers)
        room = (4 * MIB + made.fast.free) // MIB
        assert space.ram_only.policy.capacity == room
        made.tell("a", quota_objects="20")
        made.fast.capacity *= 10
        space.resize_policies(made.tiers)
        assert space.ram_only.policy.capacity == 20
        assert space.would_be.capacity == 20
        made.fast.capacity //= 10

    run(case, tmp_path)


def test_what_if_counts_for_the_room_that_there_is(tmp_path: Path) -> None:
    """The room is for few objects, and the quota changes."""

    async def case(made: World) -> None:
        space = made.namespace("a", eviction="lru", quota_hard="10M")
        full = make("lru", 10)

        def cycle(names: int, opens: int) -> None:
            for number in range(opens):
                key = 1 + number % names
                if full.touch(key) is not None:
                    space.accesses.opened(key, 0, space.parent)
                    continue
                space.accesses.looked_up(key)
                while len(full) >= full.capacity:
                    full.take()
                full.add(key)
                space.accesses.stored(key, 0, space.parent)

        def told() -> dict[str, float]:
            found: dict[str, float] = space.describe()["hit_ratio_at"]
            return found

        cycle(14, 500)
        assert told() == {}, "the room is not measured yet"
        for number in range(4):
            await made.make_file(in_ram(made, b"a/%d" % number), bytes(MIB))
        space.resize_policies(made.tiers)
        assert space.would_be.capacity == 10
        assert told() == {}, "the accesses of before were for a guess"
        cycle(14, 98)
        assert told() == {}
        assert space.describe()["hit_ratio_sample"] == {"seen": 98, "needed": 400}
        cycle(14, 402)
        assert told() == {"0.5": 0.0, "1": 0.0, "2": 1.0, "4": 1.0}
        space.resize_policies(made.tiers)
        assert told()["1"] == 0.0
        made.tell("a", quota_hard="4M")
        space.resize_policies(made.tiers)
        assert told() == {}
        full.capacity = 4
        cycle(7, 500)
        assert told() == {"0.5": 0.0, "1": 0.0, "2": pytest.approx(1, abs=0.02), "4": 1.0}

    run(case, tmp_path)


def test_spare_room_is_told_once(tmp_path: Path) -> None:
    """Objects that were not worth a write are written after all when RAM is emptied."""

    async def case(made: World) -> None:
        space = made.namespace("a", eviction="lru")
        inodes = [await made.make_file(in_ram(made, b"a/%d" % n), BYTES) for n in range(2)]
        made.dispatcher.admission.budget = 1
        for inode in inodes:
            await made.demote(inode.ino)
        assert space.refused == dict.fromkeys((inode.ino for inode in inodes), COST)
        made.check()
        made.dispatcher.write_back.start()
        await made.demote(inodes[0].ino)
        assert list(space.refused) == [inodes[1].ino]
        free = made.fast.free - made.room.headroom
        assert made.room.reclaimable == free + 2 * COST
        made.check()
        await made.read(inodes[1].ino)
        assert not space.refused, "it is asked for"
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_tier_is_not_a_namespaces_because_its_first_choice_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(made: World) -> None:
        made.namespace("nvme", media="nvme")
        made.namespace("all")
        made.forget_sizes()

        def fail(ino: int, version: int) -> int:
            raise TierError(f"no file {ino} of version {version}")

        with monkeypatch.context() as patch:
            patch.setattr(made.disk, "create", fail)
            with pytest.raises(TierError):
                await made.make_file(b"nvme/x", BYTES)
            held = await made.create(b"x", BYTES, made.at(b"all").ino)
        assert held.tier is made.ram
        assert Tier.cost(0) <= held.reserved
        await made.close(held, writable=True)
        await made.check_at_rest()

    run(case, tmp_path)
