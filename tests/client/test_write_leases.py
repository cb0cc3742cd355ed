"""Saves whose files the mount makes: files made so, files made by name, and remains."""

import errno
import os
import random
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfs import leasing, prefix
from kvfs.client import PrefixCache, Spec, files
from tests.client.prompts import SPEC, TOKENS, blocks_of
from tests.client.test_in_place import LARGE, PATHS
from tests.conftest import Mount
from tests.harness import Mounted, wait_for

GIVEN = blocks_of(TOKENS)


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the files that the client makes itself."""
    made: list[str] = []
    create = files.create

    def noted(path: str) -> int:
        made.append(path)
        return create(path)

    monkeypatch.setattr(files, "create", noted)
    return made


@pytest.fixture
def cache(kv: Mounted) -> Iterator[PrefixCache]:
    with PrefixCache(kv.path / "n", SPEC, create=True) as found:
        yield found


def same(cache: PrefixCache, given: torch.Tensor = GIVEN) -> bool:
    return torch.equal(torch.stack(list(cache.load(TOKENS).tensors)), given)


def at_rest(kv: Mounted) -> None:
    wait_for(lambda: not kv.status()["writers"], "nobody writes")


def test_all_are_made_by_the_mount(kv: Mounted, cache: PrefixCache, by_name: list[str]) -> None:
    for at in range(0, 10, 5):
        assert cache.save(TOKENS, GIVEN[at : at + 5], start=at) == at + 5
        assert not kv.status()["writers"], "they are sealed when it returns"
    assert not by_name
    assert same(cache)
    assert cache.stats.blocks_saved == 10


def test_the_mode_is_that_of_the_process(cache: PrefixCache, by_name: list[str]) -> None:
    before = os.umask(0o027)
    try:
        assert cache.save(TOKENS, GIVEN) == 10
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(Path(cache.path, path).stat().st_mode) for path in PATHS}
    assert modes == {0o640}
    assert not by_name


@pytest.mark.parametrize("bad", [0, 4, 9])
def test_a_write_that_fails(
    kv: Mounted, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """The failed block and all blocks after it are removed."""
    real = os.pwritev
    wanted = GIVEN[bad].contiguous().view(torch.uint8).flatten().numpy().tobytes()

    def fail(fd: int, runs: Any, offset: int) -> int:  # noqa: ANN401
        if bytes(runs[0])[: len(wanted)] == wanted:
            real(fd, [wanted[: len(wanted) // 2]], 0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, runs, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail)
        assert cache.save(TOKENS, GIVEN) == bad
    assert not Path(cache.path, PATHS[bad]).exists()
    assert cache.load(TOKENS).blocks == cache.match(TOKENS).blocks == bad
    assert cache.stats.save_errors == 1
    at_rest(kv)
    assert cache.save(TOKENS, GIVEN) == 10
    assert same(cache)


def test_some_are_there(cache: PrefixCache, by_name: list[str]) -> None:
    """A killed writer left some too short: they are replaced, and the next ones as well."""
    folder = Path(cache.path)
    assert cache.save(TOKENS, GIVEN[:6]) == 6
    os.truncate(folder / PATHS[4], 1)
    assert cache.save(TOKENS, GIVEN) == 10
    assert by_name
    assert same(cache)


def test_blocks_without_room_in_ram_are_made_by_name(mount: Mount, by_name: list[str]) -> None:
    kv = mount("ram=16M,nvme={tmp}/nvme,nvme_size=256M")
    spec = Spec(model="m", revision="r", dtype="float32", axes={"token": 4, "dim": 1 << 18})
    given = blocks_of(TOKENS, spec)  # of 4 MiB
    with PrefixCache(kv.path / "n", spec, create=True) as cache:
        assert cache.save(TOKENS, given) == 10
        assert 0 < len(by_name) < 10
        assert same(cache, given)


def test_an_older_kvfs(
    cache: PrefixCache, by_name: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount refuses the request: all files are made by name, and leases work on."""
    real = os.pwrite

    def older(fd: int, data: bytes, offset: int) -> int:
        if data[:4] == leasing.MAKE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", older)
    assert cache.save(TOKENS, GIVEN[:5]) == 5
    assert cache.save(TOKENS, GIVEN) == 10
    assert len(by_name) == 10
    assert not cache._leases.makes
    assert cache._leases.offered
    assert same(cache)


def test_done_is_not_heard(
    kv: Mounted, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block without the mount's confirmation counts as saved if it has its size."""
    real = os.pwrite

    def deaf(fd: int, data: bytes, offset: int) -> int:
        count = real(fd, data, offset)
        if data[:4] == leasing.DONE:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return count

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", deaf)
        assert cache.save(TOKENS, GIVEN) == 10
    assert same(cache)
    at_rest(kv)


def test_many_save_the_same(kv: Mounted) -> None:
    crowd = 4
    for number in range(5):
        folder, begin = kv.path / f"n{number}", threading.Barrier(crowd)
        PrefixCache(folder, LARGE, create=True).close()
        given = blocks_of(TOKENS, LARGE)

        def one(
            folder: Path = folder,
            begin: threading.Barrier = begin,
            given: torch.Tensor = given,
        ) -> int:
            with PrefixCache(folder, LARGE) as cache:
                begin.wait()
                return cache.save(TOKENS, given)

        with ThreadPoolExecutor(crowd) as pool:
            saved = [found.result() for found in [pool.submit(one) for _ in range(crowd)]]
        assert saved == [10] * crowd
        with PrefixCache(folder, LARGE) as cache:
            assert same(cache, given)


def test_the_daemon_dies_meanwhile(kv: Mounted) -> None:
    """Saves and loads go on; every block read was saved."""
    chance = random.Random(number := 20261123)
    print(f"seed {number}")
    given, keys = blocks_of(TOKENS, LARGE), LARGE.keys(TOKENS)
    ended = threading.Event()

    def save() -> None:
        at = 0
        while not ended.is_set():
            folder, victim = kv.path / f"n{at % 3}", chance.randrange(10)
            with PrefixCache(folder, LARGE, create=True) as cache:
                cache.save(TOKENS, given)
                for block, wanted in zip(cache.load(TOKENS).tensors, given, strict=False):
                    assert torch.equal(block, wanted)
            above, key = (LARGE.root, *keys)[victim : victim + 2]
            with suppress(OSError):
                (folder / prefix.path(above, key)).unlink()
            at += 1

    with ThreadPoolExecutor(2) as pool:
        savers = [pool.submit(save) for _ in range(2)]
        for _ in range(4):
            begun = kv.counter("created")
            wait_for(partial(_saves_on, kv, savers, begun), "they save on")
            before = kv.pid
            kv.kill_daemon()
            wait_for(partial(_is_another, kv, before), "another daemon serves")
        ended.set()
        for one in savers:
            one.result()
    at_rest(kv)
    for number in range(3):
        with PrefixCache(kv.path / f"n{number}", LARGE, create=True) as cache:
            for block, wanted in zip(cache.load(TOKENS).tensors, given, strict=False):
                assert torch.equal(block, wanted)


def _saves_on(kv: Mounted, savers: list[Future[None]], begun: int) -> bool:
    return kv.counter("created") > begun + 5 or any(one.done() for one in savers)


def _is_another(kv: Mounted, before: int) -> bool:
    return kv.pid != before
