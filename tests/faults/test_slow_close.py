"""A daemon dies while it closes a file on a slow disk, and a client opens that file again."""

import os
from pathlib import Path

import pytest

from kvfs.control import request
from tests.conftest import Mount
from tests.faults.conftest import with_site
from tests.harness import Mounted, wait_for

pytestmark = pytest.mark.slow

OLD, NEW = b"old" * 1000, b"new!" * 2000


@pytest.fixture
def kv(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> Mounted:
    with_site(monkeypatch, "slow_close")
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=1G")
    kv.allow_log("was killed by SIGKILL")
    return kv


def open_while_it_closes(kv: Mounted, faults: str) -> int:
    """A descriptor of a client whose OPEN was on its way when the daemon died."""
    file: Path = kv.path / "a"
    request(kv.path, "arm", faults=faults)
    file.write_bytes(OLD)
    wait_for(lambda: not kv.status()["writers"], "it is sealed, and its close begins")
    descriptor = os.open(file, os.O_RDWR)
    assert kv.status()["takeovers"] == 1
    return descriptor


def use_unlinked(kv: Mounted, descriptor: int) -> None:
    os.unlink(kv.path / "a")
    assert os.pread(descriptor, 1 << 20, 0) == OLD
    os.pwrite(descriptor, NEW, 0)
    assert os.pread(descriptor, 1 << 20, 0) == NEW
    os.close(descriptor)
    kv.idle()


def test_a_backing_id_that_was_closed_is_given_to_nobody(kv: Mounted) -> None:
    """The daemon dies with the id closed, when the new open is about to begin another version."""
    use_unlinked(kv, open_while_it_closes(kv, "fuse.backing.closed=kill@1;tiers.rename=delay:30@1"))


def test_unused_backing_id_is_closed(kv: Mounted) -> None:
    """The daemon dies with the new open done by another id.

    A search for mappings must not find the old.
    """
    use_unlinked(kv, open_while_it_closes(kv, "fuse.handle.bound=kill@2"))
