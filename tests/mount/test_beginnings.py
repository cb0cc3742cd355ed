"""Where the first files of a fresh mount begin: blocks of all layouts, and other names."""

import hashlib
import mmap
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvfs.control import request
from kvfs.layouts import LIVES
from tests.conftest import USUAL, Mount
from tests.harness import KVFS, Mounted
from tests.unit.test_layouts import MD5, NAMES, SHA1
from tests.unit.test_sizes import PAIRS

M = 1 << 20
DATA = b"k" * 5000
LARGE = b"k" * (4 * M)
WRITERS = 8


def tier_of(kv: Mounted, path: Path) -> str:
    """The tier of the bytes that an open file has."""
    found: str = stat(kv, path)["open"]["tier"]
    return found


def stat(kv: Mounted, path: Path) -> dict[str, Any]:
    return request(kv.path, "stat", ino=path.stat().st_ino)


def write(kv: Mounted, path: Path) -> str:
    """Write a file, and return the tier in which it began."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(DATA)
        return tier_of(kv, path)


@pytest.fixture(scope="module")
def fresh(module_mount: Mount) -> Mounted:
    return module_mount(USUAL)


@pytest.fixture
def space(fresh: Mounted, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A namespace of its own for each test: no size is known in it."""
    name = hashlib.sha1(request.node.name.encode(), usedforsecurity=False).hexdigest()[:12]
    path = fresh.path / f"n{name}"
    subprocess.run([*KVFS, "ns", "create", str(path)], check=True, capture_output=True)
    yield path
    subprocess.run([*KVFS, "ns", "drop", str(path)], check=True, capture_output=True)


@pytest.mark.parametrize(("name", "facts"), NAMES)
def test_first_file_of_each_layout_begins_in_ram(
    fresh: Mounted, space: Path, name: str, facts: dict[str, Any]
) -> None:
    pool = LIVES[facts.get("layout", "sglang-file")].pool
    assert write(fresh, space / name) == ("nvme" if pool else "ram")


@pytest.mark.parametrize("layout", PAIRS)
def test_renamed_first_block_stays_in_ram_and_teaches_its_size(
    fresh: Mounted, space: Path, layout: str
) -> None:
    final, temporary = (space / name for name in PAIRS[layout])
    assert write(fresh, temporary) == "ram"
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary.rename(final)
    assert "ram" in stat(fresh, final)["tiers"]
    assert final.read_bytes() == DATA
    again = temporary.with_name(temporary.name)
    with again.open("xb"):
        assert stat(fresh, again)["begins"]["expected"] == 8192
        assert tier_of(fresh, again) == "ram"


def test_block_written_with_o_direct_begins_in_ram(fresh: Mounted, space: Path) -> None:
    """As the fs tier of vLLM: a probe, then blocks under temporary names."""
    above = space / "m_0123456789ab_r0" / "000" / "00_g0"
    above.mkdir(parents=True)
    with mmap.mmap(-1, M) as block:
        block[:] = bytes(range(256)) * (M // 256)
        for name in (".o_direct_probe_17.tmp", f"{64 * 'a'}.bin_17.tmp"):
            path = above / name
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
            try:
                assert os.write(file, block) == M
                assert tier_of(fresh, path) == "ram"
            finally:
                os.close(file)
        final = above / f"{64 * 'a'}.bin"
        path.rename(final)
        assert final.read_bytes() == block[:]


@pytest.mark.parametrize(
    "path",
    [
        f"{SHA1}.tmp/_data.safetensors",
        f"3%{SHA1}/model.layers.0.self_attn.attn.safetensors",
        f"{MD5}/model.layers.0.self_attn.attn.safetensors",
    ],
)
def test_file_that_safetensors_saves_begins_in_ram(fresh: Mounted, space: Path, path: str) -> None:
    """`save_file` writes a temporary name, and renames it before it closes the file."""
    block = space / path
    block.parent.mkdir()
    tensors = {"kv": np.arange(M, dtype=np.float32)}
    save_file(tensors, block)
    assert list(stat(fresh, block)["tiers"]) == ["ram"]
    assert [entry.name for entry in block.parent.iterdir()] == [block.name]
    assert np.array_equal(load_file(block)["kv"], tensors["kv"])


def test_vua_block_that_its_directory_names_begins_in_ram(fresh: Mounted, space: Path) -> None:
    begun, final = space / f"{SHA1}.tmp", space / SHA1
    for name in ("_data.safetensors", "_tokens.safetensors"):
        assert write(fresh, begun / name) == "ram"
    begun.rename(final)
    assert "ram" in stat(fresh, final / "_data.safetensors")["tiers"]


def test_large_model_file_sends_no_block_to_nvme(fresh: Mounted, space: Path) -> None:
    """The pages have the same extension and directory as the model file."""
    weights = space / "weights.bin"
    with weights.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, 300 * M)
        assert tier_of(fresh, weights) == "nvme"
    for number in range(20):
        digest = hashlib.sha256(b"%d" % number).hexdigest()
        assert write(fresh, space / f"{digest}_m_0_1.bin") == "ram"
    assert write(fresh, space / "model.bin") == "nvme"
    weights.unlink()


def test_name_that_no_layout_knows_begins_on_nvme_until_its_kind_is_known(
    fresh: Mounted, space: Path
) -> None:
    (space / "a").mkdir()
    assert write(fresh, space / "x.kv") == "nvme"
    assert write(fresh, space / "a" / "y.kv") == "ram"
    assert write(fresh, space / "plain") == "nvme"
    assert write(fresh, space / "other") == "ram"
    assert write(fresh, space / "a" / "plain") == "nvme"


@pytest.mark.parametrize("size", [64 * M, 100 * M])
@pytest.mark.parametrize("ram", ["256M", "64M"])
def test_first_blocks_of_several_writers_find_room(mount: Mount, ram: str, size: int) -> None:
    """Together they are larger than RAM, and no size is known when they begin."""
    kv = mount(f"ram={ram},nvme={{tmp}}/nvme,nvme_size=2G")
    files = [
        os.open(kv.path / f"{number:064x}_m_0_1.bin", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        for number in range(WRITERS)
    ]
    tiers = [tier_of(kv, path) for path in sorted(kv.path.iterdir())]
    assert tiers == (["ram"] * 2 + ["nvme"] * 6 if ram == "256M" else ["nvme"] * 8)
    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(lambda file: fill(file, size), files))
    kv.idle()
    for path in kv.path.iterdir():
        assert path.stat().st_size == size
    assert kv.counter("sealed") == WRITERS


def fill(file: int, size: int) -> None:
    """Write a file and close it, as a connector does: each write must be whole."""
    for offset in range(0, size, 4 * M):
        assert os.pwrite(file, LARGE, offset) == len(LARGE)
    os.close(file)


def stat_text(path: Path) -> str:
    done = subprocess.run([*KVFS, "stat", str(path)], check=True, capture_output=True, text=True)
    return " ".join(done.stdout.split())


def test_stat_says_where_a_file_begins_and_why(fresh: Mounted, space: Path) -> None:
    page, pool = space / f"{64 * 'a'}_m_0_1.bin", space / "swap.rank_0"
    known, plain = space / "x.kv", space / "plain"
    for path in (pool, known, plain):
        write(fresh, path)
    known.rename(page)
    assert stat(fresh, page)["begins"] == {
        "tier": "ram",
        "rule": "block",
        "layout": "sglang-file",
        "extension": None,
        "expected": None,
    }
    text = "ram: the name is that of a block of sglang-file; no file of this kind is known"
    assert f"a new one begins in {text}" in stat_text(page)
    page.rename(known)
    assert "8.0 KiB expected, learned from files of this kind" in stat_text(known)
    found = [stat(fresh, path)["begins"] for path in (pool, known, plain)]
    assert [one["rule"] for one in found] == ["pool", "extension", "directory"]
    assert [one["layout"] for one in found] == ["vllm-disk", None, None]
    assert [one["extension"] for one in found] == [None, "kv", None]
    assert [one["tier"] for one in found] == ["ram"] * 3
    assert all(one["expected"] > 0 for one in found)
    assert "begins" not in stat(fresh, space)
