"""Answers of an open whose inode goes away once, and again after the lookup of the kernel."""

import errno
import os
import stat
from pathlib import Path

import pytest
import trio

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.pool.kernel_lookups import KernelLookups
from kvfs.fuse.second_tries import LATE, MANY, SecondTries
from tests.unit.test_request_paths import CALLER, mounted
from tests.unit.world import World, world

import pyfuse3  # isort: skip

THREAD, OTHER = 10, 11
FILE = stat.S_IFREG | 0o644


async def dropped(made: World, name: bytes) -> int:
    """Store an object, and return its inode number after its drop."""
    inode = await made.store(name, b"bytes", made.fast)
    made.ledger.removals.drop(inode, "evicted")
    return inode.ino


def test_only_the_first_stale_inode_of_an_open_is_told_to_the_kernel(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        served = mounted(made)

        async def code(ino: int) -> int:
            with pytest.raises(pyfuse3.FUSEError) as caught:
                await served.open(ino, os.O_RDONLY, CALLER)
            return caught.value.errno

        assert await code(await dropped(made, b"a")) == errno.ESTALE
        inode = await made.store(b"a", b"other", made.fast)
        assert (await served.lookup(ROOT_INO, b"a", CALLER)).st_ino == inode.ino
        made.ledger.removals.drop(inode, "evicted")
        assert await code(inode.ino) == errno.ENOENT
        assert await code(inode.ino) == errno.ESTALE  # another open

    with world(tmp_path, passthrough=True) as made:
        trio.run(case, made)


@pytest.mark.parametrize("lookups", [1, 2])
def test_a_lookup_in_vain_ends_an_open(tmp_path: Path, lookups: int) -> None:
    """The kernel looks up once, or also the name that it knew. Another open follows at once."""

    async def case(made: World) -> None:
        served = mounted(made)
        for name in (b"a", b"b"):
            inode = await made.store(name, b"bytes", made.fast)
            await served.lookup(ROOT_INO, name, CALLER)
            made.ledger.removals.drop(inode, "evicted")
            with pytest.raises(pyfuse3.FUSEError) as caught:
                await served.open(inode.ino, os.O_RDONLY, CALLER)
            assert caught.value.errno == errno.ESTALE
            for _ in range(lookups):
                with pytest.raises(pyfuse3.FUSEError) as caught:
                    await served.lookup(ROOT_INO, name, CALLER)
                assert caught.value.errno == errno.ENOENT

    with world(tmp_path, passthrough=True) as made:
        trio.run(case, made)


def test_a_stale_inode_belongs_to_a_second_try_until_its_call_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 10**12
    monkeypatch.setattr("time.monotonic_ns", lambda: now)
    tries = SecondTries()

    def refused(thread: int) -> bool:
        tries.begins(thread)
        return tries.refused(thread)

    assert not tries.refused(THREAD)
    assert not tries.refused(OTHER)
    assert tries.refused(THREAD)  # the next one belongs to another call
    assert not tries.refused(THREAD)
    tries.opened(THREAD)
    assert not tries.refused(THREAD)
    for _ in range(2):
        tries.looks_up(THREAD, ROOT_INO, b"a")
        tries.walked(THREAD, ROOT_INO, b"a")
    assert tries.refused(THREAD)  # the kernel has looked up once more, and found another inode
    assert not tries.refused(THREAD)
    now += LATE
    assert not refused(THREAD)


def test_an_operation_of_a_second_try_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup waits for an index and a bucket, and so does the open."""
    now = 10**12
    monkeypatch.setattr("time.monotonic_ns", lambda: now)
    tries = SecondTries()
    assert not tries.refused(THREAD)
    now += LATE // 2
    for _ in range(2):
        tries.begins(THREAD)
        now += 3 * LATE
        tries.ends(THREAD)
        now += LATE // 2
    tries.begins(THREAD)
    now += 3 * LATE
    assert tries.refused(THREAD)


def test_a_third_lookup_of_the_last_name_belongs_to_another_call() -> None:
    tries = SecondTries()
    assert not tries.refused(THREAD)
    for _ in range(2):
        tries.looks_up(THREAD, ROOT_INO, b"a")
        tries.walked(THREAD, ROOT_INO, b"a")
    assert THREAD in tries.threads
    tries.looks_up(THREAD, ROOT_INO, b"a")
    assert not tries.refused(THREAD)


def test_a_lookup_of_another_name_ends_a_call_whose_walk_has_ended() -> None:
    tries = SecondTries()
    assert not tries.refused(THREAD)
    tries.looks_up(THREAD, ROOT_INO, b"directory")
    tries.looks_up(THREAD, 7, b"a")
    tries.walked(THREAD, 7, b"a")
    tries.looks_up(OTHER, 7, b"b")
    assert THREAD in tries.threads
    tries.looks_up(THREAD, 7, b"b")
    assert not tries.refused(THREAD)


def test_a_link_walks_two_paths() -> None:
    tries = SecondTries()
    assert not tries.refused(THREAD, 2)
    for name in (b"a", b"a", b"b"):
        tries.looks_up(THREAD, ROOT_INO, name)
        tries.walked(THREAD, ROOT_INO, name)
    assert tries.refused(THREAD, 2)
    assert not tries.refused(THREAD, 2)
    for name in (b"a", b"b", b"c"):
        tries.looks_up(THREAD, ROOT_INO, name)
        tries.walked(THREAD, ROOT_INO, name)
    assert not tries.refused(THREAD, 2)


def test_each_stale_inode_right_after_a_takeover_belongs_to_a_second_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 10**12
    monkeypatch.setattr("time.monotonic_ns", lambda: now)
    tries = SecondTries()
    tries.takes_over()
    assert tries.refused(THREAD)
    now += LATE
    assert not tries.refused(THREAD)


def test_the_oldest_threads_are_forgotten() -> None:
    tries = SecondTries()
    for thread in range(MANY + 1):
        assert not tries.refused(thread)
    assert not tries.refused(0)
    assert tries.refused(MANY)


def test_the_kernel_knows_an_inode_until_it_has_given_all_its_lookups_back() -> None:
    lookups, remote, local = KernelLookups(), Inode(7, FILE, 0, 0), Inode(8, FILE, 0, 0)
    remote.in_pool = True
    for _ in range(3):
        lookups.answered(remote)
        lookups.answered(local)
    remote.in_pool = False  # a copy has come meanwhile
    lookups.answered(remote)
    assert not lookups.given_back(7, 1)
    assert not lookups.given_back(7, 2)
    assert lookups.given_back(7, 1)
    assert lookups.given_back(8, 1)
    assert lookups.given_back(7, 1)  # of the daemon before
