"""Directories that another user made, or may exchange, are refused and left unchanged."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.errors import ConfigError
from kvfs.tiers import NvmeTier, RamTier

MIB = 1 << 20
OTHER, NOBODY = 1234, 65534


def everything(root: Path) -> list[tuple[str, int, int]]:
    """Return all paths below a root, each with its owner and ctime."""
    found = sorted(root.rglob("*"))
    return [(str(path), path.lstat().st_uid, path.lstat().st_ctime_ns) for path in found]


def of_another(root: Path) -> None:
    root.mkdir()
    os.chown(root, OTHER, OTHER)


def objects_elsewhere(root: Path) -> None:
    (root.parent / "elsewhere").mkdir()
    root.mkdir()
    (root / "objects").symlink_to(root.parent / "elsewhere")


def one_folder_elsewhere(root: Path) -> None:
    (root.parent / "elsewhere").mkdir()
    (root / "objects").mkdir(parents=True)
    (root / "objects/00").symlink_to(root.parent / "elsewhere")


def lock_elsewhere(root: Path) -> None:
    """Make the lock a link to another file: the lock's holder would write its name there."""
    (root.parent / "precious").write_text("precious")
    root.mkdir()
    (root / "lock").symlink_to(root.parent / "precious")


def catalog_elsewhere(root: Path) -> None:
    root.mkdir()
    (root / "catalog").symlink_to(root.parent)


def link_of_another(root: Path) -> None:
    (root.parent / "mine").mkdir()
    root.symlink_to(root.parent / "mine")
    os.chown(root, OTHER, OTHER, follow_symlinks=False)


def below_what_is_everybodys(root: Path) -> None:
    root.mkdir()
    root.parent.chmod(0o777)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (of_another, "belongs to uid 1234, expected uid 0"),
        (objects_elsewhere, "objects is a symbolic link"),
        (one_folder_elsewhere, "objects/00 is a symbolic link"),
        (lock_elsewhere, "lock is a symbolic link"),
        (catalog_elsewhere, "catalog is a symbolic link"),
        (link_of_another, "is a symbolic link that uid 1234 has made"),
        (below_what_is_everybodys, "to which everybody may write"),
    ],
)
def test_directory_that_others_can_change_is_refused_as_tier(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    root = tmp_path / "parent" / "nvme"
    root.parent.mkdir()
    make(root)
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        NvmeTier(root, MIB)
    assert everything(tmp_path) == before


def test_a_link_of_ones_own_and_a_parent_like_tmp_are_as_good_as_any(tmp_path: Path) -> None:
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent").chmod(0o1777)
    (tmp_path / "nvme").symlink_to(tmp_path / "parent/real")
    (tmp_path / "parent/real").mkdir()
    NvmeTier(tmp_path / "nvme", MIB).close()
    assert (tmp_path / "parent/real/identity").exists()


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """The path of an unprivileged user's RAM tier, which any user can guess."""
    path = Path(f"/dev/shm/kvfs-{NOBODY}-test-ownership")
    yield path
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def test_shared_memory_that_another_has_made_first(shared_memory: Path) -> None:
    shared_memory.mkdir()
    shared_memory.chmod(0o777)
    (shared_memory / "identity").write_text("test-ownership 1")
    os.seteuid(NOBODY)
    try:
        with pytest.raises(ConfigError, match="belongs to uid 0, expected uid 65534"):
            RamTier(Path("/x"), MIB, identity="test-ownership", epoch=None, huge="always")
    finally:
        os.seteuid(0)
    assert os.listdir(shared_memory) == ["identity"]


def test_shared_memory_that_is_a_link(shared_memory: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    shared_memory.symlink_to(tmp_path)
    os.chown(shared_memory, OTHER, OTHER, follow_symlinks=False)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(ConfigError, match="symbolic link that uid 1234 has made"):
            RamTier(Path("/x"), MIB, identity="test-ownership", epoch=None, huge="always")
    finally:
        os.seteuid(0)
    assert os.listdir(tmp_path) == []
