"""Blocks leased to a cache: the cache uses its leases, and ends them."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from kvfs import leasing, prefix
from kvfs.client import PrefixCache, files, leased
from kvfs.client.leases import LeaseClient, Lent
from tests.client.prompts import SPEC, TOKENS, blocks_of
from tests.conftest import Mount
from tests.harness import Mounted, wait_for

GIVEN = blocks_of(TOKENS)
KEYS = SPEC.keys(TOKENS)

Opens = Callable[[str], int]


@pytest.fixture(autouse=True)
def few_blocks_are_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the short loads of these tests ask for leases."""
    monkeypatch.setattr(leased, "BY_NAME", 0)


@pytest.fixture
def kv(emptied: Mount) -> Mounted:
    return emptied("ram=256M")


@pytest.fixture
def opens(kv: Mounted) -> Opens:
    """How many of a kind the mount has counted since the test began."""
    before = kv.status()["counters"]
    return lambda kind: kv.counter(f"opens_{kind}") - before[f"opens_{kind}"]


@pytest.fixture
def cache(kv: Mounted) -> Iterator[PrefixCache]:
    with PrefixCache(kv.path / "llama", SPEC, create=True) as made:
        assert made.save(TOKENS, GIVEN) == 10
        wait_for(lambda: not kv.status()["writers"], "all is there")
        yield made


def none_left(kv: Mounted) -> None:
    wait_for(lambda: not kv.status()["open_handles"], "all leases have ended")


def path_of(cache: PrefixCache, at: int) -> Path:
    return Path(cache.path) / prefix.path(KEYS[at - 1] if at else SPEC.root, KEYS[at])


def test_loading_uses_leases(kv: Mounted, opens: Opens, cache: PrefixCache) -> None:
    out = torch.zeros_like(GIVEN)
    assert cache.load(TOKENS, out).blocks == 10
    assert torch.equal(out, GIVEN)
    assert opens("lent") == 10
    assert opens("passthrough") == 10, "those of the save"
    none_left(kv)
    assert cache.prefetch(TOKENS).result() == 10
    assert opens("lent") == 20
    cache.close()
    none_left(kv)


@pytest.mark.parametrize(("most", "lent"), [(9, 10), (10, 0)])
def test_short_load_opens_by_name(
    opens: Opens, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, most: int, lent: int
) -> None:
    monkeypatch.setattr(leased, "BY_NAME", most)
    out = torch.zeros_like(GIVEN)
    assert cache.load(TOKENS, out).blocks == 10
    assert torch.equal(out, GIVEN)
    assert opens("lent") == lent


def test_few_mapped_blocks_count_as_open(
    kv: Mounted, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leased, "BY_NAME", 10)
    mapped = cache.load(TOKENS, mode="mmap").tensors
    assert len(mapped) == kv.status()["open_handles"] == 10
    del mapped
    gc.collect()
    cache.close()
    none_left(kv)


def test_a_mapping_keeps_its_lease(kv: Mounted, cache: PrefixCache) -> None:
    mapped = cache.load(TOKENS, mode="mmap").tensors
    assert kv.status()["open_handles"] == 10
    one = mapped[3]
    del mapped
    gc.collect()
    assert cache.load(TOKENS, blocks=1).blocks == 1, "which gives back what has ended"
    wait_for(lambda: kv.status()["open_handles"] == 1, "one is left")
    cache.close()
    assert kv.status()["open_handles"] == 1
    path_of(cache, 9).unlink()
    assert torch.equal(one, GIVEN[3])
    del one
    gc.collect()
    none_left(kv)
    wait_for(lambda: not _has_open(cache), "the descriptor is closed")


def _has_open(cache: PrefixCache) -> list[str]:
    links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return [
        str(link.readlink())
        for link in links
        if link.is_symlink()
        and "/.match" in str(link.readlink())
        and cache.path in str(link.readlink())
    ]


@pytest.mark.parametrize("mode", ["copy", "mmap"])
@pytest.mark.parametrize("at", [0, 1, 2, 7])
def test_load_ends_before_a_missing_block(
    kv: Mounted, cache: PrefixCache, at: int, mode: str
) -> None:
    path_of(cache, at).unlink()
    loaded = cache.load_keys(SPEC.root, KEYS, mode=mode, blocks=10)  # type: ignore[arg-type]
    assert loaded.blocks == at
    assert all(torch.equal(*pair) for pair in zip(loaded.tensors, GIVEN[:at], strict=True))
    del loaded
    gc.collect()
    cache.close()
    none_left(kv)


def test_block_that_is_not_leased_is_opened_by_name(
    kv: Mounted, opens: Opens, cache: PrefixCache
) -> None:
    with path_of(cache, 4).open("r+b"):
        out = torch.zeros_like(GIVEN)
        assert cache.load(TOKENS, out).blocks == 10
        assert torch.equal(out, GIVEN)
        assert opens("lent") == 4
    os.truncate(path_of(cache, 6), 1)
    assert cache.load(TOKENS, out).blocks == 6
    none_left(kv)


def test_another_daemon_is_asked_anew(kv: Mounted, cache: PrefixCache) -> None:
    mapped = cache.load(TOKENS, mode="mmap")
    kv.kill_daemon()
    for _ in range(2):
        assert torch.equal(torch.stack(list(cache.load(TOKENS).tensors)), GIVEN)
    assert torch.equal(torch.stack(list(mapped.tensors)), GIVEN)
    del mapped
    gc.collect()
    cache.close()
    none_left(kv)


def test_a_child_ends_no_lease_of_its_parent(kv: Mounted, cache: PrefixCache) -> None:
    mapped = list(cache.load(TOKENS, mode="mmap").tensors)
    child = os.fork()
    if not child:
        mapped.clear()
        gc.collect()
        cache._leases.give_back([0])
        cache.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert kv.status()["open_handles"] == 10
    mapped.clear()
    gc.collect()
    none_left(kv)


def test_lease_of_a_closed_cache_ends_when_its_descriptor_is_returned(
    kv: Mounted, cache: PrefixCache
) -> None:
    lent = asked(cache._leases, leasing.LeaseRequest(SPEC.root, KEYS, "", SPEC.stored_bytes))
    assert len(lent) == 10
    cache.close()
    assert asked(cache._leases, leasing.LeaseRequest(SPEC.root, KEYS, "", SPEC.stored_bytes)) == []
    assert kv.status()["open_handles"] == 10
    assert _has_open(cache)
    for descriptor, _ in lent:
        os.close(descriptor)
    cache._leases.give_back(lease for _, lease in lent)
    none_left(kv)
    wait_for(lambda: not _has_open(cache), "the descriptor is closed")


def asked(leases: LeaseClient, request: leasing.LeaseRequest) -> Lent:
    found: SimpleQueue[Lent] = SimpleQueue()
    leases.ask(request, found.put)
    return found.get()


def test_a_cache_that_is_not_closed(kv: Mounted, cache: PrefixCache) -> None:
    other = PrefixCache(cache.path, SPEC)
    mapped = list(other.load(TOKENS, mode="mmap").tensors[:3])
    assert len(_has_open(cache)) == 4, "of either what asks for matches, and what for leases"
    del other
    gc.collect()
    wait_for(lambda: len(_has_open(cache)) == 3, "its question has ended")
    wait_for(lambda: kv.status()["open_handles"] == 3, "what is mapped is kept")
    mapped.clear()
    gc.collect()
    none_left(kv)
    wait_for(lambda: len(_has_open(cache)) == 2, "its leases have ended")


def test_closed_in_the_middle_of_loads(kv: Mounted, cache: PrefixCache) -> None:
    """The loads end or are refused; no lease stays, and no file stays open."""
    before = len(os.listdir("/proc/self/fd"))
    refused = 0
    for _ in range(30):
        other = PrefixCache(cache.path, SPEC)
        with ThreadPoolExecutor(3) as pool:
            loads = [pool.submit(_load_until_refused, other) for _ in range(3)]
            wait_for(partial(_has_loaded, other), "they load")
            other.close()
            refused += sum(load.result() for load in loads)
    assert refused == 90
    none_left(kv)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before, "all descriptors are closed")


def _has_loaded(cache: PrefixCache) -> bool:
    return cache.stats.blocks_loaded > 0


def _load_until_refused(cache: PrefixCache) -> bool:
    while True:
        try:
            out = torch.zeros_like(GIVEN)
            assert cache.load_keys(SPEC.root, KEYS, out, blocks=10).blocks == 10
            assert torch.equal(out, GIVEN)
        except ValueError as error:
            return "is closed" in str(error)


def test_late_answer_is_not_taken_for_the_next_one(
    kv: Mounted, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks would not be those of the request."""
    assert cache.load(TOKENS).blocks == 10
    real = os.pwrite

    def twice(fd: int, data: bytes, offset: int) -> int:
        if data.startswith(leasing.OPEN):
            other = leasing.unpack_request(data)
            first = leasing.LeaseRequest(
                KEYS[0], KEYS[1:4], "", SPEC.stored_bytes, other.number - 1
            )
            real(fd, leasing.pack_request(first), 0)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", twice)
    for _ in range(3):
        out = torch.zeros_like(GIVEN)
        assert cache.load(TOKENS, out).blocks == 10
        assert torch.equal(out, GIVEN)
    monkeypatch.undo()
    assert cache.load(TOKENS, out).blocks == 10
    cache.close()
    none_left(kv)


def test_a_process_that_may_open_few_files(kv: Mounted, cache: PrefixCache) -> None:
    code = f"""
import os, resource, sys, torch
from kvfs.client import PrefixCache, leased
from tests.client.prompts import SPEC, TOKENS, blocks_of
given = blocks_of(TOKENS)
leased.BY_NAME = 0
with PrefixCache({cache.path!r}, SPEC, threads=1) as cache:
    out = torch.zeros_like(given)
    assert cache.load(TOKENS, out, blocks=1).blocks == 1
    free = os.dup(0)
    os.close(free)
    for more in (1, 3, 6, 20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, 4096))
        out.zero_()
        assert cache.load(TOKENS, out).blocks == 10, (more, cache.stats)
        assert torch.equal(out, given)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    none_left(kv)


def test_elsewhere_nothing_is_asked(tmp_path: Path) -> None:
    leases = LeaseClient(str(tmp_path))
    for _ in range(2):
        assert asked(leases, leasing.LeaseRequest(SPEC.root, KEYS, "", 1)) == []
    assert leases.offered is False
    leases.give_back([1, 2])
    leases.close()
    assert asked(leases, leasing.LeaseRequest(SPEC.root, KEYS, "", 1)) == []
    with PrefixCache(tmp_path / "plain", SPEC, create=True) as cache:
        assert cache.save(TOKENS, GIVEN) == 10
        for _ in range(2):
            assert torch.equal(torch.stack(list(cache.load(TOKENS).tensors)), GIVEN)


def test_a_mount_that_is_read_only_is_asked_once(mount: Mount) -> None:
    kv = mount("ram=256M,nvme={tmp}/nvme,nvme_size=1G")
    with PrefixCache(kv.path / "llama", SPEC, create=True) as cache:
        assert cache.save(TOKENS, GIVEN) == 10
    kv.remount(f"{kv.options},ro")
    leases = LeaseClient(str(kv.path / "llama"))
    assert asked(leases, leasing.LeaseRequest(SPEC.root, KEYS, "", 1)) == []
    assert leases.offered is False
    leases.close()
    with PrefixCache(kv.path / "llama", SPEC) as cache:
        assert torch.equal(torch.stack(list(cache.load(TOKENS).tensors)), GIVEN)


def test_a_descriptor_is_checked_when_it_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "block"
    path.write_bytes(b"x" * 10)
    with path.open("rb") as file, pytest.raises(OSError, match="expected a file of 4096 bytes"):
        files.map_block(file.fileno(), 4096, unmapped=lambda: pytest.fail("there is none"))
