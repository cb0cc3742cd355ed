"""SGLang 0.5.23 HiCacheFile on a mount whose RAM tier is smaller than what SGLang keeps there."""

import pytest

from tests.conftest import Mount
from tests.connectors.conftest import Client
from tests.harness import Mounted

pytestmark = pytest.mark.clients

MiB = 1 << 20
PAGE = 8 * MiB  # 64 tokens of Llama-3.1-8B
PAGES = 24
RAM = 128 * MiB
DRIVER = "run_sglang_hicache.py"
ARGUMENTS = ("--pages", str(PAGES))


@pytest.fixture
def mounted(mount: Mount) -> Mounted:
    return mount(f"ram={RAM},nvme={{tmp}}/nvme,nvme_size=4G")


def test_pages_are_found_by_other_processes_and_after_a_remount(
    mounted: Mounted, client: Client
) -> None:
    """Every page of a set larger than the RAM tier is found and right, then cleared."""
    run = (DRIVER, mounted.path / "sglang", *ARGUMENTS)

    written = client(*run, "--keep")
    assert written["page_bytes"] == PAGE
    assert written["left_in_dir"] == PAGES
    status = mounted.idle()
    ram, nvme = status["tiers"]["ram"], status["tiers"]["nvme"]
    assert ram["used_bytes"] <= ram["capacity_bytes"] < PAGES * PAGE
    assert nvme["used_bytes"] >= PAGES * PAGE - ram["capacity_bytes"]
    assert status["counters"]["dropped"] == 0
    assert client(*run, "--reader", "--keep")["present"] == PAGES

    mounted.remount()
    read = client(*run, "--reader")  # and then cleared
    assert read["present"] == PAGES
    assert read["left_in_dir"] == 0


def test_sglang_can_see_how_much_room_there_is(mounted: Mounted, client: Client) -> None:
    """Its own eviction and its cache of lookups work: both call statfs and list the directory."""
    cache = mounted.path / "sglang"
    kept = client(DRIVER, cache, *ARGUMENTS, "--keep", "--max-size", f"{PAGES // 2 * 8}Mi")
    assert 0 < kept["present"] <= PAGES // 2
    cached = client(DRIVER, mounted.path / "cached", *ARGUMENTS, "--meta-cache")
    assert cached["left_in_dir"] == 0
