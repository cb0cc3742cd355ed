"""Objects of other nodes in the bucket: kvfs finds, lists, revalidates and forgets them."""

import errno
import os
import random
import stat
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing

from kvfs import matching, prefix
from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.bucket.listing import bucket_lookup as timing
from kvfs.core.bucket.listing import open_predictor
from kvfs.core.bucket.listing.bucket_lookup import BucketLookup
from kvfs.core.bucket.listing.importing import Importing
from kvfs.core.bucket.listing.remote_entries import is_stub
from kvfs.core.lending.matching import Matching
from kvfs.errors import CatalogError, ControlError, NotFoundError, StaleError
from kvfs.s3.errors import (
    MetadataError,
    NoBucketError,
    NoObjectError,
    ObjectChangedError,
    OutageError,
    RefusedError,
    ThrottledError,
    WrongBytesError,
)
from kvfs.s3.facts import Facts
from kvfs.s3.store import ListingPage
from kvfs.settings import Settings
from kvfs.tiers import Bucket
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_uploader import BLOCK, BLOCK_TMP, contents
from tests.unit.world import World, digest, world

import kvfs.fuse.passthrough  # isort: skip  # noqa: F401 (the C part, before pyfuse3)
from kvfs.fuse import operations  # isort: skip  # it imports pyfuse3, after the C part
import pyfuse3  # isort: skip

A, B, C = b"a" * 10_000, b"b" * 20_000, b"c" * 500


RECHECK = 30.0  # s, as `Bucket` has it
IDLE = 0.5  # real s: threads that see to files take some


async def later(seconds: float) -> None:
    """So much time has passed."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    clock.jump(seconds)
    await trio.testing.wait_all_tasks_blocked()


class Requests:
    """A kernel that asks for the first time, each time."""

    number = 0

    def request(self) -> tuple[int, bool]:
        self.number += 1
        return self.number, False

    def changed(self, ino: int) -> None:
        """It has no attributes."""

    @staticmethod
    def requester() -> int:
        return Caller.pid


class Caller:
    """The calling process."""

    pid = uid = gid = 0


class Node:
    """A world with the requests of a kernel."""

    caller = cast("pyfuse3.RequestContext", Caller())

    def __init__(self, made: World) -> None:
        self.made = made
        self.operations = operations.Operations(
            *(made.tree, made.objects, made.lifecycle, cast("operations.FuseKernel", Requests())),
            slots=10,
            timeout=3600.0,
            bucket_listing=made.dispatcher.bucket_listing,
        )

    @property
    def bucket(self) -> Bucket:
        assert self.made.bucket is not None
        return self.made.bucket

    @property
    def bucket_lookup(self) -> BucketLookup:
        assert self.made.dispatcher.bucket_listing is not None
        return self.made.dispatcher.bucket_listing.bucket_lookup

    @property
    def importing(self) -> Importing:
        assert self.made.dispatcher.importing is not None
        return self.made.dispatcher.importing

    @property
    def calls(self) -> dict[str, int]:
        """Return the calls of the store since the last look, counted by name."""
        store = self.made.bucket_store
        assert isinstance(store, FaultyStore)
        found = {name: count for name, count in store.calls.items() if name != "any"}
        store.calls.clear()
        return found

    def faults(self, *wanted: Fault) -> None:
        store = self.made.bucket_store
        assert isinstance(store, FaultyStore)
        store.faults = list(wanted)
        store.calls.clear()

    async def find(self, path: bytes) -> Inode | None:
        """As a stat(2) finds it."""
        at = ROOT_INO
        for name in path.split(b"/"):
            try:
                at = (await self.operations.lookup(at, name, self.caller)).st_ino
            except pyfuse3.FUSEError as error:
                if error.errno != errno.ENOENT:
                    raise
                return None
        return self.made.ledger.table.inode(at)

    async def there(self, path: bytes) -> Inode:
        found = await self.find(path)
        assert found is not None, path
        return found

    async def names(self, path: bytes = b"") -> list[bytes]:
        """As readdir(3) lists them."""
        ino = (await self.there(path)).ino if path else ROOT_INO
        await self.operations.opendir(ino, self.caller)
        listed = self.made.tree.list_entries(ino, 2, 10_000)
        assert listed.ended
        return sorted(name for name, _, _ in listed.entries)

    async def read(self, path: bytes) -> bytes | None:
        try:
            return await self._read(path)
        except StaleError:  # the kernel looks the name up again
            return await self._read(path)

    async def _read(self, path: bytes) -> bytes | None:
        found = await self.find(path)
        if found is None:
            return None
        await self.bucket_lookup.fetch_metadata(found.ino)
        try:
            return await self.made.read(found.ino)
        except NotFoundError:
            return None

    async def store(self, path: bytes, content: bytes) -> Inode:
        """A new file, or a new version of one, that the bucket has when this returns."""
        found = await self.find(path)
        if found is None:
            found = await self.made.make_file(path, content)
        else:
            held = await self.made.objects.open(found.ino, writable=True, truncate=True)
            self.made.write(held, content)
            await self.made.close(held, writable=True)
        await self.made.upload_all()
        return self.made.tree.inode(found.ino)

    async def unlink(self, path: bytes) -> None:
        above, _, name = path.rpartition(b"/")
        parent = (await self.there(above)).ino if above else ROOT_INO
        self.made.tree.unlink(parent, name)

    async def behind(self) -> None:
        """Until nothing is asked any more."""
        while self.bucket_lookup._looks:
            await trio.lowlevel.checkpoint()


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
            trio.run(all_of_it, one, other, clock=trio.testing.MockClock(autojump_threshold=IDLE))

    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    return do


def test_object_sealed_by_another_node_is_found(run: Callable[[Case], None]) -> None:
    async def case(one: Node, other: Node) -> None:
        one.made.mkdir(b"d")
        one.made.mkdir(b"d/e")
        before = await one.store(b"d/e/f", A)
        assert await other.find(b"d/e/g") is None
        found = await other.there(b"d/e/f")
        assert (found.size, found.digest, found.mode) == (len(A), digest(A), before.mode)
        assert found.mtime_ns == before.mtime_ns
        assert (other.made.ledger.accounts.spilled, other.bucket.objects, other.bucket.used) == (
            1,
            1,
            len(A),
        )
        other.made.check()
        assert await other.read(b"d/e/f") == A
        assert other.bucket.counters["found"] == 1

    run(case)


def test_absent_name_is_cached_for_a_second(run: Callable[[Case], None]) -> None:
    async def case(one: Node, other: Node) -> None:
        assert await other.find(b"x") is None
        assert other.calls == {"head": 1, "list": 2}
        assert await other.find(b"x") is None
        assert other.calls == {}
        assert other.bucket.counters["absent_cached"] == 1
        await one.store(b"x", A)
        await later(timing.VALID)
        assert await other.read(b"x") == A

    run(case)


def test_the_only_one_to_use_a_prefix_asks_nothing(run: Callable[[Case], None]) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        other.bucket.shared = False
        assert await other.find(b"x") is None
        assert await other.names() == []
        assert other.calls == {}

    run(case)


def test_names_of_blocks_save_requests(run: Callable[[Case], None]) -> None:
    async def case(_: Node, other: Node) -> None:
        other.made.mkdir(b"d")
        assert await other.find(b"d/" + BLOCK_TMP) is None
        assert other.calls == {}
        assert await other.find(b"d/" + BLOCK) is None
        assert other.calls == {"head": 1}, "a block is no directory"
        other.made.namespace("n", media="ram+nvme")
        other.calls  # noqa: B018 (what was asked so far)
        assert await other.find(b"n/x") is None
        assert other.calls == {}

    run(case)


def test_unlinked_object_is_not_found_in_the_bucket(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        await other.there(b"x")
        await other.unlink(b"x")
        assert await other.find(b"x") is None
        assert contents(store) == {"@0/x": A}, "the bucket has yet to follow"
        await other.made.upload_all()
        assert contents(store) == {}
        assert await other.find(b"x") is None

    run(case)


def test_an_answer_from_before_it_was_deleted_is_not_believed(
    run: Callable[[Case], None], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "FIRST_WAIT", 1000.0)

    async def case(_: Node, other: Node) -> None:
        remote = other.made.remote
        assert remote is not None
        nothing = remote.before

        async def make() -> None:
            remote.before = nothing
            await other.made.make_file(b"x", A)
            await other.made.upload_all()
            remote.after = remove

        async def remove() -> None:  # the bucket was asked between the two
            remote.after = nothing
            assert contents(store) == {"@0/x": A}
            await other.unlink(b"x")
            await other.made.upload_all()

        remote.before = make
        assert await other.find(b"x") is None
        assert contents(store) == {}
        assert other.made.catalog.lookup(ROOT_INO, b"x") is None
        assert other.bucket.counters["found"] == 0

    run(case)


@pytest.mark.parametrize("how", ["create", "rename", "mkdir"])
def test_file_made_during_the_lookup_keeps_the_name(run: Callable[[Case], None], how: str) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        made, remote = other.made, other.made.remote
        assert remote is not None
        if how == "rename":
            await made.make_file(b"y", B)
        nothing = remote.after

        async def take() -> None:
            remote.after = nothing
            if how == "create":
                await made.make_file(b"x", B)
            elif how == "rename":
                made.renames.rename(ROOT_INO, b"y", ROOT_INO, b"x", 0)
            else:
                made.mkdir(b"x")

        remote.after = take
        found = await other.there(b"x")
        assert found.is_dir == (how == "mkdir")
        assert how == "mkdir" or await made.read(found.ino) == B

    run(case)


def test_renamed_object_is_listed_once(run: Callable[[Case], None], store: MemoryStore) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        await other.there(b"x")
        other.made.renames.rename(ROOT_INO, b"x", ROOT_INO, b"y", 0)
        assert await other.find(b"x") is None
        assert await other.names() == [b"y"]
        await other.made.upload_all()
        assert contents(store) == {"@0/y": A}
        assert await other.find(b"x") is None
        assert await one.read(b"y") == A
        await one.there(b"x")  # it has its own copy, and asks behind
        await one.behind()
        assert await one.find(b"x") is None

    run(case)


def test_a_directory_that_was_renamed_or_removed_does_not_rise(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        one.made.mkdir(b"d")
        for number in range(3):
            await one.store(b"d/%d" % number, A)
        assert await other.find(b"d") is not None
        await other.operations.rename(ROOT_INO, b"d", ROOT_INO, b"e", 0, other.caller)
        assert await other.find(b"d") is None
        await other.made.walk()
        assert await other.find(b"d") is None
        assert await other.names() == [b"e"]
        await other.made.upload_all()
        assert contents(store).keys() == {"@0/e/0", "@0/e/1", "@0/e/2"}
        for number in range(3):
            await other.unlink(b"e/%d" % number)
        other.made.tree.rmdir(ROOT_INO, b"e")
        assert len(contents(store)) == 3
        assert await other.find(b"e") is None
        await later(timing.VALID + 5)
        assert await other.names() == []
        await other.made.upload_all()
        assert await other.names() == []

    run(case)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"kvfs-size": "-1"},
        {"kvfs-codec": "rot13"},
        {"kvfs-format": "9"},
        {"kvfs-stored-size": "1"},
    ],
)
def test_foreign_object_is_enoent(
    run: Callable[[Case], None], store: MemoryStore, wrong: dict[str, str]
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        metadata = store.objects["p/@0/x"].metadata
        metadata.update(wrong)
        if not wrong:
            metadata.clear()
        assert await other.find(b"x") is None
        assert other.bucket.counters["refused"] == 1
        await later(timing.VALID)
        assert await other.names() == [b"x"], "a listing cannot tell"
        assert await other.find(b"x") is None
        assert contents(store) == {"@0/x": A}, "it is left alone"

    run(case)


def test_lookup_before_an_open_asks_with_the_open(run: Callable[[Case], None]) -> None:
    async def case(one: Node, other: Node) -> None:
        for name in (b"a", b"b", b"c", b"d"):
            await one.store(name, A)
            await other.there(name)
        caller = Caller()
        caller.pid = 7
        other.caller = cast("pyfuse3.RequestContext", caller)
        await later(timing.VALID)
        other.calls.clear()
        first = await other.there(b"a")
        assert other.calls == {"head": 1}, "nothing says yet that it will be opened"
        other.bucket_lookup.open_predictor.opened(7, first.ino)
        second = await other.there(b"b")
        other.bucket_lookup.open_predictor.opened(7, second.ino)
        await later(open_predictor.PAUSE)
        assert other.calls == {}, "its open asks"
        await other.there(b"c")
        await later(0.0)  # its pause has begun
        assert other.calls == {}
        await later(open_predictor.PAUSE)
        await other.behind()
        assert other.calls == {"head": 1}, "no open has come, so it is asked behind"
        await one.unlink(b"d")
        await one.made.upload_all()
        other.calls.clear()
        assert await other.find(b"d") is None, "it does not open what it looks up any more"

    run(case)


def test_a_catalog_that_fails_meanwhile_ends_nothing(
    run: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_ino: int) -> None:
        raise CatalogError("no disk")

    async def case(one: Node, other: Node) -> None:
        for name in (b"a", b"b"):
            await one.store(name, A)
        first = await other.there(b"a")
        await other.there(b"b")
        caller = Caller()
        caller.pid = 7
        other.caller = cast("pyfuse3.RequestContext", caller)
        await later(timing.VALID)
        await other.there(b"a")
        other.bucket_lookup.open_predictor.opened(7, first.ino)
        await other.there(b"b")
        await later(0.0)  # its pause has begun
        with monkeypatch.context() as patch:
            patch.setattr(other.made.ledger.dirty, "stored", fail)
            await later(open_predictor.PAUSE)
        assert "is not compared with the bucket: no disk" in caplog.text

    run(case)


def test_object_downloaded_just_now_is_not_revalidated(run: Callable[[Case], None]) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"a", A)
        found = await other.there(b"a")
        await later(timing.VALID)
        assert await other.made.read(found.ino) == A
        other.calls.clear()
        await other.there(b"a")
        await other.behind()
        assert "head" not in other.calls
        await later(RECHECK)
        await other.there(b"a")
        await other.behind()
        assert other.calls == {"head": 1}

    run(case)


def test_questions_about_one_name_are_one_and_others_go_together(
    run: Callable[[Case], None],
) -> None:
    async def case(one: Node, other: Node) -> None:
        other.made.mkdir(b"d")
        await one.made.make_file(b"x", A)
        await one.made.upload_all()
        sent: list[int] = []
        remote = other.made.remote
        assert remote is not None

        async def count() -> None:
            sent.append(1)
            for _ in range(5):
                await trio.lowlevel.checkpoint()

        remote.before = count
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(other.there, b"x")
        assert len(sent) == 1
        assert other.calls["head"] == 1
        sent.clear()
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(other.find, b"y%d" % number)
        assert len(sent) < 10
        assert other.bucket.counters["lookups"] == 101

    run(case)


def test_a_store_that_fails_is_a_miss_and_left_alone_for_a_moment(
    run: Callable[[Case], None],
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        other.faults(Fault("head", 0, OutageError("out")))
        assert await other.find(b"x") is None
        assert other.bucket.counters["failures"] == 1
        assert other.bucket.health.state == "suspect"
        other.faults()
        assert await other.find(b"x") is None
        assert await other.names() == []
        assert other.calls == {}
        await later(timing.QUIET)
        assert await other.read(b"x") == A

    run(case)


def test_a_store_that_is_slow_is_a_miss_and_its_answer_is_entered(
    run: Callable[[Case], None],
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        remote = other.made.remote
        assert remote is not None
        nothing = remote.before

        async def slow() -> None:
            remote.before = nothing
            await trio.sleep(5 * timing.WAIT)

        assert await other.find(b"y") is None, "what comes first may wait longer"
        remote.before = slow
        began = trio.current_time()
        assert await other.find(b"x") is None
        assert trio.current_time() < began + 1.5 * timing.WAIT
        await later(10 * timing.WAIT)
        assert other.made.catalog.lookup(ROOT_INO, b"x") is not None
        assert await other.read(b"x") == A

    run(case)


def test_unreachable_bucket_is_not_asked(run: Callable[[Case], None]) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        other.bucket.health.unanswered(0.0, "gone")
        assert await other.find(b"x") is None
        with pytest.raises(ControlError, match="is down"):
            await other.importing.start([])
        assert other.calls == {}

    run(case)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_object_deleted_or_replaced_by_others_goes_at_its_next_lookup(
    run: Callable[[Case], None], store: MemoryStore, how: str, *, copy: bool
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        found = await other.there(b"x")
        if copy:
            assert await other.read(b"x") == A
        if how == "deleted":
            await one.unlink(b"x")
            await one.made.upload_all()
        else:
            await one.store(b"x", B)
        await later(RECHECK if copy else timing.VALID)
        if copy:  # the answer is at once, and the question behind
            assert (await other.there(b"x")).ino == found.ino
            await other.behind()
        after = await other.find(b"x")
        if how == "deleted":
            assert after is None
        else:
            assert after is not None
            assert after.ino != found.ino
            assert await other.read(b"x") == B
        assert other.bucket.counters["stale"] == 1
        assert other.made.ledger.counters["dropped_stale"] == 1
        assert (ROOT_INO, b"x", found.ino) in other.made.gone
        assert contents(store) == ({} if how == "deleted" else {"@0/x": B})

    run(case)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("says", ["no bucket", "listed"])
def test_a_404_that_is_not_about_the_object_takes_nothing_away(
    run: Callable[[Case], None], says: str, *, copy: bool
) -> None:
    """The bucket is gone, or a proxy answers requests that it does not know."""

    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        found = await other.there(b"x")
        if copy:
            assert await other.read(b"x") == A
        faults = [Fault("head", 0, NoObjectError("404"))]
        if says == "no bucket":
            faults.append(Fault("list", 0, NoBucketError("no such bucket")))
        other.faults(*faults)
        await later(RECHECK)
        for _ in range(2):
            assert (await other.there(b"x")).ino == found.ino
            await other.behind()
        assert other.bucket.counters["stale"] == 0
        other.faults()
        await later(RECHECK)
        assert (await other.there(b"x")).ino == found.ino
        await other.behind()
        assert await other.read(b"x") == A

    run(case)


def test_open_file_keeps_its_replaced_object(run: Callable[[Case], None]) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        ino = (await other.there(b"x")).ino
        held = await other.made.objects.open(ino, writable=False)
        await one.store(b"x", B)
        await later(RECHECK)
        await other.there(b"x")
        await other.behind()
        assert other.made.content(held) == A
        assert (await other.there(b"x")).ino == ino
        await other.made.close(held, writable=False)
        await later(RECHECK)
        await other.there(b"x")
        await other.behind()
        assert await other.read(b"x") == B

    run(case)


def test_an_upload_of_its_own_is_not_taken_for_that_of_another(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, _: Node) -> None:
        await one.store(b"x", A)
        ino = (await one.there(b"x")).ino
        remote = one.made.remote
        assert remote is not None
        nothing = remote.after

        async def rewrite() -> None:
            remote.after = nothing
            await one.store(b"x", B)

        remote.after = rewrite
        await later(RECHECK)
        await one.there(b"x")
        await one.behind()
        assert (await one.there(b"x")).ino == ino
        assert await one.read(b"x") == B
        assert contents(store) == {"@0/x": B}

    run(case)


def test_a_directory_is_listed_when_it_is_read(run: Callable[[Case], None]) -> None:
    async def case(one: Node, other: Node) -> None:
        one.made.mkdir(b"d")
        one.made.mkdir(b"d/below")
        names = sorted(b"%d" % number for number in range(30))
        for name in names:
            await one.made.make_file(b"d/" + name, A)
        await one.store(b"d/below/x", B)
        await other.made.make_file(b"own", C)
        assert await other.names() == [b"d", b"own"]
        assert await other.names(b"d") == [*names, b"below"]
        assert other.bucket.counters["imported"] == 30
        other.made.check()
        other.calls  # noqa: B018 (what was asked so far)
        assert await other.names(b"d") == [*names, b"below"]
        assert other.calls == {}, "a listing is good for a while"
        parent = (await other.there(b"d")).ino
        bare = other.made.find(b"7", parent)
        assert is_stub(bare)
        assert bare.size == len(A)
        assert other.bucket_lookup.ttl_remaining(bare, 3600.0) == 0
        attributes = await other.operations.getattr(bare.ino, other.caller)
        before = one.made.at(b"d/7")
        assert attributes.st_mtime_ns == before.mtime_ns
        assert not is_stub(other.made.find(b"7", parent))
        assert await other.read(b"d/7") == A
        assert await other.read(b"d/below/x") == B
        for name in names[:10]:
            await one.unlink(b"d/" + name)
        await one.made.upload_all()
        await later(6)
        other.made.ledger.removals.evict(other.made.find(b"7", parent))
        assert await other.names(b"d") == [*names[10:], b"below"]

    run(case)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_listing_revalidates_local_objects(
    run: Callable[[Case], None], store: MemoryStore, how: str
) -> None:
    async def case(one: Node, other: Node) -> None:
        for name in (b"x", b"y"):
            await one.store(name, A)
            assert await other.read(name) == A
        before = {name: other.made.at(name).ino for name in (b"x", b"y")}
        assert await other.names() == [b"x", b"y"]
        if how == "deleted":
            await one.unlink(b"x")
            await one.made.upload_all()
        else:
            await one.store(b"x", B)
        await later(6)
        other.calls  # noqa: B018 (what was asked so far)
        assert await other.names() == [b"x", b"y"], "once in so many seconds only"
        assert set(other.calls) == {"list"}
        await later(RECHECK)
        assert await other.names() == ([b"y"] if how == "deleted" else [b"x", b"y"])
        assert other.calls["head"] == 1, "what is as it was is not asked for"
        assert other.made.at(b"y").ino == before[b"y"]
        assert other.bucket_lookup.confirmed.age(before[b"y"]) < 1
        if how == "replaced":
            assert other.made.at(b"x").ino != before[b"x"]
            assert await other.read(b"x") == B
        assert other.bucket.counters["stale"] == 1
        assert (ROOT_INO, b"x", before[b"x"]) in other.made.gone
        assert contents(store) == {"@0/y": A} | ({} if how == "deleted" else {"@0/x": B})

    run(case)


def test_an_old_listing_takes_nothing_away(
    run: Callable[[Case], None], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a cache between, or of an index that is behind: it lacks what is there, or has it as it
    was."""

    async def case(one: Node, other: Node) -> None:
        await one.store(b"old", A)
        old = store.list("p/@0/", delimiter="/")
        await one.store(b"old", B)
        await one.store(b"new", A)
        inodes = {}
        for name, content in ((b"old", B), (b"new", A)):
            assert await other.read(name) == content
            inodes[name] = other.made.at(name).ino
        real = MemoryStore.list

        def stale(self: MemoryStore, prefix: str, **options: int | str) -> ListingPage:
            return old if prefix == "p/@0/" else real(self, prefix, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(MemoryStore, "list", stale)
        assert await other.names() == [b"new", b"old"]
        for name, ino in inodes.items():
            assert other.made.at(name).ino == ino
        assert other.bucket.counters["stale"] == 0
        assert (await other.read(b"old"), await other.read(b"new")) == (B, A)

    run(case)


def test_listing_keeps_open_dirty_and_local_objects(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        for name in (b"open", b"dirty"):
            await one.store(name, A)
            assert await other.read(name) == A
        held = await other.made.objects.open(other.made.at(b"open").ino, writable=False)
        other.made.renames.rename(ROOT_INO, b"dirty", ROOT_INO, b"renamed", 0)
        await other.made.make_file(b"fresh", C)
        for key in list(store.objects):
            store.delete(key)
        await later(RECHECK)
        assert await other.names() == [b"fresh", b"open", b"renamed"]
        assert other.made.content(held) == A
        await other.made.close(held, writable=False)
        await other.made.upload_all()
        assert contents(store) == {"@0/fresh": C, "@0/renamed": A}

    run(case)


def test_stub_entry_is_not_read_without_its_metadata(run: Callable[[Case], None]) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        await other.names()
        bare = other.made.find(b"x")
        with pytest.raises(NotFoundError):
            await other.made.read(bare.ino)
        other.faults(Fault("head", 0, OutageError("out")))
        assert await other.bucket_lookup.fetch_metadata(bare.ino) is None
        assert other.made.find(b"x").ino == bare.ino, "the name stays"
        other.faults()
        await later(timing.QUIET)
        assert await other.read(b"x") == A

    run(case)


REFUSALS = (
    *(NoObjectError("404"), NoBucketError("404"), ObjectChangedError("412")),
    *(ThrottledError("503"), OutageError("out"), RefusedError("403")),
    *(WrongBytesError("other bytes"), MetadataError("nonsense")),
)
OTHERS = ("p/@0/same", "p/@0/larger")
LIES: dict[str, list[tuple[Fault, ...]]] = {
    "errors of head": [(Fault("head", 0, error),) for error in REFUSALS],
    "errors of get": [(Fault("get", 0, error),) for error in REFUSALS],
    "errors of all": [(Fault("any", 0, error),) for error in REFUSALS],
    "other bytes": [
        *((Fault("get", keep=keep),) for keep in (0, 100)),
        (Fault("get", 0, OutageError("out"), keep=100),),
        (Fault("get", 1, NoObjectError("404")),),
        (Fault("get", flip=True),),
        *((Fault("get", instead=key),) for key in OTHERS),
    ],
    "another object": [
        *((Fault(verb, instead=key),) for verb in ("head", "list") for key in OTHERS),
        *((Fault("head", beside=key),) for key in OTHERS),
        (Fault("head", instead=OTHERS[0]), Fault("get", instead=OTHERS[1])),
        (Fault("head", instead=OTHERS[0]), Fault("get", 0, NoObjectError("404"))),
        *((Fault("head", 1, instead=key), Fault("head", 2)) for key in OTHERS),
    ],
}


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("kind", LIES)
def test_a_store_that_lies_to_a_node_that_never_saw_the_name_is_a_miss(
    run: Callable[[Case], None], store: MemoryStore, kind: str, *, listed: bool
) -> None:
    """Each open is ENOENT, or has the right bytes: never ESTALE, and never other bytes."""

    async def case(one: Node, other: Node) -> None:
        others = {b"same": b"s" * len(A), b"larger": B}
        for name, content in others.items():
            await one.store(name, content)
        for number, lie in enumerate(LIES[kind]):
            directory = b"d%d" % number
            one.made.mkdir(directory)
            path = directory + b"/x"
            await one.store(path, A)
            assert await other.find(directory)
            other.faults(*lie)
            if listed:
                await other.names(directory)
            for _ in range(3):
                assert await other.read(path) in {None, A}, lie
            await later(timing.QUIET)
            assert await other.read(path) in {None, A}, lie
            await other.behind()
            other.faults()
            other.bucket.health.probed(time.monotonic(), "")
            await later(RECHECK)
            await other.read(path)
            await other.behind()
            etag = store.head(f"p/@0/{path.decode()}").etag
            damaged = other.bucket.gives_wrong_bytes(f"p/@0/{path.decode()}", etag)
            assert await other.read(path) == (None if damaged else A), lie
        for name, content in others.items():
            assert await other.read(name) == content

    run(case)


def test_renamed_stub_entry_keeps_its_metadata_in_the_bucket(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        await one.store(b"x", A)
        before = Facts.of_head("x", store.head("p/@0/x"))
        await other.names()
        other.made.renames.rename(ROOT_INO, b"x", ROOT_INO, b"y", 0)
        await other.made.upload_all()
        after = Facts.of_head("y", store.head("p/@0/y"))
        assert replace(after, key=before.key) == before
        assert contents(store) == {"@0/y": A}
        assert await other.read(b"y") == A

    run(case)


def test_a_namespace_is_found_in_its_greatest_version(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        one.made.namespace("n", version="9")
        await one.store(b"n/old", A)
        store.objects["p/n@10/new"] = store.objects["p/n@9/old"]
        found = await other.there(b"n")
        own = other.made.ledger.namespaces.own(found.ino)
        assert own is not None
        assert own.settings == replace(Settings(), version=10)
        assert await other.names(b"n") == [b"new"]
        assert await other.read(b"n/new") == A
        other.made.drop("n")
        assert await other.find(b"n") is None
        await other.made.walk()
        assert await other.find(b"n") is None

    run(case)


def test_templates_give_the_settings_of_a_found_namespace(run: Callable[[Case], None]) -> None:
    async def case(one: Node, other: Node) -> None:
        one.made.namespace("n", version="2")
        one.made.namespace("kept", version="2")
        one.made.mkdir(b"plain")
        for path in (b"n/x", b"kept/x", b"plain/x"):
            await one.store(path, A)
        told = {"n": {"weight": "7"}, "kept": {"media": "ram+nvme"}, "plain": {"weight": "3"}}
        other.made.templates = lambda name: Settings.parse(told[name]) if name in told else None
        own = other.made.ledger.namespaces.own((await other.there(b"n")).ino)
        assert own is not None
        assert (own.settings.weight, own.settings.version) == (7, 2)
        assert await other.find(b"kept") is None
        assert await other.find(b"plain") is None
        assert await other.names() == [b"n"]

    run(case)


def test_expired_object_is_neither_entered_nor_deleted(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        one.made.namespace("n")
        other.made.namespace("n", ttl="1h", ttl_from="write")
        inode = await one.made.make_file(b"n/x", A)
        one.made.attributes.change(inode.ino, mtime_ns=10**9)
        await one.made.upload_all()
        assert await other.find(b"n/x") is None
        await other.made.upload_all()
        assert len(contents(store)) == 1

    run(case)


async def imported(node: Node, *paths: str) -> tuple[int, int, dict[str, int]]:
    await node.importing.start(paths)
    while not (found := await node.importing.look())["ended"]:
        await trio.lowlevel.checkpoint()
    assert not found["failed"]
    return found["names"], found["known"], found["refused"]


def test_an_import_brings_all_names_with_their_facts(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    long = b"/".join(b"%d" % number * 200 for number in range(1, 6))

    async def case(one: Node, other: Node) -> None:
        one.made.namespace("n", version="3")
        for at in range(1, 5):
            one.made.mkdir(b"/".join(long.split(b"/")[:at]))
        one.made.mkdir(b"n/d")
        for path in (b"x", b"n/d/y", long):
            await one.store(path, A)
        store.put("p/foreign", b"", {}, once=False)
        store.put("p/@0/strange", b"", {}, once=False)
        names, known, refused = await imported(other)
        assert (names, known) == (3, 0)
        assert refused == {
            "no name of kvfs has such a key": 1,
            "no object of this kvfs: its metadata or codec": 1,
        }
        other.calls  # noqa: B018 (what was asked so far)
        for path in (b"x", b"n/d/y", long):
            assert not is_stub(other.made.at(path))
        assert await imported(other) == (0, 3, refused)
        assert await other.read(long) == A
        other.made.check()

    run(case)


HOSTILE = (
    *("@0/.kvfs", "@0/.kvfs/stats", ".kvfs@1/stats"),  # the mount's control files
    *("@0/%2E%2E", "@0/%2E", "@0/%00", "@0/d/%2E%2E", "@0/d/%00", "@0/d/" + "x" * 300),
    *("@0/%2E%2E/x", "@0/%00/x", "@0/d/%2E%2E/%2E%2E/x", "@0/" + "y" * 300 + "/x"),
    *("%2E%2E@1/x", "%2E@1/x", "z" * 300 + "@1/x", "@0/a%2Fb", "@0/d/../x", "@0//x", "@0/d/\n"),
    *("@0/d/%0a", "n@99999999999999999999/x", "n@-1/x", "@0/%zz", "%/../x", ".kvfs/../x"),
)


@pytest.mark.parametrize("all_at_once", [False, True])
def test_keys_that_no_kvfs_has_made_are_no_names(
    run: Callable[[Case], None],
    store: MemoryStore,
    all_at_once: bool,  # noqa: FBT001 (pytest's)
) -> None:
    """A client that may write to the bucket can choose any key: none leads out of a directory.

    Such keys do not hide the names of other objects either.
    """

    async def case(one: Node, other: Node) -> None:
        one.made.mkdir(b"d")
        one.made.namespace("n", version="3")
        for path in (b"x", b"d/x", b"n/x"):
            await one.store(path, A)
        right = dict(store.objects["p/@0/x"].metadata)
        for key in HOSTILE:
            store.put(f"p/{key}", A, right, once=False)
        if all_at_once:
            names, known, _ = await imported(other)
            assert (names, known) == (3, 0)
        assert await other.names() == [b"d", b"n", b"x"]
        assert await other.names(b"d") == [b"x"]
        assert await other.names(b"n") == [b"x"]
        assert await other.read(b"d/x") == A
        assert {f"p/{key}" for key in HOSTILE} <= store.objects.keys(), "they are left alone"
        other.made.check()

    run(case)


def test_import_counts_missing_and_foreign_keys(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        one.made.mkdir(b"d")
        await one.store(b"d/x", A)
        store.put("p/@0/strange", b"", {}, once=False)
        other.made.mkdir(b"own")
        for paths, missing in (
            ((), []),
            (("d", "own", "d/x", "strange"), []),
            (("nowhere", "d", "d/y", "own/x"), ["nowhere", "d/y", "own/x"]),
        ):
            await imported(other, *paths)
            assert (await other.importing.look())["missing"] == missing

    run(case)


def test_an_import_may_be_of_some_paths_and_goes_on_where_it_ended(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    async def case(one: Node, other: Node) -> None:
        one.made.mkdir(b"d")
        one.made.namespace("n")
        for path in (b"d/1", b"d/2", b"d2", b"n/1", b"n/2"):
            await one.store(path, A)
        other.bucket.shared = False
        assert await imported(other, "d/1", "n/2") == (2, 0, {})
        assert await imported(other, "d", "n") == (2, 2, {})
        assert not other.made.catalog.lookup(ROOT_INO, b"d2")
        other.bucket.shared = True
        assert await other.names() == [b"d", b"d2", b"n"]
        assert await imported(other) == (1, 4, {}), "what was bare has its facts now"
        store.put("p/m@1/x", A, store.head("p/n@1/1").metadata, once=False)
        await other.made.make_file(b"m", B)
        names, _, refused = await imported(other)
        assert (names, refused) == (0, {"of a namespace, or a version of one, that is not here": 1})

    run(case)


def test_random_walks_of_two_nodes_read_only_written_bytes(
    run: Callable[[Case], None], store: MemoryStore
) -> None:
    seed = int(os.environ.get("KVFS_SEED", random.randrange(1 << 32)))
    print(f"seed {seed}")
    dice = random.Random(seed)
    paths = [b"a", b"b", b"d/a", b"d/b"]
    written: dict[bytes, set[bytes]] = {path: set() for path in paths}

    async def step(node: Node) -> None:
        path, other = dice.sample(paths, 2)
        what = dice.choice(
            ["write", "write", "read", "read", "unlink", "rename", "list", "evict", "sync", "wait"]
        )
        if what == "wait":
            await later(dice.choice([0.1, timing.VALID, RECHECK]))
        elif what == "sync":
            await node.made.upload_all()
        elif what == "list":
            await node.names()
        elif what == "read":
            content = await node.read(path)
            assert content is None or content in written[path], path
        elif what == "write":
            content = dice.randbytes(dice.randrange(1, 5000))
            written[path].add(content)
            await node.store(path, content)
        elif (found := await node.find(path)) is not None:
            parent, name = found.links[0][0], path.rpartition(b"/")[2]
            target, into = other.rpartition(b"/")[2], other.rpartition(b"/")[0]
            if what == "unlink":
                node.made.tree.unlink(parent, name)
            elif what == "evict" and found.in_bucket:
                node.made.ledger.removals.evict(found)
            elif what == "rename" and (directory := await node.find(into) if into else found):
                await node.find(other)
                if await node.find(path):
                    written[other] |= written[path]
                    ino = directory.ino if into else ROOT_INO
                    node.made.renames.rename(parent, name, ino, target, 0)
        await node.behind()
        node.made.check_accounts()

    async def case(one: Node, other: Node) -> None:
        nodes = (one, other)
        one.made.mkdir(b"d")
        other.made.mkdir(b"d")
        for _ in range(300):
            await step(dice.choice(nodes))
        for _ in range(3):
            for node in nodes:
                await node.made.upload_all()
        for _ in range(3):
            await later(RECHECK)
            for node in nodes:
                for path in paths:
                    await node.find(path)
                    await node.behind()
        for path in paths:
            key = f"p/@0/{path.decode()}"
            for node in nodes:
                found = await node.find(path)
                told = None if found is None else node.made.ledger.dirty.stored(found.ino)
                if found is None or told is None or told.key != key or not found.in_bucket:
                    continue  # nowhere, or of this node only: another one has published the name
                assert key in store.objects, path
                assert await node.read(path) == store.objects[key].data, path

    run(case)


def test_kernel_caches_names_of_a_shared_bucket_briefly(
    run: Callable[[Case], None],
) -> None:
    async def case(one: Node, other: Node) -> None:
        inode = await one.store(b"x", A)
        assert one.bucket_lookup.ttl_remaining(inode, 3600.0) == RECHECK
        one.made.ledger.removals.evict(inode)
        assert one.bucket_lookup.ttl_remaining(inode, 3600.0) == timing.VALID
        assert one.bucket_lookup.ttl_remaining(inode, 0.5) == 0.5
        directory = other.made.mkdir(b"d")
        assert stat.S_ISDIR(directory.mode)
        assert one.bucket_lookup.ttl_remaining(directory, 3600.0) == 3600.0
        found = await other.there(b"x")
        assert other.bucket_lookup.ttl_remaining(found, 3600.0, listed=True) == timing.VALID
        await later(timing.VALID)
        assert other.bucket_lookup.ttl_remaining(found, 3600.0, listed=True) == 0, (
            "nobody has looked at it"
        )
        assert await other.read(b"x") is not None
        await later(RECHECK / 2)
        found = other.made.at(b"x")
        left = other.bucket_lookup.ttl_remaining(found, 3600.0, listed=True)
        assert 0 < left < RECHECK / 2 + timing.VALID
        assert other.bucket_lookup.ttl_remaining(found, 3600.0) == RECHECK
        one.bucket.shared = False
        assert one.bucket_lookup.ttl_remaining(inode, 3600.0) == 3600.0

    run(case)


def test_prefixes_of_another_node(run: Callable[[Case], None]) -> None:
    """Found by their paths, with the directories that they bring; what goes there goes here."""
    root = prefix.root_key("a fingerprint")
    keys = prefix.block_keys(root, range(5), 1)
    paths = [b"n/" + prefix.path(*pair).encode() for pair in pairwise([root, *keys])]

    async def case(one: Node, other: Node) -> None:
        for node in (one, other):
            node.made.namespace("n", prefix="on")
        one.made.mkdir(b"n/" + root.hex().encode())
        for path in paths:
            await one.store(path, A)
        for at in (3, 0, 1):  # as a bisection asks
            assert await other.find(paths[at])
            other.made.check_names()
        assert await other.read(paths[4]) == A
        assert await other.find(paths[2])
        other.made.check_names()
        request = matching.unpack_request(matching.pack_request(root, keys))
        answer = await Matching(other.made.tree).answer((await other.there(b"n")).ino, request)
        assert (answer.blocks, sum(answer[1:4])) == (5, 5 * len(A))
        await one.unlink(paths[1])
        await one.made.close_prefixes()
        await one.made.upload_all()
        assert [await one.find(path) is not None for path in paths] == [True, *[False] * 4]
        await later(RECHECK)
        assert await other.find(paths[1]) is None
        await other.made.close_prefixes()
        assert [await other.find(path) is not None for path in paths] == [True, *[False] * 4]
        for node in (one, other):
            node.made.check_names()

    run(case)
