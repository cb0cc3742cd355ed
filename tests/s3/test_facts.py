"""Metadata: written fields come back, and any other text is an error that names its place."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.compression.container import codec_name
from kvfs.s3.boto import BotoStore
from kvfs.s3.chunks import LEAST, MOST, Chunks
from kvfs.s3.errors import MetadataError
from kvfs.s3.facts import FORMAT, MODEL_MAX, Facts
from kvfs.s3.store import Head
from kvfs.s3.transfer import ATTEMPT

FACTS = Facts(
    size=5,
    digest=bytes(range(16)),
    mtime_ns=1_700_000_000_123_456_789,
    mode=0o640,
    uid=1000,
    gid=100,
    key=0x1234,
    parent_key=1,
    model="meta-llama/Llama 3 é",
    stored_size=5,
    stored_digest=bytes(range(16)),
)
digests = st.binary(min_size=16, max_size=16)
sizes = st.integers(0, 2**63 - 1)
models = st.binary(max_size=MODEL_MAX).map(
    lambda data: data.replace(b"\0", b"").decode("utf-8", "surrogateescape")
)


def head(metadata: dict[str, str], size: int = 5) -> Head:
    return Head(size, "etag", 0.0, metadata)


@given(
    st.builds(
        Facts,
        size=sizes,
        digest=digests,
        mtime_ns=st.integers(-(2**63) + 1, 2**63 - 1),
        mode=st.integers(0, 0o7777),
        uid=st.integers(0, 2**32 - 2),
        gid=st.integers(0, 2**32 - 2),
        key=st.integers(0, 2**63 - 1),
        parent_key=st.integers(0, 2**63 - 1),
        model=models,
        codec=st.sampled_from(["zstd", "planes-zstd.1", codec_name(2)]),
        stored_size=sizes,
        stored_digest=digests,
        header=st.one_of(st.just(b""), digests),
    )
)
def test_facts_come_back(facts: Facts) -> None:
    metadata = facts.metadata()
    assert Facts.of_head("key", head(metadata, facts.stored_size)) == facts
    assert all(text.isascii() and text.isprintable() and text.strip() for text in metadata.values())
    assert _length(metadata) < 2048 - 100


def _length(metadata: dict[str, str]) -> int:
    return sum(len(name) + len(text) for name, text in metadata.items())


def test_the_longest_fits_beside_the_attempt() -> None:
    most = 2**63 - 1
    size = MOST * LEAST
    facts = Facts(
        size=size,
        digest=b"x" * 16,
        uid=2**32 - 2,
        gid=2**32 - 2,
        key=most,
        parent_key=most,
        stored_size=size,
        stored_digest=b"x" * 16,
        header=b"x" * 16,
        mtime_ns=-most,
        mode=0o7777,
        model="\udcff" * MODEL_MAX,
        chunks=Chunks(LEAST, (2**64 - 1,) * MOST),
    )
    metadata = facts.metadata()
    assert Facts.of_head("key", head(metadata, size)) == facts
    assert _length({**metadata, ATTEMPT: "0" * 32}) < 2048


def test_facts_survive_the_store(boto: BotoStore) -> None:
    boto.put("key", b"hello", FACTS.metadata(), once=True)
    assert Facts.of_head("key", boto.head("key")) == FACTS


def test_unknown_metadata_is_ignored() -> None:
    metadata = {**FACTS.metadata(), "kvfs-newer": "x", "mtime": "y", "kvfs-put": "z"}
    assert Facts.of_head("key", head(metadata)) == FACTS


def test_a_long_model_is_cut() -> None:
    metadata = replace(FACTS, model="é" * 1000).metadata()
    assert len(Facts.of_head("key", head(metadata)).model.encode(errors="surrogateescape")) == 255


@pytest.mark.parametrize("name", FACTS.metadata())
def test_a_field_that_is_missing_is_named(name: str) -> None:
    metadata = FACTS.metadata()
    del metadata[name]
    with pytest.raises(MetadataError, match=f"some/key: metadata {name} is missing"):
        Facts.of_head("some/key", head(metadata))


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("size", ["", "-1", "05", "5.0", "1_0", "٣", " 5", "9" * 19, "9" * 5000, "0x5", "nan"]),
        ("xxh3-128", ["", "00", "g" * 32, "A" * 32, "0" * 33]),
        ("codec", ["", "../x", "Z", "x" * 33, "zstd\n"]),
        ("mode", ["", "8888", "10000", "-001", "644"]),
        ("uid", ["4294967295", "-1", "root"]),
        ("mtime-ns", ["", "-0", "1e9", "9" * 19, "--1"]),
        ("key", ["", "12", "x" * 16, "f" * 16]),
        ("model", ["", "a b", "%", "%zz", "é", "x" * 256]),
        ("format", ["", "0", "2", "one"]),
        ("stored-size", ["6", "4"]),
        ("stored-xxh3-128", ["0" * 32]),
        ("header", ["", "00", "g" * 32, "A" * 32, "0" * 33]),
    ],
)
def test_a_field_that_is_wrong_is_named(name: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(MetadataError, match=r"some/key: .*"):
            Facts.of_head("some/key", head({**FACTS.metadata(), f"kvfs-{name}": text}))


def test_another_length_than_was_stored() -> None:
    with pytest.raises(MetadataError, match="4 bytes"):
        Facts.of_head("key", head(FACTS.metadata(), 4))


def test_a_newer_format_is_named() -> None:
    with pytest.raises(MetadataError, match=f"format {FORMAT + 1}"):
        Facts.of_head("key", head({**FACTS.metadata(), "kvfs-format": str(FORMAT + 1)}))


@given(st.dictionaries(st.sampled_from(list(FACTS.metadata())), st.text(max_size=40)))
def test_whatever_is_there_is_facts_or_one_error(change: dict[str, str]) -> None:
    metadata = {**FACTS.metadata(), **change}
    try:
        found = Facts.of_head("key", head(metadata))
    except MetadataError:
        return
    assert {name: found.metadata()[name] for name in change} == change
