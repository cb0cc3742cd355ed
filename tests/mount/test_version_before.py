"""This version mounts the NVMe directories that the version before has left: tests/data has two."""

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Mount
from tests.data import fill
from tests.harness import KVFS, Mounted

DATA = Path(fill.__file__).parent


def unpacked(tmp_path: Path, archive: str) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir(mode=0o700)
    command = ["tar", "--extract", "--file", str(DATA / archive), "--directory", str(nvme)]
    subprocess.run(command, check=True)  # Python's tarfile loses nanoseconds


def settings(kv: Mounted, name: str) -> dict[str, Any]:
    spaces = kv.status()["namespaces"]
    found: dict[str, Any] = next(one for one in spaces if one["name"] == name)["settings"]
    return found


@pytest.mark.parametrize("archive", ["nvme-closed.tar.xz", "nvme-killed.tar.xz"])
def test_a_directory_of_the_version_before_is_mounted(
    mount: Mount, tmp_path: Path, archive: str
) -> None:
    unpacked(tmp_path, archive)
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    kv.expect_log("is a copy: it begins without what the other has in RAM")
    if "killed" in archive:
        kv.expect_log("the last session did not end properly")
    root = kv.path
    for name in fill.SIZES:
        assert (root / name).read_bytes() == fill.content(name), name
    assert (root / "kv/packed").read_bytes() == fill.packed()
    with (root / "sparse").open("rb") as file:
        assert os.pread(file.fileno(), 6, 1 << 19) == fill.ISLAND
        assert os.fstat(file.fileno()).st_size == 1 << 20
    assert os.readlink(root / "link") == "kv/a"
    assert (root / "dir/hard").samefile(root / "plain")
    assert stat.S_ISFIFO((root / "dir/fifo").lstat().st_mode)
    assert os.getxattr(root / "kv/a", "user.note") == fill.NOTE
    assert os.getxattr(root / "kv/pinned", "user.kvfs.pin") == b"on"
    assert (root / "kv/b").stat().st_mtime_ns == fill.TIME
    assert stat.S_IMODE((root / "kv/b").stat().st_mode) == 0o640
    assert stat.S_IMODE((root / "dir/below").stat().st_mode) == 0o750
    told = settings(kv, "kv")
    assert (told["quota_hard"], told["eviction"], told["compression"]) == ("64M", "lru", "nvme")
    assert settings(kv, "tree")["prefix"] == "on"
    assert kv.counter("dropped") == 0
    (root / "kv/new").write_bytes(b"of this version")
    done = subprocess.run(
        [*KVFS, "fsck", str(root), "--hashes"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    kv.umount()
    kv.mount()
    assert (root / "kv/new").read_bytes() == b"of this version"
