"""Warming: objects come to the fastest tier on request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.jobs import warm
from kvfs.core.moves import transfers
from kvfs.errors import ConfigError, NoSpaceError
from kvfs.s3.errors import NoObjectError
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_prefetch import here, run, spilled
from tests.unit.test_uploader import A, again, counters, faults
from tests.unit.world import MIB, World, world


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, store=FaultyStore(MemoryStore())) as found:
        trio.run(found.ledger.dirty.load)
        yield found
        trio.run(found.check_at_rest)


async def tree(made: World) -> list[Inode]:
    """Spilled files in several directories."""
    for path in (b"d", b"d/e", b"d/e/f", b"other"):
        made.mkdir(path)
    names = [b"%s/%d" % (path, n) for path in (b"d", b"d/e", b"d/e/f") for n in range(50)]
    return await spilled(made, names)


async def warmed(made: World, *inos: int) -> dict[str, Any]:
    """Order it and wait for its end."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.dispatcher.warm.run)
        number = made.dispatcher.warm.start(inos)
        found = None
        while found is None or not found["over"]:
            await wait_all_tasks_blocked()
            found = made.dispatcher.warm.look(number)
        nursery.cancel_scope.cancel()
    return found


def test_a_tree_comes_whole(made: World) -> None:
    async def case() -> None:
        inodes = await tree(made)
        found = await warmed(made, made.at(b"d").ino)
        assert here(made, inodes) == list(range(150))
        size = sum(inode.size for inode in inodes)
        assert (found["files"], found["done"], found["failed"]) == (150, 150, 0)
        assert (found["bytes"], found["done_bytes"]) == (size, size)
        assert counters(made)["warmed"] == counters(made)["downloads"] == 150
        made.check()
        await warmed(made, made.at(b"d").ino)
        assert counters(made)["downloads"] == 150

    run(case)


def test_files_that_find_no_room_in_ram_are_counted(made: World) -> None:
    async def case() -> None:
        large = made.fast.capacity // 4
        inodes = [
            await made.store(b"d/%d" % number, bytes(large), made.disk) for number in range(5)
        ]
        found = await warmed(made, *[inode.ino for inode in inodes])
        in_ram = [made.fast in made.ledger.tiers.holders(again(made, one.ino)) for one in inodes]
        assert (found["done"], found["failed"]) == (5, 0)
        assert (found["in_ram"], found["no_room"]) == (sum(in_ram), 5 - sum(in_ram)) == (3, 2)
        made.tell(".", media="nvme")
        other = await made.store(b"e/other", b"x", made.disk)
        found = await warmed(made, other.ino)
        assert (found["done"], found["in_ram"], found["no_room"]) == (1, 0, 0)

    run(case)


def test_object_compressed_on_nvme_is_warmed_to_ram(made: World) -> None:
    async def case() -> None:
        made.tell(".", compression="nvme")
        content = b"1" * transfers.PACKED_LEAST
        inode = await made.store(b"a", content, made.ram)
        await made.demote(inode.ino)
        made.ledger.records.remove_copy(again(made, inode.ino), made.fast)
        assert again(made, inode.ino).packed is not None
        found = await warmed(made, inode.ino)
        assert found["done"] == 1
        assert made.ledger.tiers.holders(again(made, inode.ino)) == [made.ram, made.nvme]
        assert await made.read(inode.ino) == content
        made.check()

    run(case)


def test_object_only_on_nvme_is_warmed_to_ram(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.nvme)
        found = await warmed(made, inode.ino)
        assert made.ledger.tiers.holders(again(made, inode.ino)) == [made.ram, made.nvme]
        assert found["done"] == 1

    run(case)


def test_without_a_bucket_it_is_from_nvme_to_ram(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", A, made.nvme)
        found = await warmed(made, ROOT_INO)
        assert made.ledger.tiers.holders(again(made, inode.ino)) == [made.ram, made.nvme]
        assert found["done"] == 1

    with world(tmp_path) as made:
        run(lambda: case(made))


def test_objects_that_do_not_fit_are_counted_with_their_reason(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inodes = await spilled(made, [b"%08d" % n for n in range(12)], MIB // 16)
        found = await warmed(made, ROOT_INO)
        assert found["done"] == len(here(made, inodes))
        assert 4 <= found["done"] < 12
        assert found["why"] == {
            "no tier has room that is free, or was not used lately": 12 - found["done"]
        }
        made.check()

    with world(tmp_path, ram=4 * MIB, nvme=0, store=FaultyStore(MemoryStore())) as made:
        run(lambda: case(made))


def test_cancel_ends_fetches_that_are_not_begun(made: World) -> None:
    async def case() -> None:
        assert made.remote is not None
        inodes = await tree(made)
        go = trio.Event()
        made.remote.before = go.wait
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.warm.run)
            number = made.dispatcher.warm.start([made.at(b"d").ino])
            await wait_all_tasks_blocked()
            made.dispatcher.warm.cancel(number)
            go.set()
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        found = made.dispatcher.warm.look(number)
        assert found is not None
        assert found["over"]
        assert found["done"] == len(here(made, inodes)) == 2
        assert found["why"] == {"cancelled": 148}

    run(case)


def test_opens_go_before_it(made: World) -> None:
    async def case() -> None:
        assert made.remote is not None
        inodes = await tree(made)
        order: list[int] = []
        gate = trio.Semaphore(0)
        made.remote.before = gate.acquire
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.warm.run)
            made.dispatcher.warm.start([made.at(b"d").ino])
            await wait_all_tasks_blocked()
            for inode in inodes[-4:]:
                nursery.start_soon(made.read, inode.ino)
            await wait_all_tasks_blocked()
            while len(order) < 8:
                gate.release()
                await wait_all_tasks_blocked()
                order += [n for n in here(made, inodes) if n not in order]
            assert set(order) >= {146, 147, 148, 149}
            for _ in inodes:
                gate.release()
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    run(case)


@pytest.mark.parametrize("trouble", ["down", "unlinked", "written", "gone"])
def test_object_that_cannot_be_warmed_has_a_reason(made: World, trouble: str) -> None:
    async def case() -> None:
        assert made.bucket is not None
        (inode,) = await spilled(made, [b"a"])
        held = None
        if trouble == "down":
            made.bucket.health.unanswered(0.0, "cut off")
            why = "is down"
        elif trouble == "unlinked":
            made.tree.unlink(ROOT_INO, b"a")
            why = ""
        elif trouble == "written":
            held = await made.objects.open(inode.ino, writable=True, truncate=True)
            why = "it is being written"
        else:
            faults(made, Fault("get", 0, NoObjectError("no such key")))
            why = "another node has unlinked"
        found = await warmed(made, inode.ino)
        assert found["done"] == 0
        assert found["failed"] == bool(why)
        assert all(why in reason for reason in found["why"])
        if held is not None:
            await made.close(held, writable=True)

    run(case)


def test_warm_attribute_starts_the_job_and_shows_the_rest(made: World) -> None:
    async def case() -> None:
        inodes = await tree(made)
        life, d = made.lifecycle, made.at(b"d")
        name = b"user.kvfs.warm"
        for wrong in (b"2", b"", b"on"):
            with pytest.raises(ConfigError, match="expected 1"):
                life.set_attribute(d, name, wrong)
        assert life.attribute(d, name) == b"0"
        life.set_attribute(d, name, b"1")
        life.set_attribute(d, name, b"1")
        said = [life.attribute(one, name) for one in (d, inodes[0], inodes[-1], made.at(b"other"))]
        assert said == [b"1", b"1", b"1", b"0"]
        life.set_attribute(d, name, b"0")
        assert life.attribute(d, name) == b"0"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.warm.run)
            await wait_all_tasks_blocked()
            assert here(made, inodes) == []
            life.set_attribute(inodes[3], name, b"1")
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert here(made, inodes) == [3]
        assert life.attribute(inodes[3], name) == b"0"
        assert life.attributes(d) == []

    run(case)


def test_orders_have_a_bound(made: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "JOBS_MOST", 2)
    monkeypatch.setattr(warm, "FILES_MOST", 100)

    async def case() -> None:
        await tree(made)
        numbers = [made.dispatcher.warm.start([made.at(b"d").ino]) for _ in range(2)]
        with pytest.raises(NoSpaceError, match="2 orders"):
            made.dispatcher.warm.start([ROOT_INO])
        made.dispatcher.warm.cancel_all()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.warm.run)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert all((made.dispatcher.warm.look(number) or {})["over"] for number in numbers)
        found = await warmed(made, made.at(b"d").ino)
        assert (found["files"], found["done"]) == (100, 100)
        assert found["why"] == {"only the first 100 files of one order are brought": 1}

    run(case)
