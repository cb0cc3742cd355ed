"""Blocks that a cache is lent: that it uses leases, and that it ends them."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvfs import leasing, prefix
from kvfs.client import PrefixCache, files
from kvfs.client.leases import Leases
from tests.client.prompts import SPEC, TOKENS, blocks_of
from tests.conftest import Mount
from tests.harness import Mounted, wait_for

GIVEN = blocks_of(TOKENS)
KEYS = SPEC.keys(TOKENS)


@pytest.fixture
def kv(mount: Mount) -> Mounted:
    return mount("ram=256M")


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


def test_loading_uses_leases(kv: Mounted, cache: PrefixCache) -> None:
    out = torch.zeros_like(GIVEN)
    assert cache.load(TOKENS, out).blocks == 10
    assert torch.equal(out, GIVEN)
    assert kv.counter("opens_lent") == 10
    assert kv.counter("opens_passthrough") == 10, "those of the save"
    none_left(kv)
    assert cache.prefetch(TOKENS).result() == 10
    assert kv.counter("opens_lent") == 20
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
def test_what_vanished_shortens(kv: Mounted, cache: PrefixCache, at: int, mode: str) -> None:
    path_of(cache, at).unlink()
    loaded = cache.load_keys(SPEC.root, KEYS, mode=mode, blocks=10)  # type: ignore[arg-type]
    assert loaded.blocks == at
    assert all(torch.equal(*pair) for pair in zip(loaded.tensors, GIVEN[:at], strict=True))
    del loaded
    gc.collect()
    cache.close()
    none_left(kv)


def test_what_is_not_lent_is_opened_by_name(kv: Mounted, cache: PrefixCache) -> None:
    with path_of(cache, 4).open("r+b"):
        out = torch.zeros_like(GIVEN)
        assert cache.load(TOKENS, out).blocks == 10
        assert torch.equal(out, GIVEN)
        assert kv.counter("opens_lent") == 4
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
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert kv.status()["open_handles"] == 10
    mapped.clear()
    gc.collect()
    none_left(kv)


def test_a_finalizer_waits_for_nobody(kv: Mounted, cache: PrefixCache) -> None:
    """It may run in the very thread that has the turn."""
    leases = cache._leases
    request = leasing.Request(SPEC.root, KEYS, "", SPEC.stored_bytes)
    lent = leases.ask(request)
    assert len(lent) == 10
    with leases._lock:
        leases.give_back([lease for _, lease in lent])
    assert kv.status()["open_handles"] == 10
    more = leases.ask(request._replace(keys=KEYS[:1]))
    assert kv.status()["open_handles"] == 1, "with the next one they are given back"
    for descriptor, lease in [*lent, *more]:
        os.close(descriptor)
        leases.give_back([lease])
    none_left(kv)


def test_a_process_that_may_open_few_files(kv: Mounted, cache: PrefixCache) -> None:
    code = f"""
import os, resource, sys, torch
from kvfs.client import PrefixCache
from tests.client.prompts import SPEC, TOKENS, blocks_of
given = blocks_of(TOKENS)
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
    leases = Leases(str(tmp_path))
    for _ in range(2):
        assert leases.ask(leasing.Request(SPEC.root, KEYS, "", 1)) == []
    assert leases.offered is False
    leases.give_back([1, 2])
    leases.close()
    with PrefixCache(tmp_path / "plain", SPEC, create=True) as cache:
        assert cache.save(TOKENS, GIVEN) == 10
        for _ in range(2):
            assert torch.equal(torch.stack(list(cache.load(TOKENS).tensors)), GIVEN)


def test_a_descriptor_is_checked_when_it_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "block"
    path.write_bytes(b"x" * 10)
    with path.open("rb") as file, pytest.raises(OSError, match="expected a file of 4096 bytes"):
        files.map_block(file.fileno(), 4096, unmapped=lambda: pytest.fail("there is none"))
