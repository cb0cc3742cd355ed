"""A lookup of an absent block is a miss, once; what makes a name is none. All views agree."""

import json
import os
import random
import re
import subprocess
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvfs import matching
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.mount.test_metrics import free_port, get, scrape, value

OPTIONS = "ram=64M,nvme={tmp}/nvme,nvme_size=256M"
NEAR = 0.02  # of an estimate: older accesses have less weight in it


def counted(kv: Mounted, name: str, space: str = "engine") -> int:
    found = next(one for one in kv.status()["namespaces"] if one["name"] == space)
    return int(found["counters"].get(name, 0))


def hits(kv: Mounted) -> int:
    return counted(kv, "read_ram") + counted(kv, "read_nvme")


def misses(kv: Mounted, expected: int) -> None:
    """Lookups count once no create can follow them."""
    wait_for(lambda: counted(kv, "misses") >= expected, f"{expected} misses")
    assert counted(kv, "misses") == expected


def closed(kv: Mounted) -> None:
    wait_for(lambda: kv.status()["open_handles"] == 0, "nobody has a file open")


def engine(kv: Mounted) -> Path:
    """A namespace with room for so few objects that the what-if ratios need no sample."""
    settings = {"quota_objects": "400"}
    request(kv.path, "ns_create", name="engine", settings=settings, uid=0, gid=0)
    return kv.path / "engine"


def write_plain(path: Path) -> None:
    path.write_bytes(b"content")


def write_renamed(path: Path) -> None:
    """As programs do that no layout knows."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(b"content")
    part.rename(path)


def write_as_sglang(path: Path) -> None:
    part = path.with_name(f".{uuid.uuid4()}.tmp")
    part.write_bytes(b"content")
    part.rename(path)


def write_with_directory(path: Path) -> None:
    folder = path.with_name(path.name + "-of")
    os.makedirs(folder, exist_ok=True)
    (folder / "part").write_bytes(b"content")
    (folder / "part").rename(path)


def write_exclusively(path: Path) -> None:
    with path.open("xb") as file:
        file.write(b"content")


def write_linked(path: Path) -> None:
    first = path.with_name(path.name + ".first")
    first.write_bytes(b"content")
    path.hardlink_to(first)
    first.unlink()


WRITERS = [
    *(write_plain, write_renamed, write_as_sglang, write_with_directory),
    *(write_exclusively, write_linked),
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("fast", ["on", "off"])
def test_known_hits_and_misses_read_back(
    mount: Mount, write: Callable[[Path], None], fast: str
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    choose, port = random.Random(seed), free_port()
    kv = mount(f"{OPTIONS},fast_open={fast},metrics={port}")
    space = engine(kv)
    found = missed = 0
    for _ in range(600):
        path = space / f"{choose.randrange(60):064x}_model_0_1.bin"
        try:
            assert path.read_bytes() == b"content"
            found += 1
        except FileNotFoundError:
            missed += 1
            write(path)
    misses(kv, missed)
    assert hits(kv) == found
    ratio = found / (found + missed)
    samples = scrape(port)
    shown = sum(
        value(samples, "kvfs_namespace_hits_total", namespace="engine", tier=tier)
        for tier in ("ram", "nvme")
    )
    assert (shown, value(samples, "kvfs_namespace_misses_total", namespace="engine")) == (
        found,
        missed,
    )
    estimate = value(samples, "kvfs_namespace_hit_ratio_estimate", namespace="engine", times="1")
    assert abs(estimate - ratio) <= NEAR


def test_views_agree_with_the_access_log(mount: Mount, tmp_path: Path) -> None:
    """Top, the page and the profile of a load of 2,037 hits and 37 misses."""
    log, page = tmp_path / "access.log", free_port()
    kv = mount(f"{OPTIONS},access_log={log},web={page}")
    space, found = engine(kv), 0
    for number in range(37):
        path = space / f"{number:064x}_model_0_1.bin"
        assert not path.exists()
        write_as_sglang(path)
    while found < 2037:
        for path in sorted(space.iterdir())[: 2037 - found]:
            path.read_bytes()
            found += 1
    misses(kv, 37)
    wait_for(lambda: len(log.read_text().splitlines()) >= 2037 + 2 * 37, "all of it is written")
    told = json.loads(subprocess.check_output([*KVFS, "profile", str(log), "--json"]))
    told = told["namespaces"]["engine"]
    assert (told["reads"], told["misses"], told["hit_ratio"]) == (2037, 37, 0.9822)

    def shown() -> dict[str, Any]:
        spaces = json.loads(get(f"http://127.0.0.1:{page}/api/now")).get("namespaces", [])
        found: dict[str, Any] = next((one for one in spaces if one["name"] == "engine"), {})
        return found

    wait_for(lambda: round(shown().get("ratio") or 0, 4) == 0.9822, "the page has looked")
    assert shown()["misses"] == 37
    assert abs(shown()["would_be"]["1"] - 0.9822) <= NEAR
    top = subprocess.check_output(
        [*KVFS, "top", str(kv.path), "--once"], text=True, env=os.environ | {"COLUMNS": "160"}
    )
    line = next(one for one in top.splitlines() if one.startswith("engine"))
    assert re.search(r" 37 +- +98\.2% +98\.[0-9]%", line), top


@pytest.mark.parametrize("fast", ["on", "off"])
def test_what_is_no_block_is_no_miss(mount: Mount, fast: str) -> None:
    kv = mount(f"{OPTIONS},fast_open={fast}")
    space = engine(kv)
    for name in (".git", ".hidden", f".{uuid.uuid4()}.tmp", ".match", ".kvfs"):
        assert not (space / name).is_dir()
    (space / "directory" / "below").mkdir(parents=True)
    (space / "link").symlink_to("directory")
    (space / "file").write_bytes(b"content")
    (space / "file").rename(space / "other")
    os.mkfifo(space / "fifo")
    assert not (space / "missing").exists()
    misses(kv, 1)
    run = [*KVFS, "ns", "create", str(kv.path / "made")]  # which looks whether it is there
    subprocess.run(run, check=True, capture_output=True)
    assert counted(kv, "misses", ".") == 0


@pytest.mark.parametrize("fast", ["on", "off"])
def test_a_command_of_kvfs_counts_no_miss(mount: Mount, fast: str) -> None:
    kv = mount(f"{OPTIONS},fast_open={fast}")
    space = engine(kv)
    for parent in (kv.path, space):
        for words in (
            ("stat",),
            ("evict",),
            ("pin",),
            ("warm",),
            ("du",),
            ("ns", "show"),
            ("status",),
        ):
            done = subprocess.run(
                [*KVFS, *words, str(parent / "absent")], capture_output=True, check=False
            )
            assert done.returncode == 2 or words == ("status",), done
    assert not (space / "missing").exists()
    misses(kv, 1)
    assert counted(kv, "misses", ".") == 0


@pytest.mark.parametrize("fast", ["on", "off"])
def test_each_lookup_in_vain_counts(mount: Mount, fast: str) -> None:
    kv = mount(f"{OPTIONS},fast_open={fast}")
    space = engine(kv)
    for number in range(3000):
        assert not (space / f"{number % 1500}").exists()
    misses(kv, 3000)
    assert not (space / "directory" / "block").exists()
    misses(kv, 3001)
    wait_for(lambda: kv.status()["counters"]["misses"] == 3001, "the mount counts them as well")


def test_each_open_counts_while_others_have_it_open(mount: Mount) -> None:
    kv = mount(OPTIONS)
    path = engine(kv) / "block"
    path.write_bytes(b"content")
    closed(kv)
    with path.open("rb"), path.open("rb"), path.open("rb"):
        assert hits(kv) == 3
        assert request(kv.path, "stat", path="engine/block")["heat"]["opens"] == 1
    assert sum(tier["hits"] for tier in kv.status()["tiers"].values()) == 3


def unlink(path: Path) -> None:
    path.unlink()


def rewrite(path: Path) -> None:
    path.write_bytes(b"new content")


def replace(path: Path) -> None:
    write_renamed(path)


def rename(path: Path) -> None:
    path.rename(path.with_name(path.name + ".renamed"))


@pytest.mark.parametrize(
    "change", [unlink, rewrite, replace, rename], ids=lambda change: change.__name__
)
def test_each_open_counts_though_its_object_goes(
    mount: Mount, change: Callable[[Path], None]
) -> None:
    port = free_port()
    kv = mount(f"{OPTIONS},metrics={port}")
    space = engine(kv)
    paths = [space / f"{number}" for number in range(50)]
    for path in paths:
        path.write_bytes(b"content")
    wait_for(lambda: kv.status()["fast_open"]["objects"] > 40, "opens are answered fast")
    for path in paths:
        for _ in range(4):
            path.read_bytes()
        change(path)
    assert hits(kv) == 200
    samples = scrape(port)
    timed = value(samples, "kvfs_namespace_open_seconds_count", namespace="engine")
    assert timed == sum(tier["hits"] for tier in kv.status()["tiers"].values()) == 200


@pytest.mark.parametrize("fast", ["on", "off"])
@pytest.mark.parametrize("change", [unlink, replace], ids=lambda change: change.__name__)
def test_opens_of_a_file_that_lost_its_name_count(
    mount: Mount, change: Callable[[Path], None], fast: str
) -> None:
    """As of a program that looked up the name just before it went."""
    kv = mount(f"{OPTIONS},fast_open={fast}")
    path, log = engine(kv) / "block", kv.path.parent / "accesses"
    path.write_bytes(b"content")
    if fast == "off":
        request(kv.path, "set", access_log=str(log))
    looked_up = os.open(path, os.O_PATH)
    change(path)
    same = Path(f"/proc/self/fd/{looked_up}")
    with same.open("rb"), same.open("rb"):
        assert same.read_bytes() == b"content"
    os.close(looked_up)
    if fast == "off":
        wait_for(lambda: log.read_text().count('"path":"engine/"') == 3, "the log has the opens")
    assert hits(kv) == sum(tier["hits"] for tier in kv.status()["tiers"].values()) == 3


def test_each_open_counts_though_all_objects_are_evicted(mount: Mount) -> None:
    kv = mount(OPTIONS)
    settings = {"quota_hard": "8M", "eviction": "lru"}
    request(kv.path, "ns_create", name="engine", settings=settings, uid=0, gid=0)
    space = kv.path / "engine"
    for round_ in range(3):
        for number in range(7):
            write_renamed(space / f"{round_}-{number}")
            (space / f"{round_}-{number}").write_bytes(bytes(1 << 20))
            for _ in range(10):
                (space / f"{round_}-{number}").read_bytes()
    assert hits(kv) == 210


@pytest.mark.parametrize("fast", ["on", "off"])
def test_an_open_that_races_with_an_eviction_is_one_miss(mount: Mount, fast: str) -> None:
    kv = mount(f"{OPTIONS},fast_open={fast}")
    path = engine(kv) / "block"
    found = missed = 0
    with ThreadPoolExecutor() as evictor:
        for _ in range(60):
            path.write_bytes(b"content")
            ino = path.stat().st_ino
            evicted = evictor.submit(request, kv.path, "evict", inos=[ino], drop=True)
            while not evicted.done():  # an object that is open stays
                try:
                    path.read_bytes()
                    found += 1
                except FileNotFoundError:
                    missed += 1
                    break
    print("refused opens:", kv.status()["errors"].get("open", {}).get("StaleError", 0))
    misses(kv, missed)
    assert hits(kv) == found


def test_a_question_of_match_has_one_miss_at_most(mount: Mount) -> None:
    kv = mount(OPTIONS)
    settings = {"prefix": "on"}
    request(kv.path, "ns_create", name="engine", settings=settings, uid=0, gid=0)
    space, parent = kv.path / "engine", os.urandom(16)
    keys = [os.urandom(16) for _ in range(3)]
    matched(space, parent, keys, blocks=0)
    misses(kv, 1)
    folder = space / parent.hex()
    for at, key in enumerate(keys):
        folder.mkdir(exist_ok=True)
        (folder / key.hex()).write_bytes(b"content")
        closed(kv)
        before = counted(kv, "misses")
        matched(space, parent, keys, blocks=at + 1)
        misses(kv, before + (at < 2))
        folder = space / key.hex()


def matched(space: Path, parent: bytes, keys: list[bytes], blocks: int) -> None:
    asked = os.open(space / matching.NAME, os.O_RDWR)
    try:
        os.pwrite(asked, matching.pack_request(parent, keys), 0)
        answer = matching.unpack_answer(os.pread(asked, matching.answer_size(len(keys)), 0))
    finally:
        os.close(asked)
    assert answer.blocks == blocks


def test_what_if_knows_the_objects_of_the_mount_before(mount: Mount) -> None:
    kv = mount(OPTIONS)
    space = engine(kv)
    for number in range(100):
        (space / f"{number}").write_bytes(b"content")
    kv.remount()
    wait_for(lambda: kv.status()["census_done"], "all objects are counted")
    for number in range(400):
        (space / f"{number % 100}").read_bytes()
    for number in range(100, 120):
        assert not (space / f"{number}").exists()
    (space / "0").unlink()
    assert not (space / "0").exists()
    misses(kv, 21)
    found = next(one for one in kv.status()["namespaces"] if one["name"] == "engine")
    assert found["hit_ratio_at"]["1"] == pytest.approx(400 / 421, abs=NEAR)


@pytest.mark.parametrize("names", [14, 20])
def test_what_if_of_a_small_quota_agrees_with_the_measured_ratio(mount: Mount, names: int) -> None:
    """Names in a cycle that is longer than the room: LRU has no hit, and twice the room has all."""
    kv = mount(OPTIONS)
    settings = {"quota_hard": "10M", "eviction": "lru"}
    request(kv.path, "ns_create", name="engine", settings=settings, uid=0, gid=0)
    space, opens = kv.path / "engine", 0

    def told() -> dict[str, float]:
        spaces = kv.status()["namespaces"]
        found: dict[str, float] = next(one for one in spaces if one["name"] == "engine")[
            "hit_ratio_at"
        ]
        return found

    def cycle(rounds: int) -> None:
        nonlocal opens
        for number in range(rounds * names):
            path = space / f"{number % names}"
            opens += 1
            try:
                path.read_bytes()
            except FileNotFoundError:
                path.write_bytes(bytes(1 << 20))

    cycle(4)
    assert told() == {}
    while not (ratios := told()):
        cycle(1)
    assert opens >= 400
    assert hits(kv) / opens == pytest.approx(0, abs=0.01)
    assert ratios["1"] == pytest.approx(0, abs=NEAR)
    assert ratios["2"] == pytest.approx(1, abs=0.1)
