"""Any bytes for a name: what it says of blocks, what it is called in a bucket, how it is shown."""

import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvfs.catalog.inode import Inode
from kvfs.cli.screen import line
from kvfs.fuse.errnos import SHOWN, shown
from kvfs.layouts import LIVES, link, recognise
from kvfs.s3.facts import Facts
from kvfs.s3.keys import KEY_MAX, Keys, ObjectName, Space, escape, unescape
from kvfs.s3.store import Head
from tests.unit.fuzz import answers_in_time, fuzzed, long_ones, spoiled, spoiled_bytes

NAMES = (
    "llama@4@0@1f@half.pt",
    "m-SEP-x@00000004@00@" + "0" * 16 + "@a.data",
    "0" * 64 + ".mamba_org-model_0_2.bin",
    "." + "0" * 32 + ".tmp",
    "a" * 16 + "-" + "b" * 16 + ".r3.kv",
    "ab12.bin_Xy9.tmp",
    "_data.safetensors",
    "model.layers.0.safetensors",
    "12-34.bucket",
    "block_1_pool_2.bin",
    "dynamo-kvbm-disk-cache-x",
    "cache.rank_3",
)
PARENTS = ("m_0123456789ab_r0", "0a1", "bc_g0", "0" * 40, "7%" + "0" * 40, "0" * 32, "plain")
# Names that are wrong for code that takes them for text, a path, a URL or a header.
HOSTILE = (
    *(
        b"\n",
        b"a\r\nx-amz-meta-kvfs-size: 0",
        b"%00",
        b"%2E%2E",
        b"..",
        b".",
        b"...",
        b"?x=y",
        b"#",
    ),
    *(b"\xff\xfe", "é".encode(), "e\u0301".encode(), b" ", b"\t", b"\x1b]0;title\x07", b"\x7f"),
    *(b"@", b"%40", b"@1", b"&", b"+", b"<x>", b"\\", b'"', b"'", b"a" * 255, b"\xff" * 255),
)
PARTS = st.sampled_from(HOSTILE) | st.binary(min_size=1, max_size=255).map(
    lambda part: part.replace(b"\0", b"0").replace(b"/", b"_")
)
PATHS = st.lists(PARTS, min_size=1, max_size=30).map(b"/".join)


@fuzzed
@given(
    st.lists(spoiled_bytes(PARENTS), max_size=4),
    spoiled_bytes(NAMES),
    spoiled_bytes(["../" + "0" * 40]),
)
def test_any_name_is_recognised_or_none(directory: list[bytes], name: bytes, target: bytes) -> None:
    found = recognise(tuple(directory), name)
    assert found is None or (found.layout in LIVES and 0 < found.key < 1 << 63)
    said = link(tuple(directory), b"parent", target)
    assert said is None or all(0 < key < 1 << 63 for key in said)


def test_no_name_takes_for_ever() -> None:
    def parse(text: str) -> None:
        name = text.encode()
        recognise((name, name), name)

    answers_in_time(parse)
    for begin, end in (("m@4@0@", ".pt"), ("0" * 64 + "_", ".bin"), ("", ".data"), ("", ".weka1")):
        for text in long_ones(begin, end):
            parse(text)


@fuzzed
@given(PARTS, st.integers(0, 1 << 31), PATHS, st.sampled_from(["", "p/", "a/b/"]))
def test_a_key(namespace: bytes, version: int, path: bytes, prefix: str) -> None:
    """It is the object's alone, and means itself to every client, proxy and file system."""
    keys, name = Keys(prefix), ObjectName(namespace, version, path)
    key = keys.of(name)
    assert key.startswith(prefix)
    assert len(key) <= KEY_MAX
    assert re.fullmatch(r"[A-Za-z0-9_.=,~!()@%/-]+", key)
    assert not {"", ".", ".."} & set(key.split("/"))
    assert not key.removeprefix(prefix).startswith(".kvfs/")
    record = keys.record(name)
    if record is None:
        assert keys.parse(key) == name
    else:
        assert keys.parse_record(*record) == name
    assert Space.parse(str(Space(namespace, version))) == Space(namespace, version)


@fuzzed
@given(PARTS)
def test_a_part_of_a_key(part: bytes) -> None:
    assert unescape(escape(part)) == part


def test_names_that_look_alike_have_keys_of_their_own() -> None:
    """This holds even for names that Unicode takes for the same."""
    one, other = "é", unicodedata.normalize("NFD", "é")
    keys = Keys("p/")
    found = {keys.of(ObjectName(b"ns", 1, text.encode())) for text in (one, other, "E", "e", "e ")}
    assert len(found) == 5


@fuzzed
@given(spoiled(["ns@1/a/b", "@1/x", "ns%40@7/%2E%2E", "%/" + "0" * 64, ".kvfs/format.json"]))
@example("ns@9999999999999999999/x")
@example("ns@1/%00")
def test_keys_that_others_have_made(text: str) -> None:
    """A listed key gives a name that has this very key, or none.

    A directory cannot have every such name: tests/unit/test_bucket_lookup.py tests the others.
    """
    for keys in (Keys(""), Keys("p/")):
        found = keys.parse(keys.prefix + text)
        assert found is None or keys.of(found) == keys.prefix + text
        if found is not None:
            assert b"\0" not in found.namespace + found.path
        keys.parse_folder(keys.prefix + text)
        keys.record_of(keys.prefix + text)


@fuzzed
@given(PARTS | st.binary(max_size=255))
def test_a_model_in_a_header(name: bytes) -> None:
    """User metadata of S3 travels as headers of HTTP: printable ASCII, and no end of a line."""
    facts = Facts(
        size=1,
        digest=bytes(16),
        mtime_ns=0,
        mode=0o600,
        uid=0,
        gid=0,
        model=name.replace(b"\0", b"").decode("utf-8", "surrogateescape"),
        stored_size=1,
        stored_digest=bytes(16),
    )
    metadata = facts.metadata()
    assert all(re.fullmatch(r"[!-~]*", text) for text in metadata.values())
    assert sum(len(key) + len(text) for key, text in metadata.items()) <= 2048
    assert Facts.of_head("key", Head(1, "etag", 0.0, metadata)) == facts


@fuzzed
@given(st.binary(max_size=60) | PARTS)
def test_a_name_on_a_terminal(name: bytes) -> None:
    """No control sequence, no end of a line, nothing that turns the line around."""
    text = line(name.decode("utf-8", "surrogateescape")).plain
    assert text.isprintable()


@fuzzed
@given(st.text(max_size=40), st.binary(max_size=400))
def test_logged_arguments_are_printable_without_bytes(text: str, data: bytes) -> None:
    """Names as Python writes them; of bytes that are no name, how many."""
    assert shown("lookup", (1, b"\x1b[31m\n", object())).isprintable()
    told = shown("write", (3, 0, b"secret" + data))
    assert "secret" not in told
    assert f"{6 + len(data)} bytes" in told
    assert "secret" not in shown("setxattr", (1, b"user.x", b"secret", object()))
    assert len(shown("create", (text, data, Inode(1, 0, 0, 0)))) <= SHOWN


@pytest.mark.parametrize(
    "parse", [Keys("p/").parse, Space.parse, unescape, lambda text: escape(text.encode())]
)
def test_no_key_takes_for_ever(parse: object) -> None:
    assert callable(parse)
    answers_in_time(parse)
    for text in long_ones("p/ns@1/"):
        parse(text)
