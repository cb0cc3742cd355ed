"""The copies that a mover makes of files."""

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from kvfs.mounts import mount, umount
from kvfs.movement.copying import PIECE, Moved, copy, read_through
from kvfs.movement.files import SourceChangedError

RANDOM = random.Random(1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "to").mkdir()
    return tmp_path / "to/target"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mount("none", path, "tmpfs", 0, "size=1M")
    yield path
    umount(path)


def left_in(target: Path) -> list[str]:
    return os.listdir(target.parent)


@pytest.mark.parametrize("size", [0, 1, 4095, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 7])
@pytest.mark.parametrize("sync", [False, True])
def test_a_copy_is_the_same_and_its_digest_says_so(
    source: Path, target: Path, size: int, *, sync: bool
) -> None:
    content = RANDOM.randbytes(size)
    source.write_bytes(content)
    os.utime(source, ns=(5, 1_700_000_000_123_456_789))
    moved = copy(str(source), str(target), size, sync=sync, cold=sync)
    assert target.read_bytes() == content
    assert moved.digest == xxhash.xxh3_128(content).digest()
    assert target.stat().st_mtime_ns == source.stat().st_mtime_ns
    assert moved.blocks == target.stat().st_blocks
    assert target.stat().st_mode & 0o137 == 0
    assert left_in(target) == ["target"]
    assert read_through(str(source), size, sync=sync) == Moved(
        moved.digest, source.stat().st_blocks, mtime_ns=source.stat().st_mtime_ns
    )


def test_copy_of_a_sparse_file_is_sparse(source: Path, target: Path) -> None:
    with source.open("wb") as file:
        file.truncate(8 * PIECE)
        file.seek(5 * PIECE)
        file.write(b"island")
    moved = copy(str(source), str(target), 8 * PIECE, sync=False, cold=False)
    assert target.stat().st_size == 8 * PIECE
    assert moved.blocks * 512 <= PIECE
    with target.open("rb") as file:
        file.seek(5 * PIECE)
        assert file.read(6) == b"island"
    assert moved.digest == xxhash.xxh3_128(source.read_bytes()).digest()


def test_a_former_half_made_copy_is_overwritten(source: Path, target: Path) -> None:
    source.write_bytes(b"new")
    Path(f"{target}.part").write_bytes(b"left by one that died, and longer")
    copy(str(source), str(target), 3, sync=False, cold=False)
    assert target.read_bytes() == b"new"
    assert left_in(target) == ["target"]


@pytest.mark.parametrize("size", [0, 99, 101, 10 * PIECE])
def test_another_size_than_expected_leaves_nothing(source: Path, target: Path, size: int) -> None:
    source.write_bytes(bytes(100))
    with pytest.raises(SourceChangedError, match=f"100 bytes, expected {size}"):
        copy(str(source), str(target), size, sync=False, cold=False)
    assert left_in(target) == []
    with pytest.raises(SourceChangedError):
        read_through(str(source), size, sync=False)


def meddle(monkeypatch: pytest.MonkeyPatch, harm: Callable[[], object]) -> None:
    """Do harm after the first piece was read."""
    real = os.preadv
    left = [harm]

    def preadv(*arguments: object) -> int:
        got = real(*arguments)  # type: ignore[arg-type]
        while left:
            left.pop()()
        return got

    monkeypatch.setattr(os, "preadv", preadv)


def test_a_source_that_is_written_to_leaves_nothing(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_bytes(bytes(2 * PIECE))
    os.utime(source, ns=(0, 0))
    meddle(monkeypatch, lambda: os.utime(source))
    with pytest.raises(SourceChangedError, match=r"was written at \d+ ns, expected 0"):
        copy(str(source), str(target), 2 * PIECE, sync=False, cold=False)
    assert left_in(target) == []


def test_a_source_that_shrinks_leaves_nothing(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_bytes(bytes(2 * PIECE))
    meddle(monkeypatch, lambda: os.truncate(source, 5))
    with pytest.raises(SourceChangedError, match="ended at"):
        copy(str(source), str(target), 2 * PIECE, sync=False, cold=False)
    assert left_in(target) == []


def test_a_full_file_system_leaves_nothing(source: Path, small: Path) -> None:
    content = RANDOM.randbytes(2 << 20)
    source.write_bytes(content)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        copy(str(source), str(small / "target"), len(content), sync=False, cold=False)
    assert os.listdir(small) == []


def test_a_missing_source_leaves_nothing(source: Path, target: Path) -> None:
    with pytest.raises(FileNotFoundError):
        copy(str(source), str(target), 1, sync=False, cold=False)
    with pytest.raises(FileNotFoundError):
        read_through(str(source), 1, sync=False)
    assert left_in(target) == []


def test_a_link_is_not_followed(source: Path, target: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    source.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        copy(str(source), str(target), 1, sync=False, cold=False)


def test_copying_leaves_no_descriptor_open(source: Path, target: Path) -> None:
    source.write_bytes(b"x")
    before = os.listdir("/proc/self/fd")
    copy(str(source), str(target), 1, sync=True, cold=True)
    with pytest.raises(SourceChangedError):
        copy(str(source), str(target), 2, sync=True, cold=True)
    read_through(str(source), 1, sync=True)
    assert os.listdir("/proc/self/fd") == before
