"""Hydration of objects at an open, and the opens for which it fails."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.catalog import ROOT_INO, Inode
from kvfs.errors import NotFoundError, StaleError
from kvfs.s3.errors import OutageError, RefusedError, StoreError, ThrottledError
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_uploader import A, B, again, contents, counters, faults
from tests.unit.world import MIB, World, world


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def made(tmp_path: Path, store: MemoryStore) -> Iterator[World]:
    with world(tmp_path, store=FaultyStore(store)) as found:
        trio.run(found.ledger.dirty.load)
        yield found
        trio.run(found.check_at_rest)


async def spilled(made: World, name: bytes = b"a", content: bytes = A) -> Inode:
    """An object that only the bucket has."""
    inode = await made.store(name, content, made.ram)
    await made.upload_all()
    made.ledger.removals.evict(again(made, inode.ino))
    found = again(made, inode.ino)
    assert made.ledger.tiers.holders(found) == []
    made.check()
    return found


def test_an_open_brings_it_back_as_it_was(made: World) -> None:
    async def case() -> None:
        before = await spilled(made)
        assert await made.read(before.ino) == A
        after = again(made, before.ino)
        assert made.ledger.tiers.holders(after) == [made.ram]
        assert (after.mtime_ns, after.size, after.version) == (before.mtime_ns, len(A), 1)
        assert after.in_bucket
        made.check()
        assert await made.read(before.ino) == A
        assert counters(made)["downloads"] == 1
        assert made.bucket is not None
        assert (made.bucket.hits, made.fast.hits) == (1, 1)
        counted = made.ledger.namespaces.default.counters
        assert (counted["read_s3"], counted["read_ram"]) == (1, 1)
        assert sum(made.ledger.latencies.hydrate["s3"].counts) == 1

    trio.run(case)


def test_looking_at_it_fetches_nothing(made: World) -> None:
    async def case() -> None:
        inode = await spilled(made)
        calls = faults(made).calls
        assert made.find(b"a").size == len(A)
        assert [name for name, _, _ in made.tree.list_entries(ROOT_INO, 2, 10).entries] == [b"a"]
        assert made.lifecycle.attribute(inode, b"user.kvfs.tier") == b"s3"
        assert made.lifecycle.attribute(inode, b"user.kvfs.dirty") == b"0"
        assert not calls

    trio.run(case)


@pytest.mark.parametrize("uploads", [True, False])
def test_an_open_waits_for_uploads_that_make_room(
    tmp_path: Path, store: MemoryStore, *, uploads: bool
) -> None:
    async def case(made: World) -> None:
        assert made.bucket is not None
        assert made.remote is not None
        await made.ledger.dirty.load()
        inode = await spilled(made, content=bytes(2 * MIB))
        count = 0
        while made.fast.free - made.room.headroom >= 2 * MIB:
            await made.store(b"f%d" % count, bytes(MIB), made.ram)
            count += 1
        made.bucket.wait = 5.0
        found: list[bytes] = []

        async def read() -> None:
            if uploads:
                found.append(await made.read(inode.ino))
                return
            with pytest.raises(NotFoundError, match=r"no tier has room|not here within"):
                await made.read(inode.ino)

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            assert trio.current_time() == began, "it waits"
            assert made.bucket.counters["waits"] == 1
            if uploads:
                await made.upload_all()
        assert found == ([bytes(2 * MIB)] if uploads else [])
        assert trio.current_time() <= began + 5
        await made.upload_all()
        assert await made.read(inode.ino) == bytes(2 * MIB)
        await made.check_at_rest()

    with world(tmp_path, ram=16 * MIB, nvme=0, store=FaultyStore(store)) as made:
        trio.run(case, made, clock=MockClock(autojump_threshold=0))


def test_object_without_room_in_ram_is_hydrated_to_nvme(tmp_path: Path, store: MemoryStore) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", A * 1000, made.nvme)
        await made.upload_all()
        made.ledger.removals.evict(again(made, inode.ino))
        await made.dispatcher.trash.empty()
        assert await made.read(inode.ino) == A * 1000
        assert made.ledger.tiers.holders(again(made, inode.ino)) == [made.nvme]
        made.restart(crash=True)
        await made.census()
        assert await made.read(inode.ino) == A * 1000, "it is not synced, and proven by its digest"
        await made.check_at_rest()

    with world(tmp_path, store=store) as made:
        trio.run(case, made)


def test_many_that_open_it_at_once_fetch_it_once(made: World) -> None:
    async def case() -> None:
        inode = await spilled(made)
        calls = faults(made).calls
        found: list[bytes] = []

        async def read() -> None:
            found.append(await made.read(inode.ino))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(read)
        assert found == [A] * 20
        assert calls["get"] == 1

    trio.run(case)


def test_a_writer_that_truncates_needs_no_bytes(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await spilled(made)
        calls = faults(made).calls
        held = await made.objects.open(inode.ino, writable=True, truncate=True)
        made.write(held, B)
        await made.close(held, writable=True)
        assert not calls["get"]
        made.check()
        await made.upload_all()
        assert contents(store) == {"@0/a": B}

    trio.run(case)


def test_a_writer_that_does_not_has_them(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await spilled(made)
        held = await made.objects.open(inode.ino, writable=True)
        made.write(held, b"x", len(A))
        await made.close(held, writable=True)
        assert not again(made, inode.ino).in_bucket
        await made.upload_all()
        assert contents(store) == {"@0/a": A + b"x"}

    trio.run(case)


@pytest.mark.parametrize(
    "error", [OutageError("out"), ThrottledError("slow"), RefusedError("no"), StoreError("odd")]
)
def test_outage_is_a_miss_of_one_open_only(made: World, error: StoreError) -> None:
    async def case() -> None:
        assert made.bucket is not None
        inode = await spilled(made)
        faults(made, Fault("get", 0, error))
        with pytest.raises(NotFoundError):
            await made.read(inode.ino)
        assert made.find(b"a").in_bucket
        assert made.bucket.health.state == "suspect"
        assert made.bucket.errors == {type(error).__name__: made.bucket.counters["failures"]}
        assert made.ledger.namespaces.default.counters["misses"] == 1
        assert not any(made.ledger.latencies.hydrate["s3"].counts)
        made.check()
        faults(made)
        assert await made.read(inode.ino) == A

    trio.run(case)


def test_an_outage_is_one_warning(made: World, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> int:
        return sum(
            one.levelno == logging.WARNING and "stays in the bucket" in one.getMessage()
            for one in caplog.records
        )

    async def case() -> None:
        names = [b"a", b"b", b"c"]
        inodes = [await spilled(made, name) for name in names]
        for outages in (1, 2):
            faults(made, Fault("get", 0, OutageError("out")))
            for inode in inodes:
                with pytest.raises(NotFoundError):
                    await made.read(inode.ino)
            assert warnings() == outages
            faults(made)
            assert await made.read(inodes[0].ino) == A
            made.ledger.removals.evict(again(made, inodes[0].ino))

    trio.run(case)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("harm", ["gone", "changed", "wrong", "short"])
def test_object_missing_or_wrong_in_the_bucket_is_a_lasting_miss(
    made: World, store: MemoryStore, harm: str, caplog: pytest.LogCaptureFixture, *, shared: bool
) -> None:
    caplog.set_level(logging.INFO)

    async def case() -> None:
        assert made.bucket is not None
        made.bucket.shared = shared
        inode = await spilled(made)
        followed = shared and harm in {"gone", "changed"}
        theirs = b"theirs" * 1000
        if harm == "gone":
            store.objects.clear()
        elif harm == "changed":
            store.put("p/@0/a", theirs, {}, once=False)
        elif harm == "wrong":
            faults(made, Fault("get", 0, flip=True))
        else:
            faults(made, Fault("get", 0, keep=100))
        with pytest.raises(StaleError if followed else NotFoundError):
            await made.read(inode.ino)
        assert made.catalog.inode(inode.ino) is None
        assert made.gone == [(ROOT_INO, b"a", inode.ino)]
        assert made.ledger.counters["misses"] == (not followed)
        assert made.bucket.counters["stale"] == followed
        assert any(one.levelno == logging.ERROR for one in caplog.records) != followed
        assert made.bucket.health.state == "healthy"
        faults(made)
        await made.upload_all()
        left = {"gone": {}, "changed": {"@0/a": theirs}}.get(harm, {"@0/a": A})
        assert contents(store) == left, "nothing is deleted there"

    trio.run(case)


def test_object_with_wrong_bytes_may_be_written_anew(made: World, store: MemoryStore) -> None:
    """Also if that has the same ETag, and though something else of its name is there."""

    async def case() -> None:
        assert made.bucket is not None
        inode = await spilled(made)
        store.objects["p/@0/a"].data = bytes(len(A))
        with pytest.raises(NotFoundError):
            await made.read(inode.ino)
        assert made.bucket.gives_wrong_bytes("p/@0/a")
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        assert contents(store) == {"@0/a": A}
        assert not made.bucket.gives_wrong_bytes("p/@0/a")
        made.ledger.removals.evict(again(made, inode.ino))
        assert await made.read(inode.ino) == A

    trio.run(case)


def test_object_copied_onto_itself_is_the_same(made: World, store: MemoryStore) -> None:
    """Its ETag is another one then, in some stores."""

    async def case() -> None:
        inode = await spilled(made)
        store.objects["p/@0/a"].etag = "another"
        assert await made.read(inode.ino) == A
        made.ledger.removals.evict(again(made, inode.ino))
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        await made.upload_all()
        assert contents(store) == {"@0/b": A}
        assert await made.read(inode.ino) == A

    trio.run(case)


def test_bytes_that_are_wrong_once_are_fetched_again(made: World) -> None:
    async def case() -> None:
        inode = await spilled(made)
        faults(made, Fault("get", 1, flip=True))
        assert await made.read(inode.ino) == A

    trio.run(case)


def test_while_the_bucket_is_down_nothing_is_asked(made: World) -> None:
    async def case() -> None:
        assert made.bucket is not None
        inode = await spilled(made)
        calls = faults(made).calls
        made.bucket.health.unanswered(0.0, "cut off")
        with pytest.raises(NotFoundError, match="cut off"):
            await made.read(inode.ino)
        assert not calls
        made.bucket.health.probed(0.0)
        assert await made.read(inode.ino) == A

    trio.run(case)


def test_slow_hydration_is_a_miss_and_a_later_open_finds_it(made: World) -> None:
    async def case() -> None:
        assert made.bucket is not None
        assert made.remote is not None
        assert made.dispatcher.hydration is not None
        inode = await spilled(made)
        go = trio.Event()
        made.remote.before = go.wait
        made.bucket.wait = 0.01
        for _ in range(3):  # of those that come later none waits for as long again
            with pytest.raises(NotFoundError, match="not here within"):
                await made.read(inode.ino)
        go.set()
        while made.dispatcher.hydration._running:  # noqa: ASYNC110 (it tells nobody of its end)
            await trio.sleep(0.001)
        calls = faults(made).calls
        assert await made.read(inode.ino) == A
        assert not calls

    trio.run(case)


def test_waiting_open_is_a_miss_when_the_bucket_is_down(made: World) -> None:
    async def case() -> None:
        assert made.bucket is not None
        assert made.remote is not None
        inode = await spilled(made)
        go = trio.Event()
        made.remote.before = go.wait
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def goes_down() -> None:
                await wait_all_tasks_blocked()
                assert made.bucket is not None
                made.bucket.health.unanswered(0.0, "it hangs")

            with pytest.raises(NotFoundError, match=r"is in .* only: it hangs"):
                await made.read(inode.ino)
        go.set()
        await wait_all_tasks_blocked()

    trio.run(case, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("happening", ["unlink", "rename", "replace"])
def test_object_changed_during_its_fetch_ends_right(made: World, happening: str) -> None:
    async def case() -> None:
        assert made.remote is not None
        inode = await spilled(made)

        async def happen() -> None:
            if happening == "unlink":
                made.tree.unlink(ROOT_INO, b"a")
            elif happening == "rename":
                made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
            else:
                await made.store(b"t", B, made.ram)
                made.renames.rename(ROOT_INO, b"t", ROOT_INO, b"a", 0)

        made.remote.after = happen
        if happening == "rename":
            assert await made.read(inode.ino) == A
        else:
            with pytest.raises(StaleError):  # the kernel looks the name up again
                await made.read(inode.ino)
            assert made.ledger.counters["misses"] == 0
        await made.dispatcher.trash.empty()
        made.check()

    trio.run(case)


def test_object_with_a_new_key_during_its_fetch_is_read(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        assert made.remote is not None
        inode = await spilled(made)
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        go = trio.Event()
        made.remote.before = go.wait
        found: list[bytes] = []

        async def read() -> None:
            found.append(await made.read(inode.ino))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.upload_all)
            await wait_all_tasks_blocked()
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            go.set()
        assert found == [A]
        assert contents(store) == {"@0/b": A}

    trio.run(case)


def test_a_copy_that_is_lost_comes_back_from_the_bucket(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        await made.upload_all()
        Path(made.fast.path(inode.ino, 1)).unlink()  # noqa: ASYNC240 (a file of a test)
        assert await made.read(inode.ino) == A
        assert not made.gone

    trio.run(case)


def test_uploaded_objects_survive_the_loss_of_ram(made: World) -> None:
    async def before() -> None:
        await made.store(b"a", A, made.ram)
        await made.upload_all()

    async def after() -> None:
        await made.census()
        await made.ledger.dirty.load()
        assert made.ledger.accounts.spilled == 1
        made.check()
        assert await made.read(made.find(b"a").ino) == A

    trio.run(before)
    made.restart(lose_ram=True)
    trio.run(after)


def test_all_fetches_together_have_a_bound(made: World) -> None:
    async def case() -> None:
        assert made.remote is not None
        assert made.dispatcher.hydration is not None
        budget = made.dispatcher.hydration.budget
        budget.most = 30_000
        inodes = [await spilled(made, b"%d" % number, A + b"%d" % number) for number in range(8)]
        most = running = 0

        async def before() -> None:
            nonlocal most, running
            running += 1
            most = max(most, running)
            await trio.sleep(0.001)

        async def after() -> None:
            nonlocal running
            running -= 1

        made.remote.before, made.remote.after = before, after
        async with trio.open_nursery() as nursery:
            for inode in inodes:
                nursery.start_soon(made.read, inode.ino)
        assert most == 2
        assert (budget.bytes, budget.count, budget.waiting) == (0, 0, 0)

    trio.run(case)


def test_quota_counts_resident_objects_only(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        space = made.namespace("n", quota_objects="2", eviction="lru")
        for number in range(5):
            await made.make_file(b"n/%d" % number, A)
            await made.upload_all()
        assert (space.objects, space.held_objects["s3"]) == (2, 5)
        assert len(contents(store)) == 5
        assert [name for name, _, _ in made.tree.list_entries(space.ino, 2, 10).entries] == [
            b"%d" % number for number in range(5)
        ]
        assert await made.read(made.at(b"n/0").ino) == A
        made.check()

    trio.run(case)


def test_without_its_bucket_a_name_stays(made: World, store: MemoryStore) -> None:
    async def before() -> None:
        await spilled(made)
        await made.store(b"b", B, made.ram)

    async def without() -> None:
        await made.census()
        inode = made.find(b"a")
        with pytest.raises(NotFoundError, match="not mounted"):
            await made.read(inode.ino)
        assert made.find(b"a").ino == inode.ino
        made.check()
        made.tree.unlink(ROOT_INO, b"a")

    async def after() -> None:
        await made.census()
        await made.upload_all()
        assert contents(store) == {"@0/b": B}

    trio.run(before)
    kept = made.bucket_store
    made.bucket_store = None
    made.restart()
    trio.run(without)
    made.bucket_store = kept
    made.restart()
    trio.run(after)


def test_attributes_of_a_file_say_where_it_is(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", A, made.ram)
        where = made.lifecycle.attribute
        assert (where(inode, b"user.kvfs.tier"), where(inode, b"user.kvfs.dirty")) == (b"ram", b"1")
        await made.demote(inode.ino)
        await made.upload_all()
        inode = made.find(b"a")
        assert where(inode, b"user.kvfs.tier") == b"ram+nvme+s3"
        assert where(inode, b"user.kvfs.dirty") == b"0"
        assert where(made.tree.inode(ROOT_INO), b"user.kvfs.tier") is None
        held = await made.objects.open(inode.ino, writable=True)
        assert where(held.inode, b"user.kvfs.dirty") == b"1"
        await made.close(held, writable=True)

    trio.run(case)
