"""Any content of a bucket: what kvfs would have written, or an error that is a miss."""

from contextlib import closing
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from kvfs.errors import ConfigError, TooLargeError, UnsupportedError
from kvfs.s3 import marker, nodes
from kvfs.s3.chunks import Chunks
from kvfs.s3.errors import MetadataError, StoreError
from kvfs.s3.facts import Facts
from kvfs.s3.keys import Keys, ObjectName, Space
from kvfs.s3.nodes import Node, Nodes
from kvfs.s3.store import Head
from kvfs.s3.transfer import StoreTransfers, Terms
from tests.s3.memory import MemoryStore
from tests.unit.fuzz import answers_in_time, fuzzed, spoiled, spoiled_bytes

KEYS = Keys("p/")
NEST = b"[" * 3000  # more than Python has stack for
LARGE = 100 << 20
FACTS = Facts(
    size=LARGE,
    digest=bytes(range(16)),
    mtime_ns=1,
    mode=0o640,
    uid=1,
    gid=2,
    key=3,
    parent_key=4,
    model="llama",
    stored_size=LARGE,
    stored_digest=bytes(range(16)),
    chunks=Chunks(8 << 20, tuple(range(13))),
    header=bytes(16),
)
RIGHT = FACTS.metadata()


@fuzzed
@given(st.sampled_from([*RIGHT, "kvfs-new"]), st.data(), st.integers(-1, 1 << 63))
def test_metadata(name: str, data: st.DataObject, size: int) -> None:
    """Accepted metadata would be written again in the same form."""
    text = data.draw(spoiled([RIGHT.get(name, "")]))
    metadata = {**RIGHT, name: text}
    for length in (LARGE, size):
        try:
            found = Facts.of_head("key", Head(length, "etag", 0.0, metadata))
        except MetadataError:
            continue
        known = {key: value for key, value in metadata.items() if key in RIGHT}
        assert found.metadata() == known


@fuzzed
@given(st.dictionaries(st.sampled_from(list(RIGHT)) | st.text(max_size=9), st.text(max_size=40)))
def test_metadata_of_others(metadata: dict[str, str]) -> None:
    try:
        Facts.of_head("key", Head(1, "etag", 0.0, metadata))
    except MetadataError:
        return


@fuzzed
@given(spoiled_bytes(['{"format": 1, "owner": ""}', '{"format": 1, "owner": "me"}']))
@example(NEST)
@example(b'{"format": true, "owner": ""}')
@example(b"\xff\xfe")
def test_any_bucket_marker_is_read_or_refused(content: bytes) -> None:
    store = MemoryStore()
    store.put(f"{KEYS.own}format.json", content, {}, once=False)
    with closing(StoreTransfers(store, Terms())) as transfers:
        try:
            marker.look(transfers, KEYS, "me", exclusive=False)
        except (ConfigError, StoreError):  # the latter for what is too long to be one
            return


NODE = Node("me-1", "host", "/mnt/kv", frozenset({Space(b"a", 1)}), frozenset({Space(b"b@", 2)}))


@fuzzed
@given(spoiled_bytes([NODE.to_json()]), spoiled(["me-1"]))
@example(NEST, "me-1")
@example(b'{"format": 1}', "me-1")
def test_malformed_node_record_is_skipped(content: bytes, identity: str) -> None:
    """A record that makes no sense is logged, and does not keep others from being read."""
    identity = identity.encode("utf-8", "replace").decode()  # keys are text of XML
    store = MemoryStore()
    store.put(
        nodes.key_of(KEYS, "good"),
        replace(NODE, identity="good").to_json().encode(),
        {},
        once=False,
    )
    store.put(nodes.key_of(KEYS, identity), content, {}, once=False)
    with closing(StoreTransfers(store, Terms())) as transfers:
        found = Nodes(transfers, KEYS)
        assert "good" in {node.identity for node in found.look()} | set(found.unread)
        if identity != "good":
            assert "good" not in found.unread
        try:
            nodes.publish(transfers, KEYS, replace(NODE, identity="me-1"))
        except MetadataError:
            return


LONG = ObjectName(b"ns", 1, b"/".join([b"x" * 250] * 5))


@fuzzed
@given(spoiled_bytes([(KEYS.record(LONG) or ("", b""))[1]]))
def test_records_of_long_names(content: bytes) -> None:
    key, _ = KEYS.record(LONG) or ("", b"")
    try:
        assert KEYS.parse_record(key, content) == LONG
    except MetadataError:
        return


def test_no_text_takes_for_ever() -> None:
    def head(text: str) -> None:
        for name in RIGHT:
            metadata = {**RIGHT, name: text}
            try:
                Facts.of_head("key", Head(LARGE, "etag", 0.0, metadata))
            except MetadataError:
                continue

    answers_in_time(head, UnsupportedError, TooLargeError)
    answers_in_time(lambda text: KEYS.parse_record("k", text.encode()), MetadataError)
