"""Full and failing disks: a block is not saved, or a miss, and no call raises."""

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfs.client import PrefixCache, Spec
from tests.client.prompts import SPEC, TOKENS, block_of, blocks_of
from tests.harness import wait_for

GIVEN = blocks_of(TOKENS)


def files_below(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.is_file()]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = Spec(model="m", revision="r", dtype="float32", axes={"token": 4, "dim": 8192})
    given = blocks_of(TOKENS, spec)
    # One thread: several take room for later blocks, and the first block may find none.
    with PrefixCache(small, spec, threads=1) as cache:
        saved = cache.save(TOKENS, given)
        assert 1 <= saved <= 8, "128 KiB each"
        files = files_below(small)
        assert len(files) == saved
        assert all(path.stat().st_size == spec.stored_bytes for path in files)
        stats = cache.stats.as_dict()
        assert (stats["blocks_saved"], stats["blocks_unsaved"]) == (saved, 10 - saved)
        assert stats["save_errors"] >= 1
        assert "No space left on device" in caplog.text
        loaded = cache.load(TOKENS)
        assert torch.equal(torch.stack(list(loaded.tensors)), given[:saved])
        files[0].unlink()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("failing", ["pwritev", "rename", "close"])
def test_a_write_that_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    failing: str,
) -> None:
    real: Callable[..., Any] = getattr(os, failing)
    calls = []

    def fail(*arguments: Any) -> Any:  # noqa: ANN401
        calls.append(arguments)
        result = real(*arguments) if failing == "close" or len(calls) != 5 else None
        if len(calls) == 5:
            raise OSError(code, os.strerror(code))
        return result

    with PrefixCache(tmp_path, SPEC, threads=1) as cache:
        with monkeypatch.context() as patched:
            patched.setattr(os, failing, fail)
            assert cache.save(TOKENS, GIVEN) == 4
        assert len(files_below(tmp_path)) == 4
        assert cache.stats.save_errors == 1
        assert cache.stats.blocks_unsaved == 6
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert os.strerror(code) in record.message
        assert cache.load(TOKENS).blocks == 4
        assert cache.save(TOKENS, GIVEN) == 10, "what failed once is tried again"


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, runs, at: real(fd, [runs[0][:100]], at))
    with PrefixCache(tmp_path, SPEC) as cache:
        assert cache.save(TOKENS, GIVEN) == 10
        assert torch.equal(torch.stack(list(cache.load(TOKENS).tensors)), GIVEN)


def test_a_write_of_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with PrefixCache(tmp_path, SPEC) as cache:
        assert cache.save(TOKENS, GIVEN) == 0
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_read_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    real = os.preadv
    calls = []

    def fail(*arguments: Any) -> int:  # noqa: ANN401
        calls.append(arguments)
        if len(calls) == 5:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    with PrefixCache(tmp_path, SPEC, threads=1) as cache:
        cache.save(TOKENS, GIVEN)
        monkeypatch.setattr(os, "preadv", fail)
        out = torch.zeros_like(GIVEN)
        assert cache.load(TOKENS, out).blocks == 4
        assert torch.equal(out[:4], GIVEN[:4])
        stats = cache.stats
        assert (stats.load_errors, stats.blocks_absent) in {(1, 0), (0, 6)}
        assert bool(caplog.records) == (code == errno.EIO), "what has gone is no news"
        assert cache.load(TOKENS, out).blocks == 10


def test_a_read_that_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file shrinks after the look at its size, before its bytes are read."""
    real = os.preadv

    def shrink(fd: int, buffers: list[memoryview], at: int) -> int:
        return 0 if at else real(fd, [buffers[0][:100]], at)

    with PrefixCache(tmp_path, SPEC) as cache:
        cache.save(TOKENS, GIVEN)
        monkeypatch.setattr(os, "preadv", shrink)
        assert cache.load(TOKENS, torch.zeros_like(GIVEN)).blocks == 0
        assert cache.load(TOKENS).tensors == []


def test_error_of_a_thread_is_raised_when_all_threads_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 1 / 0)
    with PrefixCache(tmp_path, SPEC) as cache:
        cache.save(TOKENS, GIVEN)
        with pytest.raises(ZeroDivisionError):
            cache.load(TOKENS)


def test_a_block_that_its_storage_can_not_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = Spec(model="m", revision="r", dtype="bfloat16", axes=SPEC.axes, storage="fp8")
    given = blocks_of(TOKENS, spec)
    given[6, 0, 0, 0, 0] = float("nan")
    with PrefixCache(tmp_path, spec) as cache:
        assert cache.save(TOKENS, given) == 6
        assert "storage=fp8: numbers from" in caplog.text
        assert len(files_below(tmp_path)) == 6


def unfinished(path: Path) -> list[Path]:
    return list(path.glob("*/*.tmp"))


WRITER = """
import sys
from kvfs.client import PrefixCache, Spec
from tests.client.prompts import TOKENS, blocks_of
spec = Spec(model="m", revision="r", dtype="float32", axes={"token": 4, "dim": 1 << 18})
given = blocks_of(TOKENS, spec)
with PrefixCache(sys.argv[1], spec) as cache:
    print("ready", flush=True)
    cache.save(TOKENS, given)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_in_the_middle_of_a_block(tmp_path: Path) -> None:
    spec = Spec(model="m", revision="r", dtype="float32", axes={"token": 4, "dim": 1 << 18})
    for number in range(3):
        where = tmp_path / str(number)
        where.mkdir()
        writer = subprocess.Popen([sys.executable, "-c", WRITER, where], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        wait_for(partial(unfinished, where), "a block is being written")
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        with PrefixCache(where, spec) as cache:
            loaded = cache.load(TOKENS)
            print(f"killed after {loaded.blocks} blocks")
            for key, block in zip(spec.keys(TOKENS), loaded.tensors, strict=False):
                assert torch.equal(block, block_of(key, spec))
            assert cache.save(TOKENS, blocks_of(TOKENS, spec)) == 10
            assert cache.load(TOKENS).blocks == 10
