"""Compression of objects on their way to a bucket, and their way back."""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.catalog import ROOT_INO, Stored
from kvfs.compression import files
from kvfs.compression.container import FRAME, DamagedError, codec_name
from kvfs.errors import NotFoundError, UnsupportedError
from kvfs.movement import packing
from kvfs.movement.downloading import DownloadJob, download
from kvfs.movement.publishing import About, Target
from kvfs.movement.uploading import upload
from kvfs.s3.errors import ObjectExistsError, SourceError, StoreError
from kvfs.s3.facts import Facts
from kvfs.s3.transfer import StoreTransfers, Terms
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_hydration import spilled
from tests.unit.test_uploader import again, contents, counters, faults
from tests.unit.world import MIB, World, digest, world

CODECS = {codec_name(size) for size in (1, 2, 4)}
MTIME = 1_700_000_000 * 10**9
SEED = int(os.environ.get("KVFS_SEED", "31"))


def numbers(count: int, seed: int = 7) -> bytes:
    """So many elements of 2 bytes: one that repeats, one that does not."""
    dice = random.Random(seed)
    return b"".join(bytes([byte, 0x3F]) for byte in dice.randbytes(count))


KV = numbers(100_000)
NOISE = random.Random(8).randbytes(100_000)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def transfers(store: MemoryStore) -> Iterator[StoreTransfers]:
    made = StoreTransfers(store, Terms(single=MIB, part=5 * MIB))
    yield made
    made.close()


def about(content: bytes, known: bytes = b"") -> About:
    return About(len(content), known, MTIME, 0o644, 1, 2, 0, 0, "", "0644 1 2 0")


def there(
    transfers: StoreTransfers,
    folder: Path,
    content: bytes,
    *,
    known: bytes = b"",
    scratch: str | None = "",
    key: str = "k",
) -> tuple[Stored, packing.PackingResult | None]:
    """It goes up."""
    source = folder / "source"
    source.write_bytes(content)
    os.utime(source, ns=(MTIME, MTIME))
    target = Target(key, None, once=True)
    done = upload(
        transfers, str(source), MTIME, about(content, known), target, str(folder), scratch
    )
    assert done.digest == digest(content)
    assert done.stored.attributes == "0644 1 2 0"
    return done.stored, done.packing


def back(transfers: StoreTransfers, folder: Path, stored: Stored, content: bytes) -> bytes:
    """It comes down, or raises and leaves nothing."""
    path = folder / "back"
    path.unlink(missing_ok=True)
    try:
        download(transfers, DownloadJob(stored, str(path), len(content), digest(content), MTIME))
    finally:
        assert {one.name for one in folder.iterdir()} <= {"source", "back"}
    return path.read_bytes()


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    print_blob=True,
)
@given(
    size=st.one_of(st.integers(0, 5000), st.integers(FRAME - 9, FRAME + 9)),
    element=st.sampled_from([1, 2, 4, 8]),
    alphabet=st.integers(1, 256),
    seed=st.integers(0, 1 << 32),
    known=st.booleans(),
)
def test_any_bytes_of_any_element_size_come_back(
    tmp_path: Path, size: int, element: int, alphabet: int, seed: int, *, known: bool
) -> None:
    """Whether that makes them smaller or larger."""
    dice = random.Random(seed)
    piece = bytes(dice.randrange(alphabet) for _ in range(min(size, 4099)))
    content = (piece * (size // max(1, len(piece)) + 1))[:size]
    transfers = StoreTransfers(MemoryStore(), Terms(single=MIB, part=5 * MIB))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "sampled", lambda *_: element)
        patch.setattr(files, "PAYS", 0.0)
        stored, result = there(
            transfers, tmp_path, content, known=digest(content) if known else b""
        )
    assert result is not None
    assert stored.codec == (codec_name(element) if size else "none")
    assert back(transfers, tmp_path, stored, content) == content
    transfers.close()


@pytest.mark.parametrize("seed", [SEED + number for number in range(40)])
def test_damaged_bytes_are_never_given_out(
    tmp_path: Path, store: MemoryStore, transfers: StoreTransfers, seed: int
) -> None:
    """This covers damage that the digest shows, and damage with a digest of its own."""
    dice = random.Random(seed)
    stored, _ = there(transfers, tmp_path, KV)
    held = store.objects["k"]
    data = bytearray(held.data)
    harm = dice.choice(["flip", "cut", "longer", "codec", "zeros"])
    at = dice.randrange(len(data))
    if harm == "flip":
        data[at] ^= 1 << dice.randrange(8)
    elif harm == "cut":
        del data[at:]
    elif harm == "longer":
        data += dice.randbytes(1 + at % 100)
    elif harm == "zeros":
        data[at:] = bytes(len(data) - at)
    else:
        stored = stored._replace(codec=dice.choice([codec_name(4), "blosc-zstd-s2/2", "zip"]))
    held.data = bytes(data)
    believed = stored
    if dice.randrange(2):
        believed = stored._replace(size=len(data), digest=digest(bytes(data)))
    try:
        found = back(transfers, tmp_path, believed, KV)
    except (StoreError, DamagedError, UnsupportedError):
        assert not (tmp_path / "back").exists()
    else:  # the element size is in each chunk as well: its name is for people
        assert found == KV


def test_incompressible_object_is_uploaded_plain(
    tmp_path: Path, store: MemoryStore, transfers: StoreTransfers
) -> None:
    stored, result = there(transfers, tmp_path, NOISE)
    assert (stored.codec, stored.size, store.objects["k"].data) == ("none", len(NOISE), NOISE)
    assert result is not None
    assert (result.smaller, result.failure) == (False, "")
    assert result.cpu_seconds > 0


def test_object_compressible_only_in_its_sample_is_uploaded_plain(
    tmp_path: Path, transfers: StoreTransfers
) -> None:
    size, pieces = 8 * MIB, 16
    piece = files.SAMPLE // pieces
    data = bytearray(random.Random(9).randbytes(size))
    for number in range(pieces):
        at = number * ((size - piece) // (pieces - 1) & ~7)
        data[at : at + piece] = bytes(piece)
    content = bytes(data)
    assert files.sampled(lambda at, count: content[at : at + count], size, None) is not None
    stored, result = there(transfers, tmp_path, content)
    assert stored.codec == "none"
    assert result is not None
    assert not result.smaller
    assert back(transfers, tmp_path, stored, content) == content


def test_large_object_is_packed_on_the_disk(
    tmp_path: Path, transfers: StoreTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MEMORY", 1000)
    stored, result = there(transfers, tmp_path, KV)
    assert stored.codec == "none", "without a disk it stays as it is"
    assert result is not None
    assert "without a disk 1000 at most" in result.failure
    stored, result = there(transfers, tmp_path, KV, scratch=str(tmp_path), key="l")
    assert stored.codec in CODECS
    assert result == packing.PackingResult(result.cpu_seconds if result else 0, smaller=True)
    assert back(transfers, tmp_path, stored, KV) == KV


def test_failed_compression_uploads_the_object_plain(
    tmp_path: Path, transfers: StoreTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MEMORY", 1000)
    stored, result = there(transfers, tmp_path, KV, scratch=str(tmp_path / "not there"))
    assert stored.codec == "none"
    assert result is not None
    assert "No such file" in result.failure


def test_a_rotten_file_is_not_compressed_into_a_good_object(
    tmp_path: Path, store: MemoryStore, transfers: StoreTransfers
) -> None:
    with pytest.raises(SourceError):
        there(transfers, tmp_path, KV, known=digest(b"what was sealed"))
    assert not store.objects


def test_in_parts(tmp_path: Path, transfers: StoreTransfers, store: MemoryStore) -> None:
    content = numbers(6 * MIB)
    stored, _ = there(transfers, tmp_path, content)
    assert stored.size > MIB
    assert stored.etag.endswith("-2")
    facts = Facts.of_head("k", store.head("k"))
    assert (facts.size, facts.stored_size) == (len(content), stored.size)
    assert back(transfers, tmp_path, stored, content) == content


@pytest.mark.parametrize("theirs", ["", None])
@pytest.mark.parametrize("ours", ["", None])
def test_the_same_object_of_another_node_is_the_same_whatever_its_codec(
    tmp_path: Path, transfers: StoreTransfers, theirs: str | None, ours: str | None
) -> None:
    first, _ = there(transfers, tmp_path, KV, scratch=theirs)
    second, _ = there(transfers, tmp_path, KV, scratch=ours)
    assert second == first
    assert back(transfers, tmp_path, second, KV) == KV
    with pytest.raises(ObjectExistsError):
        there(transfers, tmp_path, NOISE, scratch=ours)


def test_a_codec_that_is_not_known_here_is_another_object(
    tmp_path: Path, transfers: StoreTransfers, store: MemoryStore
) -> None:
    stored, _ = there(transfers, tmp_path, KV)
    facts = Facts.of_head("k", store.head("k"))
    held = store.objects["k"]
    held.metadata = replace(facts, codec="blosc-zstd-s2/9").metadata()
    assert stored.codec in CODECS
    with pytest.raises(ObjectExistsError, match="cannot be read by this version"):
        there(transfers, tmp_path, KV)


# In a mount


@pytest.fixture
def made(tmp_path: Path, store: MemoryStore) -> Iterator[World]:
    with world(tmp_path, store=FaultyStore(store)) as found:
        trio.run(found.ledger.dirty.load)
        found.tell(".", compression="s3")
        yield found
        trio.run(found.check_at_rest)


def test_compressed_upload_is_hydrated_unchanged(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await spilled(made, b"a", KV)
        stored = made.ledger.dirty.stored(inode.ino)
        assert stored is not None
        assert stored.codec in CODECS
        assert contents(store).keys() == {"@0/a"}
        assert len(contents(store)["@0/a"]) == stored.size < len(KV) / 1.8
        assert made.bucket is not None
        assert made.bucket.used == len(KV), "as its readers see it"
        assert await made.read(inode.ino) == KV
        counted = counters(made)
        assert counted["compressed"] == counted["decompressed"] == 1
        assert counted["compressed_bytes"] == len(KV)
        assert counted["compressed_to_bytes"] == counted["upload_bytes"] == stored.size
        assert counted["compress_cpu_us"] > 0
        assert counted["decompress_cpu_us"] > 0
        assert "not_compressed" not in counted

    trio.run(case)


def test_namespace_with_compression_off_uploads_plain(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        made.namespace("n", compression="off")
        await made.make_file(b"n/a", KV)
        await made.make_file(b"b", NOISE)
        await made.upload_all()
        assert contents(store) == {"n@1/a": KV, "@0/b": NOISE}
        assert counters(made)["not_compressed"] == 1

    trio.run(case)


def test_the_name_of_a_block_says_how_large_its_numbers_are(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int | None] = []
    plain = files.sampled

    def sampled(read: Callable[[int, int], bytes], size: int, known: int | None) -> int | None:
        tried.append(known)
        return plain(read, size, known)

    monkeypatch.setattr(files, "sampled", sampled)

    async def case() -> None:
        await made.make_file(b"m@2@1@abc@bfloat16.data", KV)
        await made.make_file(b"m@2@1@abc@fp8_e5m2.data", KV)
        await made.make_file(b"a", KV)
        await made.upload_all()
        assert tried == [2, None, None]
        stored = made.ledger.dirty.stored(made.find(b"m@2@1@abc@bfloat16.data").ino)
        assert stored is not None
        assert stored.codec == codec_name(2)

    trio.run(case)


def test_a_rename_there_keeps_the_codec(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await spilled(made, b"a", KV)
        before = contents(store)["@0/a"]
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        await made.upload_all()
        assert contents(store) == {"@0/b": before}
        assert Facts.of_head("p/@0/b", store.head("p/@0/b")).codec in CODECS
        assert await made.read(inode.ino) == KV

    trio.run(case)


@pytest.mark.parametrize("fault", [Fault("get", 0, flip=True), Fault("get", 0, keep=100)])
def test_damage_there_is_a_miss(made: World, fault: Fault) -> None:
    async def case() -> None:
        inode = await spilled(made, b"a", KV)
        faults(made, fault)
        with pytest.raises(NotFoundError):
            await made.read(inode.ino)
        assert made.catalog.inode(inode.ino) is None
        assert made.ledger.counters["opens_unreadable"] == 1
        faults(made)
        await made.upload_all()

    trio.run(case)


def test_a_file_that_rotted_here_is_not_uploaded(made: World) -> None:
    async def case() -> None:
        inode = await made.store(b"a", KV, made.ram)
        await made.demote(inode.ino)  # which knows the digest from then on
        path = Path(made.fast.path(inode.ino, 1))
        times = path.stat()  # noqa: ASYNC240 (a file of a test)
        path.write_bytes(KV[:-1] + b"x")  # noqa: ASYNC240
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        await made.upload_all()
        found = again(made, inode.ino)
        assert made.ledger.tiers.holders(found) == [made.nvme]
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 1
        made.ledger.removals.evict(found)
        assert await made.read(inode.ino) == KV

    trio.run(case)
