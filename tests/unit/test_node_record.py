"""This node's record in the bucket, and what the daemon tells of its objects there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvfs.core.bucket import node
from kvfs.core.bucket.node import NodeRecord
from kvfs.s3.errors import OutageError
from kvfs.s3.keys import Keys, Space
from kvfs.s3.nodes import Node, Nodes
from kvfs.s3.transfer import StoreTransfers, Terms
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_uploader import A
from tests.unit.world import World, world

X1, X2, Y1 = Space(b"x", 1), Space(b"x", 2), Space(b"y", 1)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def faulty(store: MemoryStore) -> FaultyStore:
    return FaultyStore(store)


@pytest.fixture
def made(tmp_path: Path, faulty: FaultyStore) -> Iterator[World]:
    with world(tmp_path, store=faulty) as found:
        trio.run(found.ledger.dirty.load)
        yield found
        trio.run(found.check_at_rest)


def node_record(made: World) -> NodeRecord:
    found = made.dispatcher.node_record
    assert found is not None
    return found


def record(store: MemoryStore) -> Node:
    transfers = StoreTransfers(store, Terms())
    (found,) = Nodes(transfers, Keys("p/")).look()
    transfers.close()
    return found


def test_record_lists_the_namespaces(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        told = node_record(made)
        await told.look()
        assert record(store).has == frozenset()
        made.namespace("x")
        await told.look()
        assert record(store).has == {X1}
        store.put("p/x@1/left", b"", {}, once=False)
        made.tell("x", version="2")
        made.namespace("y")
        await told.look()
        assert record(store).has == {X1, X2, Y1}, "what is yet to be walked may be in use"
        await made.walk()
        await told.look()
        found = record(store)
        assert (found.has, found.had) == (frozenset({X2, Y1}), frozenset({X1}))
        assert (found.identity, found.mountpoint) == ("w", "")
        store.delete("p/x@1/left")
        made.namespace("z")
        await told.look()
        assert record(store).had == frozenset(), "there is nothing to explain"

    trio.run(case)


def test_record_is_written_at_a_change_and_once_a_day(made: World, faulty: FaultyStore) -> None:
    async def case() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node_record(made).watch)
            await trio.sleep(3600)
            assert faulty.calls["put"] == 1
            made.namespace("x")
            await trio.sleep(0.1)
            assert faulty.calls["put"] == 2
            await trio.sleep(86400 - 3601)
            assert faulty.calls["put"] == 2
            await trio.sleep(3700)
            assert faulty.calls["put"] == 3
            nursery.cancel_scope.cancel()

    trio.run(case, clock=MockClock(autojump_threshold=0))


def test_restart_keeps_the_record_until_all_trees_are_walked(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        made.namespace("x")
        await node_record(made).look()
        made.drop("x")
        made.restart()
        await made.census()
        await made.ledger.dirty.load()
        await node_record(made).look()
        assert record(store).has == {X1}
        await made.walk()
        await node_record(made).look()
        assert record(store).has == frozenset()

    trio.run(case)


def test_record_keeps_the_namespace_of_an_uncopied_rename(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        told = node_record(made)
        for name in ("x", "y"):
            made.namespace(name)
        await made.make_file(b"x/a", A)
        await made.upload_all()
        made.renames.rename(made.at(b"x").ino, b"a", made.at(b"y").ino, b"a", 0)
        await told.look()
        made.drop("x")
        await made.walk()
        await told.look()
        assert record(store).has == {X1, Y1}
        has = node.spaces(made.ledger.namespaces)
        assert has == {Y1}
        keys = Keys("p/")
        assert node.strays_after(made.catalog, keys, has, 0) == (["p/x@1/a"], 0)
        await made.upload_all()
        await told.look()
        assert record(store).has == {Y1}
        assert node.strays_after(made.catalog, keys, has, 0)[0] == []

    trio.run(case)


def test_a_store_that_fails_is_asked_again(
    made: World, faulty: FaultyStore, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def case() -> None:
        faulty.faults.append(Fault("put", error=OutageError("away")))
        told = node_record(made)
        await told.look()
        await told.look()
        assert told.published is None
        warned = [one for one in caplog.records if one.levelname == "WARNING"]
        assert [one.getMessage() for one in warned] == [
            "this node's record is not in s3://memory/p/ yet, kvfs tries again: away (said once)"
        ]
        faulty.faults.clear()
        await told.look()
        assert record(store).has == frozenset()

    trio.run(case)


def test_all_of_many_marks_are_looked_at(made: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "STEP", 2)
    monkeypatch.setattr(node, "STEPS", 2)

    async def case() -> None:
        names = [b"long" * 60 + b"%d" % number for number in range(7)]
        made.mkdir(b"d")
        deep = b"d"
        for _ in range(4):
            deep += b"/" + b"e" * 250
            made.mkdir(deep)
        for name in names:
            await made.make_file(deep + b"/" + name, A)
        await made.upload_all()
        assert made.bucket is not None
        found: list[str] = []
        after, asked = 0, 0
        while after or not asked:
            told = await node.describe(made.ledger.namespaces, made.bucket, "w", "/notes", after)
            found += told["strays"]
            after, asked = told["after"], asked + 1
        assert len(found) == len(set(found)) == len(names), "a hash does not say whose it is"
        assert asked == 2
        assert told["identity"] == "w"

    trio.run(case)
