"""The contract of `kvfs.s3.store`, on each implementation."""

import threading
from collections.abc import Iterator

import pytest

from kvfs.s3.boto import BotoStore
from kvfs.s3.errors import (
    NoObjectError,
    NoUploadError,
    ObjectChangedError,
    ObjectExistsError,
    StoreError,
    WrongBytesError,
)
from kvfs.s3.store import PART_MIN, Part, Store
from tests.s3.memory import MemoryStore

MiB = 1 << 20


@pytest.fixture(params=["memory", "boto"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        return MemoryStore()
    found: BotoStore = request.getfixturevalue("boto")
    return found


def put(store: Store, key: str, data: bytes = b"bytes") -> str:
    return store.put(key, data, {}, once=False)


def get(store: Store, key: str, start: int, length: int, etag: str = "") -> bytes:
    return b"".join(store.get(key, start, length, etag=etag))


def test_put_object_has_its_bytes_and_metadata(store: Store) -> None:
    etag = store.put("a/b", b"hello", {"kvfs-size": "5"}, once=True)
    head = store.head("a/b")
    assert (head.size, head.etag, head.metadata) == (5, etag, {"kvfs-size": "5"})
    assert head.modified > 0
    assert get(store, "a/b", 0, 5, etag) == b"hello"


def test_the_clock_is_that_of_the_objects(store: Store) -> None:
    before = store.clock()
    put(store, "a")
    assert before - 1 <= store.head("a").modified <= store.clock() + 1, "HTTP tells whole seconds"


def test_an_object_may_be_empty(store: Store) -> None:
    put(store, "empty", b"")
    assert store.head("empty").size == 0
    assert get(store, "empty", 0, 0) == b""


def test_a_copy_has_the_bytes_and_metadata_of_its_own(store: Store) -> None:
    etag = store.put("a", b"bytes", {"kvfs-x": "1"}, once=True)
    copied = store.copy("a", "b%20/c", {"kvfs-y": "2"}, etag=etag)
    head = store.head("b%20/c")
    assert (head.size, head.etag, head.metadata) == (5, copied, {"kvfs-y": "2"})
    assert get(store, "b%20/c", 0, 5, copied) == b"bytes"
    if isinstance(store, MemoryStore):  # Ceph takes whatever is there
        put(store, "a", b"others")
        with pytest.raises(ObjectChangedError):
            store.copy("a", "d", {}, etag=etag)
    with pytest.raises(NoObjectError):
        store.copy("e", "d", {}, etag=etag)
    with pytest.raises(NoObjectError):
        store.head("d")


def test_a_put_replaces_unless_it_is_once(store: Store) -> None:
    put(store, "a", b"one")
    put(store, "a", b"two")
    with pytest.raises(ObjectExistsError):
        store.put("a", b"three", {}, once=True)
    assert get(store, "a", 0, 3) == b"two"


def test_of_racing_puts_one_wins(store: Store) -> None:
    won: list[bytes] = []
    lost: list[bytes] = []
    gate = threading.Barrier(8)

    def race(number: int) -> None:
        data = bytes([number]) * MiB
        gate.wait()
        try:
            store.put("raced", data, {}, once=True)
        except ObjectExistsError:
            lost.append(data)
        else:
            won.append(data)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert get(store, "raced", 0, MiB) == won[0]


def test_ranges(store: Store) -> None:
    data = bytes(range(256)) * (3 * MiB // 256)
    put(store, "a", data)
    assert get(store, "a", 0, len(data)) == data
    assert get(store, "a", 1000, 2 * MiB) == data[1000 : 1000 + 2 * MiB]
    assert get(store, "a", len(data) - 7, 100) == data[-7:]
    with pytest.raises(WrongBytesError):
        get(store, "a", len(data), 1)


def test_peek_returns_the_first_bytes_and_the_head(store: Store) -> None:
    data = bytes(range(256)) * 40
    etag = store.put("a", data, {"kvfs-x": "1"}, once=True)
    head, first = store.peek("a", 100, etag=etag)
    assert (head, first) == (store.head("a"), data[:100])
    assert store.peek("a", 1 << 20, etag=etag) == (head, data)
    put(store, "a", b"another")
    with pytest.raises(ObjectChangedError):
        store.peek("a", 100, etag=etag)
    with pytest.raises(NoObjectError):
        store.peek("nothing", 100, etag=etag)


def test_range_of_a_changed_object_is_refused(store: Store) -> None:
    etag = put(store, "a", b"one")
    assert get(store, "a", 0, 3, etag) == b"one"
    put(store, "a", b"two")
    with pytest.raises(ObjectChangedError):
        get(store, "a", 0, 3, etag)


def test_missing_object_raises_no_object_error(store: Store) -> None:
    with pytest.raises(NoObjectError):
        store.head("nothing")
    with pytest.raises(NoObjectError):
        get(store, "nothing", 0, 1)
    store.delete("nothing")


def test_delete(store: Store) -> None:
    put(store, "a")
    store.delete("a")
    with pytest.raises(NoObjectError):
        store.head("a")


def test_delete_many(store: Store) -> None:
    keys = [f"many/{number} %2F~" for number in range(12)]
    for key in keys:
        put(store, key)
    put(store, "stays")
    assert store.delete_many([*keys, "many/nothing"]) == {}
    assert store.delete_many([]) == {}
    assert [entry.key for entry in store.list("").entries] == ["stays"]


def pages(store: Store, prefix: str, limit: int, delimiter: str = "") -> Iterator[str]:
    after = ""
    while True:
        page = store.list(prefix, after=after, delimiter=delimiter, limit=limit)
        names = [entry.key for entry in page.entries] + page.folders
        assert len(names) <= limit
        yield from sorted(names)
        if not page.after:
            return
        after = page.after


@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
def test_list_goes_on_where_a_page_ended(store: Store, limit: int) -> None:
    names = ["p/a", "p/b/1", "p/b/2", "p/b0", "p/c d", "p/e/x/y", "p/é", "p/~"]
    for name in [*names, "o", "q"]:
        put(store, name)
    assert list(pages(store, "p/", limit)) == sorted(names, key=str.encode)
    assert list(pages(store, "p/", limit, "/")) == [
        *("p/a", "p/b/", "p/b0", "p/c d", "p/e/", "p/~", "p/é"),
    ]
    assert list(pages(store, "p/b", limit, "/")) == ["p/b/", "p/b0"]
    assert list(pages(store, "nothing/", limit)) == []


def test_listing_agrees_with_head(store: Store) -> None:
    etag = put(store, "a", b"123")
    [entry] = store.list("a").entries
    assert (entry.key, entry.size, entry.etag) == ("a", 3, etag)
    assert abs(entry.modified - store.head("a").modified) < 1.0


def test_an_upload_in_parts(store: Store) -> None:
    pieces = [b"1" * PART_MIN, b"2" * PART_MIN, b"3"]
    upload_id = store.begin("big", {"kvfs-size": "x"})
    with pytest.raises(NoObjectError):
        store.head("big")
    assert [(one.key, one.upload_id) for one in store.uploads("b")] == [("big", upload_id)]
    sent = [
        Part(number, store.put_part("big", upload_id, number, data))
        for number, data in reversed(list(enumerate(pieces, 1)))
    ]
    sent.sort()
    store.complete("big", upload_id, sent, once=False)
    head = store.head("big")
    assert head.size == 2 * PART_MIN + 1
    assert head.metadata == {"kvfs-size": "x"}
    assert get(store, "big", 0, head.size, head.etag) == b"".join(pieces)
    assert list(store.uploads("")) == []


def test_a_part_may_be_bytes_of_another_object(store: Store) -> None:
    data = b"1" * PART_MIN + b"2" * PART_MIN + b"3"
    etag = store.put("a", data, {"kvfs-x": "1"}, once=True)
    upload_id = store.begin("b%20", {"kvfs-y": "2"})
    ranges = [(PART_MIN, PART_MIN + 1), (0, 5)]
    parts = [
        Part(number, store.copy_part("a", "b%20", upload_id, number, *wanted, etag=etag))
        for number, wanted in enumerate(ranges, 1)
    ]
    store.complete("b%20", upload_id, parts, once=False)
    head = store.head("b%20")
    assert (head.size, head.metadata) == (PART_MIN + 6, {"kvfs-y": "2"})
    assert get(store, "b%20", 0, head.size, head.etag) == data[PART_MIN:] + data[:5]


def test_an_object_is_copied_onto_itself_in_parts(store: Store) -> None:
    data = bytes(range(256)) * (PART_MIN // 128)
    etag = store.put("a", data, {"kvfs-x": "1"}, once=True)
    upload_id = store.begin("a", {"kvfs-x": "2"})
    parts = [
        Part(number, store.copy_part("a", "a", upload_id, number, start, PART_MIN, etag=etag))
        for number, start in enumerate((0, PART_MIN), 1)
    ]
    store.complete("a", upload_id, parts, once=False)
    head = store.head("a")
    assert head.metadata == {"kvfs-x": "2"}
    assert get(store, "a", 0, head.size, head.etag) == data


def test_copy_part_of_a_wrong_source_is_refused(store: Store) -> None:
    etag = put(store, "a")
    upload_id = store.begin("b", {})
    with pytest.raises(NoObjectError):
        store.copy_part("c", "b", upload_id, 1, 0, 1, etag=etag)
    with pytest.raises(StoreError):
        store.copy_part("a", "b", upload_id, 1, 4, 100, etag=etag)
    with pytest.raises(StoreError):
        store.copy_part("a", "b", "no-such-upload", 1, 0, 5, etag=etag)
    if isinstance(store, MemoryStore):  # Ceph takes whatever is there
        put(store, "a", b"others")
        with pytest.raises(ObjectChangedError):
            store.copy_part("a", "b", upload_id, 1, 0, 5, etag=etag)
    store.abort("b", upload_id)


def test_a_part_may_be_sent_again(store: Store) -> None:
    upload_id = store.begin("big", {})
    store.put_part("big", upload_id, 1, b"wrong")
    etag = store.put_part("big", upload_id, 1, b"right")
    store.complete("big", upload_id, [Part(1, etag)], once=False)
    assert get(store, "big", 0, 5) == b"right"


def test_an_upload_is_aborted(store: Store) -> None:
    upload_id = store.begin("big", {})
    store.put_part("big", upload_id, 1, b"data")
    store.abort("big", upload_id)
    store.abort("big", upload_id)
    assert list(store.uploads("")) == []
    with pytest.raises(NoUploadError):
        store.put_part("big", upload_id, 2, b"data")
    with pytest.raises(NoObjectError):
        store.head("big")


def test_parts_that_are_not_there_make_no_object(store: Store) -> None:
    upload_id = store.begin("big", {})
    store.put_part("big", upload_id, 1, b"data")
    with pytest.raises(WrongBytesError):
        store.complete("big", upload_id, [Part(1, "0" * 32)], once=False)
    with pytest.raises(NoObjectError):
        store.head("big")
    store.abort("big", upload_id)


def test_unknown_upload_is_refused(store: Store) -> None:
    with pytest.raises(NoUploadError):
        store.put_part("big", "no-such-upload", 1, b"data")
    with pytest.raises(StoreError):
        store.complete("big", "no-such-upload", [Part(1, "0" * 32)], once=False)
