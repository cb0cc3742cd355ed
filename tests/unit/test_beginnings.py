"""Where blocks and other new files begin, by kinds of names: sizes, guesses and their bounds."""

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from kvfs.catalog import ROOT_INO
from kvfs.core.capacity.sizes import UNKNOWN_SIZE
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.namespaces import places
from kvfs.tiers import Tier
from tests.unit.world import MIB, World, world

LARGE = 256 * MIB  # of RAM: the least in which a block of unknown size begins
BYTES = b"k" * MIB
POOLS = (b"dynamo-kvbm-disk-cache-AbCdEf", b"hf3fs_vllm_data_file_2", b"swap.rank_0")


def run(
    case: Callable[[World], Awaitable[None]],
    tmp_path: Path,
    ram: int = LARGE,
    nvme: int = 4 * LARGE,
) -> None:
    with world(tmp_path, ram=ram, nvme=nvme) as made:
        trio.run(case, made)


def page(number: int) -> bytes:
    return b"%b_m_0_1.bin" % hashlib.sha256(b"%d" % number).hexdigest().encode()


def unfinished(number: int) -> bytes:
    return b".%032x.tmp" % number


async def begins(made: World, name: bytes, parent: int = ROOT_INO) -> Tier:
    """Create a file with 1 MiB, close it, and return its tier."""
    held = await made.create(name, BYTES, parent)
    await made.close(held, writable=True)
    return held.tier


async def close_all(made: World, files: list[OpenObject]) -> None:
    for held in files:
        await made.close(held, writable=True)
    await made.check_at_rest()


def test_first_block_of_a_fresh_mount_begins_in_ram(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        held = await made.create(page(1))
        assert (held.tier, held.reserved) == (made.ram, UNKNOWN_SIZE)
        assert await begins(made, b"notes.bin") is made.disk
        await close_all(made, [held])

    run(case, tmp_path)


def test_temporary_name_teaches_the_size_of_the_final_name(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        assert await begins(made, unfinished(1)) is made.ram
        for name in (unfinished(2), page(2)):
            held = await made.create(name, BYTES)
            assert (held.tier, held.reserved) == (made.ram, MIB)
            await close_all(made, [held])

    run(case, tmp_path)


@pytest.mark.parametrize("name", POOLS)
def test_first_pool_of_blocks_begins_on_nvme(tmp_path: Path, name: bytes) -> None:
    """It is as large as a cache, and its process has it open as long as it runs."""

    async def case(made: World) -> None:
        assert await begins(made, name) is made.disk

    run(case, tmp_path)


def test_large_file_changes_no_expectation_for_blocks_with_its_extension(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        weights = await made.create(b"weights.bin")
        assert weights.tier is made.disk
        made.placement.learn(weights, 2 * LARGE)
        assert [await begins(made, page(number)) for number in range(3)] == [made.ram] * 3
        held = await made.create(b"model.bin")
        assert (held.tier, held.expected) == (made.disk, 2 * LARGE)
        await close_all(made, [weights, held])

    run(case, tmp_path)


def test_sizes_of_one_namespace_say_nothing_of_another(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a")
        made.namespace("b")
        one, other = made.at(b"a").ino, made.at(b"b").ino
        assert await begins(made, b"x.kv", one) is made.disk
        assert await begins(made, b"y.kv", one) is made.ram
        assert await begins(made, b"x.kv", other) is made.disk

    run(case, tmp_path)


def test_extension_is_known_in_all_directories_of_a_namespace(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        folders = [made.mkdir(name).ino for name in (b"a", b"b")]
        assert await begins(made, b"x.kv.tmp17", folders[0]) is made.disk
        assert await begins(made, b"x.kv", folders[1]) is made.ram
        assert await begins(made, b"plain", folders[0]) is made.disk
        assert await begins(made, b"other", folders[0]) is made.ram
        assert await begins(made, b"plain", folders[1]) is made.disk

    run(case, tmp_path)


@pytest.mark.parametrize("ram", [MIB, 16 * MIB, LARGE - 4096])
def test_block_of_unknown_size_begins_on_nvme_if_ram_is_small(tmp_path: Path, ram: int) -> None:
    """It might outgrow all of RAM, and its writer would get ENOSPC."""

    async def case(made: World) -> None:
        held = await made.create(page(1), b"k" * 4096)
        assert (held.tier, held.guess) == (made.disk, 0)
        await made.close(held, writable=True)
        held = await made.create(page(2))
        assert held.tier is made.ram
        await close_all(made, [held])

    run(case, tmp_path, ram=ram)


def test_block_of_unknown_size_begins_in_ram_without_nvme(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        held = await made.create(page(1))
        assert (held.tier, held.reserved) == (made.ram, 4 * MIB)
        await close_all(made, [held])

    run(case, tmp_path, ram=16 * MIB, nvme=0)


def test_blocks_of_unknown_size_leave_half_of_ram(tmp_path: Path) -> None:
    """Each may outgrow its reservation, so RAM has room for twice as many bytes."""

    async def case(made: World) -> None:
        files = [await made.create(page(number)) for number in range(8)]
        assert [held.tier for held in files] == [made.ram] * 2 + [made.disk] * 6
        assert made.fast.reserved == LARGE // 2
        made.write(files[0], BYTES)
        await made.close(files[0], writable=True)
        files[0] = await made.create(page(8))
        assert (files[0].tier, files[0].reserved) == (made.ram, MIB), "one file tells the size"
        await close_all(made, files)

    run(case, tmp_path)


def test_guess_counts_for_no_quota(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a", quota_hard=str(8 * MIB))
        files = [await made.create(page(number), BYTES, space.ino) for number in range(2)]
        assert [held.tier for held in files] == [made.ram] * 2
        await close_all(made, files)
        assert space.objects == 2

    run(case, tmp_path)


def test_room_for_a_guess_is_kept_while_the_file_grows(tmp_path: Path) -> None:
    """RAM has copies that may go. Each file has reserved its guess, so no bytes are lent twice."""

    async def case(made: World) -> None:
        made.expect(b"x", MIB)
        for number in range(200):
            inode = await made.make_file(b"x%d" % number, BYTES)
            await made.demote(inode.ino)
        files = [await made.create(page(number)) for number in range(2)]
        assert [(held.tier, held.reserved) for held in files] == [(made.ram, UNKNOWN_SIZE)] * 2
        assert made.fast.free >= made.room.headroom
        await close_all(made, files)

    run(case, tmp_path)


def test_block_that_was_open_at_a_takeover_teaches_its_size(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        held = await made.create(page(1), BYTES)
        held.kind = ()  # as the next daemon finds it
        await made.close(held, writable=True)
        held = await made.create(page(2))
        assert (held.tier, held.expected) == (made.ram, MIB)
        await close_all(made, [held])

    run(case, tmp_path)


def test_new_version_of_a_block_begins_where_its_kind_does(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.make_file(page(1), BYTES)
        made.forget_sizes()
        held = await made.objects.open(inode.ino, writable=True, truncate=True)
        assert (held.tier, held.guess) == (made.ram, UNKNOWN_SIZE)
        await close_all(made, [held])

    run(case, tmp_path)


def test_create_recognises_its_name_once(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        before = places._recognise.cache_info().misses
        held = await made.create(page(10**9), BYTES)  # no other test has this name
        await made.close(held, writable=True)
        assert places._recognise.cache_info().misses == before + 1

    run(case, tmp_path)
