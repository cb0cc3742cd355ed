"""Any bytes in a catalog, a container or a trace: what kvfs could have written, or a refusal."""

import gzip
import lzma
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvfs.catalog import Catalog, audit, keys
from kvfs.catalog.inode import Inode, PackedCopy
from kvfs.catalog.keys import Stored
from kvfs.compression import container
from kvfs.compression.container import DamagedError, expect_codec, frames_in
from kvfs.errors import CatalogError, ConfigError, UnsupportedError
from kvfs.simulation import trace
from tests.unit.fuzz import LONG, answers_in_time, fuzzed, in_time, spoiled, spoiled_bytes

INODE = Inode(
    *(7, 0o100644, 1000, 1000),
    size=5000,
    sealed=True,
    on_nvme=True,
    digest=bytes(range(16)),
    links=((1, 7), (2, 9)),
    namespace=3,
    key=4,
    packed=PackedCopy("blosc-zstd-s2/1", 100, 8, bytes(16)),
)
LINK = Inode(8, 0o120777, 0, 0, links=((1, 8),), target=b"../x")
STORED = keys.stored_value(Stored("p/@0/x", "etag", 9, bytes(16), "none", "0644 0 0 1"))


@fuzzed
@given(spoiled_bytes([INODE.pack(), LINK.pack()]))
@example(INODE.pack()[:-20])
def test_records_of_inodes(record: bytes) -> None:
    """`audit` never raises; what it takes is written again as it was read."""
    found = audit.inode(keys.number_key(7), record)
    assert found is None or found.pack() == record
    try:
        Inode.unpack(7, record)
    except struct.error:
        return


@fuzzed
@given(st.binary(max_size=40), spoiled_bytes([STORED, b"engine\0model", bytes(8) + b"name"]))
def test_other_records(key: bytes, value: bytes) -> None:
    audit.by_cookie(key, value)
    audit.by_name(key, value)
    audit.publication(value)
    audit.dropped(value)
    audit.model(key, value)
    audit.stored(value)
    audit.deleted(value)
    audit.xattr(key)
    keys.number(key)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    made = Catalog(tmp_path_factory.mktemp("fuzz") / "catalog")
    yield made
    made.close()


@fuzzed
@given(
    st.sampled_from(
        [b"i", b"d", b"c", b"x", b"o", b"n", b"r", b"t", b"p", b"l", b"s", b"u", b"k", b"z"]
    ),
    st.binary(max_size=24),
    spoiled_bytes([STORED, INODE.pack()]),
)
def test_a_catalog_with_anything_in_it(
    catalog: Catalog, kind: bytes, key: bytes, value: bytes
) -> None:
    """A record that makes no sense raises one error, or is skipped."""
    written = [kind + key, b"i" + bytes(8)]
    catalog.commit([(one, value) for one in written], sync=False)
    try:
        catalog.inodes_after(0, 10)
        catalog.inodes([0])
        catalog.marks(kind)
        catalog.inode(0)
    except CatalogError:
        return
    finally:
        catalog.commit([(one, None) for one in written], sync=False)


@fuzzed
@given(st.sampled_from(["format", "next_id"]), spoiled_bytes(["4", "16"]))
@example("format", "\u0663".encode())
@example("format", "\u00b2".encode())
@example("format", b"\xff")
@example("next_id", b"9" * 5000)
def test_catalog_with_malformed_facts_is_refused(catalog: Catalog, name: str, value: bytes) -> None:
    """Opening it is a refusal."""
    before = catalog.record(b"m", name.encode())
    catalog.commit([(b"m" + name.encode(), value)], sync=False)
    try:
        catalog._check_format()
        catalog._first_free(16)
    except ConfigError:
        return
    finally:
        catalog.commit([(b"m" + name.encode(), before)], sync=False)


SIZE = (4 << 20) + 5
HEAD = container.head(SIZE, [(4 << 20, 1), (20, 2)])
TOLD = len(HEAD) + (4 << 20) + 20


@fuzzed
@given(
    spoiled_bytes([HEAD]),
    st.booleans(),
    st.integers(-1, 1 << 60) | st.just(SIZE),
    st.integers(0, 1 << 60),
)
def test_heads_of_containers(
    data: bytes,
    proven: bool,  # noqa: FBT001 (drawn)
    size: int,
    stored: int,
) -> None:
    """Heads with a right digest are tried, too: a writer to the bucket can make such."""
    if proven and len(data) >= 8:
        data = data[:-8] + struct.pack("<Q", xxh3_64_intdigest(data[:-8]))
    for told in (TOLD, stored):
        try:
            frames = frames_in(data, size if 0 <= size <= 1 << 40 else SIZE, told)
        except DamagedError:
            continue
        for frame in islice(frames, 3):
            assert len(data) <= frame.position <= frame.position + frame.stored <= told


@fuzzed
@given(spoiled(["blosc-zstd-s2/1", "none"]))
def test_names_of_codecs(name: str) -> None:
    try:
        expect_codec(name)
    except UnsupportedError:
        return


LINES = (
    '{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n',
    '{"timestamp": 0.5, "input_length": 0, "output_length": 0, "hash_ids": []}\n',
)


def read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for request in trace.read(str(path)):
        assert request.tokens >= 0
        assert all(key > 0 for key in request.keys)


@fuzzed
@given(
    spoiled_bytes([*LINES, "".join(LINES)]),
    st.sampled_from([bytes, gzip.compress, lzma.compress]),
    st.integers(0, 60),
)
@example(b"[" * 3000, bytes, 0)
@example(b'{"timestamp": ' + b"9" * 5000 + b"}", bytes, 0)
@example(b"\xff", bytes, 0)
def test_traces(tmp_path: Path, content: bytes, packed: type[bytes], cut: int) -> None:
    data = packed(content)
    for part in (data, data[: max(0, len(data) - cut)]):
        try:
            read(tmp_path / "trace", part)
        except ConfigError:
            continue


def test_no_trace_takes_for_ever(tmp_path: Path) -> None:
    answers_in_time(lambda text: read(tmp_path / "trace", text.encode()), ConfigError)
    with in_time("a long record"):
        audit.stored(STORED + b"\0" * LONG)
