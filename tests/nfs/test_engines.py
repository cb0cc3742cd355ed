"""Real LMCache and SGLang write on the mount; a client of NFS reads what they wrote."""

import hashlib
from pathlib import Path

import pytest

from scripts.libnfs import Client as Nfs
from tests.conftest import Mount
from tests.connectors.conftest import Client, client, forks
from tests.harness import Mounted
from tests.nfs.conftest import Exported

pytestmark = pytest.mark.clients

__all__ = ["client", "forks"]  # the fixtures

MIB = 1 << 20


@pytest.fixture
def mounted(mount: Mount) -> Mounted:
    """A mount with a RAM tier that is smaller than the written files."""
    return mount("ram=128M,nvme={tmp}/nvme,nvme_size=4G,allow_other")


def digests(nfs: Nfs, directory: str) -> list[str]:
    names = [entry.name.decode() for entry in nfs.listdir(directory)]
    found = [name for name in names if name not in {".", ".."}]
    return sorted(hashlib.sha256(nfs.read(f"{directory}/{name}")).hexdigest() for name in found)


def local(directory: Path) -> list[str]:
    files = directory.iterdir()
    return sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


@pytest.mark.parametrize("mode", ["fs", "local_disk"])
def test_chunks_of_lmcache_are_read_by_nfs(
    mounted: Mounted, exported: Exported, client: Client, mode: str
) -> None:
    cache = mounted.path / "lmcache"
    cache.mkdir()
    written = client("run_lmcache.py", cache, "--mode", mode, "--chunks", "6", "--keep")
    with exported(mounted).client() as nfs:
        found = digests(nfs, "lmcache")
    assert len(found) == 6
    assert found == local(cache)
    if mode == "local_disk":
        assert found == sorted(written["sha256"])


def test_pages_of_sglang_are_read_by_nfs_while_the_daemon_is_replaced(
    mounted: Mounted, exported: Exported, client: Client
) -> None:
    cache = mounted.path / "sglang"
    server = exported(mounted)
    client("run_sglang_hicache.py", cache, "--pages", "24", "--keep")
    with server.client(4) as nfs:
        before = digests(nfs, "sglang")
        mounted.kill_daemon()
        assert digests(nfs, "sglang") == before
    assert len(before) == 24
    assert before == local(cache)
