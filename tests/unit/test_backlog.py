"""Uploads of objects that were sealed before the mount or their namespace took the bucket."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.catalog import keys
from kvfs.core.bucket.upload import backlog
from kvfs.core.bucket.upload.backlog import Backlog
from kvfs.core.ledger.dirty import CAUGHT_UP
from kvfs.daemon.storage import bind
from tests.s3.memory import MemoryStore
from tests.unit.test_uploader import BLOCK_TMP, A, B, again, contents, counters
from tests.unit.world import World, world


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    """A mount that has no bucket yet."""
    with world(tmp_path) as found:
        yield found
        trio.run(found.check_at_rest)


async def with_bucket(made: World, store: MemoryStore) -> Backlog:
    """It is mounted anew, with one."""
    if made.bucket is None:
        bind(made.catalog, None)
    made.bucket_store = store
    made.restart()
    await made.census()
    await made.ledger.dirty.load()
    return Backlog(made.dispatcher.transfers)


def test_older_objects_are_uploaded_in_the_order_of_their_seals(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        made.namespace("n", media="ram+nvme")
        for name in (b"c", b"a", b"b", b"n/a", BLOCK_TMP):
            await made.make_file(name, A)
        looking = await with_bucket(made, store)
        dirty = made.ledger.dirty
        assert not len(dirty)
        await looking.look()
        wanted = [made.find(name).ino for name in (b"c", b"a", b"b")]
        assert [ino for ino, _ in made.catalog.marks(keys.UNSTORED)] == sorted(wanted)
        taken = [dirty.take() for _ in wanted]
        assert taken == wanted
        assert dirty.oldest_ns == again(made, wanted[0]).backing_mtime_ns
        for ino in wanted:
            dirty.give_back(ino, 0)
        made.check()
        await made.upload_all()
        assert contents(store) == {"@0/c": A, "@0/a": A, "@0/b": A}
        await looking.look()
        assert not len(dirty), "what is there is not looked for"

    trio.run(case)


def test_backlog_is_searched_once_and_after_a_mount_without_bucket(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        await made.make_file(b"a", A)
        await run(await with_bucket(made, store))
        assert len(made.ledger.dirty) == 1
        assert made.catalog.fact(CAUGHT_UP) == "1"
        await made.upload_all()
        await with_bucket(made, store)
        assert made.catalog.fact(CAUGHT_UP) == "1"
        made.bucket_store = None
        made.restart()
        bind(made.catalog, None)
        await made.census()
        await made.make_file(b"b", B)
        await run(await with_bucket(made, store))
        await made.upload_all()
        assert contents(store) == {"@0/a": A, "@0/b": B}
        assert counters(made)["uploads"] == 1

    trio.run(case)


async def run(looking: Backlog) -> None:
    """As the dispatcher does it, until all is found."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(looking.run)
        with trio.fail_after(60):
            while not looking.catalog.fact(CAUGHT_UP):
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


def test_a_namespace_that_comes_to_take_it(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        made.namespace("n", media="ram+nvme")
        await made.make_file(b"n/a", A)
        looking = await with_bucket(made, store)
        await run(looking)
        assert not len(made.ledger.dirty)
        made.tell("n", media="ram+nvme+s3")
        assert not made.catalog.fact(CAUGHT_UP)
        await run(looking)
        await made.upload_all()
        assert contents(store) == {"n@1/a": A}

    trio.run(case)


def test_a_namespace_that_ceases_to_take_it_uploads_nothing_more(
    made: World, store: MemoryStore
) -> None:
    """An object in the bucket stays there until its name goes."""

    async def case() -> None:
        await with_bucket(made, store)
        made.namespace("n", media="ram+nvme+s3")
        await made.make_file(b"n/a", A)
        await made.upload_all()
        await made.make_file(b"n/b", B)
        made.tell("n", media="ram+nvme")
        made.attributes.change(made.at(b"n/a").ino, mode=0o600)
        await made.make_file(b"n/c", B)
        assert list(made.ledger.dirty) == [made.at(b"n/b").ino]
        await made.upload_all()
        assert contents(store) == {"n@1/a": A}
        assert not len(made.ledger.dirty)
        made.ledger.removals.evict(again(made, made.at(b"n/a").ino))
        assert await made.read(made.at(b"n/a").ino) == A
        made.tree.unlink(made.at(b"n").ino, b"a")
        await made.upload_all()
        assert contents(store) == {}

    trio.run(case)


def test_no_more_become_dirty_than_keep_the_uploads_busy(
    made: World, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "STEP", 2)

    async def case() -> None:
        for number in range(40):
            await made.make_file(b"%d" % number, A)
        looking = await with_bucket(made, store)
        dirty, bucket = made.ledger.dirty, made.bucket
        assert bucket is not None
        bucket.max_dirty_bytes = 8 * len(A)
        most = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(looking.look)
            with trio.fail_after(60):
                while len(contents(store)) < 40:
                    await trio.testing.wait_all_tasks_blocked()
                    most = max(most, len(dirty))
                    assert not dirty.full
                    for ino in list(dirty):
                        await made.upload(ino)
        assert 2 < most <= 4

    trio.run(case)


def test_a_death_begins_it_anew(
    made: World, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "STEP", 2)

    async def case() -> None:
        for number in range(10):
            await made.make_file(b"%d" % number, A)
        looking = await with_bucket(made, store)
        with trio.CancelScope() as scope:

            async def die() -> None:
                scope.cancel()
                await trio.lowlevel.checkpoint()

            monkeypatch.setattr(looking, "_wait_for_room", die)
            await looking.look()
        assert 0 < len(made.ledger.dirty) < 10
        made.restart(crash=True)
        await made.census()
        await made.ledger.dirty.load()
        await Backlog(made.dispatcher.transfers).look()
        assert len(made.ledger.dirty) == 10
        await made.upload_all()
        assert len(contents(store)) == 10

    trio.run(case)
