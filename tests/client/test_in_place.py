"""Blocks written under their names: other programs' view while they grow, and the remains."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfs import prefix
from kvfs.client import PrefixCache, Spec, memory
from kvfs.client.leased import LeasedWriter
from kvfs.client.leases import LeaseClient
from kvfs.client.save import InPlace, _Chain, save_chain
from kvfs.client.stats import Stats
from kvfs.client.threads import Threads, _Turn
from tests.client.prompts import SPEC, TOKENS, block_of, blocks_of
from tests.harness import Mounted, wait_for

GIVEN = blocks_of(TOKENS)
KEYS = SPEC.keys(TOKENS)
PATHS = [prefix.path(above, key) for above, key in zip((SPEC.root, *KEYS), KEYS, strict=False)]
LARGE = Spec(model="m", revision="r", dtype="float32", axes={"token": 4, "dim": 1 << 16})  # 1 MiB


@pytest.fixture
def threads() -> Iterator[Threads]:
    found = Threads(4)
    yield found
    found.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the directories that a namespace makes itself."""
    for key in (SPEC.root, *KEYS):
        (tmp_path / key.hex()).mkdir()
    return tmp_path


def made_in(folder: Path) -> LeasedWriter:
    """Ask the mount to make the files; without a mount they are made by name."""
    leases = LeaseClient(str(folder))
    return LeasedWriter(str(folder), SPEC.root, KEYS, "", SPEC.stored_bytes, leases)


def save(folder: Path, threads: Threads, content: Callable[[int], Any] | None = None) -> int:
    return save_chain(
        *(str(folder), SPEC.root, KEYS, ""),
        content or (lambda at: memory.content(GIVEN[at])),
        parent_cached=True,
        closed=True,
        made=made_in(folder),
        threads=threads,
        stats=Stats(),
    )


def contents(folder: Path) -> list[bytes]:
    """The content of the files, which must be the first blocks."""
    found = [path for path in PATHS if (folder / path).exists()]
    assert found == PATHS[: len(found)]
    assert sum(one.is_file() for one in folder.rglob("*")) == len(found)
    return [(folder / path).read_bytes() for path in found]


def bytes_of(count: int) -> list[bytes]:
    return [GIVEN[at].view(torch.uint8).numpy().tobytes() for at in range(count)]


def test_a_chain(folder: Path, threads: Threads) -> None:
    assert save(folder, threads) == 10
    assert contents(folder) == bytes_of(10)


@pytest.mark.parametrize("failing", ["open", "pwritev", "close"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.ENOENT])
def test_failed_write_ends_the_save_and_removes_later_blocks(
    folder: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch, failing: str, error: int
) -> None:
    real = getattr(os, failing)
    calls = []

    def fail(*arguments: Any) -> Any:  # noqa: ANN401
        calls.append(arguments)
        bad = len(calls) == 5
        result = real(*arguments) if failing == "close" or not bad else None
        if bad:
            raise OSError(error, os.strerror(error))
        return result

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, fail)
        saved = save(folder, threads)
    assert saved < 10
    assert contents(folder) == bytes_of(saved)
    assert save(folder, threads) == 10, "those that are there are replaced"
    assert contents(folder) == bytes_of(10)


def test_an_exception_of_the_content_is_raised_when_all_is_removed(
    folder: Path, threads: Threads
) -> None:
    @contextlib.contextmanager
    def content(at: int) -> Iterator[memory.Runs]:
        if at == 4:
            raise ZeroDivisionError
        yield memory.view(GIVEN[at])

    with pytest.raises(ZeroDivisionError):
        save(folder, threads, content)
    assert contents(folder) == bytes_of(len(contents(folder)))
    assert len(contents(folder)) <= 4


def test_files_are_made_in_order(folder: Path) -> None:
    """The order holds even if the first block's writer comes late."""
    chain = InPlace(str(folder), [str(folder / path) for path in PATHS], made_in(folder))
    last_first = [*range(9, -1, -1)]
    with ThreadPoolExecutor(10) as pool:
        done = {
            at: pool.submit(chain.write, at, memory.content(GIVEN[at])) for at in last_first[:-1]
        }
        assert not any((folder / path).exists() for path in PATHS)
        assert chain.write(0, memory.content(GIVEN[0]))
        assert all(one.result() for one in done.values())
    assert chain.close() == 10
    assert contents(folder) == bytes_of(10)


def test_failed_writer_keeps_the_files_of_other_writers(folder: Path, threads: Threads) -> None:
    """A writer that fails removes its own files, and no other writer's."""

    @contextlib.contextmanager
    def content(at: int) -> Iterator[memory.Runs]:
        if at == 3:
            assert save(folder, threads) == 10, "another one, who replaces it"
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        yield memory.view(GIVEN[at])

    alone = Threads(1)
    assert save(folder, alone, content) == 3
    alone.close()
    assert contents(folder) == bytes_of(10)


@pytest.mark.parametrize("where", ["over", "write", "next_index"])
def test_an_interrupt_anywhere_ends_it(
    folder: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Threads that wait for the interrupted thread's block do not wait for ever."""
    owner: Any = {"over": _Chain, "write": InPlace, "next_index": _Turn}[where]
    real = getattr(owner, where)
    calls = []

    def interrupted(*arguments: Any) -> Any:  # noqa: ANN401
        found = real(*arguments) if where == "next_index" else None
        if threading.current_thread() is threading.main_thread():
            calls.append(arguments)
            if len(calls) == 2:
                raise KeyboardInterrupt
        return found if where == "next_index" else real(*arguments)

    monkeypatch.setattr(owner, where, interrupted)
    with contextlib.suppress(KeyboardInterrupt):  # it may have had one block only
        save(folder, threads)
    assert contents(folder) == bytes_of(len(contents(folder)))


def test_writers_after_the_end_of_the_chain_stop_waiting(folder: Path) -> None:
    chain = InPlace(str(folder), [str(folder / path) for path in PATHS], made_in(folder))
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(chain.write, at, memory.content(GIVEN[at])) for at in (3, 5, 9)]
        chain.end(1)
        assert not any(one.result() for one in waiting)
    assert chain.close() == 0
    assert contents(folder) == []


# On a mount


def inode_numbers(folder: Path) -> list[int]:
    return [(folder / path).stat().st_ino for path in PATHS]


def test_a_local_namespace_is_written_in_place(
    kv: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks in a namespace that publishes at close are not written in place."""
    renamed = []
    rename = os.rename

    def noted(*paths: str) -> None:
        renamed.append(paths)
        rename(*paths)

    monkeypatch.setattr(os, "rename", noted)
    for name, publish in (("here", b"immediate"), ("late", b"close")):
        with PrefixCache(kv.path / name, SPEC, create=True) as cache:
            os.setxattr(kv.path / name, "user.kvfs.publish", publish)
            renamed.clear()
            assert cache.save(TOKENS, GIVEN) == 10
            assert torch.equal(torch.stack(list(cache.load(TOKENS).tensors)), GIVEN)
            assert len(renamed) == (0 if publish == b"immediate" else 10)


def test_a_block_that_is_growing_is_none(kv: Mounted) -> None:
    folder = kv.path / "n"
    with PrefixCache(folder, SPEC, create=True) as writer, PrefixCache(folder, SPEC) as reader:
        assert writer.save(TOKENS, GIVEN[:3]) == 3
        with (folder / PATHS[3]).open("wb", buffering=0) as growing:
            half = bytes_of(4)[3]
            for end in (0, 1, len(half) - 1):
                growing.write(half[growing.tell() : end])
                assert reader.match(TOKENS).blocks == 3
                assert reader.load(TOKENS).blocks == 3
                assert reader.load(TOKENS, mode="mmap").blocks == 3
        assert reader.match(TOKENS).blocks == 3, "closed, but too short"
        assert writer.save(TOKENS, GIVEN) == 10
        assert torch.equal(torch.stack(list(reader.load(TOKENS).tensors)), GIVEN)


def test_many_save_the_same(kv: Mounted) -> None:
    crowd = 6
    for number in range(5):
        folder, begin = kv.path / f"n{number}", threading.Barrier(crowd)
        PrefixCache(folder, SPEC, create=True).close()

        def one(folder: Path = folder, begin: threading.Barrier = begin) -> int:
            with PrefixCache(folder, SPEC) as cache:
                begin.wait()
                saved = cache.save(TOKENS, GIVEN)
                for at, block in enumerate(cache.load(TOKENS).tensors):
                    assert torch.equal(block, GIVEN[at])
                return saved

        with ThreadPoolExecutor(crowd) as pool:
            assert [one.result() for one in [pool.submit(one) for _ in range(crowd)]] == [
                10
            ] * crowd
        with PrefixCache(folder, SPEC) as cache:
            assert cache.load(TOKENS).blocks == 10
        assert not list(folder.glob("*/*.tmp"))


def test_a_quota_that_is_full(kv: Mounted) -> None:
    """Blocks that do not fit are missing, with their directories; the rest is a prefix."""
    folder = kv.path / "n"
    with PrefixCache(folder, LARGE, create=True) as cache:
        os.setxattr(folder, "user.kvfs.quota_hard", b"4M")
        given = blocks_of(TOKENS, LARGE)
        # Those that are being written are counted when they are closed: one too many may go again.
        assert 1 <= cache.save(TOKENS, given) < 10

        def left() -> int:
            return sum(path.is_file() for path in folder.rglob("*"))

        wait_for(lambda: left() <= 4, "no more than fits is there")
        wait_for(
            lambda: sum(path.is_dir() for path in folder.iterdir()) == left() + 1,
            "their directories went",
        )
        loaded = cache.load(TOKENS).tensors
        assert len(loaded) == left()
        assert torch.equal(torch.stack(list(loaded)), given[: left()])


def test_a_namespace_that_is_gone(kv: Mounted) -> None:
    folder = kv.path / "n"
    with PrefixCache(folder, SPEC, create=True) as cache:
        folder.rmdir()
        assert cache.save(TOKENS, GIVEN) == 0
        assert cache.stats.blocks_unsaved == 10


SAVE = """
import sys, torch
from kvfs.client import PrefixCache
from tests.client.test_in_place import LARGE, TOKENS, blocks_of
given = blocks_of(TOKENS, LARGE)
with PrefixCache(sys.argv[1], LARGE) as cache:
    print("begin", flush=True)
    while True:
        assert cache.save(TOKENS, given) == 10
        cache.path  # until it is killed
"""


@pytest.mark.parametrize("number", range(6))
def test_a_writer_that_is_killed(kv: Mounted, number: int) -> None:
    """A killed writer leaves a prefix, or a short block; the next save completes it."""
    folder = kv.path / "n"
    given = blocks_of(TOKENS, LARGE)
    PrefixCache(folder, LARGE, create=True).close()
    keys = LARGE.keys(TOKENS)
    above, key = (LARGE.root, *keys)[number : number + 2]
    path = folder / prefix.path(above, key)
    with subprocess.Popen(
        [sys.executable, "-c", SAVE, folder], stdout=subprocess.PIPE, text=True
    ) as writer:
        wait_for(path.exists, "the file is made")
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
    wait_for(lambda: not kv.status()["writers"], "the mount has seen it end")
    with PrefixCache(folder, LARGE) as cache:
        match = cache.match(TOKENS).blocks
        loaded = cache.load(TOKENS).tensors
        assert len(loaded) == match
        for at, block in enumerate(loaded):
            assert torch.equal(block, given[at])
        assert cache.save(TOKENS, given) == 10
        for at, block in enumerate(cache.load(TOKENS).tensors):
            assert torch.equal(block, block_of(keys[at], LARGE))
    assert not list(folder.glob("*/*.tmp"))
