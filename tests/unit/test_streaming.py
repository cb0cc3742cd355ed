"""Reads of objects that come from the bucket: chunks, their order, and their failures."""

import os
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

import pytest
import trio
import trio.testing

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.fetching import streaming
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.ledger.stream import Stream
from kvfs.errors import NotFoundError, TierError
from kvfs.movement.downloading import DownloadJob
from kvfs.movement.movers import Moved
from kvfs.movement.remote import Lane, Remote
from kvfs.movement.streams import Ends, Word, WordKind, tell
from kvfs.s3 import chunked
from kvfs.s3.chunks import LEAST, MOST, NAME, Chunks, chunk_size, weigh
from kvfs.s3.errors import MetadataError, ObjectChangedError, OutageError, WrongBytesError
from kvfs.s3.transfer import StoreTransfers, Terms
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_uploader import again, counters, faults
from tests.unit.world import InlineRemote, World, digest, world

P = ParamSpec("P")
T = TypeVar("T")
MIB = 1 << 20
SEED = 11
CONTENT = random.Random(SEED).randbytes(5 * LEAST + 4321)  # six chunks
LAST = 5


# Chunks


@pytest.mark.parametrize(
    ("size", "chunk"),
    [
        (1, LEAST),
        (MOST * LEAST, LEAST),
        (MOST * LEAST + 1, 2 * LEAST),
        (4 << 30, 64 * MIB),
        (5 << 40, 128 << 30),
    ],
)
def test_chunks_grow_with_the_object(size: int, chunk: int) -> None:
    assert chunk_size(size) == chunk
    assert -(-size // chunk) <= MOST


def test_the_digests_of_chunks_are_their_own(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    with (tmp_path / "f").open("rb") as file:
        whole, chunks = weigh(file.fileno(), len(CONTENT))
    assert whole == digest(CONTENT)
    assert len(chunks.digests) == LAST + 1
    metadata = chunks.metadata()
    assert Chunks.of_metadata("k", metadata, len(CONTENT)) == chunks
    assert Chunks.of_metadata("k", {}, len(CONTENT)) is None
    assert metadata[NAME].startswith(f"{LEAST} ")


def test_all_of_it_fits_beside_the_longest_metadata() -> None:
    most = Chunks(LEAST, tuple([(1 << 64) - 1] * MOST)).metadata()
    [(name, text)] = most.items()
    assert len(name) + len(text) <= 712  # tests/s3/test_facts.py has the rest


@pytest.mark.parametrize(
    "text", ["", "8388608", "8388608 !", "16777216 AAAAAAAAAAA=", "8388608 AAAAAAAAAAA=", "x y"]
)
def test_other_words_about_chunks_are_refused(text: str) -> None:
    with pytest.raises(MetadataError, match="kvfs-chunks"):
        Chunks.of_metadata("k", {NAME: text}, len(CONTENT))


# Their order


class Coming:
    """A download of CONTENT by chunks: in which order they came."""

    def __init__(self, tmp: Path, *faulty: Fault, part: int = LEAST, parallel: int = 1) -> None:
        self.memory = MemoryStore()
        self.etag = self.memory.put("k", CONTENT, {}, once=False)
        self.store = FaultyStore(self.memory, *faulty)
        self.transfers = StoreTransfers(self.store, Terms(part=part, parallel=parallel))
        self.path = tmp / "f"
        self.path.write_bytes(CONTENT)
        with self.path.open("rb") as file:
            self.digest, self.chunks = weigh(file.fileno(), len(CONTENT))
        self.path.write_bytes(b"")
        self.order: list[int] = []
        self.wanted: dict[int, list[int]] = {}  # by how many have come
        self.renewals = 0

    def arrived(self, number: int) -> None:
        start = number * LEAST
        assert self.path.read_bytes()[start : start + LEAST] == CONTENT[start : start + LEAST]
        self.order.append(number)

    def renewed(self) -> str:
        self.renewals += 1
        return self.store.head("k").etag

    def run(self) -> None:
        fd = os.open(self.path, os.O_RDWR)
        try:
            chunked.download(
                *(self.transfers, "k", fd, len(CONTENT)),
                etag=self.etag,
                digest=self.digest,
                chunks=self.chunks,
                renewed=self.renewed,
                wanted=lambda: self.wanted.pop(len(self.order), []),
                arrived=self.arrived,
            )
        finally:
            os.close(fd)
            self.transfers.close()


@pytest.mark.parametrize(
    ("wanted", "order"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({0: [5]}, [5, 0, 1, 2, 3, 4]),
        ({0: [3]}, [3, 4, 5, 0, 1, 2]),
        ({1: [5], 2: [2]}, [0, 5, 2, 3, 4, 1]),
        ({2: [0, 1]}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_wanted_chunks_come_next(
    tmp_path: Path, wanted: dict[int, list[int]], order: list[int]
) -> None:
    coming = Coming(tmp_path)
    coming.wanted = wanted
    coming.run()
    assert coming.order == order
    assert coming.path.read_bytes() == CONTENT


def test_a_chunk_may_take_several_requests_at_once(tmp_path: Path) -> None:
    coming = Coming(tmp_path, part=3 * MIB, parallel=4)
    coming.run()
    assert sorted(coming.order) == [0, 1, 2, 3, 4, 5]
    assert coming.store.calls["get"] == 8 + 4 * 3 + 1, "the first one is waited for"
    assert coming.path.read_bytes() == CONTENT


def test_a_chunk_that_is_wrong_once_is_fetched_again(tmp_path: Path) -> None:
    coming = Coming(tmp_path, Fault("get", 2, flip=True))
    coming.run()
    assert coming.order == [0, 1, 2, 3, 4, 5]
    assert coming.store.calls["get"] == 7
    assert coming.path.read_bytes() == CONTENT


def test_chunk_that_stays_wrong_ends_the_download(tmp_path: Path) -> None:
    coming = Coming(tmp_path, Fault("get", 2, flip=True), Fault("get", 3, flip=True))
    with pytest.raises(WrongBytesError, match=r"chunk 1 .* has another xxh3-64"):
        coming.run()
    assert coming.order == [0]


def test_an_object_that_is_copied_onto_itself_comes_on(tmp_path: Path) -> None:
    coming = Coming(tmp_path, part=3 * MIB, parallel=4)

    def another(number: int) -> None:
        arrived(number)
        if len(coming.order) == 2:
            coming.memory.objects["k"].etag = "another"

    arrived, coming.arrived = coming.arrived, another  # type: ignore[method-assign]
    coming.run()
    assert coming.renewals == 1
    assert sorted(coming.order) == [0, 1, 2, 3, 4, 5]
    assert coming.path.read_bytes() == CONTENT


def test_changed_object_ends_the_download(tmp_path: Path) -> None:
    coming = Coming(tmp_path, Fault("get", 3, ObjectChangedError("k")))
    with pytest.raises(ObjectChangedError, match="k"):
        coming.run()
    assert coming.renewals == 1, "it has the ETag that it had"
    assert coming.order == [0, 1]


def test_the_whole_is_compared_as_well(tmp_path: Path) -> None:
    coming = Coming(tmp_path)
    coming.digest = digest(b"another")
    coming.wanted = {0: [4]}
    with pytest.raises(WrongBytesError, match="xxh3-128"):
        coming.run()


# In the daemon


class Threaded(InlineRemote):
    """Streams come in a thread; the rest is done at once."""

    async def call(
        self,
        lane: Lane,
        size: int,
        destinations: Sequence[str],
        do: Callable[Concatenate[StoreTransfers, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        if do.__name__ != "stream":
            return await super().call(lane, size, destinations, do, *arguments, **options)
        transfers = StoreTransfers(self.store, self.bucket.terms or Terms())
        try:
            return await trio.to_thread.run_sync(lambda: do(transfers, *arguments, **options))
        finally:
            transfers.close()


class Gate:
    """A store that lets a range pass when a test says so."""

    def __init__(self) -> None:
        self.passes: Callable[[int], bool] = lambda _: True
        self._changed = threading.Condition()

    def let(self, passes: Callable[[int], bool]) -> None:
        with self._changed:
            self.passes = passes
            self._changed.notify_all()

    def wait(self, start: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.passes(start), 60)


class Gated(FaultyStore):
    """With a gate before each range."""

    gate: Gate

    def get(self, key: str, start: int, length: int, *, etag: str = "") -> Iterator[bytes]:
        self.gate.wait(start)
        return super().get(key, start, length, etag=etag)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def made(tmp_path: Path, store: MemoryStore, gate: Gate) -> Iterator[World]:
    gated = Gated(store)
    gated.gate = gate
    with world(tmp_path, store=gated, ram=256 * MIB, nvme=256 * MIB) as found:
        trio.run(found.ledger.dirty.load)
        begin(found)
        yield found
        trio.run(found.check_at_rest)


def begin(made: World) -> None:
    """Set the options of streaming, which `World.start` does not set."""
    assert made.bucket is not None
    assert made.remote is not None
    assert made.dispatcher.hydration is not None
    assert made.bucket_store is not None
    made.bucket.stream = 1
    made.bucket.terms = Terms()
    made.remote = Threaded(made.movers, made.bucket, made.bucket_store)
    made.dispatcher.hydration.downloader.remote = made.remote


async def spilled(made: World) -> Inode:
    inode = await made.store(b"a", CONTENT, made.ram)
    await made.upload_all()
    made.ledger.removals.evict(again(made, inode.ino))
    made.check()
    return again(made, inode.ino)


async def ended(made: World) -> None:
    assert made.dispatcher.hydration is not None
    while made.dispatcher.hydration._running:  # noqa: ASYNC110 (it tells nobody of its end)
        await trio.sleep(0.001)


async def read(made: World, held: OpenObject, start: int, length: int = 100) -> bytes:
    return await made.objects.read(held, start, length)


async def close(made: World, held: OpenObject) -> None:
    await made.close(held, writable=False)


def test_streamed_object_opens_before_its_download_ends(made: World, gate: Gate) -> None:
    async def case() -> None:
        inode = await spilled(made)
        gate.let(lambda start: start < LEAST)
        held = await made.objects.open(inode.ino, writable=False)
        assert held.direct
        assert await read(made, held, 7) == CONTENT[7:107]
        assert made.dispatcher.hydration is not None
        assert made.dispatcher.hydration.streaming == 1
        assert made.ledger.tiers.holders(held.inode) == []
        gate.let(lambda _: True)
        found = [await read(made, held, at, MIB) for at in range(0, len(CONTENT), MIB)]
        assert b"".join(found) == CONTENT
        await ended(made)
        made.check()
        assert made.ledger.tiers.holders(held.inode) == [made.ram]
        assert await read(made, held, len(CONTENT) - 3) == CONTENT[-3:]
        await close(made, held)
        assert await made.read(inode.ino) == CONTENT
        assert counters(made)["downloads"] == 1

    trio.run(case)


def test_without_digests_of_chunks_it_comes_as_a_whole(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await spilled(made)
        del store.objects["p/@0/a"].metadata[NAME]
        held = await made.objects.open(inode.ino, writable=False)
        assert not held.direct
        assert made.content(held) == CONTENT
        await close(made, held)

    trio.run(case)


def test_without_them_wrong_bytes_are_fetched_once_more(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await spilled(made)
        del store.objects["p/@0/a"].metadata[NAME]
        faults(made, Fault("get", 1, flip=True))
        held = await made.objects.open(inode.ino, writable=False)
        assert made.content(held) == CONTENT
        await close(made, held)

    trio.run(case)


def test_its_mode_may_change_elsewhere_before_it_is_opened(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await spilled(made)
        store.objects["p/@0/a"].etag = "another"
        held = await made.objects.open(inode.ino, writable=False)
        assert held.direct
        assert await read(made, held, 0) == CONTENT[:100]
        await ended(made)
        assert await read(made, held, LEAST) == CONTENT[LEAST : LEAST + 100]
        await close(made, held)

    trio.run(case)


class _Dying:
    """Movers that die; the second one has said that a chunk is there, and its file is gone."""

    def __init__(self, check: Callable[[], Awaitable[None]]) -> None:
        self.check = check

    async def stream(self, *wanted: object) -> Moved:
        ends = wanted[-1]
        assert isinstance(ends, Ends)
        out = os.open(ends.tell, os.O_WRONLY | os.O_CLOEXEC)
        first = os.open("/dev/null", os.O_RDONLY)
        try:
            tell(out, Word(WordKind.BEGUN, os.getpid() << 32 | first))
            tell(out, Word(WordKind.HERE, 1))
            tell(out, Word(WordKind.BEGUN, os.getpid() << 32 | (1 << 32) - 1))
            tell(out, Word(WordKind.HERE, 2))
            await trio.testing.wait_all_tasks_blocked(0.01)
            await self.check()
        finally:
            os.close(out)
            os.close(first)
        raise OutageError("they died")


def test_file_of_a_dead_mover_is_not_read(made: World) -> None:
    async def case() -> None:
        inode = await spilled(made)
        assert made.ram is not None
        assert made.bucket is not None
        found: list[Stream] = []
        stored = made.ledger.dirty.stored(inode.ino)
        assert stored is not None

        def began(stream: Stream) -> None:
            stream.join()
            found.append(stream)

        async def check() -> None:
            [stream] = found
            await stream.bytes_here(LEAST, LEAST, 0.0)
            with pytest.raises(TierError, match="not here within"):
                await stream.bytes_here(2 * LEAST, LEAST, 0.0)
            stream.leave()

        path = made.ram.path(inode.ino, inode.version)
        wanted = DownloadJob(stored, path, inode.size, inode.digest, inode.backing_mtime_ns)
        dying = cast("Remote", _Dying(check))
        with pytest.raises(OutageError):
            await streaming.bring(
                *(partial(dying.stream, wanted), inode, "a", made.ram, began, made.bucket)
            )
        assert found

    trio.run(case)


def test_object_below_the_bound_is_downloaded_before_its_open(made: World) -> None:
    async def case() -> None:
        assert made.bucket is not None
        inode = await spilled(made)
        for bound in (0, len(CONTENT) + 1):
            made.bucket.stream = bound
            held = await made.objects.open(inode.ino, writable=False)
            assert not held.direct
            await close(made, held)
            made.ledger.removals.evict(again(made, inode.ino))

    trio.run(case)


def test_a_rename_in_the_bucket_keeps_the_digests(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await spilled(made)
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        await made.upload_all()
        assert NAME in store.objects["p/@0/b"].metadata
        held = await made.objects.open(inode.ino, writable=False)
        assert held.direct
        assert await read(made, held, 0) == CONTENT[:100]
        await ended(made)
        await close(made, held)

    trio.run(case)


def test_a_wrong_chunk_is_an_error_and_then_a_miss(made: World, gate: Gate) -> None:
    async def case() -> None:
        inode = await spilled(made)
        gate.let(lambda _: False)
        held = await made.objects.open(inode.ino, writable=False)
        faults(made, Fault("get", 0, flip=True))
        gate.let(lambda _: True)
        for at in (0, LEAST, len(CONTENT) - 1):
            with pytest.raises(TierError, match="xxh3-64"):
                await read(made, held, at)
        await ended(made)
        await close(made, held)
        with pytest.raises(NotFoundError):
            await made.read(inode.ino)
        assert made.catalog.inode(inode.ino) is None
        await made.upload_all()

    trio.run(case)


def test_an_outage_is_an_error_and_the_next_open_goes_on(made: World, gate: Gate) -> None:
    async def case() -> None:
        inode = await spilled(made)
        gate.let(lambda _: False)
        held = await made.objects.open(inode.ino, writable=False)
        faults(made, Fault("get", 0, OutageError("away")))
        gate.let(lambda _: True)
        with pytest.raises(TierError, match="away"):
            await read(made, held, 0)
        await ended(made)
        with pytest.raises(TierError, match="away"):
            await read(made, held, 0)
        faults(made)
        other = await made.objects.open(inode.ino, writable=False)
        assert other is held
        assert await read(made, held, 0) == CONTENT[:100]
        await ended(made)
        made.check()
        await close(made, held)
        await close(made, other)

    trio.run(case)


def test_a_read_has_a_bound(made: World, gate: Gate) -> None:
    async def case() -> None:
        assert made.bucket is not None
        inode = await spilled(made)
        gate.let(lambda start: start < LEAST)
        held = await made.objects.open(inode.ino, writable=False)
        made.bucket.wait = 0.01
        with pytest.raises(TierError, match=f"bytes {LEAST} to {LEAST + 100} are not here"):
            await read(made, held, LEAST)
        gate.let(lambda _: True)
        await ended(made)
        assert await read(made, held, LEAST) == CONTENT[LEAST : LEAST + 100]
        await close(made, held)

    trio.run(case)


def test_cancelled_read_leaves_the_download_to_others(made: World, gate: Gate) -> None:
    async def case() -> None:
        inode = await spilled(made)
        gate.let(lambda start: start < LEAST)
        held = await made.objects.open(inode.ino, writable=False)
        assert await read(made, held, 0) == CONTENT[:100]
        with trio.move_on_after(0.01) as scope:
            await read(made, held, LEAST)
        assert scope.cancelled_caught
        await close(made, held)
        made.check_accounts()
        other = await made.objects.open(inode.ino, writable=False)
        assert await read(made, other, 0) == CONTENT[:100], "it is the same stream"
        gate.let(lambda _: True)
        assert await read(made, other, LEAST) == CONTENT[LEAST : LEAST + 100]
        await ended(made)
        await close(made, other)
        assert counters(made)["downloads"] == 1

    trio.run(case)


async def _unlinked(made: World, _: Inode) -> None:
    made.tree.unlink(ROOT_INO, b"a")


async def _renamed(made: World, _: Inode) -> None:
    made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)


async def _replaced(made: World, _: Inode) -> None:
    await made.store(b"t", b"other", made.ram)
    made.renames.rename(ROOT_INO, b"t", ROOT_INO, b"a", 0)


@pytest.mark.parametrize("happening", [_unlinked, _renamed, _replaced])
def test_streamed_object_is_readable_after_a_change_of_its_name(
    made: World, gate: Gate, happening: Callable[[World, Inode], Awaitable[None]]
) -> None:
    async def case() -> None:
        inode = await spilled(made)
        gate.let(lambda start: start < LEAST)
        held = await made.objects.open(inode.ino, writable=False)
        await happening(made, inode)
        spill = made.dispatcher.uploader
        assert spill is not None
        await spill.deletion.delete_some()  # not yet: it is read
        gate.let(lambda _: True)
        found = [await read(made, held, at, MIB) for at in range(0, len(CONTENT), MIB)]
        assert b"".join(found) == CONTENT
        await ended(made)
        made.check()
        await close(made, held)
        await made.dispatcher.trash.empty()
        made.check()

    trio.run(case)


@pytest.mark.parametrize("truncate", [False, True])
def test_a_writer_waits_for_all_of_it(made: World, gate: Gate, *, truncate: bool) -> None:
    async def case() -> None:
        inode = await spilled(made)
        gate.let(lambda start: start < LEAST)
        reader = await made.objects.open(inode.ino, writable=False)
        written = trio.Event()

        async def write() -> None:
            held = await made.objects.open(inode.ino, writable=True, truncate=truncate)
            made.write(held, b"new")
            written.set()
            await made.close(held, writable=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not written.is_set()
            gate.let(lambda _: True)
        assert await read(made, reader, 0, 5) == (b"new" if truncate else b"new" + CONTENT[3:5])
        made.check()
        await close(made, reader)
        assert await made.read(inode.ino) == (b"new" if truncate else b"new" + CONTENT[3:])
        await made.upload_all()

    trio.run(case)


def test_all_streams_together_have_the_bound_of_all_fetches(made: World, gate: Gate) -> None:
    async def case() -> None:
        assert made.dispatcher.hydration is not None
        made.dispatcher.hydration.budget.most = len(CONTENT)
        one = await spilled(made)
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        await made.upload_all()
        two = await spilled(made)
        gate.let(lambda start: start < LEAST)
        first = await made.objects.open(one.ino, writable=False)
        async with trio.open_nursery() as nursery:

            async def second() -> None:
                held = await made.objects.open(two.ino, writable=False)
                await close(made, held)

            nursery.start_soon(second)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert made.dispatcher.hydration.streaming == 1
            gate.let(lambda _: True)
        await ended(made)
        await close(made, first)
        assert made.dispatcher.hydration.budget.bytes == 0

    trio.run(case)


# The stream by itself


def test_bytes_of_a_file_that_was_replaced_are_waited_for_again(
    tmp_path: Path, made: World
) -> None:
    async def case() -> None:
        assert made.ram is not None
        assert made.bucket is not None
        stream = Stream(made.ram, 2 * LEAST, LEAST, made.bucket)
        stream.join()
        for name in ("one", "two"):
            (tmp_path / name).write_bytes(name.encode())
            stream.begin(os.open(tmp_path / name, os.O_RDONLY))
            if name == "one":
                stream.arrived(0)
                await stream.bytes_here(0, LEAST, 0.0)
        with pytest.raises(TierError, match="not here within"):
            await stream.bytes_here(0, LEAST, 0.0)
        assert os.pread(stream.fd, 3, 0) == b"two"
        stream.end(TierError("over"))
        with pytest.raises(TierError, match="over"):
            await stream.bytes_here(0, LEAST, 1.0)
        assert stream.fd == -1
        stream.leave()

    trio.run(case)
