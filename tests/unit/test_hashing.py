"""Digests of files with holes: the same wherever the holes are, and fast over them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.catalog import inode
from kvfs.mounts import mount, umount
from kvfs.movement import files
from kvfs.movement.copying import PIECE, copy, read_through
from kvfs.movement.files import BLOCK, data_ranges

TIB = 1 << 40
# One block each, or what is left of one at the end: data, a hole, zeros that were written, and data
# with a beginning or end of zeros.
KINDS = st.sampled_from(["data", "hole", "hole", "zeros", "late", "early"])
LAYOUTS = st.tuples(st.lists(KINDS, max_size=40), st.integers(0, BLOCK - 1), st.binary(min_size=8))
PATIENT = settings(
    max_examples=60,
    deadline=None,
    print_blob=True,  # the seed that repeats a failure
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tmpfs; what pytest has is on the machine's disk."""
    path = tmp_path_factory.mktemp("memory")
    mount("none", path, "tmpfs", 0, "size=64M,huge=within_size")
    yield path
    umount(path)


def content(layout: tuple[list[str], int, bytes]) -> list[tuple[str, bytes]]:
    kinds, last, seed = layout
    blocks = []
    for number, kind in enumerate(kinds):
        size = BLOCK if number < len(kinds) - 1 else last
        data = (seed + b"x") * (BLOCK // 8)
        half = bytes(BLOCK // 2)
        whole = {"late": half + data, "early": data[: BLOCK // 2] + half, "data": data}
        blocks.append((kind, whole.get(kind, bytes(BLOCK))[:BLOCK][:size]))
    return blocks


def write(path: Path, blocks: list[tuple[str, bytes]], *, holes: bool) -> int:
    """With holes, or with all their zeros written. Returns the size."""
    with path.open("wb") as file:
        for kind, block in blocks:
            if kind == "hole" and holes:
                file.seek(len(block), os.SEEK_CUR)
            else:
                file.write(block)
        file.truncate(sum(len(block) for _, block in blocks))
    return path.stat().st_size


@given(LAYOUTS)
@PATIENT
def test_holes_change_no_digest_and_no_byte(
    tmp_path: Path, memory: Path, layout: tuple[list[str], int, bytes]
) -> None:
    blocks = content(layout)
    expected = b"".join(block for _, block in blocks)
    found: dict[bool, set[bytes]] = {False: set(), True: set()}
    for source in (tmp_path, memory):
        for holes in (False, True):
            size = write(source / "from", blocks, holes=holes)
            assert size == len(expected)
            for sparse in (False, True):
                read = read_through(str(source / "from"), size, sync=False, sparse=sparse)
                found[sparse].add(read.digest)
                for target in (tmp_path, memory):
                    paths = str(source / "from"), str(target / "to")
                    moved = copy(*paths, size, sync=False, cold=False, sparse=sparse)
                    found[sparse].add(moved.digest)
                    assert (target / "to").read_bytes() == expected
    assert found[False] == {xxhash.xxh3_128_digest(expected)}, "as ever"
    assert len(found[True]) == 1
    (digest,) = found[True]
    assert (digest[:1], len(digest)) == (inode.SPARSE, inode.SPARSE_LENGTH)
    assert inode.SPARSE == files.SPARSE


@given(LAYOUTS, st.integers(0, 50 * BLOCK), st.integers(1, 255))
@PATIENT
def test_another_byte_is_another_digest(
    tmp_path: Path, layout: tuple[list[str], int, bytes], at: int, change: int
) -> None:
    path = tmp_path / "a"
    size = write(path, content(layout), holes=True)
    before = read_through(str(path), size, sync=False, sparse=True).digest
    with path.open("r+b") as file:
        if at < size:
            file.seek(at)
            byte = file.read(1)[0] ^ change
            file.seek(at)
            file.write(bytes([byte]))
        else:
            file.truncate(size + 1)
    now = path.stat().st_size
    assert read_through(str(path), now, sync=False, sparse=True).digest != before


def test_a_block_elsewhere_is_another_digest(tmp_path: Path) -> None:
    digests = set()
    for position in (0, BLOCK, 5 * BLOCK, PIECE, PIECE + BLOCK):
        with (tmp_path / f"{position}").open("wb") as file:
            file.truncate(4 * PIECE)
            file.seek(position)
            file.write(b"x" * BLOCK)
        path = str(tmp_path / f"{position}")
        digests.add(read_through(path, 4 * PIECE, sync=False, sparse=True).digest)
    assert len(digests) == 5


def test_holes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.truncate(8 * TIB)
        file.seek(4 * TIB + 5)
        file.write(b"island")
    total = 0
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], position: int) -> int:
        nonlocal total
        total += (got := real(fd, buffers, position))
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    moved = copy(str(path), str(tmp_path / "b"), 8 * TIB, sync=False, cold=False, sparse=True)
    assert total <= 2 * BLOCK
    assert moved.blocks * 512 <= 2 * BLOCK
    assert read_through(str(tmp_path / "b"), 8 * TIB, sync=False, sparse=True)[0] == moved.digest


def test_a_file_without_holes_is_one_part_whatever_the_file_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some have said of data that was not written back yet that it is a hole."""
    path = tmp_path / "a"
    path.write_bytes(b"x" * 3 * BLOCK)
    monkeypatch.setattr(os, "lseek", None)
    with path.open("rb") as file:
        assert list(data_ranges(file.fileno(), 3 * BLOCK)) == [(0, 3 * BLOCK)]


def test_digest_of_other_bytes_than_zeros_is_unchanged() -> None:
    """It is in catalogs."""
    state = files.SparseDigest()
    state.update(BLOCK, memoryview(b"a" * BLOCK + bytes(BLOCK) + b"end"))
    found = state.digest(3 * BLOCK + 3)
    assert found.hex() == "73d56f1a6ab4183edfd542ec91e0d5b7e0"
    parts = (
        *(b"kvfs: blocks that are not zeros\n", BLOCK.to_bytes(8, "little"), b"a" * BLOCK),
        *((3 * BLOCK).to_bytes(8, "little"), b"end", (3 * BLOCK + 3).to_bytes(8, "little")),
    )
    assert found == b"s" + xxhash.xxh3_128_digest(b"".join(parts))
