"""Each rule of the garbage collection, and each race beside it, on a store in memory."""

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvfs.errors import ConfigError
from kvfs.s3.collection import Collector, Report
from kvfs.s3.errors import MetadataError, OutageError, StoreError
from kvfs.s3.garbage import Own
from kvfs.s3.keys import Keys, ObjectName, Space
from kvfs.s3.nodes import Node, Nodes, key_of, publish
from kvfs.s3.transfer import StoreTransfers, Terms
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore

KEYS = Keys("p/")
HOUR, DAY = 3600.0, 86400.0
A, B = "aaaa", "bbbb"
LONG = b"d" * 900


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def transfers(store: MemoryStore) -> Iterator[StoreTransfers]:
    found = StoreTransfers(store, Terms())
    yield found
    found.close()


def spaces(*texts: str) -> frozenset[Space]:
    found = [Space.parse(text) for text in texts]
    return frozenset(space for space in found if space is not None)


def node(
    transfers: StoreTransfers,
    identity: str,
    *has: str,
    had: tuple[str, ...] = (),
    age: float = HOUR,
) -> None:
    publish(transfers, KEYS, Node(identity, "host", "/kv", spaces(*has), spaces(*had)))
    older(transfers, key_of(KEYS, identity), age)


def older(transfers: StoreTransfers, key: str, age: float) -> None:
    assert isinstance(transfers.store, MemoryStore)
    transfers.store.objects[key].modified = time.time() - age


def put(transfers: StoreTransfers, *keys: str, age: float = 2 * DAY) -> None:
    for key in keys:
        transfers.store.put(f"p/{key}", b"bytes", {}, once=False)
        older(transfers, f"p/{key}", age)


def put_long(transfers: StoreTransfers, space: str, age: float = 2 * DAY) -> str:
    """Put an object whose key is a hash; return the key below the prefix."""
    (found,) = spaces(space)
    name = ObjectName(*found, LONG)
    record = KEYS.record(name)
    assert record is not None
    transfers.store.put(record[0], record[1], {}, once=False)
    older(transfers, record[0], age)
    key = KEYS.of(name).removeprefix("p/")
    put(transfers, key, age=age)
    return key


def collector(
    transfers: StoreTransfers,
    own: Own | Callable[[], Own] = Own(),  # noqa: B008 (it is frozen)
    *,
    older_than: float = DAY,
    node_age: float = 30 * DAY,
    forget: tuple[str, ...] = (),
) -> Collector:
    look = own if callable(own) else lambda: own
    return Collector(transfers, KEYS, look, older_than=older_than, node_age=node_age, forget=forget)


def collect(found: Collector, *, all_recorded: bool = False) -> Report:
    report = found.look()
    found.check(report, all_recorded=all_recorded)
    found.delete(report)
    return report


def left(store: MemoryStore) -> set[str]:
    """The keys below the prefix, without records of nodes."""
    return {key.removeprefix("p/") for key in store.objects if not key.startswith(KEYS.nodes)}


def test_keys_of_namespaces_that_no_node_has_are_garbage(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A, "x@3", had=("x@2", "gone@1"))
    node(transfers, B, "x@2", "y@1")
    live = ["@0/file", "x@2/a", "x@3/a", "x@9/newer", "y@1/b"]
    put(transfers, *live, "x@1/a", "x@1/b/c", "gone@1/a")
    found = collector(transfers)
    report = found.look()
    told = {kind: tally.objects for kind, tally in report.garbage.items()}
    assert told == {"version": 2, "namespace": 1}
    assert report.kept["live"].objects == len(live) + 2, "with the records of both nodes"
    assert left(store) == {*live, "x@1/a", "x@1/b/c", "gone@1/a"}, "a look changes nothing"
    report = collect(found)
    assert report.deleted.objects == 3
    assert report.deleted.bytes == 15
    assert left(store) == set(live)


def test_foreign_keys_are_reported_and_never_deleted(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A, "x@2", had=("x@1",))
    strange = ["x@1/%41", "x@01/a", "@5/a", "README", ".kvfs/new", "%/abc", ".kvfs/names/abc"]
    put(transfers, *strange, ".kvfs/format.json")
    store.put("other/x@1/a", b"", {}, once=True)
    report = collect(collector(transfers))
    assert report.kept["foreign"].objects == len(strange)
    assert set(report.examples) == {f"p/{key}" for key in strange}
    assert report.deleted.objects == 0
    assert "other/x@1/a" in store.objects


def test_recent_object_keeps_all_of_its_namespace(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A, had=("x@1", "y@1"))
    put(transfers, "x@1/old", "y@1/old")
    put(transfers, "x@1/new", age=HOUR)
    report = collect(collector(transfers))
    assert report.withheld["recent"].objects == 2, "whoever writes there has no record"
    assert left(store) == {"x@1/old", "x@1/new"}


def test_the_clock_is_the_stores(store: MemoryStore) -> None:
    """The store's clock is a day behind; by the local clock all objects would be old enough."""
    behind = FaultyStore(store, skew=-DAY)
    transfers = StoreTransfers(behind, Terms())
    publish(transfers, KEYS, Node(A, "host", "/kv", frozenset(), spaces("x@1")))
    store.put("p/x@1/a", b"", {}, once=True)
    report = collect(collector(transfers, older_than=HOUR))
    assert report.withheld["recent"].objects == 1
    assert left(store) == {"x@1/a"}
    transfers.close()


def test_names_go_with_their_objects_and_not_before(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A, "x@2", had=("x@1",))
    live, dead = put_long(transfers, "x@2"), put_long(transfers, "x@1")
    nameless, lonely, fresh = "%/" + "0" * 64, ".kvfs/names/" + "1" * 64, "2" * 64
    put(transfers, nameless, lonely)
    put(transfers, f".kvfs/names/{fresh}", age=HOUR)  # its object is on its way
    report = collect(collector(transfers))
    assert report.kept["nameless"].objects == 1
    hashed = live.removeprefix("%/")
    assert left(store) == {live, f".kvfs/names/{hashed}", nameless, f".kvfs/names/{fresh}"}
    assert dead not in left(store)
    assert report.deleted.objects == 3


def test_left_overs_of_kvfs_itself_are_garbage(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A)
    put(transfers, ".kvfs/probe/old", ".kvfs/format.json", "@0/a")
    put(transfers, ".kvfs/probe/new", age=HOUR)
    collect(collector(transfers))
    assert left(store) == {".kvfs/probe/new", ".kvfs/format.json", "@0/a"}


def test_object_put_aside_is_deleted_if_no_catalog_has_it(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    put(transfers, ".kvfs/aside/mine", ".kvfs/aside/lost")
    node(transfers, A, age=30 * DAY)  # its own record says nothing: its catalog is asked
    own = Own(A, keys=frozenset({"p/.kvfs/aside/mine"}))
    node(transfers, B, age=1.5 * DAY)
    report = collect(collector(transfers, own))
    assert report.withheld["aside"].objects == 1, "B may have ended in the middle of it"
    node(transfers, B, age=HOUR / 2)
    collect(collector(transfers, own))
    assert left(store) == {".kvfs/aside/mine"}


def test_uploads_that_were_cut_short_are_aborted(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A)
    ids = [store.begin(f"p/{key}", {}) for key in ("@0/a", "@0/b", "@0/c", "foreign")]
    for upload_id in ids[:2] + ids[3:]:
        store.unfinished[upload_id].begun -= 2 * DAY
    own = Own(A, uploads=frozenset({ids[1]}))
    report = collector(transfers, own).look()
    assert report.garbage["upload"].objects == 1
    collect(collector(transfers, own))
    assert store.unfinished.keys() == set(ids[1:])


def test_keys_that_this_catalog_means_under_other_names_stay(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A, "y@1", had=("x@1",))
    put(transfers, "x@1/renamed", "x@1/a")
    own = Own(A, spaces("y@1"), frozenset({"p/x@1/renamed"}))
    collect(collector(transfers, own))
    assert left(store) == {"x@1/renamed"}


def test_namespaces_of_a_stale_node_count_until_it_is_forgotten(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A)
    node(transfers, B, "x@1", age=31 * DAY)
    put(transfers, "x@1/a")
    report = collect(collector(transfers))
    assert report.stale == [B]
    assert left(store) == {"x@1/a"}
    report = collect(collector(transfers, forget=(B,)))
    assert left(store) == set()
    assert key_of(KEYS, B) not in store.objects
    assert key_of(KEYS, A) in store.objects


def test_record_of_a_forgotten_node_stays_while_it_explains_keys(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A)
    node(transfers, B, "x@1", "y@1", age=31 * DAY)
    put(transfers, "x@1/a")
    put(transfers, "y@1/a", age=HOUR)
    collect(collector(transfers, forget=(B,)))
    assert left(store) == {"y@1/a"}
    assert key_of(KEYS, B) in store.objects


@pytest.mark.parametrize(
    ("forget", "reason"),
    [("cccc", "has no record; there are"), (A, "is this node"), (B, "was refreshed .* s ago")],
)
def test_forget_of_a_live_or_unknown_node_is_refused(
    transfers: StoreTransfers, forget: str, reason: str
) -> None:
    node(transfers, A)
    node(transfers, B, age=29 * DAY)
    with pytest.raises(ConfigError, match=reason):
        collector(transfers, Own(A), forget=(forget,)).look()


# What is not known


def test_unexplained_objects_are_not_deleted(transfers: StoreTransfers, store: MemoryStore) -> None:
    """A node with an older kvfs has no record: its objects look like garbage."""
    node(transfers, A, "x@2", had=("y@1",))
    put(transfers, "x@1/a", "y@1/a", "z@7/a")
    found = collector(transfers)
    report = found.look()
    assert [str(space) for space in report.unexplained] == ["x@1", "z@7"]
    with pytest.raises(ConfigError, match=r"explains x@1, z@7.*--all-recorded"):
        found.check(report, all_recorded=False)
    collect(collector(transfers), all_recorded=True)
    assert left(store) == set()


def test_collection_without_any_record_is_refused(transfers: StoreTransfers) -> None:
    put(transfers, ".kvfs/probe/a")
    with pytest.raises(ConfigError, match="no node has a record"):
        collect(collector(transfers), all_recorded=True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "is no record of a node"),
        (b'{"format": 2}', "has format 2, expected 1"),
        (b"[" * 100_000, "is no record of a node"),
        (Node("cccc", "h", "/m", frozenset()).to_json().encode(), "but its key names another"),
        (
            Node(B, "h", "/m", frozenset()).to_json().replace("[]", '["x@01"]').encode(),
            "is no namespace with its version",
        ),
    ],
)
def test_a_record_that_cannot_be_read_stops_all_deletion(
    transfers: StoreTransfers, store: MemoryStore, content: bytes, reason: str
) -> None:
    node(transfers, A, had=("x@1",))
    store.put(key_of(KEYS, B), content, {}, once=True)
    put(transfers, "x@1/a")
    found = collector(transfers)
    with pytest.raises(ConfigError, match=reason):
        collect(found)
    with pytest.raises(MetadataError, match=reason):
        publish(transfers, KEYS, Node(B, "h", "/m", frozenset()))
    collect(collector(transfers, forget=(B,)))
    assert left(store) == set()
    assert key_of(KEYS, B) not in store.objects


# Races


def test_a_namespace_that_comes_back_meanwhile_is_not_touched(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A, had=("x@1", "y@1"))
    put(transfers, "x@1/a", "y@1/a")
    found = collector(transfers)
    report = found.look()
    node(transfers, B, "x@1")  # it switches, or makes it, while the collection runs
    found.delete(report)
    assert left(store) == {"x@1/a"}


def test_this_mount_is_asked_again_before_anything_goes(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A, had=("x@1",))
    put(transfers, "x@1/a")
    told = [Own(A, spaces("x@1")), Own(A)]
    found = collector(transfers, lambda: told.pop() if len(told) > 1 else told[0])
    found.delete(found.look())
    assert left(store) == {"x@1/a"}


def test_objects_written_during_the_collection_are_kept(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A, had=("x@1", "y@1"))
    put(transfers, "x@1/a", "x@1/b", "y@1/a", "y@1/b")
    found = collector(transfers)
    report = found.look()
    put(transfers, "x@1/a", age=0)  # the same key, another object
    put(transfers, "y@1/c", age=0)
    found.delete(report)
    assert left(store) == {"x@1/a", "x@1/b", "y@1/a", "y@1/b", "y@1/c"}


def test_a_namespace_that_is_dropped_meanwhile_waits_for_the_next_look(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A, "x@1", had=("y@1",))
    put(transfers, "x@1/a", "y@1/a")
    long = put_long(transfers, "x@1")
    found = collector(transfers)
    report = found.look()
    node(transfers, A)
    found.delete(report)
    assert {"x@1/a", long} < left(store)
    assert "y@1/a" not in left(store)
    collect(collector(transfers))
    assert left(store) == set()


def test_two_collections_at_once_delete_the_same(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A, "x@2", had=("x@1",))
    put(transfers, "x@2/a", "x@1/a", "x@1/b")
    first, second = collector(transfers), collector(transfers)
    reports = [first.look(), second.look()]
    second.delete(reports[1])
    first.delete(reports[0])
    assert left(store) == {"x@2/a"}


def test_a_record_that_becomes_unreadable_meanwhile_ends_it(
    transfers: StoreTransfers, store: MemoryStore
) -> None:
    node(transfers, A, had=("x@1",))
    put(transfers, "x@1/a")
    found = collector(transfers)
    report = found.look()
    store.put(key_of(KEYS, B), b"{", {}, once=True)
    with pytest.raises(MetadataError):
        found.delete(report)
    assert left(store) == {"x@1/a"}


def test_failed_deletes_are_reported(store: MemoryStore) -> None:
    class Refusing(FaultyStore):
        def delete_many(self, keys: Sequence[str]) -> dict[str, StoreError]:
            done = super().delete_many([key for key in keys if not key.endswith("b")])
            refused: dict[str, StoreError] = {k: OutageError(k) for k in keys if k.endswith("b")}
            return done | refused

    plain = StoreTransfers(store, Terms())
    node(plain, A, age=0)
    node(plain, B, "x@1", age=31 * DAY)
    put(plain, "x@1/a", "x@1/b")
    transfers = StoreTransfers(Refusing(store), Terms())
    report = collect(collector(transfers, forget=(B,)))
    assert (report.failures, report.failed, report.deleted.objects) == (1, ["p/x@1/b"], 1)
    assert key_of(KEYS, B) in store.objects, "the next look has to know whose that is"
    plain.close()
    transfers.close()


# Records


def test_record_remembers_former_namespaces(transfers: StoreTransfers) -> None:
    for key in ("p/x@1/a", "p/y@1/a"):
        transfers.store.put(key, b"", {}, once=False)
    for has in (("x@1", "y@1", "z@1"), ("x@2", "z@1"), ("x@3",)):
        node(transfers, A, *has)
    (found,) = Nodes(transfers, KEYS).look()
    assert found.has == spaces("x@3")
    assert found.had == spaces("x@2", "y@1"), "the newest version says it of the older ones"
    transfers.store.delete("p/y@1/a")
    transfers.store.put("p/x@3/a", b"", {}, once=False)
    node(transfers, A, "x@3")
    (found,) = Nodes(transfers, KEYS).look()
    assert found.had == spaces("x@2"), "of the other nothing is left"
    transfers.store.delete("p/x@1/a")
    transfers.store.put(f"{KEYS.long}{'0' * 64}", b"", {}, once=False)
    node(transfers, A, "x@3")
    assert Nodes(transfers, KEYS).look()[0].had == spaces("x@2"), "that may be of any"
    transfers.store.delete(f"{KEYS.long}{'0' * 64}")
    node(transfers, A, "x@3")
    assert Nodes(transfers, KEYS).look()[0].had == frozenset()
    written = publish(transfers, KEYS, Node(A, "h", "/m", spaces("z@1")), keep=True)
    assert written.has == spaces("x@3", "z@1")


def test_records_are_read_again_when_they_were_written_again(store: MemoryStore) -> None:
    seen = FaultyStore(store)
    transfers = StoreTransfers(seen, Terms())
    plain = StoreTransfers(store, Terms())
    node(plain, A, "x@1")
    node(plain, B, "x@1")
    nodes = Nodes(transfers, KEYS)
    assert nodes.look() == nodes.look()
    assert seen.calls["get"] == 2
    node(plain, A, "x@2", age=0)
    assert {str(space) for one in nodes.look() for space in one.has} == {"x@1", "x@2"}
    assert seen.calls["get"] == 3
    plain.close()
    transfers.close()


def test_names_that_are_no_text_have_records(transfers: StoreTransfers) -> None:
    space = Space(b"\xff@\n", 1)
    publish(transfers, KEYS, Node(A, "h", "/mnt/\udcff", frozenset({space})))
    (found,) = Nodes(transfers, KEYS).look()
    assert (found.has, found.mountpoint) == (frozenset({space}), "/mnt/\udcff")


def test_an_outage_ends_it(store: MemoryStore) -> None:
    transfers = StoreTransfers(
        FaultyStore(store, Fault("uploads", error=OutageError("away"))), Terms()
    )
    with pytest.raises(OutageError):
        collector(transfers).look()
    transfers.close()


@pytest.mark.parametrize("text", ["", "x", "x@", "x@01", "@-1", "x@1/", "x@1/y", "x%41@1"])
def test_malformed_namespace_version_is_none(text: str) -> None:
    assert Space.parse(text) is None


@pytest.mark.parametrize("space", [Space(b"", 0), Space(b"a@b", 12), Space(b"..", 1)])
def test_a_namespace_with_its_version_is_a_folder_of_the_bucket(space: Space) -> None:
    assert Space.parse(str(space)) == space
    assert KEYS.folder(*space) == f"p/{space}/"
