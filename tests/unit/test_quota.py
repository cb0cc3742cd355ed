"""Quotas on objects: what goes for a new one, and that nothing is lost from its order."""

from pathlib import Path

import pytest
import trio

from kvfs.settings import EVICTIONS, Settings
from tests.unit.world import World, world

QUOTA = 4
FILES = 3 * QUOTA


def block(number: int, suffix: str = "") -> bytes:
    """A block of one long prompt: its parent is the one before it."""
    return f"{number:016x}-{number - 1:016x}.kv{suffix}".encode()


def limited(made: World, eviction: str) -> None:
    texts = {"quota_objects": str(QUOTA), "eviction": eviction}
    made.residency.namespaces.default.change(Settings.parse(texts))


@pytest.mark.parametrize("eviction", sorted({*EVICTIONS} - {"never", "ttl"}))
def test_a_quota_of_objects_is_used_up_and_never_exceeded(tmp_path: Path, eviction: str) -> None:
    """Whatever goes first: with some it is what was stored last, and is still being closed."""

    async def case(made: World) -> None:
        limited(made, eviction)
        for number in range(1, FILES + 1):
            await made.store(block(number), b"x", made.fast)
            made.check()
            assert made.residency.namespaces.default.objects == min(number, QUOTA)
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)


def test_a_block_that_gets_its_name_is_not_used_again(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        limited(made, "lru")
        inos = [(await made.store(block(n, ".tmp"), b"x", made.fast)).ino for n in (1, 9)]
        made.tree.rename(1, block(1, ".tmp"), 1, block(1), 0)
        assert made.listed("ram_only") == inos
        made.tree.rename(1, block(9, ".tmp"), 1, b"of another layout", 0)
        made.tree.rename(1, block(1), 1, b"of another one", 0)
        assert made.listed("ram_only") == inos[::-1]  # those are new to the order
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)
