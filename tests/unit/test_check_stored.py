"""Damage to what the catalog says of a bucket, made by hand: found, mended and gone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs.catalog import keys
from tests.s3.faulty import FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_check import kinds, look
from tests.unit.test_hydration import spilled
from tests.unit.test_uploader import A, B, again, contents
from tests.unit.world import World, world


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def made(tmp_path: Path, store: MemoryStore) -> Iterator[World]:
    with world(tmp_path, store=FaultyStore(store)) as found:
        trio.run(found.ledger.dirty.load)
        yield found
        trio.run(found.check_at_rest)


def write(made: World, kind: bytes, number: int, value: bytes) -> None:
    made.catalog.commit([(kind + keys.number_key(number), value)], sync=False)


def erase(made: World, kind: bytes, number: int) -> None:
    made.catalog.commit([(kind + keys.number_key(number), None)], sync=False)


async def mended(made: World) -> list[str]:
    """Repair, and return the kinds of the findings, which are gone afterwards."""
    found = kinds((await look(made, repair=True))[0])
    assert kinds((await look(made))[0]) == []
    return found


def test_object_only_in_the_bucket_is_no_finding(made: World) -> None:
    async def case() -> None:
        await spilled(made)
        await made.store(b"b", B, made.ram)
        assert kinds((await look(made, hashes=True))[0]) == []

    trio.run(case)


def test_object_without_place_is_dropped_unless_it_has_a_copy(made: World) -> None:
    async def case() -> None:
        gone = await spilled(made)
        here = await made.store(b"b", B, made.ram)
        await made.upload_all()
        for ino in (gone.ino, here.ino):
            erase(made, keys.STORED, ino)
        assert await mended(made) == ["stored", "stored"]
        assert made.catalog.inode(gone.ino) is None
        assert not again(made, here.ino).in_bucket
        assert await made.read(here.ino) == B
        made.check()

    trio.run(case)


@pytest.mark.parametrize("kind", [keys.STORED, keys.UNSTORED, keys.CONTESTED, keys.DELETED])
def test_marks_that_make_no_sense_go(made: World, kind: bytes) -> None:
    async def case() -> None:
        write(made, kind, 999_999, b"\xff")
        made.catalog.commit([(kind + b"x", b"x")], sync=False)
        assert await mended(made) == ["bucket", "bucket"]

    trio.run(case)


def test_bucket_object_without_inode_is_deleted(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        stored = made.catalog.record(keys.STORED, keys.number_key(inode.ino))
        assert stored is not None
        made.tree.unlink(1, b"a")
        made.ledger.removals.purge(inode.ino)
        await made.upload_all()
        store.put("p/@0/a", A, {}, once=True)
        write(made, keys.STORED, 999_999, stored)
        assert await mended(made) == ["bucket"]
        await made.upload_all()
        assert contents(store) == {}

    trio.run(case)


def test_the_last_copy_here_may_go_if_the_bucket_has_it(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        Path(made.fast.path(inode.ino, 1)).write_bytes(b"short")  # noqa: ASYNC240
        assert await mended(made) == ["damaged"]
        assert await made.read(inode.ino) == A
        await made.dispatcher.trash.empty()

    trio.run(case)
