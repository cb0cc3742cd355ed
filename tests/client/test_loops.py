"""The async variants, in asyncio and in trio."""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from kvfs.client import PrefixCache
from tests.client.prompts import SPEC, TOKENS, blocks_of

GIVEN = blocks_of(TOKENS)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    with PrefixCache(tmp_path, SPEC) as one:
        yield one


async def use(cache: PrefixCache) -> None:
    assert await cache.asave(TOKENS, GIVEN) == 10
    assert (await cache.amatch(TOKENS)).blocks == 10
    assert await cache.aprefetch(TOKENS) == 10
    loaded = await cache.aload(TOKENS)
    assert torch.equal(torch.stack(list(loaded.tensors)), GIVEN)
    with pytest.raises(ValueError, match="mode='fast'"):
        await cache.aload(TOKENS, mode="fast")  # type: ignore[arg-type]


def test_asyncio(cache: PrefixCache) -> None:
    asyncio.run(use(cache))


def test_trio(cache: PrefixCache) -> None:
    trio.run(use, cache)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Reads tell that they have begun, and wait."""
    begun, go = threading.Event(), threading.Event()
    real = os.preadv

    def wait(*arguments: Any) -> int:  # noqa: ANN401
        begun.set()
        assert go.wait(60)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", wait)
    return begun, go


def test_cancelled_asyncio_task_waits_until_its_memory_is_free(
    cache: PrefixCache, held: tuple[threading.Event, threading.Event]
) -> None:
    begun, go = held
    cache.save(TOKENS, GIVEN)
    out = torch.zeros_like(GIVEN)

    async def main() -> None:
        task = asyncio.create_task(cache.aload(TOKENS, out))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.wait([task], timeout=0.05)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert torch.equal(out, GIVEN)

    asyncio.run(main())


def test_cancelled_trio_task_waits_until_its_memory_is_free(
    cache: PrefixCache, held: tuple[threading.Event, threading.Event]
) -> None:
    begun, go = held
    cache.save(TOKENS, GIVEN)
    out = torch.zeros_like(GIVEN)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.aload, TOKENS, out)
            await trio.to_thread.run_sync(begun.wait)
            nursery.cancel_scope.cancel()
            go.set()
        assert torch.equal(out, GIVEN)

    trio.run(main)


def test_cancelled_load_that_has_not_begun_never_begins(cache: PrefixCache) -> None:
    cache.save(TOKENS, GIVEN)
    go = threading.Event()
    blockers = [cache._threads.submit(go.wait) for _ in range(cache._threads.count)]

    async def main() -> None:
        task = asyncio.create_task(cache.aload(TOKENS))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    go.set()
    assert all(blocker.result() for blocker in blockers)
    assert cache.stats.blocks_loaded == 0
