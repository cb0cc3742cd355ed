"""A bucket that lacks what the catalog says, or has something else: found, mended and gone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs.catalog import Stored, keys
from kvfs.core.check import Background
from kvfs.errors import ConfigError, NotFoundError
from kvfs.s3.errors import OutageError
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_check import kinds, look, state
from tests.unit.test_hydration import spilled
from tests.unit.test_uploader import A, B, again, contents, faults
from tests.unit.world import World, world

KEY = "p/@0/a"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def made(tmp_path: Path, store: MemoryStore) -> Iterator[World]:
    with world(tmp_path, store=FaultyStore(store)) as found:
        trio.run(found.ledger.dirty.load)
        yield found
        trio.run(found.check_at_rest)


async def mended(made: World, *, hashes: bool = False) -> list[str]:
    """Repair, and return the kinds of the findings, which are gone once all is uploaded.

    A dry run before changes nothing.
    """
    before = state(made)
    found = kinds((await look(made, bucket=True, hashes=hashes))[0])
    assert state(made) == before
    assert kinds((await look(made, bucket=True, hashes=hashes, repair=True))[0]) == found
    await made.upload_all()
    assert kinds((await look(made, bucket=True, hashes=hashes))[0]) == []
    return found


async def gone(made: World) -> None:
    with pytest.raises(NotFoundError):
        made.find(b"a")
    await made.dispatcher.trash.empty()
    made.check()


def spoil(store: MemoryStore, *, size: int = len(A), etag: str | None = None) -> None:
    """Other bytes behind the metadata that were there; with the ETag that was there or another."""
    found = store.objects[KEY]
    found.data = bytes(size)
    found.etag = etag or found.etag


def test_sound_bucket_has_no_findings(made: World) -> None:
    async def case() -> None:
        await spilled(made)
        await made.store(b"b", B, made.ram)
        await made.upload_all()
        found, survey = await look(made, bucket=True, hashes=True)
        assert kinds(found) == []
        assert survey.notes["in_bucket"] == 2

    trio.run(case)


def test_check_without_bucket_sends_no_request(made: World) -> None:
    async def case() -> None:
        await spilled(made)
        faults(made).calls.clear()
        await look(made, hashes=True)
        assert not faults(made).calls

    trio.run(case)


def test_missing_object_of_an_exclusive_bucket_is_uploaded_again(
    made: World, store: MemoryStore
) -> None:
    assert made.bucket is not None
    made.bucket.shared = False

    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        del store.objects[KEY]
        assert await mended(made) == ["absent"]
        assert contents(store) == {"@0/a": A}
        assert again(made, inode.ino).in_bucket
        made.check()

    trio.run(case)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_object_deleted_or_replaced_by_another_node_is_not_uploaded(
    made: World, store: MemoryStore, how: str
) -> None:
    async def case() -> None:
        await made.store(b"a", A, made.ram)
        await made.upload_all()
        if how == "deleted":
            del store.objects[KEY]
        else:
            store.put(KEY, B, {}, once=False)
        left = contents(store)
        assert await mended(made) == ["absent" if how == "deleted" else "altered"]
        await gone(made)
        assert contents(store) == left

    trio.run(case)


def test_renamed_object_is_uploaded_though_its_old_key_is_deleted(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        await made.store(b"a", A, made.ram)
        await made.upload_all()
        made.renames.rename(1, b"a", 1, b"b", 0)
        del store.objects[KEY]
        assert await mended(made) == ["absent"]
        assert contents(store) == {"@0/b": A}

    trio.run(case)


def test_missing_object_without_copy_loses_its_name(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        await spilled(made)
        del store.objects[KEY]
        assert await mended(made) == ["absent"]
        await gone(made)

    trio.run(case)


def test_object_of_another_node_is_not_deleted(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        await spilled(made)
        store.put(KEY, B, {}, once=False)
        assert await mended(made) == ["altered"]
        await gone(made)
        assert contents(store) == {"@0/a": B}

    trio.run(case)


def test_another_size_is_another_object(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        await spilled(made)
        spoil(store, size=3)
        assert await mended(made) == ["altered"]
        await gone(made)

    trio.run(case)


def test_the_same_object_with_another_etag_is_taken_as_it_is(
    made: World, store: MemoryStore
) -> None:
    """As a bucket that was restored has it."""

    async def case() -> None:
        inode = await spilled(made)
        store.objects[KEY].etag = "other"
        assert await mended(made) == ["altered"]
        assert await made.read(inode.ino) == A

    trio.run(case)


@pytest.mark.parametrize("copied", [True, False])
def test_wrong_bytes_in_the_bucket_are_found(made: World, store: MemoryStore, copied: bool) -> None:  # noqa: FBT001
    async def case() -> None:
        if copied:
            await made.store(b"a", A, made.ram)
            await made.upload_all()
        else:
            await spilled(made)
        spoil(store)
        assert kinds((await look(made, bucket=True))[0]) == []
        assert await mended(made, hashes=True) == ["altered"]
        assert contents(store) == ({"@0/a": A} if copied else {})
        if not copied:
            await gone(made)

    trio.run(case)


def test_bytes_with_another_etag_are_read_before_that_is_taken(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        await spilled(made)
        spoil(store, etag="other")
        assert await mended(made, hashes=True) == ["altered"]
        await gone(made)

    trio.run(case)


def test_metadata_that_say_something_else(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        await spilled(made)
        store.objects[KEY].metadata["kvfs-xxh3-128"] = "0" * 32
        assert await mended(made, hashes=True) == ["altered"]
        await gone(made)

    trio.run(case)


def test_open_object_is_not_repaired(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await spilled(made)
        held = await made.objects.open(inode.ino, writable=False)
        made.ledger.records.remove_copy(held.inode, held.tier)
        del store.objects[KEY]
        found, _ = await look(made, bucket=True, repair=True)
        told = [(one.kind, one.state, one.cure) for one in found]
        assert told == [("absent", "left", "somebody has it open")]
        await made.close(held, writable=False)
        assert await mended(made) == ["absent"]
        await gone(made)

    trio.run(case)


def test_change_during_the_check_is_no_finding(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        for name in (b"a", b"b"):
            await made.store(name, A, made.ram)
        await made.upload_all()
        assert made.remote is not None
        did: list[int] = []

        async def change() -> None:
            if not did:
                did.append(made.find(b"a").ino)
                made.tree.unlink(1, b"a")
                made.ledger.removals.purge(did[0])
                made.renames.rename(1, b"b", 1, b"c", 0)

        made.remote.after = change
        assert kinds((await look(made, bucket=True))[0]) == []
        assert did
        await made.upload_all()
        assert contents(store) == {"@0/c": A}

    trio.run(case)


def test_deletions_that_are_done_are_noted_no_more(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        await made.store(b"a", A, made.ram)
        await made.upload_all()
        with made.catalog.batch() as batch:
            for key in ("p/@0/gone", "p/@0/there"):
                stored = Stored(key, "etag", len(A), bytes(16), "none", "0644 0 0 1")
                made.ledger.dirty.superseded.delete(stored, batch)
            made.ledger.dirty.superseded.attempt("p/@0/never", "token", batch)
        store.put("p/@0/there", B, {}, once=True)
        for repair in (False, True):
            found, survey = await look(made, bucket=True, live=False, repair=repair)
            assert (kinds(found), survey.notes["deletes_done"]) == ([], 2)
        assert [value for _, value in made.catalog.marks(keys.DELETED)] == [b"p/@0/there"]
        assert (await look(made, bucket=True, repair=True))[1].notes["deletes_done"] == 0
        made.ledger.dirty.superseded.deletes.clear()
        made.ledger.dirty.superseded._attempts.clear()
        made.restart()
        await made.census()
        await made.upload_all()
        assert contents(store) == {"@0/a": A}

    trio.run(case)


@pytest.mark.parametrize("verb", ["list", "head", "get"])
def test_a_bucket_that_does_not_answer_ends_the_check(made: World, verb: str) -> None:
    async def case() -> None:
        await spilled(made)
        fault = Fault(verb, error=OutageError("away"))  # type: ignore[arg-type]
        faults(made).faults.append(fault)
        with pytest.raises(OutageError):
            await look(made, bucket=True, hashes=True, repair=True)
        faults(made).faults.clear()
        assert kinds((await look(made, bucket=True))[0]) == []

    trio.run(case)


def test_a_mount_without_a_bucket_refuses(made: World) -> None:
    async def case() -> None:
        checks = Background(made.ledger, made.movers, set())
        with pytest.raises(ConfigError, match="mount it with s3="):
            await checks.start(repair=False, hashes=False, bucket=True)

    trio.run(case)
