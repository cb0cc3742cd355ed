"""Contested objects: one whose name another node has stays here until the name is free."""

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.catalog import ROOT_INO, Inode, keys
from kvfs.core.bucket.listing import contests as timing
from kvfs.core.bucket.listing.bucket_lookup import AT_ONCE
from kvfs.core.bucket.listing.contests import Contests
from kvfs.core.bucket.upload.backlog import Backlog
from kvfs.core.ledger.dirty import CAUGHT_UP, CONTESTED_MARKED
from kvfs.s3.errors import NoBucketError, NoObjectError, OutageError
from kvfs.s3.facts import Facts
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_bucket_lookup import RECHECK, Node, later
from tests.unit.test_uploader import contents
from tests.unit.world import World, digest, world

A, B, C = b"a" * 10_000, b"b" * 20_000, b"c" * 500

Case = Callable[[Node, Node], Awaitable[None]]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def run(tmp_path: Path, store: MemoryStore) -> Callable[[Case], None]:
    """`run(case)`: with two nodes on one bucket; what must always hold holds at the end."""

    def do(case: Case) -> None:
        async def all_of_it(one: World, other: World) -> None:
            for made in (one, other):
                await made.ledger.dirty.load()
            nodes = Node(one), Node(other)
            await case(*nodes)
            for node in nodes:
                await node.behind()
                await node.made.check_at_rest()

        with (
            world(tmp_path / "one", store=FaultyStore(store)) as one,
            world(tmp_path / "other", store=FaultyStore(store)) as other,
        ):
            trio.run(all_of_it, one, other, clock=trio.testing.MockClock(autojump_threshold=0.5))

    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    return do


def contests(node: Node) -> Contests:
    assert node.made.dispatcher.contests is not None
    return node.made.dispatcher.contests


async def lost(node: Node, *paths: bytes, content: bytes = B) -> list[Inode]:
    """Files that are in conflict: another node has published these names."""
    found = [await node.made.make_file(path, content) for path in paths]
    await node.made.upload_all()
    for inode in found:
        assert is_dirty(node, inode.ino) == b"conflict"
    return found


def is_dirty(node: Node, ino: int) -> bytes:
    inode = node.made.catalog.inode(ino)
    assert inode is not None
    return node.made.lifecycle.attribute(inode, b"user.kvfs.dirty") or b""


async def ask(node: Node) -> None:
    """One step, as the task makes it."""
    each = contests(node)
    await each._ask(each.contested.turn(AT_ONCE))


def test_a_name_that_is_free_again_is_published(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"k", A)
        (inode,) = await lost(other, b"k")
        await ask(other)
        assert is_dirty(other, inode.ino) == b"conflict", "as long as the other one has it"
        await one.unlink(b"k")
        await one.made.upload_all()
        await ask(other)
        assert is_dirty(other, inode.ino) == b"1"
        await other.made.upload_all()
        assert is_dirty(other, inode.ino) == b"0"
        assert contents(store) == {"@0/k": B}
        await later(RECHECK)
        assert await one.read(b"k") == B
        counters = other.bucket.counters
        assert (counters["conflicts"], counters["conflicts_ended"]) == (1, 1)
        assert not len(other.made.ledger.dirty.contested)

    run(case)


@pytest.mark.parametrize("how", ["task", "lookup", "listing"])
def test_each_way_to_look_finds_it_out(
    run: Callable[[Case], None], store: MemoryStore, how: str
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"k", A)
        (inode,) = await lost(other, b"k")
        await one.unlink(b"k")
        await one.made.upload_all()
        async with trio.open_nursery() as nursery:
            if how == "task":
                nursery.start_soon(contests(other).run)
                while is_dirty(other, inode.ino) == b"conflict":
                    await later(RECHECK)
            elif how == "lookup":
                assert (await other.there(b"k")).ino == inode.ino
                await other.behind()
            else:
                assert await other.names() == [b"k"]
                await other.behind()
            assert is_dirty(other, inode.ino) == b"1"
            nursery.cancel_scope.cancel()
        await other.made.upload_all()
        assert contents(store) == {"@0/k": B}
        assert (await other.there(b"k")).ino == inode.ino

    run(case)


def test_contested_object_is_revalidated_no_more_often_than_a_copy(
    run: Callable[[Case], None],
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"k", A)
        await lost(other, b"k")
        other.calls  # noqa: B018 (what was asked so far)
        for _ in range(10):
            await other.there(b"k")
            await other.behind()
        assert other.calls == {"head": 1}
        await later(RECHECK)
        await other.there(b"k")
        await other.behind()
        assert other.calls == {"head": 1}

    run(case)


def test_two_that_wait_for_a_name_do_not_overwrite_each_other(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        store.put("p/@0/k", C, {}, once=True)
        mine, theirs = await lost(one, b"k", content=A), await lost(other, b"k")
        store.delete("p/@0/k")
        await ask(one)
        await ask(other)
        assert (is_dirty(one, mine[0].ino), is_dirty(other, theirs[0].ino)) == (b"1", b"1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.made.upload_all)
            nursery.start_soon(other.made.upload_all)
        (left,) = contents(store).values()
        assert left in {A, B}
        winner, loser = (one, other) if left == A else (other, one)
        assert len(loser.made.ledger.dirty.contested) == 1
        assert not len(winner.made.ledger.dirty.contested)
        assert await winner.read(b"k") == left
        assert await loser.read(b"k") == (B if left == A else A)
        await winner.unlink(b"k")
        await winner.made.upload_all()
        await ask(loser)
        await loser.made.upload_all()
        assert contents(store) == {"@0/k": B if left == A else A}

    run(case)


@pytest.mark.parametrize("how", ["unlink", "rename", "rewrite", "replace", "link", "evict"])
def test_change_of_a_contested_file_ends_right(
    run: Callable[[Case], None], store: MemoryStore, how: str
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"k", A)
        (inode,) = await lost(other, b"k")
        made = other.made
        wanted = {"@0/k": A}
        if how == "unlink":
            made.tree.unlink(ROOT_INO, b"k")
        elif how == "rename":
            made.renames.rename(ROOT_INO, b"k", ROOT_INO, b"m", 0)
            wanted["@0/m"] = B
        elif how == "rewrite":
            held = await made.objects.open(inode.ino, writable=True, truncate=True)
            made.write(held, C)
            made.check()
            await made.close(held, writable=True)
        elif how == "replace":
            await made.make_file(b"t", C)
            made.renames.rename(ROOT_INO, b"t", ROOT_INO, b"k", 0)
        elif how == "link":
            made.tree.link(inode.ino, ROOT_INO, b"m")
            made.tree.unlink(ROOT_INO, b"k")
            wanted["@0/m"] = B
        else:
            made.ledger.removals.evict(made.at(b"k"))
        made.check()
        await made.upload_all()
        assert contents(store) == wanted
        left = len(made.ledger.dirty.contested)
        assert left == (how in {"rewrite", "replace"})
        await one.unlink(b"k")
        await one.made.upload_all()
        await ask(other)
        await made.upload_all()
        del wanted["@0/k"]
        assert contents(store) == (wanted | {"@0/k": C} if left else wanted)

    run(case)


@pytest.mark.parametrize("theirs", [B, C])
def test_the_winner_replaces_its_file(
    run: Callable[[Case], None], store: MemoryStore, theirs: bytes
) -> None:
    """By the very same bytes, which ends the conflict, or by others."""

    async def case(one: Node, other: Node) -> None:
        await one.store(b"k", A)
        (inode,) = await lost(other, b"k")
        held = other.made.catalog.inode(inode.ino)
        assert held is not None
        held.digest = digest(B)  # a program has computed it meanwhile
        with other.made.catalog.batch() as batch:
            batch.put(held)
        await one.store(b"k", theirs)
        etag = store.head("p/@0/k").etag
        await ask(other)
        await other.made.upload_all()
        assert is_dirty(other, inode.ino) == (b"0" if theirs == B else b"conflict")
        assert contents(store) == {"@0/k": theirs}
        assert store.head("p/@0/k").etag == etag
        assert await other.read(b"k") == B

    run(case)


def test_an_upload_that_loses_when_its_file_was_renamed_goes_up_by_the_new_name(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"k", A)
        inode = await other.made.make_file(b"k", B)
        faulty = other.made.bucket_store
        assert isinstance(faulty, FaultyStore)
        renamed: list[bool] = []

        def rename(verb: str) -> None:
            if verb == "put" and not renamed:
                renamed.append(True)
                other.made.renames.rename(ROOT_INO, b"k", ROOT_INO, b"m", 0)

        faulty._pause = rename
        await other.made.upload_all()
        assert renamed
        assert contents(store) == {"@0/k": A, "@0/m": B}
        assert is_dirty(other, inode.ino) == b"0"
        assert other.bucket.counters["conflicts"] == 0

    run(case)


@pytest.mark.parametrize(
    "fault",
    [
        (Fault("head", 0, OutageError("out")),),
        (Fault("head", 0, NoObjectError("404")),),  # but it is listed
        (Fault("head", 0, NoObjectError("404")), Fault("list", 0, NoBucketError("404"))),
        (Fault("head", beside="p/@0/same"),),
    ],
)
def test_a_bucket_that_does_not_say_that_it_is_free_changes_nothing(
    run: Callable[[Case], None], store: MemoryStore, fault: tuple[Fault, ...]
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"k", A)
        await one.store(b"same", C)
        (inode,) = await lost(other, b"k")
        other.faults(*fault)
        await ask(other)
        assert is_dirty(other, inode.ino) == b"conflict"
        assert other.calls.get("put", 0) == 0
        other.faults()
        assert contents(store)["@0/k"] == A

    run(case)


def test_many_conflicts_are_few_requests(run: Callable[[Case], None], store: MemoryStore) -> None:
    """So many at most in a step, `recheck` seconds between; longer where nothing changes."""
    count = 3 * AT_ONCE

    async def case(_: Node, other: Node) -> None:
        names = [b"%04d" % number for number in range(count)]
        for name in names:
            store.put(f"p/@0/{name.decode()}", C, {}, once=True)
        inodes = await lost(other, *names)
        other.calls  # noqa: B018 (what was asked so far)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(contests(other).run)
            asked = 0
            for _step in range(40):
                await later(RECHECK / 4)
                steps = (trio.current_time() - began) / RECHECK + 1
                asked += other.calls.get("head", 0)
                assert asked <= steps * AT_ONCE
            assert asked >= count, "all of them in turn"
            seen = asked
            for _step in range(4 * timing.LONGEST):
                await later(RECHECK)
                seen += other.calls.get("head", 0)
            assert seen - asked <= count * 8, "less and less"
            for inode in inodes:
                assert is_dirty(other, inode.ino) == b"conflict"
            store.delete("p/@0/0100")
            while not len(other.made.ledger.dirty):
                await later(RECHECK)
            nursery.cancel_scope.cancel()
        await other.made.upload_all()
        assert contents(store)["@0/0100"] == B
        assert len(other.made.ledger.dirty.contested) == count - 1

    run(case)


def test_flush_asks_for_contested_objects_once(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"k", A)
        await one.store(b"m", A)
        inodes = await lost(other, b"k", b"m")
        each = contests(other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(each.run)
            await later(1)
            await one.unlink(b"k")
            await one.made.upload_all()
            other.calls  # noqa: B018 (what was asked so far)
            each.hurry()
            with trio.move_on_after(RECHECK / 2):
                while each.hurrying:  # noqa: ASYNC110 (nothing tells of it)
                    await trio.sleep(0.1)
            assert is_dirty(other, inodes[0].ino) == b"1"
            assert other.calls["head"] == 2
            each.hurry()
            assert not each.hurrying, "so often it is of no use"
            nursery.cancel_scope.cancel()
        await other.made.upload_all()
        assert contents(store) == {"@0/k": B, "@0/m": A}

    run(case)


def test_flush_does_not_wait_for_ended_contests(run: Callable[[Case], None]) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"k", A)
        await lost(other, b"k")
        each = contests(other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(each.run)
            await later(1)
            each.hurry()
            await other.unlink(b"k")
            with trio.move_on_after(RECHECK):
                while each.hurrying:  # noqa: ASYNC110 (nothing tells of it)
                    await trio.sleep(0.1)
            assert not each.hurrying
            nursery.cancel_scope.cancel()

    run(case)


def test_contests_end_together_as_far_as_no_writer_waits(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        names = [b"%d" % number for number in range(8)]
        for name in names:
            await one.store(name, A)
        await lost(other, *names)
        for name in names:
            await one.unlink(name)
        await one.made.upload_all()
        other.bucket.max_dirty_bytes = 4 * 2 * len(B)
        await ask(other)
        assert len(other.made.ledger.dirty) == 2
        while len(other.made.ledger.dirty.contested):
            assert not other.made.ledger.dirty.full
            await other.made.upload_all()
            await ask(other)
        await other.made.upload_all()
        assert set(contents(store).values()) == {B}

    run(case)


def test_a_restart_knows_them(tmp_path: Path, store: MemoryStore) -> None:
    with world(tmp_path, store=FaultyStore(store)) as made:

        async def before() -> None:
            await made.ledger.dirty.load()
            store.put("p/@0/k", A, {}, once=True)
            await made.make_file(b"k", B)
            await made.upload_all()

        async def after() -> None:
            await made.census()
            dirty, ino = made.ledger.dirty, made.at(b"k").ino
            assert ino in dirty.contested, "it is asked for before that is loaded"
            await dirty.load()
            assert list(dirty.contested) == [ino]
            await Backlog(made.dispatcher.transfers).look()
            assert not len(dirty), "it is not sent in vain"
            store.delete("p/@0/k")
            node = Node(made)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(contests(node).run)
                while not len(dirty):
                    await dirty.changed.wait()
                nursery.cancel_scope.cancel()
            await made.upload_all()
            assert contents(store) == {"@0/k": B}
            await made.check_at_rest()

        trio.run(before)
        made.restart()
        trio.run(after)


def test_those_of_an_older_catalog_are_found(tmp_path: Path, store: MemoryStore) -> None:
    """It says of them only that nothing waits for its upload."""

    async def case(made: World) -> None:
        dirty = made.ledger.dirty
        await dirty.load()
        made.ledger.accounts.census_done.set()
        store.put("p/@0/k", A, {}, once=True)
        inode = await made.make_file(b"k", B)
        with made.catalog.batch() as batch:
            dirty.unmark(inode.ino, batch)
            batch.set_fact(CAUGHT_UP, "1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Backlog(made.dispatcher.transfers).run)
            while not made.catalog.fact(CONTESTED_MARKED):  # noqa: ASYNC110 (nothing tells of it)
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert inode.ino in dirty
        await made.upload_all()
        assert inode.ino in dirty.contested
        assert made.catalog.mark(keys.CONTESTED, inode.ino) is not None
        await made.check_at_rest()

    with world(tmp_path, store=FaultyStore(store)) as made:
        trio.run(case, made)


def test_object_that_leaves_the_bucket_is_not_contested(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(_: Node, other: Node) -> None:
        other.made.namespace("n")
        store.put("p/n@1/k", A, {}, once=True)
        (inode,) = await lost(other, b"n/k")
        other.made.tell("n", media="ram+nvme")
        assert is_dirty(other, inode.ino) == b"0"
        await ask(other)
        assert not len(other.made.ledger.dirty.contested)
        other.made.tell("n", media="all")
        await Backlog(other.made.dispatcher.transfers).look()
        await other.made.upload_all()
        assert is_dirty(other, inode.ino) == b"conflict"

    run(case)


def test_two_nodes_that_do_anything_with_one_name_end_as_the_bucket_says(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    async def case(one: Node, other: Node) -> None:
        nodes = (one, other)
        for _ in range(60):
            node = chance.choice(nodes)
            here = node.made.catalog.lookup(ROOT_INO, b"k")
            match chance.randrange(5):
                case 0 if here is None:
                    await node.made.make_file(b"k", chance.randbytes(5000))
                case 1 if here is not None:
                    node.made.tree.unlink(ROOT_INO, b"k")
                case 2:
                    await node.made.upload_all()
                case 3:
                    await ask(node)
                case 4:
                    await node.find(b"k")
            node.made.check()
        for node in nodes:
            await node.made.upload_all()
            await node.behind()
        for _ in range(2):
            for node in nodes:
                await ask(node)
                await node.made.upload_all()
        there = contents(store)
        for node in nodes:
            contested = list(node.made.ledger.dirty.contested)
            assert not contested or there, "nobody waits for a name that nobody has"
            if contested:
                assert Facts.of_head("k", store.head("p/@0/k")).size == 5000

    run(case)
