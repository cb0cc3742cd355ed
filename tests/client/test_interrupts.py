"""Signals in the middle of calls: the calls raise them, and leave nothing wrong behind."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch

from kvfs.client import PrefixCache
from kvfs.client.threads import Threads, _InterruptibleCall
from tests.client.prompts import SPEC, TOKENS, blocks_of
from tests.conftest import Mount
from tests.harness import Mounted, wait_for

OTHERS = [token + 1 for token in TOKENS]
GIVEN = {id(tokens): blocks_of(tokens) for tokens in (TOKENS, OTHERS)}
SEED = 11


class SignalError(TimeoutError):
    """An OSError, such as block files may raise."""


@contextmanager
def interrupting() -> Iterator[None]:
    def raising(_number: int, _frame: FrameType | None) -> None:
        raise SignalError

    before = signal.signal(signal.SIGALRM, raising)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def kv(mount: Mount) -> Mounted:
    return mount("ram=256M")


@pytest.mark.parametrize("what", ["load", "map", "save"])
def test_interrupts_at_any_moment(kv: Mounted, what: str) -> None:
    """Later loads return the right blocks, and no file stays open."""
    print("seed", SEED)
    moments = random.Random(SEED)
    came, before = 0, descriptors()
    cache = PrefixCache(kv.path / "llama", SPEC, create=True)
    with interrupting():
        for tokens in (TOKENS, OTHERS):
            assert cache.save(tokens, GIVEN[id(tokens)]) == 10
            assert cache.load(tokens).blocks == 10
        wait_for(lambda: not kv.status()["open_handles"], "all is there, and closed")
        took, kept = 0.002, list[object]()
        for at in range(150):
            tokens = (TOKENS, OTHERS)[at % 2]
            if what == "save":
                cache = _another(kv, cache, at)
            began = time.perf_counter()
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 1.5 * took))
                kept.append(_do(what, cache, tokens))
                signal.setitimer(signal.ITIMER_REAL, 0)
                took = time.perf_counter() - began
            except SignalError:
                came += 1
            # Thrown away when no signal comes: an exception in a finalizer would be ignored. The
            # signal may have come after the call, so there may be something here either way.
            kept.clear()
            for tokens in (OTHERS, TOKENS):
                _expect(cache, tokens, whole=what != "save")
        cache.close()
    assert came > 30, f"{came} of 150 were interrupted"
    wait_for(lambda: not kv.status()["open_handles"], "nothing is lent any more")
    assert descriptors() <= before


def _do(what: str, cache: PrefixCache, tokens: list[int]) -> object:
    if what == "save":
        return cache.save(tokens, GIVEN[id(tokens)])
    return cache.load(tokens, mode="mmap" if what == "map" else "copy")


def _another(kv: Mounted, cache: PrefixCache, at: int) -> PrefixCache:
    cache.close()
    return PrefixCache(kv.path / f"llama{at}", SPEC, create=True)


def _expect(cache: PrefixCache, tokens: list[int], *, whole: bool) -> None:
    given = GIVEN[id(tokens)]
    out = torch.zeros_like(given)
    count = cache.load(tokens, out).blocks
    assert count == 10 or not whole
    assert torch.equal(out[:count], given[:count])
    if not whole:
        assert cache.save(tokens, given) == 10
        assert cache.load(tokens, out).blocks == 10
        assert torch.equal(out, given)


def test_interrupted_call_waits_for_the_work_that_has_begun() -> None:
    threads = Threads(2)
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()
    calls: list[_InterruptibleCall[object]] = []

    def work(at: int) -> bool:
        if call := threads._aside.current():
            calls.append(call)
            begun.set()
        assert go_on.wait(60)
        done.append(at)
        return True

    def interrupt() -> None:
        assert begun.wait(60)
        os.kill(os.getpid(), signal.SIGALRM)
        wait_for(lambda: calls[0].interrupted, "the call knows of it")
        go_on.set()

    other = threading.Thread(target=interrupt)
    other.start()
    with interrupting(), pytest.raises(SignalError):
        threads.call(lambda: threads.leading(100, work))
    other.join()
    assert 1 <= len(done) <= 2, "no other was begun"
    threads.close()


def test_error_of_a_call_is_raised_in_the_caller(tmp_path: Path) -> None:
    threads = Threads(1)
    with pytest.raises(FileNotFoundError, match="nothing"):
        threads.call((tmp_path / "nothing").stat)
    assert threads.call(lambda: threading.current_thread().name) == "kvfs-main"
    found: list[str] = []
    elsewhere = threading.Thread(
        target=lambda: found.append(threads.call(lambda: threading.current_thread().name)),
        name="another",
    )
    elsewhere.start()
    elsewhere.join()
    assert found == ["another"]
    threads.close()
    with pytest.raises(ValueError, match="the cache is being closed"):
        threads.submit(lambda: 1)
    assert threads.call(lambda: threads.leading(5, lambda at: at < 3)) == 3
