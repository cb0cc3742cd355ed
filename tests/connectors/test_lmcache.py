"""LMCache 0.5.6 on a mount whose RAM tier is smaller than what LMCache keeps there."""

import hashlib
from typing import Any

import pytest

from tests.conftest import Mount
from tests.connectors.conftest import Client
from tests.harness import Mounted

pytestmark = pytest.mark.clients

MiB = 1 << 20
CHUNK = 32 * MiB  # 256 tokens of Llama-3.1-8B
CHUNKS = 6
RAM = 128 * MiB
DRIVER = "run_lmcache.py"
ARGUMENTS = ("--chunks", str(CHUNKS))

direct = pytest.mark.parametrize("flags", [(), ("--odirect",)], ids=["buffered", "odirect"])


@pytest.fixture
def mounted(mount: Mount) -> Mounted:
    return mount(f"ram={RAM},nvme={{tmp}}/nvme,nvme_size=4G")


def assert_beyond_ram(status: dict[str, Any]) -> None:
    """Chunks beyond the RAM tier are on NVMe, and none is lost for lack of room."""
    ram, nvme = status["tiers"]["ram"], status["tiers"]["nvme"]
    assert ram["capacity_bytes"] < CHUNKS * CHUNK
    assert ram["used_bytes"] <= ram["capacity_bytes"]
    assert nvme["used_bytes"] >= CHUNKS * CHUNK - ram["capacity_bytes"]
    assert nvme["objects"] >= (CHUNKS * CHUNK - ram["capacity_bytes"]) // CHUNK
    assert status["counters"]["dropped"] == 0


@direct
@pytest.mark.parametrize("mode", ["fs", "l2_fs", "l2_fs_native"])
def test_a_shared_cache_is_found_by_other_processes_and_after_a_remount(
    mounted: Mounted, client: Client, mode: str, flags: tuple[str, ...]
) -> None:
    """If the file's existence is the index, any process finds every chunk, before and after."""
    cache = mounted.path / "lmcache"
    cache.mkdir()  # LMCache asks for its file system's block size before it makes the directory
    run = (DRIVER, cache, "--mode", mode, *flags, *ARGUMENTS)

    written = client(*run, "--keep")
    assert written["chunk_bytes"] == CHUNK
    assert written["left_in_dir"] == CHUNKS
    assert_beyond_ram(mounted.idle())
    assert client(*run, "--reader", "--keep")["hits"] == CHUNKS

    mounted.remount()
    read = client(*run, "--reader")  # and then removed
    assert read["hits"] == CHUNKS
    assert read["left_in_dir"] == 0
    assert list(cache.iterdir()) == []


@direct
def test_a_private_cache_keeps_every_byte(
    mounted: Mounted, client: Client, flags: tuple[str, ...]
) -> None:
    """local_disk reads back all its chunks.

    Its files are right later too, though only the writing process knows of them.
    """
    cache = mounted.path / "lmcache"
    run = (DRIVER, cache, "--mode", "local_disk", *flags, *ARGUMENTS)

    def found() -> list[str]:
        return sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in cache.iterdir())

    written = client(*run, "--keep")
    assert written["hits"] == CHUNKS
    assert_beyond_ram(mounted.idle())
    assert client(*run, "--reader", "--keep")["hits"] == 0
    assert found() == sorted(written["sha256"])

    mounted.remount()
    assert found() == sorted(written["sha256"])


@direct
def test_private_cache_removes_its_own_files(
    mounted: Mounted, client: Client, flags: tuple[str, ...]
) -> None:
    """local_disk stores, reads back and unlinks all of a set larger than the RAM tier."""
    cache = mounted.path / "lmcache"
    removed = client(DRIVER, cache, "--mode", "local_disk", *flags, *ARGUMENTS)
    assert removed["hits"] == CHUNKS
    assert removed["left_in_dir"] == 0
