"""kvfs's own connectors in real LMCache and SGLang, with configurations of `kvfs connect`."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvfs.control import request
from tests.conftest import Mount
from tests.connectors.conftest import Client
from tests.harness import KVFS, Mounted

pytestmark = pytest.mark.clients

MiB = 1 << 20
CHUNK = 8 * MiB  # 256 tokens of 8 layers as Llama-3.1-8B has them
QUOTA = 64 * MiB
LMCACHE = "run_lmcache.py"
SGLANG = "run_sglang_native.py"


@pytest.fixture
def tight(mount: Mount) -> Mounted:
    return mount("ram=128M,nvme={tmp}/nvme,nvme_size=512M")


def create(mounted: Mounted, engine: str, config: Path, *settings: str, name: str = "") -> Path:
    """Make a namespace for an engine, and its configuration as a file."""
    place = mounted.path / (name or engine)
    made = [*KVFS, "ns", "create", str(place), "--for", f"{engine}-native", *settings]
    subprocess.run(made, check=True, capture_output=True)
    shown = [*KVFS, "connect", engine, str(place), "--native"]
    config.write_text(subprocess.run(shown, check=True, capture_output=True, text=True).stdout)
    return place


def show(mounted: Mounted, name: str) -> dict[str, Any]:
    mounted.idle()
    return request(mounted.path, "ns_show", name=name)


def files_below(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


class LMCache:
    """Runs of the driver in one namespace."""

    def __init__(self, mounted: Mounted, client: Client, config: Path, *settings: str) -> None:
        self.place = create(mounted, "lmcache", config, *settings)
        run = (LMCACHE, self.place, "--mode", "native", "--layers", "8", "--config", str(config))
        self.run = partial(client, *run)


def test_lmcache_is_found_by_other_processes_and_after_a_remount(
    tight: Mounted, client: Client, tmp_path: Path
) -> None:
    lmcache = LMCache(tight, client, tmp_path / "lmcache.yaml")
    arguments = ("--chunks", "6")
    written = lmcache.run(*arguments, "--keep")
    assert written["chunk_bytes"] == CHUNK
    assert written["prefix"] == 6
    assert {path.stat().st_size for path in files_below(lmcache.place)} == {CHUNK}
    tight.remount()
    read = lmcache.run(*arguments, "--reader")  # and then removed
    assert read["prefix"] == read["hits"] == 6
    assert files_below(lmcache.place) == []


def test_lmcache_misses_a_removed_chunk_and_all_after_it(
    tight: Mounted, client: Client, tmp_path: Path
) -> None:
    """The test unlinks each chunk in turn: the prefix ends there, and the others are right."""
    lmcache = LMCache(tight, client, tmp_path / "lmcache.yaml")
    arguments = ("--chunks", "4")
    lmcache.run(*arguments, "--keep")
    prefixes = []
    for gone in sorted(files_below(lmcache.place)):
        content = gone.read_bytes()
        gone.unlink()
        found = lmcache.run(*arguments, "--reader", "--keep", "--lossy")
        assert found["hits"] == 3
        prefixes.append(found["prefix"])
        gone.write_bytes(content)
    assert sorted(prefixes) == [0, 1, 2, 3]


def test_lmcache_within_a_quota(tight: Mounted, client: Client, tmp_path: Path) -> None:
    """LMCache writes twice its quota; all that it finds afterwards is right, without errors."""
    lmcache = LMCache(tight, client, tmp_path / "lmcache.yaml", f"quota_hard={QUOTA}")
    arguments = ("--chunks", "16", "--lossy", "--keep")
    found = lmcache.run(*arguments)
    assert 4 <= found["hits"] <= QUOTA / CHUNK
    assert show(tight, "lmcache")["bytes"] <= QUOTA
    assert lmcache.run(*arguments, "--reader")["hits"] == found["hits"]


def test_two_writers_of_the_same_chunks(tight: Mounted, client: Client, tmp_path: Path) -> None:
    lmcache = LMCache(tight, client, tmp_path / "lmcache.yaml")
    arguments = ("--chunks", "6", "--lossy", "--keep")
    with ThreadPoolExecutor(2) as both:
        results = list(both.map(lambda call: call(), [partial(lmcache.run, *arguments)] * 2))
    assert [result["hits"] for result in results] == [6, 6]
    assert len(files_below(lmcache.place)) == 6


class SGLang:
    """Runs of the driver in one namespace."""

    def __init__(
        self,
        mounted: Mounted,
        client: Client,
        config: Path,
        *settings: str,
        name: str = "sglang",
    ) -> None:
        self.place = create(mounted, "sglang", config, *settings, name=name)
        self.run = partial(client, SGLANG, self.place, "--config", str(config))


POOLS = (
    ("--layout", "page_first"),
    ("--layout", "layer_first"),
    ("--layout", "page_first_direct"),
    ("--layout", "page_head"),
    ("--layout", "page_first", "--mla"),
    ("--layout", "layer_first", "--mla"),
    ("--layout", "page_first_direct", "--mla", "--dtype", "float8_e4m3fn"),
)


@pytest.mark.timeout(600)  # fourteen runs
def test_sglang_is_found_by_other_processes_and_after_a_remount(
    tight: Mounted, client: Client, tmp_path: Path
) -> None:
    """There are more pages than the controller asks for at once, in every host memory layout."""
    caches = [
        (pool, SGLang(tight, client, tmp_path / f"{at}.sh", name=f"sglang{at}"))
        for at, pool in enumerate(POOLS)
    ]
    for pool, sglang in caches:
        written = sglang.run(*pool, "--keep")
        assert written["stats"]["blocks_saved"] == written["found"] == 300, pool
        sizes = {path.stat().st_size for path in files_below(sglang.place)}
        assert sizes == {written["page_bytes"]}, pool
    tight.remount()
    for pool, sglang in caches:
        assert sglang.run(*pool, "--reader")["found"] == 300, pool  # and cleared


def test_sglangs_older_interface(tight: Mounted, client: Client, tmp_path: Path) -> None:
    """Without interface_v1 SGLang gives no order: all pages are in the root's directory."""
    sglang = SGLang(tight, client, tmp_path / "sglang.sh")
    old = ("--interface", "0", "--pages", "40")
    written = sglang.run(*old, "--keep")
    assert {path.parent.name for path in files_below(sglang.place)} == {written["root"]}
    assert sglang.run(*old, "--reader")["found"] == 40


def test_sglang_matches_pages_that_all_ranks_have(
    tight: Mounted, client: Client, tmp_path: Path
) -> None:
    sglang = SGLang(tight, client, tmp_path / "sglang.sh")
    ranks = ("--ranks", "2", "--keep", "--pages", "40")
    assert sglang.run(*ranks, "--rank", "0", "--lossy")["found"] == 0
    assert sglang.run(*ranks, "--rank", "1")["found"] == 40
    assert sglang.run(*ranks, "--rank", "0", "--reader")["found"] == 40


def test_configurations_of_sglang_never_meet(
    tight: Mounted, client: Client, tmp_path: Path
) -> None:
    """SGLang's own hashes depend on tokens only. Here all pages have the same size."""
    sglang = SGLang(tight, client, tmp_path / "sglang.sh")
    roots = set()
    for other in (
        ("--layout", "page_first"),
        ("--layout", "layer_first"),
        ("--layout", "page_head"),
        ("--layout", "page_first", "--dtype", "float16"),
        ("--layout", "page_first", "--model", "mistral"),
    ):
        written = sglang.run(*other, "--pages", "40", "--keep")  # finds none before it saves
        assert written["page_bytes"] == 32 << 10
        assert written["stats"]["blocks_saved"] == 40
        roots.add(written["root"])
    assert len(roots) == 5


def test_sglang_within_a_quota(tight: Mounted, client: Client, tmp_path: Path) -> None:
    """SGLang writes more than its quota; a prefix stays, complete and right."""
    sglang = SGLang(tight, client, tmp_path / "sglang.sh", f"quota_hard={QUOTA}")
    arguments = ("--pages", "3000", "--lossy", "--keep")
    found = sglang.run(*arguments)
    assert 0 < found["found"] <= QUOTA / found["page_bytes"]
    assert show(tight, "sglang")["bytes"] <= QUOTA
    assert sglang.run(*arguments, "--reader")["found"] == found["found"]


@pytest.mark.parametrize(
    ("engine", "driver", "arguments"),
    [("lmcache", LMCACHE, ("--mode", "native")), ("sglang", SGLANG, ())],
)
def test_a_namespace_of_another_cache_is_refused(
    tight: Mounted,
    client: Client,
    tmp_path: Path,
    engine: str,
    driver: str,
    arguments: tuple[str, ...],
) -> None:
    config = tmp_path / "config"
    place = create(tight, engine, config, "fingerprint=another model")
    with pytest.raises(AssertionError, match="has the blocks of another spec") as refused:
        client(driver, place, "--config", str(config), *arguments)
    assert "got another model" in str(refused.value)
    assert files_below(place) == []
