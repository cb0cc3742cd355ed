"""Blocks to a device and from it, with a stand-in: the same code as for a GPU, on the CPU.

The stand-in does its work at the last moment, when the program waits for it. So a buffer that is
used again too early, or a call that returns too early, has the wrong bytes.
"""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvfs.client import PrefixCache, Spec
from kvfs.client.transfer import MEASURED_FROM, Done, Transfer
from tests.client.prompts import SPEC, TOKENS, blocks_of

LONG = list(range(4 * 40))
GIVEN = blocks_of(LONG)


class Standin:
    """A device that is as late as possible."""

    def __init__(self, *, registers: bool = True) -> None:
        self.registers = registers
        self.registered = 0
        self.refused = 0
        self.buffers = 0
        self.log: list[str] = []
        self._lock = threading.Lock()

    def begin(self) -> Done:
        self.log.append("begin")
        return lambda: self.log.append("after")

    def pinned(self, size: int) -> torch.Tensor:
        self.buffers += 1
        return torch.empty(size, dtype=torch.uint8)

    def run(self, work: Callable[[], object]) -> Done:
        waiting = [work]

        def done() -> None:
            with self._lock:
                if waiting:
                    waiting.pop()()

        return done

    def register(self, pages: torch.Tensor) -> Done | None:
        assert pages.data_ptr() % os.sysconf("SC_PAGESIZE") == 0
        if not self.registers:
            self.refused += 1
            return None
        with self._lock:
            self.registered += 1

        def undo() -> None:
            with self._lock:
                self.registered -= 1

        return undo


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    with PrefixCache(tmp_path, SPEC, threads=2) as one:
        yield one


def through(cache: PrefixCache, device: Standin) -> Transfer:
    """Send all tensors through `device`."""
    transfer = Transfer(device, cache.spec, cache._threads, cache.stats)
    cache._transfer = lambda _: (transfer, transfer.begin())  # type: ignore[method-assign,assignment]
    return transfer


def test_there_and_back(cache: PrefixCache) -> None:
    device = Standin()
    transfer = through(cache, device)
    assert cache.save(LONG, GIVEN) == 40
    for _ in range(3):
        out = torch.zeros_like(GIVEN)
        assert cache.load(LONG, out).blocks == 40
        assert torch.equal(out, GIVEN)
    assert transfer.way in {"pinned", "register"}
    assert device.registered == 0, "nothing is left locked"
    assert device.buffers <= 4, "two for each thread"
    assert device.log.index("begin") < device.log.index("after")


@pytest.mark.parametrize("way", ["pinned", "register"])
def test_each_way(cache: PrefixCache, way: str) -> None:
    cache.save(LONG, GIVEN)
    transfer = through(cache, Standin())
    transfer.way = way  # type: ignore[assignment]
    loaded = cache.load(LONG)
    assert torch.equal(torch.stack(list(loaded.tensors)), GIVEN)


def test_a_short_load_measures_nothing(cache: PrefixCache) -> None:
    cache.save(LONG, GIVEN)
    transfer = through(cache, Standin())
    assert cache.load(LONG, blocks=MEASURED_FROM - 1).blocks == MEASURED_FROM - 1
    assert transfer.way is None
    cache.load(LONG)
    assert transfer.way is not None


def test_pages_that_can_not_be_locked_go_by_a_buffer(cache: PrefixCache) -> None:
    cache.save(LONG, GIVEN)
    device = Standin(registers=False)
    transfer = through(cache, device)
    for _ in range(2):
        loaded = cache.load(LONG)
        assert torch.equal(torch.stack(list(loaded.tensors)), GIVEN)
    assert transfer.way == "pinned"
    assert 1 <= device.refused <= 20


@pytest.mark.parametrize("way", [None, "pinned", "register"])
def test_a_hole_ends_it(cache: PrefixCache, way: str | None) -> None:
    cache.save(LONG, GIVEN)
    device = Standin()
    transfer = through(cache, device)
    transfer.way = way  # type: ignore[assignment]
    keys = SPEC.keys(LONG)
    for hole in (25, 7, 0):
        os.unlink(
            f"{cache.path}/{keys[hole - 1].hex() if hole else SPEC.root.hex()}/{keys[hole].hex()}"
        )
        out = torch.zeros_like(GIVEN)
        assert cache.load(LONG, out).blocks == hole
        assert torch.equal(out[:hole], GIVEN[:hole])
    assert device.registered == 0


@pytest.mark.parametrize("storage", ["fp8", "int4:8"])
def test_fewer_bits(tmp_path: Path, storage: str) -> None:
    spec = Spec(model="m", revision="r", dtype="bfloat16", axes=SPEC.axes, storage=storage)
    with PrefixCache(tmp_path / "a", spec, create=True) as cache:
        assert cache.save(LONG, GIVEN) == 40
        paths = [path for path in Path(cache.path).rglob("*") if path.is_file()]
        assert {path.stat().st_size for path in paths} == {spec.stored_bytes}
        assert spec.stored_bytes < spec.block_bytes
        first = torch.stack(list(cache.load(LONG).tensors))
        error = (first.float() - GIVEN.float()).abs().max()
        assert 0 < error < 0.3
        device = Standin()
        through(cache, device)
        assert torch.equal(torch.stack(list(cache.load(LONG).tensors)), first)
        with pytest.raises(ValueError, match="mode='mmap': expected storage='raw'"):
            cache.load(LONG, mode="mmap")
    with PrefixCache(tmp_path / "b", spec, create=True) as cache:
        through(cache, Standin())
        assert cache.save(LONG, GIVEN) == 40
        assert torch.equal(torch.stack(list(cache.load(LONG).tensors)), first)


def test_malformed_stored_bytes_are_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = Spec(model="m", revision="r", dtype="bfloat16", axes=SPEC.axes, storage="fp8")
    with PrefixCache(tmp_path, spec) as cache:
        cache.save(TOKENS, blocks_of(TOKENS))
        keys = spec.keys(TOKENS)
        Path(cache.path, keys[2].hex(), keys[3].hex()).write_bytes(b"\xff" * spec.stored_bytes)
        assert cache.load(TOKENS).blocks == 3
        assert cache.stats.load_errors == 1
        assert "a scale that encode never writes" in caplog.text
