"""Quotas on objects: what goes for a new one, and that nothing is lost from its order."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from kvfs.core.capacity.victims import PASSED_MAX
from kvfs.core.namespaces.order import Victim
from kvfs.settings import EVICTIONS, Settings
from tests.unit.world import World, world

QUOTA = 4
FILES = 3 * QUOTA


def block(number: int) -> bytes:
    """A block of one long prompt: its parent is the one before it."""
    return f"{number - 1:016x}{0:016x}/{number:016x}{0:016x}".encode()


def page(number: int, suffix: str = "data") -> bytes:
    """A block that is the same one before it is renamed."""
    return f"m@1@0@{number:x}@half.{suffix}".encode()


def limited(made: World, eviction: str, objects: int = QUOTA) -> None:
    texts = {"quota_objects": str(objects), "eviction": eviction}
    made.ledger.namespaces.default.change(Settings.parse(texts))


@pytest.mark.parametrize("eviction", sorted({*EVICTIONS} - {"never", "ttl"}))
def test_a_quota_of_objects_is_used_up_and_never_exceeded(tmp_path: Path, eviction: str) -> None:
    """This holds for each policy, even if the victim is the last object, still being closed."""

    async def case(made: World) -> None:
        limited(made, eviction)
        for number in range(1, FILES + 1):
            await made.store(block(number), b"x", made.fast)
            made.check()
            assert made.ledger.namespaces.default.objects == min(number, QUOTA)
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)


def test_a_block_that_gets_its_name_is_not_used_again(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        limited(made, "lru")
        inos = [(await made.store(page(n, "tmp"), b"x", made.fast)).ino for n in (1, 9)]
        made.renames.rename(1, page(1, "tmp"), 1, page(1), 0)
        assert made.listed("ram_only") == inos
        made.renames.rename(1, page(9, "tmp"), 1, b"of another layout", 0)
        made.renames.rename(1, page(1), 1, b"of another one", 0)
        assert made.listed("ram_only") == inos[::-1]  # those are new to the order
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)


CHAIN = range(1, QUOTA)


def listed(made: World) -> set[bytes]:
    """Paths of files."""
    entries, paths = made.catalog.entries_after, set()
    for entry in entries(1, 0, 1000):
        if made.tree.inode(entry.ino).is_dir:
            paths |= {b"%b/%b" % (entry.name, below.name) for below in entries(entry.ino, 0, 1000)}
        else:
            paths.add(entry.name)
    return paths


@pytest.mark.parametrize("eviction", sorted({*EVICTIONS} - {"never", "ttl"}))
@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_parent_of_an_open_block_goes_after_it(tmp_path: Path, eviction: str, tier: str) -> None:
    async def case(made: World) -> None:
        limited(made, eviction)
        where = {one.name: one for one in made.tiers}[tier]
        inodes = [await made.store(block(number), b"x", where) for number in CHAIN]
        chain = {block(number) for number in CHAIN}
        held = await made.objects.open(inodes[-1].ino, writable=False)
        for number in range(5):
            await made.store(b"%d" % number, b"x", where)
            made.check()
            assert listed(made) == chain | {b"%d" % number}
        await made.close(held, writable=False)
        await made.store(b"more", b"x", where)
        assert listed(made) in (chain | {b"more"}, chain - {block(CHAIN[-1])} | {b"4", b"more"})
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)


@pytest.mark.parametrize("count", [3, PASSED_MAX, PASSED_MAX + 1])
def test_few_open_objects_keep_their_places_in_the_order(tmp_path: Path, count: int) -> None:
    async def case(made: World) -> None:
        names = [b"%02d" % number for number in range(count + 3)]
        limited(made, "fifo", len(names))
        inodes = [await made.store(name, b"x", made.fast) for name in names]
        held = [await made.objects.open(inode.ino, writable=False) for inode in inodes[:count]]
        await made.store(b"new", b"x", made.fast)
        assert listed(made) == {*names, b"new"} - {names[count]}
        for one in held:
            await made.close(one, writable=False)
        made.check()
        await made.store(b"newer", b"x", made.fast)
        young = count > PASSED_MAX
        assert listed(made) == {*names, b"new", b"newer"} - {
            names[count],
            names[count + 1 if young else 0],
        }
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)


def test_a_long_prompt_with_an_open_end_holds_up_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then its beginning goes after all: not all of it is looked at each time that one goes."""

    async def case(made: World) -> None:
        chain = range(1, 3 * PASSED_MAX)
        limited(made, "lru", len(chain))
        inodes = [await made.store(block(number), b"x", made.fast) for number in chain]
        held = await made.objects.open(inodes[-1].ino, writable=False)
        taken = 0
        order = made.ledger.namespaces.default.ram_only
        take = order.take

        def count(used: Callable[[int], int]) -> Victim | None:
            nonlocal taken
            taken += 1
            return take(used)

        monkeypatch.setattr(order, "take", count)
        for number in range(3):
            await made.store(b"%d" % number, b"x", made.fast)
            assert taken <= PASSED_MAX + 2
            taken = 0
        assert {block(chain[-1]), block(chain[-2])} <= listed(made)
        await made.close(held, writable=False)
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)


def test_the_begin_of_a_prompt_on_nvme_stays_as_long_as_its_end_in_memory(tmp_path: Path) -> None:
    """By the order of NVMe alone it would be the first to go."""

    async def case(made: World) -> None:
        limited(made, "lru")
        assert made.disk is not None
        await made.store(block(1), b"x", made.disk)
        await made.store(block(2), b"x", made.fast)
        for number in range(20, 40, 2):
            await made.store(block(number), b"x", made.fast)
            left = {name for name in listed(made) if name in {block(1), block(2)}}
            assert left != {block(2)}, "the end of a prompt without its begin"
            made.check()
        assert not left
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)


def test_quota_given_later_counts_existing_objects(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        assert made.disk is not None
        for number in range(1, FILES + 1):
            await made.store(block(10 * number), b"x", made.disk if number % 2 else made.fast)
        limited(made, "lru")
        space = made.ledger.namespaces.default
        before = space.quota_order_filled
        await made.quota.bring_within(space)
        assert (before, space.quota_order_filled) == (False, True)
        assert space.objects == QUOTA
        assert listed(made) == {block(10 * n) for n in range(FILES - 2 * QUOTA + 2, FILES + 1, 2)}
        made.check()
        made.ledger.namespaces.default.change(Settings())
        assert space.quota_order is None
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)
