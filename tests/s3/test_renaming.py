"""Objects in a store get other names or other metadata, without moving their bytes."""

import random
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvfs.catalog import Stored
from kvfs.movement import uploading
from kvfs.movement.downloading import DownloadJob, download
from kvfs.movement.publishing import About, Target, facts
from kvfs.s3.chunks import LEAST, Chunks
from kvfs.s3.errors import NoObjectError, ObjectChangedError, ObjectExistsError
from kvfs.s3.facts import Facts
from kvfs.s3.store import Store
from kvfs.s3.transfer import StoreTransfers, Terms
from tests.s3.memory import MemoryStore
from tests.unit.world import digest

MIB = 1 << 20
CONTENT = random.Random(3).randbytes(12 * MIB + 5)
FIRST = digest(CONTENT[:4096])
ABOUT = About(len(CONTENT), digest(CONTENT), 5, 0o644, 1, 2, 3, 4, "m", "0644 1 2 5")


@pytest.fixture(params=["memory", "boto"])
def store(request: pytest.FixtureRequest) -> Store:
    found: Store = MemoryStore() if request.param == "memory" else request.getfixturevalue("boto")
    return found


@pytest.fixture(params=["whole", "parts"])
def transfers(
    request: pytest.FixtureRequest, store: Store, monkeypatch: pytest.MonkeyPatch
) -> StoreTransfers:
    if request.param == "parts":
        monkeypatch.setattr(uploading, "WHOLE", MIB)
        monkeypatch.setattr(uploading, "PART", 5 * MIB)
    once = isinstance(store, MemoryStore)  # Ceph does not look when parts become an object
    return StoreTransfers(store, Terms(once_complete=once))


def chunks_of(content: bytes) -> Chunks:
    pieces = (content[at : at + LEAST] for at in range(0, len(content), LEAST))
    return Chunks(LEAST, tuple(xxh3_64_intdigest(piece) for piece in pieces))


def put(store: Store, key: str = "a", content: bytes = CONTENT) -> Stored:
    stored = Stored(key, "", len(content), digest(content))
    about = ABOUT._replace(size=len(content))
    metadata = facts(about, stored, digest(content), chunks_of(content), FIRST).metadata()
    return stored._replace(etag=store.put(key, content, metadata, once=True))


def read(transfers: StoreTransfers, folder: Path, stored: Stored) -> bytes:
    download(transfers, DownloadJob(stored, str(folder / "back"), len(CONTENT), ABOUT.digest, 0))
    return (folder / "back").read_bytes()


@pytest.mark.parametrize("key", ["a", "b%20"])
def test_bytes_stay_and_facts_change(transfers: StoreTransfers, tmp_path: Path, key: str) -> None:
    source = put(transfers.store)
    about = ABOUT._replace(mode=0o600, mtime_ns=7, attributes="0600 1 2 7")
    target = Target(key, None, once=key != "a", token="t")  # noqa: S106 (no password)
    done = uploading.copy(transfers, source, about, target, str(tmp_path))
    found = Facts.of_head(key, transfers.store.head(key))
    assert (found.mode, found.mtime_ns, found.digest) == (0o600, 7, ABOUT.digest)
    assert (found.chunks, found.header) == (chunks_of(CONTENT), FIRST)
    assert (done.digest, done.stored.attributes) == (ABOUT.digest, "0600 1 2 7")
    assert transfers.store.head(key).metadata["kvfs-put"] == "t"
    assert not list(transfers.store.uploads(""))
    assert not list(tmp_path.iterdir())
    assert read(transfers, tmp_path, done.stored) == CONTENT


def test_copy_keeps_an_object_that_has_the_name(transfers: StoreTransfers, tmp_path: Path) -> None:
    source, other = put(transfers.store), put(transfers.store, "b", b"others")
    with pytest.raises(ObjectExistsError):
        uploading.copy(transfers, source, ABOUT, Target("b", None, once=True), str(tmp_path))
    same = put(transfers.store, "c")
    done = uploading.copy(transfers, source, ABOUT, Target("c", None, once=True), str(tmp_path))
    assert done.stored == same._replace(attributes=ABOUT.attributes)
    assert transfers.store.head("b").etag == other.etag
    assert not list(transfers.store.uploads(""))


def test_changed_source_is_not_copied(transfers: StoreTransfers, tmp_path: Path) -> None:
    source = put(transfers.store)
    transfers.store.put("a", b"others", {}, once=False)
    target = Target("b", None, once=True)
    with pytest.raises(ObjectChangedError):
        uploading.copy(transfers, source, ABOUT, target, str(tmp_path))
    transfers.store.delete("a")
    with pytest.raises(NoObjectError):
        uploading.copy(transfers, source, ABOUT, target, str(tmp_path))
    with pytest.raises(NoObjectError):
        transfers.store.head("b")
    assert not list(transfers.store.uploads(""))
