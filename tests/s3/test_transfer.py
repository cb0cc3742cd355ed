"""Whole files up and down: complete or not at all, whatever the store does meanwhile."""

import os
import random
import threading
from collections.abc import Iterator

import pytest
import xxhash

from kvfs.s3.boto import BotoStore
from kvfs.s3.errors import (
    NoObjectError,
    ObjectChangedError,
    ObjectExistsError,
    OutageError,
    RefusedError,
    SourceError,
    StoreError,
    StoreFullError,
    ThrottledError,
    WrongBytesError,
)
from kvfs.s3.store import PART_MIN, Store
from kvfs.s3.transfer import StoreTransfers, Terms
from tests.s3.faulty import Fault, FaultyStore, slow
from tests.s3.memory import MemoryStore

MiB = 1 << 20
TERMS = Terms(single=MiB, part=PART_MIN, parallel=3)
LARGE = 4 * PART_MIN + 12345  # five parts
SMALL = MiB // 2
SIZES = [0, 1, SMALL, MiB, MiB + 1, PART_MIN, LARGE]
DATA = random.Random(5).randbytes(LARGE)


class Side:
    """A store with transfers, and files to move."""

    def __init__(self, store: Store, terms: Terms = TERMS) -> None:
        self.store = store
        self.transfers = StoreTransfers(store, terms)
        self.begun: list[str] = []

    def upload(self, data: bytes, *, digest: bytes = b"", size: int = -1, once: bool = True) -> str:
        with memory(data) as fd:
            return self.transfers.upload(
                "key",
                fd,
                len(data) if size < 0 else size,
                {"kvfs-size": str(len(data))},
                digest=digest or xxhash.xxh3_128_digest(data),
                once=once,
                begun=self.begun.append,
            )

    def download(self, data: bytes, etag: str = "") -> bytes:
        """Download with these expectations; return the bytes that arrive."""
        with memory(b"") as fd:
            self.transfers.download(
                "key", fd, len(data), etag=etag, digest=xxhash.xxh3_128_digest(data)
            )
            return os.pread(fd, len(data) + 1, 0)

    def there(self) -> bool:
        try:
            self.store.head("key")
        except NoObjectError:
            return False
        return True


class memory:  # noqa: N801 (reads as a function)
    """An open file with these bytes."""

    def __init__(self, data: bytes) -> None:
        self._fd = os.memfd_create("test")
        os.pwrite(self._fd, data, 0)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


@pytest.fixture(params=["memory", "slow", "boto"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    if request.param == "boto":
        found: BotoStore = request.getfixturevalue("boto")
        one = Side(found)
    else:
        one = Side(slow(MemoryStore()) if request.param == "slow" else MemoryStore())
    yield one
    one.transfers.close()


def faulty(*faults: Fault, store: Store | None = None) -> Side:
    return Side(FaultyStore(store or MemoryStore(), *faults))


@pytest.mark.parametrize("size", SIZES)
def test_uploaded_bytes_are_downloaded_unchanged(side: Side, size: int) -> None:
    data = DATA[:size]
    etag = side.upload(data)
    head = side.store.head("key")
    assert (head.size, head.etag, head.metadata["kvfs-size"]) == (size, etag, str(size))
    assert side.download(data, etag) == data
    assert len(side.begun) == (size > TERMS.single)
    assert list(side.store.uploads("")) == []


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_name_is_published_once(side: Side, size: int) -> None:
    side.upload(b"first")
    side.transfers.terms = Terms(single=MiB, part=PART_MIN, once_complete=False)
    with pytest.raises(ObjectExistsError):
        side.upload(DATA[:size])
    assert side.download(b"first") == b"first"
    assert list(side.store.uploads("")) == []
    side.upload(DATA[:size], once=False)
    assert side.download(DATA[:size]) == DATA[:size]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_another_file_than_was_meant_is_not_stored(side: Side, size: int) -> None:
    with pytest.raises(SourceError):
        side.upload(DATA[:size], digest=bytes(16))
    with pytest.raises(SourceError):
        side.upload(DATA[: size - 1], size=size)
    assert not side.there()
    assert list(side.store.uploads("")) == []


def test_download_of_a_changed_object_is_refused(side: Side) -> None:
    etag = side.upload(DATA)
    side.upload(DATA[::-1], once=False)
    with pytest.raises(ObjectChangedError):
        side.download(DATA, etag)


def test_small_objects_are_read_whole(side: Side) -> None:
    side.upload(b"note")
    assert side.transfers.read("key", 4) == b"note"
    with pytest.raises(WrongBytesError):
        side.transfers.read("key", 3)
    with pytest.raises(NoObjectError):
        side.transfers.read("nothing", 3)


def test_the_id_of_an_upload_is_told_before_its_first_part() -> None:
    store = FaultyStore(MemoryStore())
    one = Side(store)

    def begun(upload_id: str) -> None:
        one.begun.append(upload_id)
        assert store.log == ["begin"]

    with memory(DATA) as fd:
        digest = xxhash.xxh3_128_digest(DATA)
        one.transfers.upload("key", fd, LARGE, {}, digest=digest, once=True, begun=begun)
    assert len(one.begun) == 1


def test_no_part_is_sent_if_the_id_is_not_kept() -> None:
    store = FaultyStore(MemoryStore())
    transfers = StoreTransfers(store, TERMS)

    def fail(_: str) -> None:
        raise OSError("disk full")

    with memory(DATA) as fd, pytest.raises(OSError, match="disk full"):
        transfers.upload("key", fd, LARGE, {}, digest=b"", once=True, begun=fail)
    assert store.log == ["begin", "abort"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("late", [False, True], ids=["refused", "answer lost"])
@pytest.mark.parametrize("error", [OutageError, ThrottledError, RefusedError, StoreFullError])
def test_each_call_of_an_upload_fails_in_turn(
    size: int,
    error: type[StoreError],
    *,
    late: bool,
) -> None:
    """Then the object is whole or absent, and so is the upload, unless it has no id."""
    data = DATA[:size]
    for nth in range(1, 100):
        behind = MemoryStore()
        one = FaultyStore(behind, Fault("any", nth, error("no"), late=late))
        side = Side(one)
        done = False
        try:
            side.upload(data)
            done = True
        except error:
            print(nth, one.log)
        there = behind.objects.get("key")
        assert there is None or there.data == data
        assert there is not None or not done
        assert not behind.unfinished or not side.begun
        if one.calls["any"] < nth:
            assert done
            return
    pytest.fail("it never went through")


@pytest.mark.parametrize("part", [1, 3, 5])
def test_a_part_that_fails_aborts_the_upload(part: int) -> None:
    store = MemoryStore()
    one = faulty(Fault("put_part", part, ThrottledError("slow down")), store=store)
    with pytest.raises(ThrottledError):
        one.upload(DATA)
    assert store.objects == {}
    assert store.unfinished == {}


@pytest.mark.parametrize("error", [OutageError, ThrottledError])
def test_an_abort_that_fails_hides_nothing(
    error: type[StoreError], caplog: pytest.LogCaptureFixture
) -> None:
    one = faulty(Fault("put_part", 2, StoreFullError("full")), Fault("abort", 1, error("not now")))
    with pytest.raises(StoreFullError):
        one.upload(DATA)
    assert one.begun[0] in caplog.text


@pytest.mark.parametrize(
    ("size", "fault"),
    [
        (SMALL, Fault("put", 1, ObjectExistsError("again"), late=True)),
        (LARGE, Fault("complete", 1, ObjectExistsError("again"), late=True)),
        (LARGE, Fault("complete", 1, OutageError("in progress"), late=True)),
    ],
)
def test_a_lost_answer_is_not_another_object(size: int, fault: Fault) -> None:
    """A put is sent again when its answer was lost, and refused: the existing object is its own."""
    one = faulty(fault)
    etag = one.upload(DATA[:size])
    assert one.download(DATA[:size], etag) == DATA[:size]


def test_of_two_that_publish_in_parts_the_first_one_stays() -> None:
    """If the store does not refuse a second publish, kvfs asks again just before it."""
    store = MemoryStore(once_complete=False)
    terms = Terms(single=MiB, part=PART_MIN, once_complete=False)

    def overtake(verb: str) -> None:
        if verb == "put_part" and not store.objects:
            Side(store, terms).upload(b"first")

    one = Side(FaultyStore(store, pause=overtake), terms)
    with pytest.raises(ObjectExistsError):
        one.upload(DATA)
    assert store.objects["key"].data == b"first"
    assert store.unfinished == {}


def test_upload_overtaken_by_another_node_raises_object_exists() -> None:
    store = MemoryStore(once_complete=False)

    def overtake(verb: str) -> None:
        if verb == "head" and store.objects:
            store.put("key", b"other", {}, once=False)

    with pytest.raises(ObjectExistsError):
        Side(FaultyStore(store, pause=overtake)).upload(DATA)


def test_an_outage_at_the_end_of_a_copy_in_parts_is_no_other_object() -> None:
    store = FaultyStore(MemoryStore())
    side = Side(store)
    etag = side.upload(DATA)
    outage = OutageError("the store does not answer")
    store.faults.append(Fault("head", nth=store.calls["head"] + 2, error=outage))
    with pytest.raises(OutageError):
        side.transfers.copy_in_parts(
            *("key", "copy", LARGE, {}),
            etag=etag,
            part=PART_MIN,
            once=True,
            begun=side.begun.append,
        )


def test_a_connection_that_breaks_is_taken_up_where_it_broke() -> None:
    one = faulty()
    etag = one.upload(DATA)
    store = one.store
    assert isinstance(store, FaultyStore)
    store.faults = [Fault("get", nth, OutageError("broken"), keep=2 * MiB) for nth in (1, 2, 5)]
    store.calls.clear()
    one = Side(store, Terms(single=MiB, part=PART_MIN, parallel=1))  # or one range meets all three
    assert one.download(DATA, etag) == DATA
    assert store.calls["get"] == 8  # five ranges, and three that broke


def test_an_outage_ends_a_download() -> None:
    one = faulty(Fault("get", 0, OutageError("gone")))
    one.upload(DATA)
    with pytest.raises(OutageError):
        one.download(DATA)


@pytest.mark.parametrize(
    "fault",
    [Fault("get", 2, keep=1000), Fault("get", 2, keep=0), Fault("get", 3, flip=True)],
    ids=["short", "empty", "flipped"],
)
def test_wrong_bytes_are_found(fault: Fault) -> None:
    one = faulty(fault)
    one.upload(DATA)
    with pytest.raises(WrongBytesError):
        one.download(DATA)


def test_a_store_that_has_lost_a_part_is_found() -> None:
    store = MemoryStore()

    def lose(verb: str) -> None:
        if verb == "complete":
            store.unfinished["upload-0"].parts[2] = b"other"

    with pytest.raises(WrongBytesError):
        Side(FaultyStore(store, pause=lose)).upload(DATA)
    assert store.objects == {}


def test_failed_download_writes_no_more_to_its_file() -> None:
    held = threading.Event()
    release = threading.Event()

    def pause(verb: str) -> None:
        if verb == "get" and one.calls["get"] == 2:
            held.set()
            release.wait()

    one = FaultyStore(MemoryStore(), Fault("get", 1, RefusedError("no")), pause=pause)
    side = Side(one)
    side.upload(DATA)
    ended = threading.Event()

    def download() -> None:
        with pytest.raises(RefusedError):
            side.download(DATA)
        ended.set()

    thread = threading.Thread(target=download)
    thread.start()
    if held.wait(1.0):
        assert not ended.is_set()
    release.set()
    thread.join()
    assert ended.is_set()


def test_a_clock_that_is_ahead_is_seen() -> None:
    store = FaultyStore(MemoryStore(), skew=3600.0)
    store.put("a", b"", {}, once=True)
    [entry] = store.list("").entries
    assert entry.modified == store.head("a").modified
    store.begin("b", {})
    [upload] = store.uploads("")
    assert upload.begun - entry.modified < 60
