"""Objects that commands drop: each is counted once, with its reason, and one line tells them."""

import logging
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from kvfs.core.capacity.victims import ram_only
from kvfs.units import human
from tests.unit.world import MIB, World, world

BYTES = b"k" * 10_000
SIZE = len(BYTES)


def run(case: Callable[[World], Awaitable[None]], tmp_path: Path) -> None:
    with world(tmp_path) as made:
        trio.run(case, made)


def said_of(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    return [told for one in caplog.records if what in (told := one.getMessage())]


def dropped(made: World) -> dict[str, int]:
    """The counters of dropped objects; their sum is `dropped`."""
    found = {
        name.removeprefix("dropped_"): count
        for name, count in made.ledger.counters.items()
        if name.startswith("dropped_") and count
    }
    assert sum(found.values()) == made.ledger.counters["dropped"]
    return found


async def a_tree(made: World) -> None:
    """A namespace with ten objects, one of them with two names, and two other inodes."""
    made.namespace("a")
    made.mkdir(b"a/d")
    for number in range(5):
        await made.make_file(b"a/%d" % number, BYTES)
        await made.make_file(b"a/d/%d" % number, BYTES)
    made.tree.link(made.at(b"a/0").ino, made.at(b"a/d").ino, b"again")
    made.tree.make(made.at(b"a").ino, b"link", stat.S_IFLNK | 0o777, 0, 0, target=b"nowhere")


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("asked", "namespace a was dropped: kvfs removed its 10 objects of {}, and nothing"),
        ("version", "namespace a has a new version: kvfs removed 10 objects of {} of the earlier"),
    ],
)
def test_objects_that_go_with_their_namespace_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str, said: str, *, begun: bool
) -> None:
    """begun: the daemon died before the first of them went."""
    caplog.set_level(logging.INFO)
    with world(tmp_path) as made:

        async def go() -> None:
            await a_tree(made)
            held = await made.objects.open(made.at(b"a/3").ino, writable=False)
            if reason == "asked":
                made.drop("a")
            else:
                made.tell("a", version="2")
            assert dropped(made) == {}
            if begun:
                return
            await clear()
            await made.close(held, writable=False)
            made.ledger.removals.purge(held.inode.ino)
            assert dropped(made) == {reason: 10}

        async def clear() -> None:
            await made.census()
            await made.walk()
            assert dropped(made) == {reason: 10}
            (line,) = said_of(caplog, "namespace a")
            assert line.startswith(said.format(human(10 * SIZE)))

        trio.run(go)
        if begun:
            made.restart(crash=True)
            trio.run(clear)


def test_what_goes_for_room_in_a_dropped_namespace_goes_for_its_drop(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await a_tree(made)
        space = made.ledger.namespaces.of(made.at(b"a"))
        made.drop("a")
        assert made.room.victims.evict(ram_only, made.fast, "lose")
        assert space.drops is not None
        assert (dropped(made), space.drops.objects) == ({"asked": 1}, 1)
        await made.walk()
        assert dropped(made) == {"asked": 10}

    run(case, tmp_path)


def test_counters_go_on_in_a_new_version(tmp_path: Path) -> None:
    """Counters begin at 0 with each daemon, and never go back."""

    async def case(made: World) -> None:
        await a_tree(made)
        space = made.ledger.namespaces.of(made.at(b"a"))
        for _ in range(3):
            await made.read(made.at(b"a/0").ino)
        space.opens_timed = 3
        before = dict(space.counters)
        assert (before["written"], before["read_ram"] + before["read_nvme"]) == (10, 3)
        made.tell("a", version="2")
        after = made.ledger.namespaces.of(made.at(b"a"))
        assert (after.counters, after.opens_timed) == (before, 3)
        await made.walk()
        await made.make_file(b"a/new", BYTES)
        assert after.counters == before | {"written": 11, "written_bytes": 11 * SIZE} | {
            "dropped_version": 10
        }

    run(case, tmp_path)


def test_objects_beyond_a_quota_that_kvfs_kept_before_go_for_the_quota(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def case(made: World) -> None:
        made.namespace("a", eviction="never")
        for number in range(8):
            await made.make_file(b"a/%d" % number, BYTES)
        space = made.ledger.namespaces.of(made.at(b"a"))
        made.tell("a", quota_objects="5")
        await made.quota.bring_within(space)
        assert dropped(made) == {}
        made.tell("a", eviction="lru")
        await made.quota.bring_within(space)
        assert dropped(made) == {"quota": 3}
        assert "hard quota was set to 5 objects, and kvfs dropped 3 objects" in caplog.text

    run(case, tmp_path)


def test_objects_that_a_lower_quota_drops_have_a_reason_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Writers drop some of them, too. Later drops in the quota are for the room of a write."""
    caplog.set_level(logging.INFO)

    async def case(made: World) -> None:
        made.namespace("a", eviction="lru", quota_objects="20")
        for rank in range(2):  # a group goes together
            await made.make_file(b"a/m@3@%d@ab@half.data" % rank, BYTES)
        for number in range(8):
            await made.make_file(b"a/%d" % number, BYTES)
        space = made.ledger.namespaces.of(made.at(b"a"))
        made.tell("a", quota_objects="7")
        made.quota.trim(space)
        assert dropped(made) == {"quota": 3}
        await made.quota.bring_within(space)
        made.tell("a", quota_objects="2")
        await made.quota.bring_within(space)
        await made.make_file(b"a/last", BYTES)
        assert dropped(made) == {"quota": 8, "evicted": 1}
        await made.quota.bring_within(space)
        made.tell("a", quota_objects="9")
        await made.quota.bring_within(space)
        assert said_of(caplog, "hard quota") == [
            f"namespace a: its hard quota was set to {quota}, and kvfs dropped {objects} objects "
            f"of {human(objects * SIZE)} for that"
            for quota, objects in (("7 objects", 3), ("2 objects", 5))
        ]
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_new_quota_of_a_directory_drops_what_is_beyond_it(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.mkdir(b"a")
        for number in range(5):
            await made.make_file(b"a/%d" % number, BYTES)
        space = made.tell("a", quota_objects="2")
        await made.quota.bring_within(space)  # its objects are not accounted to it yet
        await made.walk()
        await made.quota.bring_within(space)
        assert dropped(made) == {"quota": 3}
        await made.make_file(b"a/5", BYTES)
        assert dropped(made) == {"quota": 3, "evicted": 1}

    run(case, tmp_path)


@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_objects_that_a_smaller_tier_drops_have_a_reason_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tier: str
) -> None:
    """One line tells them, also those that a writer drops during the census."""
    caplog.set_level(logging.INFO)
    with world(tmp_path, **{"ram": 0, "nvme": 0, tier: 8 * MIB}) as made:

        async def fill() -> None:
            for number in range(6):
                await made.make_file(b"%d" % number, bytes(MIB))
            made.ledger.accounts.leave_estimate()

        trio.run(fill)
        made.sizes = (3 * MIB, 0) if tier == "ram" else (0, 3 * MIB)
        made.restart()

        async def go() -> None:
            if tier == "nvme":  # its estimate says how much it has
                for inode in made.catalog.inodes_after(0, 5):
                    made.ledger.accounts.count_earlier(inode)
                made.room.make_room(made.disk)
                assert dropped(made).keys() == {"shrunk"}
            await made.census()
            made.room.shrink()
            (line,) = said_of(caplog, "began with more")
            (count,) = dropped(made).items()
            assert count[0] == "shrunk"
            assert line == (
                f"{tier} began with more than its size of 3.0 MiB, and kvfs dropped {count[1]} "
                f"objects of {human(count[1] * MIB)} for that"
            )
            made.room.shrink()
            assert len(said_of(caplog, "began with more")) == 1
            await made.make_file(b"next", bytes(2 * MIB))
            assert dropped(made).keys() == {"shrunk", "evicted"}
            await made.check_at_rest()

        trio.run(go)
