"""An operation that fails halfway leaves nothing: no room, no handle, no half of a change."""

import random
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvfs.catalog import ROOT_INO, Inode
from kvfs.errors import CatalogError, KvfsError, NotFoundError
from tests.s3.memory import MemoryStore
from tests.unit.world import MIB, World, world

BYTES = random.Random(1).randbytes(300_000)
Case = Callable[[], Awaitable[None]]


def run(case: Case) -> None:
    trio.run(case, clock=MockClock(autojump_threshold=0.002))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, passthrough=True) as one:
        yield one


def refuse(*_: object, **__: object) -> None:
    raise CatalogError("its disk takes no writes")


class Once:
    """Does what it stands for, but the call of that number, which raises."""

    def __init__(self, do: Callable[..., object], number: int) -> None:
        self.do = do
        self.number = number
        self.calls = 0

    def __call__(self, *given: object, **named: object) -> object:
        self.calls += 1
        if self.calls == self.number:
            raise CatalogError("its disk takes no writes")
        return self.do(*given, **named)


# Room


def test_demotion_of_many_returns_the_room_of_the_first_when_that_of_a_later_fails(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        inodes = [await made.store(b"%d" % number, BYTES, made.fast) for number in range(3)]
        monkeypatch.setattr(made.room, "reserve", Once(made.room.reserve, 2))
        with pytest.raises(CatalogError):
            await made.dispatcher.demotion.move(inodes)
        assert made.disk.reserved == 0
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("number", [1, 2])
def test_create_that_fails_to_note_its_size_keeps_no_room(
    made: World, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def case() -> None:
        expect = Once(made.placement.expect, number)
        monkeypatch.setattr(made.placement, "expect", expect)
        try:
            held = await made.create(b"a", BYTES)
        except CatalogError:
            pass
        else:
            await made.close(held, writable=True)
        assert [tier.reserved for tier in made.tiers] == [0, 0]
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("number", [1, 2])
def test_truncating_open_that_fails_to_note_its_size_keeps_no_room(
    made: World, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        monkeypatch.setattr(made.placement, "expect", Once(made.placement.expect, number))
        try:
            held = await made.objects.open(inode.ino, writable=True, truncate=True)
        except CatalogError:
            pass
        else:
            await made.close(held, writable=True)
        assert [tier.reserved for tier in made.tiers] == [0, 0]
        await made.check_at_rest()

    run(case)


def test_room_is_found_though_an_orphan_has_no_record(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", BYTES, made.fast)
        made.tree.unlink(ROOT_INO, b"a")
        assert inode.ino in made.ledger.orphans.rooms
        with made.catalog.batch() as batch:  # as damage does it
            batch.delete(inode)
            batch.mark_finished(inode.ino)
        wanted = made.fast.capacity - made.room.headroom
        assert made.room.reserve(made.fast, wanted)
        assert not made.ledger.orphans.rooms
        assert made.fast.reserved == wanted
        made.fast.reserved = 0

    run(case)


# Handles


def test_close_of_a_too_large_file_releases_it_though_its_drop_fails(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        made.expect(b"a", MIB)
        held = await made.create(b"a", BYTES)
        space = made.ledger.namespaces.of(held.inode)
        monkeypatch.setattr(made.placement, "too_large", lambda *_: KvfsError("it takes too much"))
        with monkeypatch.context() as patch:
            patch.setattr(made.ledger.removals, "drop", refuse)
            with pytest.raises(KvfsError, match="too much"):
                await made.close(held, writable=True)
            assert (held.writers, held.readers) == (0, 0)
            assert held.inode.ino not in made.ledger.table.open
            assert not made.backings.taken
            with pytest.raises(CatalogError):
                await made.ledger.retries.run()
            assert (held.writers, len(made.ledger.retries.waiting)) == (0, 1)
        await made.ledger.retries.run()
        assert not made.ledger.retries.waiting
        with pytest.raises(NotFoundError):
            made.find(b"a")
        assert space.objects == 0
        await made.check_at_rest()

    run(case)


# Consequences of a commit


def test_consequences_of_a_commit_all_happen_though_one_fails(made: World) -> None:
    done: list[int] = []

    def fail() -> None:
        raise CatalogError("a defect")

    batch = made.catalog.batch()
    batch.set_fact("a", "b")
    batch.then(partial(done.append, 1))
    batch.then(fail)
    batch.then(partial(done.append, 2))
    with pytest.raises(CatalogError, match="a defect"):
        batch.__exit__(None, None, None)
    assert done == [1, 2]
    assert made.catalog.fact("a") == "b"


def test_seal_of_an_uploaded_object_reads_nothing_after_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path, store=MemoryStore()) as stored:

        async def case() -> None:
            inode = await stored.store(b"a", BYTES, stored.fast)
            await stored.upload_all()
            before = stored.ledger.dirty.stored(inode.ino)
            assert before is not None
            held = await stored.objects.open(inode.ino, writable=True)
            stored.write(held, b"new")
            commit, committed = stored.catalog.commit, list[bool]()

            def once(*given: object, **named: object) -> None:
                commit(*given, **named)  # type: ignore[arg-type]
                committed.append(True)

            with monkeypatch.context() as patch:
                patch.setattr(stored.catalog, "commit", once)
                patch.setattr(stored.ledger.dirty, "stored", _guarded(stored, committed))
                stored.objects.sealing.flush(held, writable=True)
            assert committed
            await stored.objects.sealing.release(held, writable=True)
            assert stored.ledger.dirty.superseded.claimed(inode.ino)
            await stored.check_at_rest()

        run(case)


def _guarded(stored: World, committed: list[bool]) -> Callable[[int], object]:
    real = stored.ledger.dirty.stored

    def guarded(ino: int) -> object:
        assert not committed, "it reads the catalog after the commit"
        return real(ino)

    return guarded


# Records of open objects


CHANGES: dict[str, Callable[[World, Inode], object]] = {
    "chmod": lambda made, inode: made.attributes.change(inode.ino, mode=0o600),
    "rename": lambda made, _: made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0),
    "unlink": lambda made, _: made.tree.unlink(ROOT_INO, b"a"),
    "drop": lambda made, inode: made.ledger.removals.drop(inode, "evicted"),
    "not in the bucket": lambda made, inode: made.ledger.records.record_not_in_bucket(inode),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_read_that_fails_within_a_change_leaves_the_record_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Let the catalog answer nothing any more, so that no code can read the old record."""

    async def case(made: World) -> None:
        inode = await made.make_file(b"a", BYTES)
        await made.upload_all()
        held = await made.objects.open(inode.ino, writable=False)
        before = held.inode.copy()
        with monkeypatch.context() as patch:
            patch.setattr(made.catalog, "mark", refuse)
            with pytest.raises(CatalogError):
                CHANGES[change](made, held.inode)
        assert held.inode == before
        await made.close(held, writable=False)

    with world(tmp_path, store=MemoryStore()) as made:
        trio.run(case, made)
