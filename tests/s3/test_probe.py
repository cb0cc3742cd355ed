"""A mount's requests to a bucket before it changes anything."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvfs.errors import ConfigError
from kvfs.s3.boto import BotoStore
from kvfs.s3.errors import OutageError, RefusedError, StoreError, StoreFullError, ThrottledError
from kvfs.s3.keys import Keys
from kvfs.s3.marker import Marker, claim
from kvfs.s3.probe import probe
from kvfs.s3.transfer import StoreTransfers, Terms
from scripts.s3_server import Server
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore

KEYS = Keys("kv/")
TERMS = Terms()


@pytest.mark.parametrize("once_put", [False, True])
@pytest.mark.parametrize("once_complete", [False, True])
def test_probe_finds_the_conditions_that_the_store_honours(
    *, once_put: bool, once_complete: bool
) -> None:
    store = MemoryStore(once_put=once_put, once_complete=once_complete)
    expected = replace(TERMS, once_put=once_put, once_complete=once_complete)
    assert probe(store, KEYS, TERMS) == expected
    assert (store.objects, store.unfinished) == ({}, {})


def test_ceph_honours_the_one_and_not_the_other(boto: BotoStore) -> None:
    """S3 servers do not keep all promises; this test notices if that changes."""
    assert probe(boto, KEYS, TERMS) == replace(TERMS, once_put=True, once_complete=False)
    assert boto.list("").entries == []
    assert list(boto.uploads("")) == []


def test_a_store_that_refuses_conditions_does_not_honour_them() -> None:
    store = FaultyStore(
        MemoryStore(),
        Fault("put", 1, RefusedError("NotImplemented")),
        Fault("complete", 1, RefusedError("NotImplemented")),
    )
    assert probe(store, KEYS, TERMS) == replace(TERMS, once_put=False, once_complete=False)


@pytest.mark.parametrize("verb", ["list", "put", "get", "head", "begin", "put_part", "delete"])
def test_missing_permission_is_refused_with_its_cure(verb: str) -> None:
    fault = Fault(verb, 0, RefusedError(f"AccessDenied {verb}"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{verb}.*list, read, write and delete below"):
        probe(FaultyStore(MemoryStore(), fault), KEYS, TERMS)


@pytest.mark.parametrize("error", [OutageError, ThrottledError, StoreFullError])
def test_outage_during_the_probe_is_no_configuration_error(error: type[StoreError]) -> None:
    for nth in range(1, 10):
        with pytest.raises(error):
            probe(FaultyStore(MemoryStore(), Fault("any", nth, error("no"))), KEYS, TERMS)


def test_a_store_that_lies_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes read differ from those written"):
        probe(FaultyStore(MemoryStore(), Fault("get", flip=True)), KEYS, TERMS)


def test_a_bucket_that_is_not_there(s3: Server) -> None:
    with pytest.raises(ConfigError, match=r"NoSuchBucket.*create the bucket"):
        probe(BotoStore(s3.place("no-such-bucket")), KEYS, TERMS)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "InvalidAccessKeyId"),
    ],
)
def test_wrong_credentials(
    s3: Server,
    bucket: str,
    changed: dict[str, str],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in changed.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{code}.*credentials") as caught:
        probe(BotoStore(s3.place(bucket)), KEYS, TERMS)
    assert all(text not in str(caught.value) for text in changed.values())


def test_no_credentials(s3: Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in s3.credentials:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(ConfigError, match=r"NoCredentialsError.*credentials"):
        probe(BotoStore(s3.place(bucket)), KEYS, TERMS)


def test_no_such_profile(s3: Server, bucket: str) -> None:
    with pytest.raises(RefusedError, match="ProfileNotFound"):
        BotoStore(replace(s3.place(bucket), profile="nobody"))


def test_probe_of_a_closed_port_is_an_outage(s3: Server, bucket: str) -> None:
    place = replace(s3.place(bucket), endpoint="http://127.0.0.1:1")
    with pytest.raises(OutageError, match="EndpointConnectionError"):
        probe(BotoStore(place, attempts=1), KEYS, TERMS)


@pytest.fixture
def transfers() -> Iterator[StoreTransfers]:
    found = StoreTransfers(MemoryStore(), TERMS)
    yield found
    found.close()


def test_a_prefix_is_claimed_once(transfers: StoreTransfers) -> None:
    assert claim(transfers, KEYS, "me", exclusive=False) == Marker(1, "")
    assert claim(transfers, KEYS, "you", exclusive=False) == Marker(1, "")
    with pytest.raises(ConfigError, match="shared with other nodes"):
        claim(transfers, KEYS, "me", exclusive=True)


def test_a_prefix_that_one_kvfs_has_to_itself(transfers: StoreTransfers) -> None:
    assert claim(transfers, KEYS, "me", exclusive=True) == Marker(1, "me")
    assert claim(transfers, KEYS, "me", exclusive=False) == Marker(1, "me")
    with pytest.raises(ConfigError, match="belongs to kvfs me alone, this kvfs is you"):
        claim(transfers, KEYS, "you", exclusive=False)
    assert claim(transfers, Keys("other/"), "you", exclusive=True) == Marker(1, "you")


def test_of_two_that_claim_at_once_both_see_the_same() -> None:
    store = MemoryStore()

    def overtake(verb: str) -> None:
        if verb == "put" and not store.objects:
            claim(StoreTransfers(store, TERMS), KEYS, "first", exclusive=True)

    with pytest.raises(ConfigError, match="belongs to kvfs first"):
        claim(StoreTransfers(FaultyStore(store, pause=overtake), TERMS), KEYS, "me", exclusive=True)


def test_a_newer_format_is_refused(transfers: StoreTransfers) -> None:
    transfers.put("kv/.kvfs/format.json", b'{"format": 2, "owner": ""}', {}, once=True)
    with pytest.raises(ConfigError, match="format 2, this kvfs knows 1; mount it with a newer"):
        claim(transfers, KEYS, "me", exclusive=False)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"null", b"{}", b'{"format": "1", "owner": ""}', b"[" * 4000, b"\xff"),
        *(b'{"format": 1, "owner": 7}', b'{"format": true, "owner": ""}', b'{"format": 0}'),
    ],
)
def test_a_marker_that_kvfs_did_not_write(transfers: StoreTransfers, text: bytes) -> None:
    transfers.put("kv/.kvfs/format.json", text, {}, once=True)
    with pytest.raises(ConfigError, match="kvfs did not write this object"):
        claim(transfers, KEYS, "me", exclusive=False)
