"""Real clients in namespaces of `kvfs ns create --for`, configured with its output.

The clients write more than the namespace may have. They go on, and all that they find is right.
"""

import shlex
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
CHUNK = 32 * MiB  # 256 tokens of Llama-3.1-8B
PAGE = 8 * MiB
QUOTA = 256 * MiB


@pytest.fixture
def tight(mount: Mount) -> Mounted:
    return mount("ram=128M,nvme={tmp}/nvme,nvme_size=512M")


def create(mounted: Mounted, name: str, connector: str) -> str:
    """Make a namespace for a connector; return the configuration to paste."""
    done = subprocess.run(
        [*KVFS, "ns", "create", mounted.path / name, "--for", connector, f"quota_hard={QUOTA}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def show(mounted: Mounted, name: str) -> dict[str, Any]:
    mounted.idle()
    return request(mounted.path, "ns_show", name=name)


def test_local_disk_loses_nothing_behind_its_back(
    tight: Mounted, client: Client, tmp_path: Path
) -> None:
    """LMCache drops files as it likes. kvfs drops other clients' files, but none of LMCache's."""
    config = tmp_path / "lmcache.yaml"
    config.write_text(create(tight, "disk", "lmcache-local-disk"))
    for number in range(64):  # the tiers are full before it comes
        (tight.path / f"{number}.kv").write_bytes(b"x" * (16 * MiB))
    arguments = ("--config", str(config), "--chunks", "16", "--lossy", "--keep")
    found = client("run_lmcache.py", tight.path / "disk", "--mode", "local_disk", *arguments)
    assert 4 <= found["hits"] <= 0.9 * QUOTA / CHUNK
    assert found["left_in_dir"] == found["hits"]
    for number in range(64):
        (tight.path / f"{number}.kv").write_bytes(b"x" * (16 * MiB))
    assert len(list((tight.path / "disk").iterdir())) == found["left_in_dir"]
    assert show(tight, "disk")["bytes"] <= QUOTA
    assert tight.counter("dropped") > 0


def test_lmcache_fs_within_a_quota(tight: Mounted, client: Client, tmp_path: Path) -> None:
    """LMCache writes twice its quota; afterwards it finds its last chunks."""
    config = tmp_path / "lmcache.yaml"
    config.write_text(create(tight, "shared", "lmcache-fs"))
    run = ("run_lmcache.py", tight.path / "shared", "--mode", "fs", "--config", str(config))
    arguments = ("--chunks", "16", "--lossy", "--keep")
    found = client(*run, *arguments)
    assert 4 <= found["hits"] <= QUOTA / CHUNK
    assert show(tight, "shared")["bytes"] <= QUOTA
    assert client(*run, *arguments, "--reader")["hits"] == found["hits"]
    tight.remount()
    assert client(*run, *arguments, "--reader")["hits"] == found["hits"]
    assert show(tight, "shared")["bytes"] <= QUOTA


def test_two_writers_of_the_same_chunks(tight: Mounted, client: Client, tmp_path: Path) -> None:
    """LMCache's temporary names are the same in all processes; publish=close keeps files whole."""
    config = tmp_path / "lmcache.yaml"
    config.write_text(create(tight, "shared", "lmcache-fs"))
    run = ("run_lmcache.py", tight.path / "shared", "--mode", "fs", "--config", str(config))
    arguments = (*run, "--chunks", "6", "--lossy", "--keep")
    with ThreadPoolExecutor(2) as both:
        results = list(both.map(lambda call: call(), [partial(client, *arguments)] * 2))
    assert [result["hits"] for result in results] == [6, 6]
    assert client(*arguments, "--reader")["hits"] == 6
    assert len(list((tight.path / "shared").iterdir())) == 6


def test_sglang_within_a_quota(tight: Mounted, client: Client) -> None:
    """SGLang writes twice its quota; all that it finds afterwards is right."""
    printed = create(tight, "sglang", "sglang-file")
    exports = [line for line in printed.splitlines() if line.startswith("export ")]
    variables = dict(shlex.split(line)[1].split("=", 1) for line in exports)
    cache = Path(variables["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"])
    run = ("run_sglang_hicache.py", cache, "--pages", "64", "--lossy")
    found = client(*run, "--keep")
    assert 16 <= found["present"] <= QUOTA / PAGE
    assert show(tight, "sglang")["bytes"] <= QUOTA
    assert client(*run, "--keep", "--reader")["present"] == found["present"]
