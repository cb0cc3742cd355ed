"""Uploads to a bucket: their objects, their time, and the objects in the bucket afterwards."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from xxhash import xxh3_64_hexdigest

from kvfs.catalog import ROOT_INO, Inode, keys
from kvfs.core.ledger import dirty as dirty_module
from kvfs.core.names.renames import RENAME_EXCHANGE
from kvfs.daemon.storage import bind
from kvfs.errors import ConfigError, NoSpaceError
from kvfs.movement import uploading
from kvfs.s3.errors import (
    NoObjectError,
    OutageError,
    RefusedError,
    ThrottledError,
    WrongBytesError,
)
from kvfs.s3.facts import Facts
from kvfs.s3.place import BucketPlace
from kvfs.s3.store import Part
from kvfs.tiers import Bucket, Tier
from tests.s3.faulty import Fault, FaultyStore, Verb
from tests.s3.memory import MemoryStore
from tests.unit.world import MIB, World, digest, world

BLOCK, BLOCK_TMP = b"m@2@1@abc@half.data", b"m@2@1@abc@half.tmp"
A, B = b"a" * 10_000, b"b" * 20_000
LOST = Fault("put", 1, OutageError("out"), late=True)  # the store does it, but no answer comes


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def made(tmp_path: Path, store: MemoryStore) -> Iterator[World]:
    with world(tmp_path, store=FaultyStore(store)) as found:
        yield found
        if found.ledger.dirty.loaded:
            trio.run(found.check_at_rest)


def faults(made: World, *wanted: Fault) -> FaultyStore:
    store = made.bucket_store
    assert isinstance(store, FaultyStore)
    store.faults = list(wanted)
    store.calls.clear()
    return store


def contents(store: MemoryStore) -> dict[str, bytes]:
    """Without what is kvfs's own."""
    found = {key.removeprefix("p/"): one.data for key, one in store.objects.items()}
    return {key: data for key, data in found.items() if not key.startswith(".kvfs/")}


def again(made: World, ino: int) -> Inode:
    found = made.catalog.inode(ino)
    assert found is not None
    return found


def counters(made: World) -> dict[str, int]:
    assert made.bucket is not None
    return {name: count for name, count in made.bucket.counters.items() if count}


@pytest.fixture(params=["ram", "nvme"])
def tier(request: pytest.FixtureRequest, made: World) -> Tier:
    return next(tier for tier in made.tiers if tier.name == request.param)


def test_sealed_object_is_uploaded_with_its_metadata(
    made: World, store: MemoryStore, tier: Tier
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, tier)
        assert inode.ino in made.ledger.dirty
        assert (made.ledger.dirty.bytes, len(made.ledger.dirty)) == (len(A), 1)
        made.check()
        await made.upload_all()
        made.check()
        found = again(made, inode.ino)
        assert found.in_bucket
        assert found.digest == digest(A)
        assert inode.ino not in made.ledger.dirty
        assert contents(store) == {"@0/a": A}
        facts = Facts.of_head("p/@0/a", store.head("p/@0/a"))
        assert (facts.size, facts.digest, facts.mode) == (len(A), digest(A), 0o644)
        assert facts.mtime_ns == found.mtime_ns
        assert made.ledger.namespaces.default.held["s3"] == len(A)

    trio.run(case)


def test_uploads_are_in_the_order_of_the_seals(made: World) -> None:
    async def case() -> None:
        for name in (b"c", b"a", b"b"):
            await made.store(name, A, made.ram)
        dirty = made.ledger.dirty
        dirty.hurry(1)
        taken = [dirty.take() for _ in range(3)]
        assert taken == [made.find(name).ino for name in (b"c", b"a", b"b")]
        assert dirty.take() is None
        for ino in taken:
            assert ino is not None
            dirty.give_back(ino, 0)

    trio.run(case)


def test_an_object_waits_for_its_time_unless_it_is_written_through(made: World) -> None:
    async def case() -> None:
        assert made.bucket is not None
        made.bucket.delay = 1000
        through = made.namespace("n", write="through")
        del through
        await made.store(b"a", A, made.ram)
        dirty = made.ledger.dirty
        assert dirty.take() is None
        assert 900 < dirty.next_due() <= 1000
        written = await made.make_file(b"n/b", B)
        assert dirty.take() == written.ino
        dirty.give_back(written.ino, 0)
        dirty.hurry(1)
        assert {dirty.take(), dirty.take()} == {written.ino, made.find(b"a").ino}
        for ino in list(dirty):
            dirty.give_back(ino, 0)

    trio.run(case)


def test_object_without_s3_media_is_not_uploaded(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        made.namespace("n", media="ram+nvme")
        await made.make_file(b"n/a", A)
        await made.make_file(b"b", B)
        await made.upload_all()
        assert contents(store) == {"@0/b": B}

    trio.run(case)


def test_a_temporary_name_waits_for_its_rename(made: World, store: MemoryStore) -> None:
    name, temporary = BLOCK, BLOCK_TMP

    async def case() -> None:
        await made.make_file(temporary, A)
        assert not len(made.ledger.dirty)
        made.renames.rename(ROOT_INO, temporary, ROOT_INO, name, 0)
        await made.upload_all()
        assert len(contents(store)) == 1
        assert contents(store).popitem()[1] == A

    trio.run(case)


def test_a_new_version_takes_the_place_of_the_old_one(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        held = await made.objects.open(inode.ino, writable=True, truncate=True)
        assert not again(made, inode.ino).in_bucket
        made.write(held, B)
        await made.close(held, writable=True)
        made.check()
        await made.upload_all()
        assert contents(store) == {"@0/a": B}
        assert counters(made)["uploads"] == 2

    trio.run(case)


def test_an_unlink_deletes_and_a_new_file_of_the_name_takes_it_back(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        await made.store(b"a", A, made.ram)
        await made.store(b"b", B, made.ram)
        await made.upload_all()
        made.tree.unlink(ROOT_INO, b"a")
        made.tree.unlink(ROOT_INO, b"b")
        assert made.ledger.dirty.superseded.deletes.keys() == {"p/@0/a", "p/@0/b"}
        await made.store(b"a", B, made.ram)
        await made.upload(made.find(b"a").ino)
        assert made.ledger.dirty.superseded.deletes.keys() == {"p/@0/b"}
        await made.upload_all()
        assert contents(store) == {"@0/a": B}
        made.check_accounts()

    trio.run(case)


def test_object_unlinked_while_open_leaves_the_bucket(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        held = await made.objects.open(inode.ino, writable=False)
        made.tree.unlink(ROOT_INO, b"a")
        made.check()
        await made.upload_all()
        assert contents(store) == {}
        assert made.content(held) == A
        await made.close(held, writable=False)

    trio.run(case)


def test_a_rename_is_a_copy_in_the_bucket(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        await made.store(b"a", A, made.ram)
        await made.store(b"b", B, made.ram)
        await made.upload_all()
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        made.check()
        await made.upload_all()
        assert contents(store) == {"@0/b": A}
        assert counters(made)["copies"] == 1
        made.check()
        made.renames.rename(ROOT_INO, b"b", ROOT_INO, b"c", 0)
        made.renames.rename(ROOT_INO, b"c", ROOT_INO, b"b", 0)
        await made.upload_all()
        assert contents(store) == {"@0/b": A}
        assert counters(made)["copies"] == 1, "there and back is no change"

    trio.run(case)


def test_an_exchange_of_two_names_ends_right(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        await made.store(b"a", A, made.ram)
        await made.store(b"b", B, made.ram)
        await made.upload_all()
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", RENAME_EXCHANGE)
        await made.upload_all()
        assert contents(store) == {"@0/a": B, "@0/b": A}

    trio.run(case)


def test_a_directory_moves_with_all_below_it(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        made.mkdir(b"d")
        made.mkdir(b"d/e")
        await made.make_file(b"d/e/a", A)
        await made.make_file(b"d/b", B)
        await made.upload_all()
        made.renames.rename(ROOT_INO, b"d", ROOT_INO, b"f", 0)
        await made.walk()
        await made.upload_all()
        assert contents(store) == {"@0/f/e/a": A, "@0/f/b": B}
        made.tell("f", eviction="lru")
        await made.walk()
        await made.upload_all()
        assert contents(store) == {"f@1/e/a": A, "f@1/b": B}
        made.tell("f", version="2")
        await made.make_file(b"f/c", A)
        await made.walk()
        await made.upload_all()
        assert contents(store) == {"f@2/c": A}
        made.drop("f")
        await made.walk()
        await made.upload_all()
        assert contents(store) == {}

    trio.run(case)


def test_object_moved_to_a_namespace_without_s3_leaves_the_bucket(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        made.namespace("n", media="ram+nvme")
        await made.store(b"a", A, made.ram)
        await made.upload_all()
        made.renames.rename(ROOT_INO, b"a", made.at(b"n").ino, b"a", 0)
        await made.upload_all()
        assert contents(store) == {}
        assert not made.at(b"n/a").in_bucket
        made.check()

    trio.run(case)


def test_the_first_name_of_several_is_the_one_in_the_bucket(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        made.tree.link(inode.ino, ROOT_INO, b"b")
        await made.upload_all()
        assert contents(store) == {"@0/a": A}
        made.tree.unlink(ROOT_INO, b"a")
        await made.upload_all()
        assert contents(store) == {"@0/b": A}

    trio.run(case)


# The metadata in the bucket


def facts(store: MemoryStore, key: str = "p/@0/a") -> Facts:
    return Facts.of_head(key, store.head(key))


@pytest.mark.parametrize("spilled", [False, True])
def test_mode_owner_and_time_go_up_without_the_bytes(
    made: World, store: MemoryStore, *, spilled: bool
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        if spilled:
            made.ledger.removals.evict(again(made, inode.ino))
        calls = faults(made).calls
        made.attributes.change(inode.ino, mode=0o4600, uid=7, gid=8, mtime_ns=9)
        assert inode.ino in made.ledger.dirty
        assert made.ledger.dirty.bytes == 0, "no writer is to wait for it"
        made.check()
        await made.upload_all()
        found = facts(store)
        assert (found.mode, found.uid, found.gid, found.mtime_ns) == (0o4600, 7, 8, 9)
        assert found.digest == digest(A)
        assert contents(store) == {"@0/a": A}
        assert (calls["put"], calls["get"], calls["copy"]) == (0, 0, 1)
        assert not made.ledger.dirty.superseded.deletes
        assert await made.read(inode.ino) == A
        made.attributes.change(inode.ino, mode=0o600)
        made.attributes.change(inode.ino, mode=0o4600)
        await made.upload_all()
        assert calls["copy"] == 1, "there and back is no change"

    trio.run(case)


def test_read_object_is_not_uploaded_again(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        made.attributes.change(inode.ino, atime_ns=9)
        await made.read(inode.ino)
        assert not len(made.ledger.dirty)

    trio.run(case)


@pytest.mark.parametrize("stored", [False, True])
def test_a_mode_that_changes_on_its_way_goes_up_too(
    made: World, store: MemoryStore, *, stored: bool
) -> None:
    async def case() -> None:
        assert made.remote is not None
        remote = made.remote
        inode = await made.store(b"a", A, made.ram)
        if stored:
            await made.upload_all()
            made.attributes.change(inode.ino, mode=0o400)

        async def happen() -> None:
            remote.after = _nothing
            made.attributes.change(inode.ino, mode=0o600)

        remote.after = happen
        await made.upload(inode.ino)
        assert facts(store).mode == (0o400 if stored else 0o644)
        made.check()
        made.restart(crash=True)
        await made.census()
        await made.upload_all()
        assert facts(store).mode == 0o600
        assert counters(made)["copies"] == 1

    trio.run(case)


def test_a_mode_and_a_name_that_change_go_up_together(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        made.attributes.change(inode.ino, mode=0o600)
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        await made.upload_all()
        assert facts(store, "p/@0/b").mode == 0o600
        assert contents(store) == {"@0/b": A}
        assert counters(made)["copies"] == 1

    trio.run(case)


def test_unknown_attributes_in_the_catalog_cause_no_upload(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        stored = made.ledger.dirty.stored(inode.ino)
        assert stored is not None
        with made.catalog.batch() as batch:
            value = keys.stored_value(stored)
            batch.mark(keys.STORED, inode.ino, value[: value.rindex(b"\0")])
        before = store.objects["p/@0/a"]
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        made.renames.rename(ROOT_INO, b"b", ROOT_INO, b"a", 0)
        await made.upload_all()
        assert store.objects["p/@0/a"] is before

    trio.run(case)


# More than one request copies


@pytest.mark.parametrize("what", ["name", "mode"])
def test_large_object_is_copied_in_parts(
    made: World, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(uploading, "WHOLE", MIB)
    monkeypatch.setattr(uploading, "PART", 5 * MIB)
    content = os.urandom(11 * MIB)

    async def case() -> None:
        inode = await made.store(b"a", content, made.nvme)
        await made.upload_all()
        calls = faults(made).calls
        if what == "name":
            made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        else:
            made.attributes.change(inode.ino, mode=0o600)
        await made.upload_all()
        key = "@0/b" if what == "name" else "@0/a"
        assert contents(store) == {key: content}
        assert facts(store, f"p/{key}").mode == (0o644 if what == "name" else 0o600)
        assert (calls["copy_part"], calls["copy"], calls["put_part"]) == (3, 0, 0)
        assert not store.unfinished
        assert not list((made.tmp / "uploads").iterdir())
        made.ledger.removals.evict(again(made, inode.ino))
        await made.dispatcher.trash.empty()
        assert await made.read(inode.ino) == content

    trio.run(case)


@pytest.mark.parametrize("what", ["name", "mode"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("verb", ["begin", "copy_part", "complete", "head"])
def test_a_copy_in_parts_that_fails_is_made_again(
    made: World,
    store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    verb: Verb,
    *,
    late: bool,
) -> None:
    monkeypatch.setattr(uploading, "WHOLE", 1000)

    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        made.ledger.removals.evict(again(made, inode.ino))
        if what == "name":
            made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        else:
            made.attributes.change(inode.ino, mode=0o600)
        calls = faults(made, Fault(verb, 1, OutageError("out"), late=late)).calls
        await made.upload_all()
        assert calls[verb] > 1 or (verb, late) == ("complete", True), "its own attempt is known"
        key = "@0/b" if what == "name" else "@0/a"
        assert contents(store) == {key: A}
        assert facts(store, f"p/{key}").mode == (0o644 if what == "name" else 0o600)
        assert await made.read(inode.ino) == A

    trio.run(case)


@pytest.mark.parametrize("what", ["name", "mode"])
@pytest.mark.parametrize("verb", ["copy", "complete"])
def test_copy_with_a_lost_answer_is_found(
    made: World, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, what: str, verb: Verb
) -> None:
    """It was carried out, the store went away, and so did the daemon."""
    if verb == "complete":
        monkeypatch.setattr(uploading, "WHOLE", 1000)

    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        made.ledger.removals.evict(again(made, inode.ino))
        if what == "name":
            made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        else:
            made.attributes.change(inode.ino, mode=0o600)
        out = OutageError("out")
        lost = Fault(verb, 1, out, late=True)
        silent = [Fault("head", number, out) for number in range(2 + (what == "name"), 9)]
        faults(made, lost, *silent)
        await made.upload(inode.ino)
        made.restart(crash=True)
        faults(made)
        await made.census()
        await made.upload_all()
        key = "@0/b" if what == "name" else "@0/a"
        assert contents(store) == {key: A}
        assert facts(store, f"p/{key}").mode == (0o644 if what == "name" else 0o600)
        assert await made.read(inode.ino) == A

    trio.run(case)


@pytest.mark.parametrize("theirs", [A, B])
def test_a_copy_in_parts_meets_another_node(
    made: World, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, theirs: bytes
) -> None:
    """The other node's object comes while the parts are copied."""
    monkeypatch.setattr(uploading, "WHOLE", 1000)

    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        said = replace(facts(store), digest=digest(theirs), size=len(theirs))
        said = replace(said, stored_digest=said.digest, stored_size=said.size)
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        plain = store.complete

        def complete(key: str, upload_id: str, parts: Sequence[Part], *, once: bool) -> None:
            store.put("p/@0/b", theirs, said.metadata(), once=True)
            plain(key, upload_id, parts, once=once)

        monkeypatch.setattr(store, "complete", complete)
        await made.upload_all()
        assert contents(store)["@0/b"] == theirs
        assert counters(made).get("conflicts", 0) == (theirs == B)
        assert not store.unfinished
        assert await made.read(inode.ino) == A

    trio.run(case)


# While it goes up


def during(made: World, happening: str) -> None:
    """An event comes after the store has the object, and before its answer."""
    assert made.remote is not None
    remote = made.remote

    async def happen() -> None:
        remote.after = _nothing
        if happening == "unlink":
            made.tree.unlink(ROOT_INO, b"a")
        elif happening == "rename":
            made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        elif happening == "replace":
            await made.store(b"t", B, made.ram)
            made.renames.rename(ROOT_INO, b"t", ROOT_INO, b"a", 0)
        else:
            held = await made.objects.open(made.find(b"a").ino, writable=True, truncate=True)
            made.write(held, B)
            await made.close(held, writable=True)

    remote.after = happen


async def _nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("happening", "left"),
    [
        ("unlink", {}),
        ("rename", {"@0/b": A}),
        ("replace", {"@0/a": B}),
        ("rewrite", {"@0/a": B}),
    ],
)
def test_object_changed_during_its_upload_ends_right(
    made: World, store: MemoryStore, happening: str, left: dict[str, bytes]
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        during(made, happening)
        await made.upload(inode.ino)
        assert contents(store) == {"@0/a": A}
        made.check()
        await made.upload_all()
        assert contents(store) == left
        made.check()

    trio.run(case)


# Others


def test_the_same_block_of_another_node_is_taken_for_ours(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        theirs = store.objects["p/@0/a"]
        made.tree.unlink(ROOT_INO, b"a")
        await made.upload_all()
        store.objects["p/@0/a"] = theirs
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        assert again(made, inode.ino).in_bucket
        assert store.objects["p/@0/a"] is theirs

    trio.run(case)


def test_another_block_of_that_name_stays_and_ours_is_local(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        store.put("p/@0/a", B, {}, once=True)
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        inode = again(made, inode.ino)
        assert not inode.in_bucket
        assert contents(store) == {"@0/a": B}
        assert counters(made)["conflicts"] == 1
        where = made.lifecycle.attribute
        assert where(inode, b"user.kvfs.tier") == b"ram"
        assert where(inode, b"user.kvfs.dirty") == b"conflict"
        made.tree.unlink(ROOT_INO, b"a")
        await made.upload_all()
        assert contents(store) == {"@0/a": B}, "it is not ours to delete"

    trio.run(case)


@pytest.mark.parametrize("here", [True, False])
def test_a_lost_race_for_a_name_leaves_nothing_under_the_old_one(
    made: World, store: MemoryStore, *, here: bool
) -> None:
    async def case() -> None:
        inode = await made.store(b"t", A, made.ram)
        await made.upload_all()
        made.renames.rename(ROOT_INO, b"t", ROOT_INO, b"a", 0)
        store.put("p/@0/a", B, {}, once=True)
        if not here:
            made.ledger.removals.evict(again(made, inode.ino))
        await made.upload_all()
        assert contents(store) == {"@0/a": B}
        assert counters(made)["conflicts"] == 1
        if here:
            assert not again(made, inode.ino).in_bucket
            assert await made.read(inode.ino) == A
        else:  # its name is that of the other one from now on
            assert made.gone == [(ROOT_INO, b"a", inode.ino)]
        made.check()

    trio.run(case)


@pytest.mark.parametrize("what", ["mode", "name"])
@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("theirs", [None, B])
def test_object_changed_by_others_during_a_metadata_copy_follows_the_bucket(
    made: World, store: MemoryStore, what: str, theirs: bytes | None, *, here: bool
) -> None:
    async def case() -> None:
        assert made.bucket is not None
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        if not here:
            made.ledger.removals.evict(again(made, inode.ino))
        if what == "mode":
            made.attributes.change(inode.ino, mode=0o600)
        else:
            made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        store.delete("p/@0/a")
        if theirs is not None:
            store.put("p/@0/a", theirs, {}, once=True)
        await made.upload_all()
        left = {} if theirs is None else {"@0/a": theirs}
        meant = what == "name" and here
        assert contents(store) == (left | {"@0/b": A} if meant else left)
        assert made.bucket.counters["stale"] == (not meant)
        assert made.bucket.health.state == "healthy"
        made.check()

    trio.run(case)


def test_object_unlinked_by_others_after_its_upload_is_uploaded_again(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        assert made.bucket is not None
        await made.store(b"a", A, made.ram)
        faults(made, Fault("put", 1, NoObjectError("gone again")))
        await made.upload_all()
        assert made.bucket.health.state == "healthy"
        assert contents(store) == {"@0/a": A}

    trio.run(case)


# Failures


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "error", [OutageError("out"), ThrottledError("slow"), RefusedError("no"), WrongBytesError("x")]
)
def test_failed_upload_stays_dirty_and_is_retried(
    made: World, store: MemoryStore, error: Exception, *, late: bool
) -> None:
    async def case() -> None:
        assert made.bucket is not None
        inode = await made.store(b"a", A, made.ram)
        faults(made, Fault("put", 1, error, late=late))  # type: ignore[arg-type]
        await made.upload(inode.ino)
        if not again(made, inode.ino).in_bucket:  # its own attempt is known by its token
            assert inode.ino in made.ledger.dirty
            own = isinstance(error, WrongBytesError)
            assert made.bucket.health.state == ("healthy" if own else "suspect")
        made.check()
        await made.upload_all()
        assert contents(store) == {"@0/a": A}

    trio.run(case)


def test_a_store_that_fails_is_asked_ever_less_often(made: World) -> None:
    async def case() -> None:
        spill = made.dispatcher.uploader
        assert spill is not None
        pauses = [spill.backoff.failed("upload", OutageError("out")) for _ in range(10)]
        assert all(0.5 * least <= pause <= least for pause, least in zip(pauses, (1, 2, 4, 8)))  # noqa: B905
        assert 10 <= pauses[-1] <= 20
        assert not spill.backoff.ready
        spill.backoff.reset()
        assert spill.backoff.ready

    trio.run(case)


def spoil(path: Path) -> None:
    """Other bytes, that nothing tells of but their digest."""
    times = path.stat()
    path.write_bytes(A[:-1] + b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_copy_with_other_bytes_is_not_uploaded_but_quarantined(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.demote(inode.ino)
        spoil(Path(made.fast.path(inode.ino, inode.version)))
        await made.upload(inode.ino)
        assert contents(store) == {}
        assert made.ledger.tiers.holders(again(made, inode.ino)) == [made.nvme]
        await made.upload_all()
        assert contents(store) == {"@0/a": A}

    trio.run(case)


def test_an_upload_in_parts_that_is_cut_short_is_aborted_at_the_next_start(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        assert made.bucket is not None
        assert made.dispatcher.uploader is not None
        upload_id = store.begin("p/@0/a", {})
        note = made.tmp / "uploads" / f"{xxh3_64_hexdigest(b'p/@0/a')}.json"
        note.write_text(json.dumps({"key": "p/@0/a", "upload_id": upload_id}))
        await made.dispatcher.uploader._sweep()
        assert not store.unfinished
        assert not list((made.tmp / "uploads").glob("*.json"))

    trio.run(case)


def test_a_damaged_note_of_an_upload_aborts_nothing_and_stays(
    made: World, store: MemoryStore
) -> None:
    """A note is about the key that its name says, so that it cannot end another node's upload."""

    async def case() -> None:
        assert made.dispatcher.uploader is not None
        upload_id = store.begin("p/@0/a", {})
        notes = made.tmp / "uploads"
        told = json.dumps({"key": "p/@0/a", "upload_id": upload_id})
        (notes / "of-another-key.json").write_text(told)
        (notes / "elsewhere").write_text(told)
        (notes / f"{xxh3_64_hexdigest(b'p/@0/a')}.json").symlink_to(notes / "elsewhere")
        (notes / "empty.json").touch()
        (notes / "binary.json").write_bytes(bytes(range(256)))
        (notes / "cut.json").write_text("{")
        (notes / "deep.json").write_text("[" * 100_000)
        os.mkfifo(notes / "pipe.json")
        before = sorted(notes.iterdir())
        await made.dispatcher.uploader._sweep()
        assert [*store.unfinished] == [upload_id]
        assert sorted(notes.iterdir()) == before

    trio.run(case)


# After a start


def test_restart_finds_dirty_objects_and_pending_deletes(made: World, store: MemoryStore) -> None:
    async def before() -> None:
        for name in (b"a", b"b", b"c", b"d"):
            await made.store(name, A + name, made.nvme)
        await made.upload_all()
        made.tree.unlink(ROOT_INO, b"d")
        for name in (b"b", b"a"):
            held = await made.objects.open(made.find(name).ino, writable=True, truncate=True)
            made.write(held, B)
            await made.close(held, writable=True)

    async def after() -> None:
        dirty = made.ledger.dirty
        ino = made.find(b"a").ino
        assert ino in dirty, "before anything is loaded"
        assert made.find(b"c").ino not in dirty
        await made.census()
        await dirty.load()
        assert {made.find(name).ino for name in (b"a", b"b")} == set(dirty)
        dirty.hurry(1)
        assert dirty.take() == made.find(b"b").ino, "in the order of the seals"
        dirty.give_back(made.find(b"b").ino, 0)
        made.check()
        await made.upload_all()
        assert contents(store) == {"@0/a": B, "@0/b": B, "@0/c": A + b"c"}

    trio.run(before)
    made.restart()
    trio.run(after)


def test_a_catalog_that_never_had_a_bucket_has_no_marks(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await made.store(b"a", A, made.ram)
        for kind in (keys.STORED, keys.UNSTORED, keys.DELETED):
            assert not made.catalog.marks(kind)

    with world(tmp_path) as made:
        trio.run(case, made)


# Room


def test_uploaded_object_leaves_the_tiers_and_keeps_its_name(
    made: World, store: MemoryStore, tier: Tier
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, tier)
        await made.upload_all()
        assert made.room.reserve(tier, tier.capacity - made.room.headroom) or tier is made.ram
        if made.ledger.tiers.holders(again(made, inode.ino)):
            made.ledger.removals.evict(again(made, inode.ino))
        tier.reserved = 0
        found = made.find(b"a")
        assert made.ledger.tiers.holders(found) == []
        assert not made.gone
        assert not made.ledger.records.is_lost(found)
        await made.dispatcher.trash.empty()
        made.check()
        assert made.ledger.accounts.spilled == 1
        assert contents(store) == {"@0/a": A}
        made.tree.unlink(ROOT_INO, b"a")
        await made.upload_all()
        assert contents(store) == {}
        made.check()

    trio.run(case)


def test_dirty_object_is_no_victim(made: World) -> None:
    async def case() -> None:
        assert made.nvme is not None
        await made.store(b"a", A, made.nvme)
        await made.store(b"b", B, made.nvme)
        await made.upload(made.find(b"b").ino)
        while made.room._reclaim(made.nvme):
            pass
        assert made.ledger.tiers.holders(made.find(b"a")) == [made.nvme]
        assert made.ledger.tiers.holders(made.find(b"b")) == []

    trio.run(case)


@pytest.mark.parametrize("full", ["tiers", "bound"])
def test_a_writer_waits_for_uploads_and_not_for_ever(made: World, full: str) -> None:
    async def case() -> None:
        assert made.bucket is not None
        assert made.dispatcher.uploader is not None
        made.bucket.wait = 0.05
        made.bucket.max_dirty_bytes = 1 << 40 if full == "tiers" else 1
        made.namespace("n", media="ram+s3")

        async def fill() -> None:
            for count in range(20):
                made.forget_sizes()
                made.learn(made.at(b"n"), b"f0", 2 * MIB)
                await made.make_file(b"n/f%d" % count, bytes([count]) * 2 * MIB)

        with pytest.raises(NoSpaceError):
            await fill()
        assert (len(made.ledger.dirty) == 1) == (full == "bound")
        assert counters(made)["waits"]
        made.bucket.wait = 30
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.uploader.run)
            await made.make_file(b"n/more", B)
            nursery.cancel_scope.cancel()
        assert counters(made)["uploads"]

    trio.run(case)


def test_quota_waits_for_uploads_of_its_victims(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        assert made.dispatcher.uploader is not None
        space = made.namespace("n", quota_objects="2", eviction="lru")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.uploader.run)
            for number in range(8):
                await made.make_file(b"n/%d" % number, A)
            nursery.cancel_scope.cancel()
        assert space.objects <= 2
        await made.upload_all()
        assert len(contents(store)) == 8

    trio.run(case)


def test_a_file_of_holes_stays_here_and_is_dirty(
    made: World, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def case() -> None:
        held = await made.create(b"a")
        made.write(held, b"x", 100 * MIB)
        await made.close(held, writable=True)
        assert not len(made.ledger.dirty)
        assert contents(store) == {}
        inode = made.ledger.table.inode(held.inode.ino)
        assert inode is not None
        assert made.lifecycle.attribute(inode, b"user.kvfs.dirty") == b"1"

    with caplog.at_level("WARNING"):
        trio.run(case)
    assert "stays on this node only, and user.kvfs.dirty says 1: it is mostly holes" in caplog.text


@pytest.mark.parametrize("media", ["s3", "ram+s3"])
def test_a_namespace_needs_a_tier_that_is_written_to(made: World, media: str) -> None:
    if media == "s3":
        with pytest.raises(ConfigError, match="expected one more tier, such as media=nvme"):
            made.namespace("n", media=media)
    else:
        assert made.namespace("n", media=media).settings.media == ("ram", "s3")


def test_a_catalog_stays_with_its_bucket(made: World) -> None:
    async def case() -> None:
        await made.store(b"a", A, made.ram)

    trio.run(case)
    place = BucketPlace("another", "q/")
    other = Bucket(place, None, most=1, delay=0, wait=0)
    with pytest.raises(ConfigError, match=r"are in s3://memory/p/: mount with that"):
        bind(made.catalog, other)
    made.tree.unlink(ROOT_INO, b"a")
    bind(made.catalog, other)
    assert made.catalog.fact("bucket") == "s3://another/q/"


def test_a_name_that_is_too_long_for_a_key_is_written_beside_it(
    made: World, store: MemoryStore
) -> None:
    folder = b"%" * 255

    async def case() -> None:
        assert made.bucket is not None
        made.mkdir(folder)
        made.mkdir(folder + b"/" + folder)
        await made.make_file(folder + b"/" + folder + b"/a", A)
        await made.upload_all()
        (key,) = contents(store)
        record = made.bucket.keys.record_of(f"p/{key}")
        name = made.bucket.keys.parse_record(record, store.objects[record].data)
        assert name.path == folder + b"/" + folder + b"/a"
        made.tree.unlink(made.at(folder + b"/" + folder).ino, b"a")
        await made.upload_all()
        assert not store.objects, "nor is the record left"

    trio.run(case)


@pytest.mark.parametrize("then", ["unlink", "rename", "rewrite", "restart"])
def test_upload_with_a_lost_answer_leaves_nothing_behind(
    made: World, store: MemoryStore, then: str
) -> None:
    async def before() -> None:
        inode = await made.store(b"a", A, made.nvme)
        faults(made, LOST, Fault("head", 1, OutageError("out")))
        await made.upload(inode.ino)
        faults(made)
        assert contents(store) == {"@0/a": A}
        assert not again(made, inode.ino).in_bucket
        if then == "unlink":
            made.tree.unlink(ROOT_INO, b"a")
        elif then == "rename":
            made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        elif then == "rewrite":
            held = await made.objects.open(inode.ino, writable=True, truncate=True)
            made.write(held, B)
            await made.close(held, writable=True)

    async def after() -> None:
        await made.upload_all()
        wanted: dict[str, dict[str, bytes]] = {
            "unlink": {},
            "rename": {"@0/b": A},
            "rewrite": {"@0/a": B},
            "restart": {"@0/a": A},
        }
        assert contents(store) == wanted[then]
        assert not counters(made).get("conflicts")

    trio.run(before)
    if then == "restart":
        made.restart()
        trio.run(made.census)
    trio.run(after)


def test_object_of_another_node_is_not_deleted_for_a_failed_upload(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        faults(made, Fault("put", 0, OutageError("out")))
        await made.upload(inode.ino)
        faults(made)
        store.put("p/@0/a", B, {}, once=True)
        made.tree.unlink(ROOT_INO, b"a")
        await made.upload_all()
        assert contents(store) == {"@0/a": B}
        assert not made.ledger.dirty.superseded.deletes

    trio.run(case)


def test_the_oldest_is_known_without_looking_at_all(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is always the least of all dirty objects; no entry is kept in vain."""
    monkeypatch.setattr(dirty_module, "SPARE_AGES", 8)
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    async def case() -> None:
        dirty = made.ledger.dirty
        inodes = [await made.make_file(b"%d" % number, A) for number in range(20)]
        for _ in range(2000):
            inode = chance.choice(inodes)
            with made.catalog.batch() as batch:
                if chance.random() < 0.5:
                    dirty.unmark(inode.ino, batch)
                else:
                    dirty.mark(inode, batch, chance.randrange(1, 1000))
            least = min((entry.sealed_ns for entry in dirty._entries.values()), default=0)
            assert dirty.oldest_ns == least
            assert len(dirty._ages) <= 8 + 2 * (len(dirty) + 1)
        for inode in inodes:
            with made.catalog.batch() as batch:
                dirty.unmark(inode.ino, batch)
        assert dirty.oldest_ns == 0

    trio.run(case)
