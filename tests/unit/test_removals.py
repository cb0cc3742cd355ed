"""Where new files go, and what goes when room is needed."""

import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.catalog import ROOT_INO, Inode, keys
from kvfs.core.capacity import victims
from kvfs.core.capacity.sizes import UNKNOWN_SIZE
from kvfs.core.ledger.removals import FORGOTTEN_AT_ONCE
from kvfs.core.namespaces.order import key_of
from kvfs.errors import NoSpaceError, NotFoundError
from kvfs.tiers import Tier
from tests.unit.world import MIB, World, world

BYTES = random.Random(1).randbytes(MIB)
LARGE = 256 << 20


def run(case: Callable[[World], Awaitable[None]], tmp_path: Path, **options: int) -> None:
    with world(tmp_path, **options) as made:
        trio.run(case, made)


def alive(made: World, name: bytes) -> bool:
    return made.catalog.lookup(ROOT_INO, name) is not None


def names(made: World) -> list[bytes]:
    return [entry.name for entry in made.catalog.entries_after(ROOT_INO, 0, 1000)]


async def fill(made: World, tier: Tier, count: int, prefix: bytes = b"x") -> list[Inode]:
    return [await made.store(b"%b%d" % (prefix, n), BYTES, tier) for n in range(count)]


async def choose(made: World, name: bytes) -> tuple[Tier, int]:
    """Where a new file of that name begins, and the bytes that are reserved for it."""
    space = made.ledger.namespaces.default
    room = await made.placement.choose(space, made.placement.expect(made.at(b""), name))
    return room.tier, room.size


# Where it begins


def test_a_file_of_known_size_begins_in_ram(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.expect(b"a", MIB)
        assert await choose(made, b"b") == (made.ram, MIB)
        assert made.fast.reserved == MIB
        made.fast.reserved = 0

    run(case, tmp_path)


def test_a_file_of_unknown_size_begins_on_nvme(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        assert await choose(made, b"b") == (made.nvme, UNKNOWN_SIZE)
        made.disk.reserved = 0

    run(case, tmp_path, ram=16 * MIB, nvme=LARGE + 1)


def test_files_of_unknown_size_get_no_enospc_while_ram_can_be_emptied(tmp_path: Path) -> None:
    """Each sets a quarter of NVMe aside, so a few of them leave nothing there."""

    async def case(made: World) -> None:
        await fill(made, made.fast, 15)
        found = [await choose(made, b"b.new") for _ in range(5)]
        assert [tier for tier, _ in found] == [made.nvme] * 4 + [made.ram]
        made.disk.reserved = made.fast.reserved = 0

    run(case, tmp_path, ram=16 * MIB, nvme=16 * MIB)


def test_a_file_of_unknown_size_takes_no_more_than_a_quarter(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        assert await choose(made, b"b") == (made.nvme, 4 * MIB)
        made.disk.reserved = 0

    run(case, tmp_path, nvme=16 * MIB)


def test_without_nvme_everything_begins_in_ram(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        assert await choose(made, b"b") == (made.ram, 4 * MIB)
        made.fast.reserved = 0

    run(case, tmp_path, nvme=0)


def test_file_too_large_for_ram_begins_on_nvme(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.expect(b"a", 16 * MIB)
        assert await choose(made, b"b") == (made.nvme, 16 * MIB)
        made.disk.reserved = 0

    run(case, tmp_path)


def test_an_empty_file_is_not_free(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.expect(b"a", 0)
        assert await choose(made, b"b") == (made.ram, 4096)
        made.fast.reserved = 0

    run(case, tmp_path)


def test_creates_use_free_ram_before_the_census_ends(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await fill(made, made.fast, 2)
        made.restart()
        assert 2 * MIB <= made.fast.uncounted < 3 * MIB
        made.expect(b"a", MIB)
        assert await choose(made, b"b") == (made.ram, MIB)
        made.fast.reserved = 0
        await made.census()
        assert made.fast.uncounted == 0

    run(case, tmp_path)


def test_creates_use_free_nvme_before_the_census_ends(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await fill(made, made.disk, 3)
        made.ledger.accounts.leave_estimate()  # goes along with the next change
        await fill(made, made.fast, 1, b"y")
        made.restart()
        assert made.disk.uncounted == 3 * MIB
        made.expect(b"a", 20 * MIB)
        assert await choose(made, b"b") == (made.nvme, 20 * MIB)
        made.disk.reserved = 0
        await made.census()
        assert (made.disk.uncounted, made.disk.used) == (0, 3 * MIB)

    run(case, tmp_path)


def test_creates_for_which_the_estimate_leaves_no_room_wait_for_the_census(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await fill(made, made.fast, 2)
        made.restart()
        chosen: list[Tier] = []

        async def begin() -> None:
            made.expect(b"a", 14 * MIB)
            tier, size = await choose(made, b"b")
            tier.reserved -= size
            chosen.append(tier)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(begin)
            await trio.testing.wait_all_tasks_blocked()
            assert chosen == []
            await made.census()
        assert chosen == [made.nvme]

    run(case, tmp_path)


def test_creates_on_a_fresh_ram_tier_wait_for_nothing(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await fill(made, made.disk, 2)
        made.restart(lose_ram=True)
        tier, size = await choose(made, b"b")
        assert tier is made.ram
        tier.reserved -= size

    run(case, tmp_path)


# Room


def test_copies_that_nvme_has_too_leave_ram_first(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        stored = await fill(made, made.fast, 12)
        for inode in stored[6:]:
            await made.demote(inode.ino)
        assert made.room.reserve(made.fast, 5 * MIB)
        made.fast.reserved -= 5 * MIB
        assert len(names(made)) == 12, "nothing is lost"
        holders = [made.ledger.tiers.holders(made.tree.inode(inode.ino)) for inode in stored]
        assert holders[:6] == [[made.ram]] * 6
        assert holders[6:8] == [[made.nvme]] * 2
        assert holders[-1] == [made.ram, made.nvme]
        await made.check_at_rest()

    run(case, tmp_path)


def test_ram_alone_is_not_lost_while_nvme_has_room(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await fill(made, made.fast, 14)
        assert not made.room.reserve(made.fast, 4 * MIB)
        assert made.fast.reserved == 0
        made.expect(b"a", 4 * MIB)
        tier, size = await choose(made, b"b")
        assert tier is made.nvme
        tier.reserved -= size
        assert len(names(made)) == 14

    run(case, tmp_path)


def test_without_nvme_the_oldest_is_lost(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await fill(made, made.fast, 14)
        await made.read(made.find(b"x0").ino)
        made.expect(b"new", 3 * MIB)
        await made.store(b"new", BYTES * 3)
        made.room.make_room(made.fast)
        assert alive(made, b"new")
        assert alive(made, b"x0"), "it was read just now"
        assert not alive(made, b"x1")
        assert made.gone[0][:2] == (ROOT_INO, b"x1")
        await made.check_at_rest()

    run(case, tmp_path, nvme=0)


def test_the_oldest_on_nvme_is_dropped_when_it_is_full(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await fill(made, made.disk, 10)
        await made.read(made.find(b"x0").ino)
        made.expect(b"new", 4 * MIB)
        await made.store(b"new", BYTES * 4)
        made.room.make_room(made.disk)
        assert alive(made, b"x0")
        assert names(made)[-1] == b"new"
        assert [name for _, name, _ in made.gone] == [b"x1", b"x2"]
        await made.check_at_rest()

    run(case, tmp_path, ram=0, nvme=12 * MIB)


def test_the_order_of_use_survives_a_restart_by_the_hour(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        hour = 3600 * 10**9
        for number, inode in enumerate(await fill(made, made.disk, 4)):
            made.attributes.change(inode.ino, atime_ns=(10 - number) * hour)
        made.restart()
        await made.census()
        assert made.room.reserve(made.disk, 10 * MIB)
        made.disk.reserved -= 10 * MIB
        assert [name for _, name, _ in made.gone] == [b"x3", b"x2"]
        await made.check_at_rest()

    run(case, tmp_path, ram=0, nvme=12 * MIB)


@pytest.mark.parametrize("writable", [False, True])
def test_open_object_is_never_a_victim(tmp_path: Path, *, writable: bool) -> None:
    async def case(made: World) -> None:
        stored = await fill(made, made.fast, 6)
        held = [await made.objects.open(inode.ino, writable=writable) for inode in stored]
        assert not made.room.reserve(made.fast, 14 * MIB)
        assert len(names(made)) == 6
        made.check()
        for one in held:
            await made.close(one, writable=writable)
        assert made.room.reserve(made.fast, 14 * MIB)
        made.fast.reserved = 0
        await made.check_at_rest()

    run(case, tmp_path, nvme=0)


def test_a_file_that_is_being_opened_is_no_victim(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = (await fill(made, made.disk, 1))[0]
        made.ledger.table.busy[inode.ino] = None
        assert not made.room.reserve(made.disk, made.disk.capacity)
        made.room.make_room(made.disk)
        assert alive(made, b"x0")
        del made.ledger.table.busy[inode.ino]
        assert made.room.reserve(made.disk, made.disk.capacity)
        assert not alive(made, b"x0")
        made.disk.reserved = 0

    run(case, tmp_path)


def test_no_space_only_when_nothing_may_be_dropped(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        stored = await fill(made, made.fast, 15) + await fill(made, made.disk, 12, b"y")
        held = [await made.objects.open(inode.ino, writable=False) for inode in stored]
        made.disk.reserved = 4 * MIB
        made.expect(b"a", 2 * MIB)
        with pytest.raises(NoSpaceError, match=r"a new file \(2.0 MiB expected from earlier"):
            await made.create(b"new")
        made.disk.reserved = 0
        made.check()
        made.disk.reserved = 4 * MIB
        for one in held[:3]:
            await made.close(one, writable=False)
        new = await made.create(b"new", BYTES)
        assert new.tier is made.ram, "what only RAM had went, since NVMe takes nothing"
        assert [name for _, name, _ in made.gone] == [b"x0"], "more goes when more bytes come"
        await made.close(new, writable=True)
        made.disk.reserved = 0
        for one in held[3:]:
            await made.close(one, writable=False)
        await made.check_at_rest()

    run(case, tmp_path, nvme=16 * MIB)


def test_any_number_of_small_files_may_be_written_at_once(tmp_path: Path) -> None:
    """Room is set aside for what they may become; that must not refuse what they are."""

    async def case(made: World) -> None:
        held = [await made.create(b"%d" % number, b"x") for number in range(200)]
        made.check()
        for one in held:
            await made.close(one, writable=True)
        await made.check_at_rest()

    run(case, tmp_path, ram=256 * MIB, nvme=512 * MIB)


def test_expected_large_size_does_not_refuse_small_files(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.expect(b"a", 12 * MIB)
        held = [await made.create(b"%d" % number, b"x") for number in range(8)]
        for one in held:
            await made.close(one, writable=True)

    run(case, tmp_path)


def test_rewriting_the_only_large_file_finds_its_own_room(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES * 10, made.fast)
        held = await made.objects.open(inode.ino, writable=True, truncate=True)
        made.write(held, BYTES * 10)
        await made.close(held, writable=True)
        await made.check_at_rest()

    run(case, tmp_path, nvme=0)


def test_writers_that_outgrow_their_room_cost_clean_copies_first(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        stored = await fill(made, made.fast, 12)
        for inode in stored[:4]:
            await made.demote(inode.ino)
        made.fast.reserved += 4 * MIB
        made.room.make_room(made.fast)
        made.fast.reserved -= 4 * MIB
        assert len(names(made)) == 12
        await made.check_at_rest()

    run(case, tmp_path)


# Dropping


def test_a_dropped_file_loses_all_its_names_and_attributes(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES)
        made.attributes.set_xattr(inode.ino, b"user.a", b"1")
        folder = made.tree.make(ROOT_INO, b"folder", 0o40755, 0, 0)
        made.tree.link(inode.ino, folder.ino, b"b")
        made.ledger.removals.drop(made.find(b"a"), "evicted")
        assert {(parent, name) for parent, name, _ in made.gone} == {
            (ROOT_INO, b"a"),
            (folder.ino, b"b"),
        }
        with pytest.raises(NotFoundError):
            made.find(b"b", folder.ino)
        assert made.catalog.xattr_names(inode.ino) == []
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_reader_from_before_the_census_is_counted_by_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def case(made: World) -> None:
        ram, disk = (await fill(made, made.fast, 1))[0], (await fill(made, made.disk, 1, b"y"))[0]
        made.restart()
        held = [await made.objects.open(i.ino, writable=False) for i in (ram, disk)]
        await made.census()
        made.check()
        for one in held:
            await made.close(one, writable=False)
        await made.check_at_rest()

    with caplog.at_level(logging.DEBUG):
        run(case, tmp_path)


def test_unlinked_between_open_and_census_leaves_no_key(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = (await fill(made, made.fast, 1))[0]
        made.restart()
        await made.read(inode.ino)
        made.tree.unlink(ROOT_INO, b"x0")
        await made.census()
        assert made.dispatcher.write_back.start() == (0, 0)
        await made.check_at_rest()

    run(case, tmp_path)


# Inodes that the kernel has forgotten


@pytest.mark.parametrize("damaged", [False, True])
def test_forgotten_inodes_are_removed_in_one_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, damaged: bool
) -> None:
    """A record that makes no sense keeps none of them."""

    async def case(made: World) -> None:
        inos = [(await made.store(b"%d" % number, BYTES)).ino for number in range(3)]
        bad = inos.pop(1) if damaged else 0
        for entry in made.catalog.entries_after(ROOT_INO, 0, 3):
            made.tree.unlink(ROOT_INO, entry.name)
        if bad:
            key = keys.INODES + keys.number_key(bad)
            made.catalog.commit([(key, b"nonsense")], sync=False)
        made.ledger.removals.forgotten(inos[0])
        made.ledger.removals.forgotten(1)  # it has a name
        assert set(inos) <= made.ledger.orphans.rooms.keys(), "more may follow"
        for ino in (bad, *inos[1:]):
            made.ledger.removals.forgotten(ino)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.watch.forgotten)
            while made.ledger.orphans.rooms.keys() & inos:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert list(made.ledger.orphans.rooms) == ([bad] if bad else [])
        assert caplog.text.count("is not removed yet") == damaged
        assert not any(made.catalog.inode(ino) for ino in inos)

    run(case, tmp_path)


def test_many_that_the_kernel_has_forgotten_go_at_once(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        stored = await fill(made, made.fast, FORGOTTEN_AT_ONCE)
        for number, inode in enumerate(stored):
            made.tree.unlink(ROOT_INO, b"x%d" % number)
            assert len(made.ledger.orphans.rooms) == number + 1
            made.ledger.removals.forgotten(inode.ino)
        assert not made.ledger.orphans.rooms
        await made.check_at_rest()

    run(case, tmp_path)


def test_file_that_no_layout_knows_is_dropped_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two such files may have one key: an earlier kvfs made weaker keys of names."""

    async def case(made: World) -> None:
        first = await made.store(b"one/k13", BYTES, made.ram)
        second = await made.store(b"two/k12", BYTES, made.ram)
        assert first.key == second.key
        assert made.ledger.removals.drop(first, "asked") == [first]
        assert made.catalog.lookup(made.at(b"two").ino, b"k12") is not None
        assert made.catalog.lookup(made.at(b"one").ino, b"k13") is None

    monkeypatch.setattr("kvfs.layouts.key_of", lambda *_: 7)
    run(case, tmp_path)


# Guests: copies of other nodes' objects


def test_guests_go_before_older_objects(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.ledger.namespaces.default
        files = await fill(made, made.fast, 6)
        for inode in files[2:5]:
            space.add_guest(inode.ino, made.fast.name)
        for _ in range(2):  # the open that fetched it, and one more
            await made.read(files[2].ino)
        await made.read(files[4].ino)

        def go() -> list[bytes]:
            before = set(names(made))
            assert made.room.victims.evict(victims.ram_only, made.fast, "lose")
            return sorted(before - set(names(made)))

        assert go() == [b"x3"]
        assert go() == [b"x4"], "one use is that of the fetch"
        assert go() == [b"x0"], "x2 is like the others"
        assert space.guests is not None
        assert not list(space.guests.of(None))

    run(case, tmp_path)


def test_what_if_sees_the_first_open_of_a_guest_as_it_is_counted(tmp_path: Path) -> None:
    """An open that fetched the copy is no hit; one of a copy that came ahead is a hit."""

    async def case(made: World) -> None:
        space, ledger = made.ledger.namespaces.default, made.ledger
        fetched, ahead = await fill(made, made.fast, 2)
        for inode in (fetched, ahead):
            ledger.namespaces.written(inode, 0, None)
            space.would_be.forget(key_of(inode))
            space.add_guest(inode.ino, made.fast.name)
        ledger.namespaces.read(fetched, ledger.tiers.nodes)
        ledger.namespaces.read(ahead, made.fast, times=3, seen=2)
        ledger.namespaces.show_opens()
        space.accesses.count()
        assert space.would_be.accesses == 4
        assert space.would_be.hit_ratios()[1.0] == 0.75
        ghost = space.would_be.ghosts[1.0]
        assert list(ghost.guests) == [key_of(fetched)], "the other one was opened again"

    run(case, tmp_path)


def test_guest_in_use_stays(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.ledger.namespaces.default
        files = await fill(made, made.fast, 3)
        space.add_guest(files[2].ino, made.fast.name)
        held = await made.objects.open(files[2].ino, writable=False)
        assert made.room.victims.evict(victims.ram_only, made.fast, "lose")
        assert sorted(names(made)) == [b"x1", b"x2"]
        await made.close(held, writable=False)

    run(case, tmp_path)


def test_an_object_is_dropped_once(tmp_path: Path) -> None:
    """A listing has read the record of two of its names before it drops the first."""

    async def case(made: World) -> None:
        (inode,) = await fill(made, made.fast, 1)
        assert made.ledger.removals.drop(inode, "expired") == [inode]
        assert made.ledger.removals.drop(inode, "expired") == []
        made.check_accounts()

    run(case, tmp_path)


def test_drop_takes_no_name_of_another_object(tmp_path: Path) -> None:
    """A record that came back after its object had gone has a link that another object has now."""

    async def case(made: World) -> None:
        gone, other = await fill(made, made.fast, 2)
        with made.catalog.batch() as batch:
            made.tree.remove_name(ROOT_INO, made.tree.expect(ROOT_INO, b"x0")[0], gone, batch)
        with made.catalog.batch() as batch:
            gone.links = other.links
            batch.put(gone)
        made.ledger.orphans.leave(gone.ino)
        made.ledger.accounts.enter(gone)
        made.ledger.removals.drop(gone, "lost")
        assert names(made) == [b"x1"]
        assert await made.read(made.find(b"x1").ino) == BYTES
        made.check_accounts()

    run(case, tmp_path)
