"""Scans: a process that looks through a directory gets only the first bytes of its files."""

import os
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.bucket.download import hydration
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.names.tree import COOKIE_PARENT
from kvfs.core.namespaces.open_order import caller
from kvfs.core.objects import scans
from kvfs.core.objects.scans import DIRECTORIES, FEW, PAUSE, PROCESSES, Scans, process_of
from kvfs.core.objects.takeover import Left, adopt
from kvfs.errors import NotFoundError, StaleError, TierError
from kvfs.s3 import header
from kvfs.s3.chunks import LEAST as CHUNK
from kvfs.s3.errors import MetadataError, OutageError, SourceError
from kvfs.s3.header import LEAST, NAME, SIZE
from kvfs.s3.store import Store
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_hydration import spilled
from tests.unit.test_uploader import again, counters, faults
from tests.unit.world import MIB, World, digest, world

from kvfs.fuse.passthrough import Slot  # isort: skip  (the C part, before pyfuse3)
import pyfuse3  # isort: skip
from kvfs.fuse import operations  # isort: skip

SEED = 23
CONTENT = random.Random(SEED).randbytes(LEAST + 4321)
OTHER = random.Random(SEED + 1).randbytes(LEAST + 4321)


# Processes that scan


@pytest.fixture
def found() -> Iterator[Scans]:
    """Of processes that are what `caller` says."""
    yield Scans()
    caller.set(0)


@pytest.fixture
def _any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "process_of", lambda thread: thread)


def file(*parents: int) -> Inode:
    return Inode(
        ino=99, mode=0o100644, uid=0, gid=0, links=tuple((parent, 1) for parent in parents)
    )


def asked(found: Scans, process: int, *parents: int) -> bool:
    caller.set(process)
    return found.opens(file(*parents))


def listed(found: Scans, process: int, directory: int) -> None:
    caller.set(process)
    found.listed(directory)


def test_a_thread_is_of_its_process() -> None:
    threads: list[int] = []
    ends = threading.Event()

    def run() -> None:
        threads.append(threading.get_native_id())
        ends.wait(60)

    one = threading.Thread(target=run)
    one.start()
    try:
        while not threads:
            pass
        assert process_of(threads[0]) == os.getpid() != threads[0]
    finally:
        ends.set()
        one.join()
    assert process_of(0) == 0
    assert process_of(1 << 30) == 1 << 30, "it is not to be seen"


@pytest.mark.usefixtures("_any")
def test_process_that_lists_a_directory_is_a_scanner(found: Scans) -> None:
    async def case() -> None:
        assert not asked(found, 1, 10)
        listed(found, 1, 10)
        assert asked(found, 1, 10)
        assert asked(found, 1, 11, 10), "it has two names"
        assert not asked(found, 1, 11)
        assert not asked(found, 2, 10)
        assert not asked(found, 1), "it has none"
        listed(found, 0, 10)
        assert not asked(found, 0, 10), "nobody"

    trio.run(case)


@pytest.mark.usefixtures("_any")
def test_a_scan_ends_with_a_pause(found: Scans) -> None:
    async def case() -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        listed(found, 1, 10)
        for _ in range(3):
            clock.jump(PAUSE - 1)
            assert asked(found, 1, 10)
        clock.jump(PAUSE + 1)
        assert not asked(found, 1, 10)
        listed(found, 1, 11)
        assert not asked(found, 1, 10), "that was another one"

    trio.run(case, clock=MockClock())


@pytest.mark.usefixtures("_any")
def test_process_that_reads_on_is_no_scanner_until_it_rests(found: Scans) -> None:
    async def case() -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        listed(found, 1, 10)
        for _ in range(FEW + 1):
            assert asked(found, 1, 10)
        found.read_on()
        assert asked(found, 1, 10), "one of many"
        found.read_on()
        assert not asked(found, 1, 10)
        listed(found, 1, 11)
        assert not asked(found, 1, 11), "as `cp -r` goes on"
        clock.jump(PAUSE + 1)
        listed(found, 1, 11)
        assert asked(found, 1, 11)
        caller.set(2)
        found.read_on()

    trio.run(case, clock=MockClock())


@pytest.mark.usefixtures("_any")
def test_remembered_directories_and_processes_are_bounded(found: Scans) -> None:
    async def case() -> None:
        for directory in range(DIRECTORIES + 1):
            listed(found, 1, directory)
        assert not asked(found, 1, 0)
        assert asked(found, 1, 1)
        for process in range(2, PROCESSES + 2):
            assert asked(found, 1, 1), "it goes on"
            listed(found, process, 5)
        assert asked(found, 1, 1)
        assert not asked(found, 2, 5)
        assert asked(found, 3, 5)

    trio.run(case)


# The proof of a header


def test_the_digest_of_a_header(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(CONTENT)
    with path.open("rb") as file:
        found = header.weigh(file.fileno(), len(CONTENT))
        assert header.weigh(file.fileno(), LEAST) == b"", "all of it comes as fast"
    assert found == digest(CONTENT[:SIZE])
    assert header.of_metadata("k", header.metadata(found)) == found
    assert header.metadata(b"") == {}
    assert header.of_metadata("k", {}) == b""
    assert header.proven(CONTENT[:SIZE], found)
    assert not header.proven(CONTENT[1 : SIZE + 1], found)
    assert not header.proven(CONTENT[: SIZE - 1], digest(CONTENT[: SIZE - 1]))
    path.write_bytes(b"short")
    with path.open("rb") as file, pytest.raises(SourceError, match="ends at 5"):
        header.weigh(file.fileno(), len(CONTENT))


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32])
def test_another_word_about_it_is_refused(text: str) -> None:
    with pytest.raises(MetadataError, match=f"k: metadata {NAME} is .* expected 32 hexadecimals"):
        header.of_metadata("k", {NAME: text})


# In the daemon


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def made(tmp_path: Path, store: MemoryStore) -> Iterator[World]:
    with world(tmp_path, store=FaultyStore(store), passthrough=True) as found:
        trio.run(found.ledger.dirty.load)
        caller.set(os.getpid())
        yield found
        caller.set(0)
        trio.run(found.check_at_rest)


def asks(made: World) -> tuple[int, int]:
    """How often for first bytes, and for others."""
    assert isinstance(made.bucket_store, FaultyStore)
    return made.bucket_store.calls["peek"], made.bucket_store.calls["get"]


async def scanned(made: World, content: bytes = CONTENT, name: bytes = b"a") -> OpenObject:
    """Open an object that only the bucket has, as a process that has listed its directory."""
    inode = await spilled(made, name, content)
    made.objects.scans.listed(ROOT_INO)
    return await made.objects.open(inode.ino, writable=False)


async def read(made: World, held: OpenObject, start: int, length: int = 100) -> bytes:
    return await made.objects.read(held, start, length)


async def whole(made: World, held: OpenObject) -> bytes:
    pieces = [await read(made, held, at, 5000) for at in range(0, held.inode.size, 5000)]
    return b"".join(pieces)


async def close(made: World, *all_held: OpenObject) -> None:
    for held in all_held:
        await made.close(held, writable=False)


def test_a_scan_fetches_first_bytes_only(made: World) -> None:
    async def case() -> None:
        held = await scanned(made)
        assert (held.direct, held.fd, held.backing_id) == (True, -1, 0)
        assert await read(made, held, 0, SIZE) == CONTENT[:SIZE]
        assert await read(made, held, 7, SIZE - 7) == CONTENT[7:SIZE]
        made.check()
        await close(made, held)
        made.check()
        assert asks(made) == (1, 0)
        assert (counters(made)["headers"], "downloads" in counters(made)) == (1, False)
        assert made.bucket is not None
        assert made.bucket.hits == 0
        assert made.ledger.namespaces.default.counters["read_s3"] == 0
        assert made.ledger.tiers.holders(again(made, held.inode.ino)) == []

    trio.run(case)


@pytest.mark.parametrize(("start", "length"), [(0, SIZE + 1), (SIZE, 1), (1, SIZE), (0, 1 << 20)])
def test_scanned_handle_that_reads_on_gets_all_bytes(made: World, start: int, length: int) -> None:
    async def case() -> None:
        held = await scanned(made)
        assert await read(made, held, 0) == CONTENT[:100]
        assert await read(made, held, start, length) == CONTENT[start : start + length]
        made.check()
        assert held.header is None
        assert held.fd >= 0
        assert await whole(made, held) == CONTENT
        await close(made, held)
        made.check()
        assert counters(made)["downloads"] == 1
        assert made.bucket is not None
        assert made.bucket.hits == 1
        assert made.ledger.namespaces.default.counters["read_s3"] == 1
        assert await made.read(held.inode.ino) == CONTENT

    trio.run(case)


def test_readers_at_the_same_time_fetch_it_once(made: World) -> None:
    async def case() -> None:
        held = await scanned(made)
        for _ in range(FEW):
            assert made.objects.scans.opens(held.inode)
        found: list[bytes] = []

        async def one(start: int) -> None:
            found.append(await read(made, held, start))

        async with trio.open_nursery() as nursery:
            for start in (SIZE, SIZE * 2, 0):
                nursery.start_soon(one, start)
        assert sorted(found) == sorted(CONTENT[at : at + 100] for at in (SIZE, SIZE * 2, 0))
        assert made.objects.scans.opens(held.inode), "it has read on once"
        await close(made, held)
        assert counters(made)["downloads"] == 1

    trio.run(case)


def test_open_without_a_listing_downloads_the_object(made: World) -> None:
    async def case() -> None:
        inode = await spilled(made, b"a", CONTENT)
        held = await made.objects.open(inode.ino, writable=False)
        assert not held.direct
        await close(made, held)
        assert "headers" not in counters(made)

    trio.run(case)


def test_a_reader_is_found_out(made: World) -> None:
    async def case() -> None:
        held = await scanned(made)
        assert await whole(made, held) == CONTENT
        await close(made, held)
        held = await scanned(made, OTHER, b"b")
        assert not held.direct
        await close(made, held)
        assert counters(made)["headers"] == 1

    trio.run(case)


def test_others_that_scan_it_read_the_same(made: World) -> None:
    async def case() -> None:
        held = await scanned(made)
        other = await made.objects.open(held.inode.ino, writable=False)
        assert other is held
        assert await read(made, other, 0) == CONTENT[:100]
        await close(made, held)
        made.check()
        assert await read(made, other, 0) == CONTENT[:100]
        await close(made, other)
        assert asks(made) == (1, 0)

    trio.run(case)


def test_open_by_another_process_downloads_the_scanned_object(made: World) -> None:
    async def case() -> None:
        held = await scanned(made)
        caller.set(1)
        other = await made.objects.open(held.inode.ino, writable=False)
        assert other is held
        assert held.fd >= 0
        assert held.header is None
        assert await whole(made, held) == CONTENT
        await close(made, held, other)
        caller.set(os.getpid())
        assert made.objects.scans.opens(held.inode), "nobody who scans has read on"

    trio.run(case)


@pytest.mark.parametrize("truncate", [False, True])
def test_a_writer_has_all_of_it(made: World, *, truncate: bool) -> None:
    async def case() -> None:
        held = await scanned(made)
        writer = await made.objects.open(held.inode.ino, writable=True, truncate=truncate)
        made.write(writer, b"new")
        assert await read(made, held, 0, 5) == (b"new" if truncate else b"new" + CONTENT[3:5])
        await made.close(writer, writable=True)
        await close(made, held)
        wanted = b"new" if truncate else b"new" + CONTENT[3:]
        assert await made.read(held.inode.ino) == wanted
        await made.upload_all()

    trio.run(case)


async def _unlinked(made: World) -> None:
    made.tree.unlink(ROOT_INO, b"a")


async def _renamed(made: World) -> None:
    made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)


async def _replaced(made: World) -> None:
    await made.store(b"t", OTHER, made.ram)
    made.renames.rename(ROOT_INO, b"t", ROOT_INO, b"a", 0)


async def _renamed_and_unlinked(made: World) -> None:
    await _renamed(made)
    spill = made.dispatcher.uploader
    assert spill is not None
    for ino in spill.dirty:
        await made.upload(ino)
    made.tree.unlink(ROOT_INO, b"b")


HAPPENINGS = [_unlinked, _renamed, _replaced, _renamed_and_unlinked]


@pytest.mark.parametrize("happening", HAPPENINGS)
@pytest.mark.parametrize("on", [False, True])
def test_scanned_object_is_readable_after_a_change_of_its_name(
    made: World, store: MemoryStore, happening: Callable[[World], Awaitable[None]], *, on: bool
) -> None:
    async def case() -> None:
        held = await scanned(made)
        await happening(made)
        spill = made.dispatcher.uploader
        assert spill is not None
        await spill.deletion.delete_some()
        assert "p/@0/a" in store.objects, "somebody may read on"
        made.check()
        assert await read(made, held, 0) == CONTENT[:100]
        if on:
            assert await whole(made, held) == CONTENT
        await close(made, held)
        await made.dispatcher.trash.empty()
        made.check()
        await made.upload_all()
        made.check()
        gone = happening is not _replaced
        assert ("p/@0/a" in store.objects) is not gone

    trio.run(case)


def test_object_that_replaced_its_key_is_not_read_for_a_scanned_one(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        held = await scanned(made)
        await _replaced(made)
        spill = made.dispatcher.uploader
        assert spill is not None
        for ino in spill.dirty:
            await made.upload(ino)
        assert store.objects["p/@0/a"].data == OTHER
        assert await read(made, held, 0) == CONTENT[:100]
        with pytest.raises(TierError):
            await read(made, held, SIZE)
        assert await read(made, held, 0) == CONTENT[:100]
        await close(made, held)

    trio.run(case)


def test_drop_of_a_namespace_keeps_bytes_of_open_scans(made: World) -> None:
    async def case() -> None:
        made.namespace("space")
        inode = await made.make_file(b"space/a", CONTENT)
        await made.upload_all()
        made.ledger.removals.evict(again(made, inode.ino))
        made.objects.scans.listed(made.at(b"space").ino)
        held = await made.objects.open(inode.ino, writable=False)
        assert held.header is not None
        made.drop("space")
        await made.walk()
        assert await whole(made, held) == CONTENT
        await close(made, held)
        await made.walk()
        await made.upload_all()

    trio.run(case)


def test_its_next_daemon_has_the_rest_come(made: World) -> None:
    async def case() -> None:
        held = await scanned(made)
        left = Left(
            *(1, held.inode.ino, 0),
            writable=False,
            tier=held.tier.number,
            ending=False,
            direct=True,
        )
        made.restart(crash=True)
        await made.census()
        await made.ledger.dirty.load()
        again_held = adopt(made.objects, [left])[1]
        assert again_held is not held
        assert (again_held.fd, again_held.header) == (-1, None)
        made.check()
        assert await read(made, again_held, 0) == CONTENT[:100]
        assert await whole(made, again_held) == CONTENT
        await close(made, again_held)
        made.check()

    trio.run(case)


# As the kernel asks


class Asker:
    """A kernel that asks for this process, and who asks."""

    uid = gid = 0
    pid = os.getpid()

    def request(self) -> tuple[int, bool]:
        return 1, False

    def requester(self) -> int:
        return self.pid

    def changed(self, ino: int) -> None:
        """It has no attributes."""

    def bind(self, slot: Slot, *, noflush: bool) -> None:
        assert noflush
        self.direct = slot.direct

    def set_state(self, handle: int, state: object) -> None:
        """It does not die."""

    def fill(self, *_: object, nowait: bool) -> bool:
        del nowait
        return False


@pytest.mark.parametrize("lists", [True, False])
def test_scans_are_known_by_the_process_of_the_request(
    made: World, monkeypatch: pytest.MonkeyPatch, *, lists: bool
) -> None:
    async def case() -> None:
        inode = await spilled(made, b"a", CONTENT)
        asker = Asker()
        mount = operations.Operations(
            *(made.tree, made.objects, made.lifecycle, cast("operations.FuseKernel", asker)),
            slots=10,
            timeout=1.0,
        )
        who = cast("pyfuse3.RequestContext", asker)
        monkeypatch.setattr(pyfuse3, "readdir_reply", lambda *_: True)
        if lists:
            await mount.readdir(ROOT_INO, COOKIE_PARENT, cast("Any", None))
        handle = (await mount.open(inode.ino, os.O_RDONLY, who)).fh
        assert asker.direct is lists
        if lists:
            assert await mount.read(handle, 0, SIZE) == CONTENT[:SIZE]
            assert asks(made) == (1, 0)
            assert await mount.read(handle, SIZE - 1, 100) == CONTENT[SIZE - 1 : SIZE + 99]
        assert asks(made) == (int(lists), 1)
        await mount.release(handle)

    trio.run(case)


# With any fault of the bucket, no bytes are given that were not compared


@pytest.mark.parametrize(
    "fault",
    [
        Fault("peek", flip=True),
        Fault("peek", keep=SIZE - 1),
        Fault("peek", error=MetadataError("peek")),
    ],
)
def test_unverified_header_is_not_served(made: World, fault: Fault) -> None:
    async def case() -> None:
        inode = await spilled(made, b"a", CONTENT)
        made.objects.scans.listed(ROOT_INO)
        faults(made, fault)
        held = await made.objects.open(inode.ino, writable=False)
        assert not held.direct, "it came as a whole"
        assert made.content(held) == CONTENT
        await close(made, held)
        assert "headers" not in counters(made)
        assert made.bucket is not None
        assert made.bucket.health.state == "healthy"

    trio.run(case)


async def _without(store: MemoryStore) -> None:
    del store.objects["p/@0/a"].metadata[NAME]


async def _another_etag(store: MemoryStore) -> None:
    store.objects["p/@0/a"].etag = "another"


async def _of_another(store: MemoryStore) -> None:
    metadata = store.objects["p/@0/a"].metadata
    metadata["kvfs-xxh3-128"] = metadata["kvfs-stored-xxh3-128"] = digest(OTHER).hex()


@pytest.mark.parametrize("change", [_without, _another_etag, _of_another])
def test_scan_of_an_object_that_changed_in_the_bucket_downloads_it(
    made: World, store: MemoryStore, change: Callable[[MemoryStore], Awaitable[None]]
) -> None:
    async def case() -> None:
        inode = await spilled(made, b"a", CONTENT)
        await change(store)
        made.objects.scans.listed(ROOT_INO)
        held = await made.objects.open(inode.ino, writable=False)
        assert not held.direct
        assert made.content(held) == CONTENT
        await close(made, held)

    trio.run(case)


def test_small_ones_and_those_stored_compressed_come_as_a_whole(
    made: World, store: MemoryStore
) -> None:
    async def case() -> None:
        held = await scanned(made, CONTENT[:LEAST])
        assert not held.direct
        assert NAME not in store.objects["p/@0/a"].metadata
        await close(made, held)
        made.namespace("packed", compression="s3")
        inode = await made.make_file(b"packed/a", bytes(MIB))
        await made.upload_all()
        assert store.objects["p/packed@1/a"].metadata["kvfs-codec"] != "none"
        made.ledger.removals.evict(again(made, inode.ino))
        made.objects.scans.listed(made.at(b"packed").ino)
        held = await made.objects.open(inode.ino, writable=False)
        assert not held.direct
        assert made.content(held) == bytes(MIB)
        await close(made, held)
        assert asks(made)[0] == 0

    trio.run(case)


def test_an_object_that_is_gone_is_a_miss_for_good(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await spilled(made, b"a", CONTENT)
        made.objects.scans.listed(ROOT_INO)
        store.objects.clear()
        with pytest.raises(StaleError):
            await made.objects.open(inode.ino, writable=False)
        assert made.catalog.inode(inode.ino) is None

    trio.run(case)


def test_a_broken_connection_is_asked_again(made: World) -> None:
    async def case() -> None:
        inode = await spilled(made, b"a", CONTENT)
        made.objects.scans.listed(ROOT_INO)
        faults(made, Fault("peek", 1, OutageError("broken")))
        held = await made.objects.open(inode.ino, writable=False)
        assert held.header is not None
        await close(made, held)

    trio.run(case)


def test_an_outage_is_a_miss_as_ever(made: World) -> None:
    async def case() -> None:
        inode = await spilled(made, b"a", CONTENT)
        made.objects.scans.listed(ROOT_INO)
        store = faults(made, Fault("any", error=OutageError("away")))
        with pytest.raises(NotFoundError, match="away"):
            await made.objects.open(inode.ino, writable=False)
        assert made.ledger.counters["opens_unreadable"] == 1
        assert counters(made)["failures"] == 1
        assert made.bucket is not None
        assert made.bucket.health.state == "suspect"
        made.bucket.health.probed(0.0, "away")
        made.bucket.health.probed(0.0, "away")
        assert made.bucket.health.down
        asked = store.calls["any"]
        with pytest.raises(NotFoundError, match="away"):
            await made.objects.open(inode.ino, writable=False)
        assert store.calls["any"] == asked, "nobody asks"
        made.check()
        assert made.catalog.inode(inode.ino) is not None

    trio.run(case)


def test_an_outage_while_it_is_open_is_an_error(made: World) -> None:
    async def case() -> None:
        held = await scanned(made)
        faults(made, Fault("get", error=OutageError("away")))
        with pytest.raises(TierError, match="away"):
            await read(made, held, SIZE)
        assert await read(made, held, 0) == CONTENT[:100], "that was proven"
        faults(made)
        assert await whole(made, held) == CONTENT, "it was only late"
        await close(made, held)

    trio.run(case)


def test_slow_header_is_a_miss_and_leaves_nothing(made: World) -> None:
    async def case() -> None:
        assert made.remote is not None
        assert made.dispatcher.hydration is not None
        inode = await spilled(made, b"a", CONTENT)
        made.objects.scans.listed(ROOT_INO)
        answers = trio.Event()
        made.remote.before = answers.wait
        with pytest.raises(NotFoundError, match="not here within 30 s"):
            await made.objects.open(inode.ino, writable=False)
        answers.set()
        await wait_all_tasks_blocked()
        made.check()
        assert not made.dispatcher.hydration._header_requests
        assert "headers" not in counters(made)

    trio.run(case, clock=MockClock(autojump_threshold=0.01))


def test_an_unmount_waits_for_no_header(made: World) -> None:
    async def case() -> None:
        assert made.remote is not None
        assert made.dispatcher.hydration is not None
        inode = await spilled(made, b"a", CONTENT)
        made.objects.scans.listed(ROOT_INO)
        made.remote.before = trio.sleep_forever

        async def open_it() -> None:
            with pytest.raises(NotFoundError, match="given up"):
                await made.objects.open(inode.ino, writable=False)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_it)
            await wait_all_tasks_blocked()
            made.dispatcher.hydration.stop()

    trio.run(case)


@pytest.mark.parametrize("happening", [_unlinked, _replaced])
def test_object_removed_before_its_header_comes_is_stale(
    made: World, happening: Callable[[World], Awaitable[None]]
) -> None:
    async def case() -> None:
        assert made.remote is not None
        inode = await spilled(made, b"a", CONTENT)
        made.objects.scans.listed(ROOT_INO)

        async def meanwhile() -> None:
            assert made.remote is not None
            made.remote.after = made.remote.before
            await happening(made)

        made.remote.after = meanwhile
        with pytest.raises((NotFoundError, StaleError)):
            await made.objects.open(inode.ino, writable=False)
        made.check()
        await made.upload_all()

    trio.run(case)


def test_process_with_many_open_headers_gets_whole_objects(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        monkeypatch.setattr(hydration, "HEADERS_MOST", 1)
        one = await scanned(made)
        two = await scanned(made, OTHER, b"b")
        assert (one.direct, two.direct) == (True, False)
        await close(made, one, two)
        three = await scanned(made, OTHER, b"c")
        assert three.direct
        await close(made, three)

    trio.run(case)


def test_scan_waits_for_a_running_download(made: World) -> None:
    async def case() -> None:
        assert made.remote is not None
        inode = await spilled(made, b"a", CONTENT)
        made.objects.scans.listed(ROOT_INO)
        answers = trio.Event()
        made.remote.before = answers.wait
        caller.set(1)
        found: list[OpenObject] = []

        async def open_it() -> None:
            found.append(await made.objects.open(inode.ino, writable=False))

        with trio.move_on_after(0.01):
            await open_it()
        caller.set(os.getpid())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_it)
            await wait_all_tasks_blocked()
            answers.set()
        [held] = found
        assert not held.direct
        await close(made, held)
        assert asks(made)[0] == 0

    trio.run(case)


def test_a_large_one_streams_on(tmp_path: Path, store: Store) -> None:
    content = random.Random(SEED).randbytes(2 * CHUNK + 5)

    async def case(made: World) -> None:
        assert made.bucket is not None
        await made.ledger.dirty.load()
        made.bucket.stream = 1
        held = await scanned(made, content)
        assert held.header is not None
        assert await read(made, held, 2 * CHUNK) == content[2 * CHUNK :]
        assert made.dispatcher.hydration is not None
        assert made.dispatcher.hydration.headers == 0
        made.check_accounts()
        assert await read(made, held, 0) == content[:100]
        await close(made, held)
        await made.check_at_rest()

    with world(tmp_path, store=FaultyStore(store), ram=64 * MIB) as made:
        caller.set(os.getpid())
        trio.run(case, made)
        caller.set(0)


def test_a_new_name_and_mode_there_keep_the_digest(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await spilled(made, b"a", CONTENT)
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        made.attributes.change(inode.ino, mode=0o600)
        await made.upload_all()
        assert store.objects["p/@0/b"].metadata[NAME] == digest(CONTENT[:SIZE]).hex()
        assert store.objects["p/@0/b"].metadata["kvfs-mode"] == "0600"
        made.objects.scans.listed(ROOT_INO)
        held = await made.objects.open(inode.ino, writable=False)
        assert held.header is not None
        await close(made, held)

    trio.run(case)
