"""A copy on NVMe of an object that RAM has takes no room from objects that were used later."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.errors import NoSpaceError
from tests.unit.world import MIB, World, world

BYTES = os.urandom(MIB)
RAM, NVME = 15, 16  # objects that have room in each tier: a sixteenth of RAM stays free
Case = Callable[[World], Awaitable[None]]


def run(case: Case, tmp_path: Path, *, ram: int = 16 * MIB, nvme: int = NVME * MIB) -> None:
    with world(tmp_path, ram=ram, nvme=nvme) as made:
        trio.run(case, made, clock=MockClock(autojump_threshold=0.02))


async def rest(made: World, seconds: int = 5) -> None:
    """The background works until nothing is left to do, and for some seconds more."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.dispatcher.run)
        for _ in range(10 * seconds):
            await trio.sleep(0.1)
            await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def fill_ram(made: World, space: str = "a", number: int = RAM) -> None:
    for one in range(number):
        await made.store(b"%b/ram-%d" % (space.encode(), one), BYTES, made.fast)


async def fill_nvme(made: World, space: str = "a", number: int = NVME) -> None:
    for one in range(number):
        await made.store(b"%b/nvme-%d" % (space.encode(), one), BYTES, made.disk)


def names(made: World, space: str = "a") -> set[bytes]:
    directory = made.at(space.encode()).ino
    return {entry.name for entry in made.catalog.entries_after(directory, 0, 1 << 20)}


def doubled(made: World) -> int:
    return made.ledger.accounts.doubled_objects


def test_nothing_goes_for_copies_of_older_objects(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", eviction="lru")
        await fill_ram(made)
        await fill_nvme(made)
        await rest(made)
        assert len(names(made)) == RAM + NVME
        assert made.room.reclaimable >= made.fast.capacity // 4, "the oldest give their room"
        await made.store(b"a/new", BYTES, made.fast)
        assert b"ram-0" not in names(made)
        assert len(names(made)) == RAM + NVME
        await made.check_at_rest()

    run(case, tmp_path)


def test_older_objects_go_for_copies_and_no_more_than_are_wanted(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", eviction="lru")
        await fill_nvme(made, number=64)
        await fill_ram(made, number=60)
        await rest(made)
        assert doubled(made) == 16, "reclaimable is 25 %"
        assert names(made) == {b"ram-%d" % one for one in range(60)} | {
            b"nvme-%d" % one for one in range(16, 64)
        }
        await made.check_at_rest()

    run(case, tmp_path, ram=64 * MIB, nvme=64 * MIB)


def test_objects_that_found_no_room_are_copied_once_nvme_has_room(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", eviction="lru")
        await fill_ram(made)
        await fill_nvme(made)
        await rest(made)
        assert doubled(made) == 0
        for one in range(NVME):
            made.tree.unlink(made.at(b"a").ino, b"nvme-%d" % one)
        await rest(made)
        assert doubled(made) == 4
        for one in range(4):
            found = made.at(b"a/ram-%d" % one)
            assert made.ledger.tiers.holders(found) == made.tiers
        await made.check_at_rest()

    run(case, tmp_path)


def test_copies_of_what_stays_take_no_room_from_newer_objects(tmp_path: Path) -> None:
    """kvfs could not drop these objects instead, so they stay in RAM."""

    async def case(made: World) -> None:
        made.namespace("stays", eviction="never")
        made.namespace("a", eviction="lru")
        await fill_ram(made, "stays")
        await fill_nvme(made)
        await rest(made)
        assert doubled(made) == 0
        assert len(names(made)) == NVME
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_namespace_with_less_keeps_its_older_objects(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("less", eviction="lru")
        made.namespace("a", eviction="lru")
        await fill_ram(made, "less")
        await fill_nvme(made)
        await rest(made)
        assert (len(names(made)), len(names(made, "less"))) == (NVME, RAM)
        for one in range(4):
            await made.make_file(b"less/new-%d" % one, BYTES)
        assert len(names(made, "less")) > RAM, "it takes room of the one with more"
        await made.check_at_rest()

    run(case, tmp_path)


def test_what_stays_makes_room_for_promotions(tmp_path: Path) -> None:
    """A program opens objects of NVMe again and again: they come to RAM."""

    async def case(made: World) -> None:
        made.namespace("stays", eviction="never")
        made.namespace("a", eviction="lru")
        await fill_ram(made, "stays")
        await fill_nvme(made)
        last = made.at(b"a/nvme-%d" % (NVME - 1)).ino
        await made.promote(last)
        assert made.ledger.counters["promotions_skipped"] == 1
        await rest(made)
        assert len(names(made)) < NVME
        await made.promote(last)
        assert made.ledger.tiers.holders(made.at(b"a/nvme-%d" % (NVME - 1))) == made.tiers
        assert len(names(made, "stays")) == RAM
        await made.check_at_rest()

    run(case, tmp_path)


def test_what_stays_makes_room_for_objects_of_ram_only(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("stays", eviction="never")
        made.namespace("a", eviction="lru")
        made.namespace("memory", media="ram")
        await fill_ram(made, "stays")
        await fill_nvme(made)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.run)
            while True:  # the first creates are refused
                try:
                    await made.make_file(b"memory/file", BYTES)
                except NoSpaceError:
                    await trio.sleep(0.1)
                else:
                    break
            nursery.cancel_scope.cancel()
        assert names(made, "memory") == {b"file"}
        await made.check_at_rest()

    run(case, tmp_path)


@pytest.mark.parametrize("nvme", [32, 5])
def test_a_burst_leaves_the_newest_files(tmp_path: Path, nvme: int) -> None:
    """Its files begin on NVMe while RAM is full of earlier ones, which are copied only then."""

    async def case(made: World) -> None:
        made.namespace("a", eviction="lru")
        burst_over = trio.Event()
        made.movers.before = burst_over.wait
        written = 0

        async def write(number: int) -> None:
            nonlocal written
            for _ in range(number):
                await made.make_file(b"a/%03d.kv" % written, BYTES)
                written += 1

        made.learn(made.at(b"a"), b"0.kv", MIB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.run)
            await write(30)
            burst_over.set()
            for number in (0, 10, 30, 0):
                await write(number)
                for _ in range(30):
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        left, least = names(made), RAM + nvme - 5  # all room, without that of copies
        assert left >= {b"%03d.kv" % number for number in range(written - least, written)}
        # A movement that is under way keeps an older object or two on a small NVMe.
        strays = left - {b"%03d.kv" % number for number in range(written - len(left), written)}
        assert len(strays) <= (0 if nvme > RAM else 2)
        await made.check_at_rest()

    run(case, tmp_path, nvme=nvme * MIB)
