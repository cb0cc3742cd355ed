"""Control files beside a real directory of their name, from earlier versions of kvfs."""

import json
import os
import stat
from pathlib import Path

import pytest

from kvfs.catalog import ROOT_INO, Catalog, Dentry, Inode
from tests.conftest import Mount


def test_a_real_directory_hides_them_until_it_is_renamed(mount: Mount, tmp_path: Path) -> None:
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=256M")
    kv.umount()
    catalog = Catalog(tmp_path / "nvme" / "catalog")
    ino = catalog.next_id()
    inode = Inode(ino, stat.S_IFDIR | 0o755, 0, 0, links=((ROOT_INO, ino),))
    with catalog.batch() as batch:
        batch.link(ROOT_INO, Dentry(b".kvfs", ino, ino))
        batch.put(inode)
    catalog.close()
    kv.expect_log("hides the control files")
    kv.mount()
    assert os.listdir(kv.path) == [".kvfs"]
    real = kv.path / ".kvfs"
    (real / "stats").write_bytes(b"mine")
    assert os.listdir(real) == ["stats"]
    real.rename(kv.path / "mine")
    assert (kv.path / "mine" / "stats").read_bytes() == b"mine"
    assert json.loads((real / "stats").read_text())["objects"] == 1
    assert os.listdir(kv.path) == ["mine"]
    with pytest.raises(PermissionError):
        (kv.path / "mine").rename(real)
