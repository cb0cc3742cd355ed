"""Creates wait for demotions that are under way, if these make room for them, and not for long."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.core.capacity.demoting import WAIT
from kvfs.errors import NoSpaceError, NotFoundError, QuotaError
from tests.unit.world import MIB, World, world

BYTES = os.urandom(MIB)
FILES = 15  # in each tier: RAM has room for no more, and NVMe for one more
STAYS = {"eviction": "never"}


def run(case: Callable[[World], Awaitable[None]], tmp_path: Path) -> None:
    with world(tmp_path, ram=16 * MIB, nvme=16 * MIB) as made:
        trio.run(case, made, clock=MockClock(autojump_threshold=0.1))


async def fill(made: World, space: bytes = b"a", *, demoted: bytes = b"a") -> int:
    """Fill RAM, and leave NVMe room for one object.

    Return the inode of the object in RAM that belongs to the namespace `demoted`.
    """
    first = await made.store(demoted + b"/first", BYTES, made.fast)
    for number in range(1, FILES):
        await made.store(b"%b/ram-%d" % (space, number), BYTES, made.fast)
    for number in range(FILES):
        await made.store(b"%b/nvme-%d" % (space, number), BYTES, made.disk)
    return first.ino


class Moving:
    """A demotion that has reserved its room. It goes on after `end`."""

    def __init__(self) -> None:
        self.end = trio.Event()
        self.fails = False

    async def wait(self) -> None:
        await self.end.wait()
        if self.fails:
            raise OSError("the disk is broken")


@asynccontextmanager
async def demoting(made: World, ino: int) -> AsyncIterator[Moving]:
    """Demote an object. The demotion ends with the block, or before."""
    moving = Moving()
    made.movers.before = moving.wait
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.demote, ino)
        await wait_all_tasks_blocked()
        assert (made.disk.reserved, made.room.demoting.bytes) == (MIB, MIB)
        try:
            yield moving
        finally:
            moving.end.set()


async def refused_after(made: World, path: bytes) -> float:
    """The seconds after which a create is refused."""
    before = trio.current_time()
    with pytest.raises(NoSpaceError):
        await made.make_file(path, BYTES)
    return trio.current_time() - before


@pytest.mark.parametrize("demoted", [b"a", b"less"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_create_gets_the_room_of_a_demotion_that_ends(
    tmp_path: Path, *, fails: bool, demoted: bytes
) -> None:
    async def case(made: World) -> None:
        made.namespace("a", **STAYS)
        made.namespace("less")
        async with (
            demoting(made, await fill(made, demoted=demoted)) as moving,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(made.make_file, b"a/more", BYTES)
            await trio.sleep(WAIT / 2)
            with pytest.raises(NotFoundError):
                made.at(b"a/more")
            ends = trio.current_time()
            moving.fails = fails
            moving.end.set()
        assert trio.current_time() == ends
        found = made.ledger.tiers.holders(made.at(b"a/more"))
        assert found == [made.disk if fails else made.fast]
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_new_version_waits_and_the_demotion_needs_no_lock_of_it(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", **STAYS)
        ino = await fill(made)
        again = made.at(b"a/nvme-1").ino
        async with demoting(made, ino) as moving, trio.open_nursery() as nursery:

            async def truncate() -> None:
                held = await made.objects.open(again, writable=True, truncate=True)
                await made.close(held, writable=True)

            nursery.start_soon(truncate)
            await trio.sleep(WAIT / 2)
            assert made.at(b"a/nvme-1").size == MIB
            moving.end.set()
        assert made.at(b"a/nvme-1").size == 0
        await made.check_at_rest()

    run(case, tmp_path)


def test_creates_that_waited_keep_the_quota(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", quota_objects=str(2 * FILES + 1), **STAYS)
        ino, refused = await fill(made), 0

        async def create(path: bytes) -> None:
            nonlocal refused
            try:
                await made.make_file(path, b"")
            except QuotaError:
                refused += 1

        async with demoting(made, ino) as moving, trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(create, b"a/more-%d" % number)
            await wait_all_tasks_blocked()
            moving.end.set()
        assert refused == 2

    run(case, tmp_path)


def test_nothing_under_way_is_no_wait(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", **STAYS)
        await fill(made)
        await made.store(b"a/last", BYTES, made.disk)
        assert await refused_after(made, b"a/more") == 0

    run(case, tmp_path)


def test_a_disk_that_is_down_is_no_wait(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", **STAYS)
        async with demoting(made, await fill(made)):
            for at in (1.0, 2.0, 3.0, 4.0):
                made.disk.health.probed(at, "EIO")
            assert made.disk.health.down
            assert await refused_after(made, b"a/more") == 0

    run(case, tmp_path)


def test_creates_share_one_bound_while_no_demotion_ends(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", **STAYS)
        async with demoting(made, await fill(made)):
            await trio.sleep(1)
            assert await refused_after(made, b"a/more") == pytest.approx(WAIT - 1)
            assert await refused_after(made, b"a/more") == 0

    run(case, tmp_path)


@pytest.mark.parametrize(
    ("settings", "writer", "demoted"),
    [
        ({"pin": "on"}, b"a", b"a"),  # the object stays in RAM as well
        (STAYS, b"slow", b"a"),  # the writer's namespace takes no room in RAM
    ],
)
def test_a_demotion_that_makes_no_room_is_no_wait(
    tmp_path: Path, settings: dict[str, str], writer: bytes, demoted: bytes
) -> None:
    async def case(made: World) -> None:
        made.namespace("a", **settings)
        made.namespace("less")
        made.namespace("slow", media="nvme")
        async with demoting(made, await fill(made, demoted=demoted)):
            assert await refused_after(made, writer + b"/more") == 0

    run(case, tmp_path)
