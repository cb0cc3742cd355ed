"""Directories of blocks: made and removed with them, by every way that gives or takes a name."""

import contextlib
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs import prefix
from kvfs.catalog import ROOT_INO, Inode
from kvfs.catalog.keys import GOING
from kvfs.core.capacity.victims import on_nvme
from kvfs.core.namespaces.blocks import ONE_FILE
from kvfs.errors import ConfigError, NotFoundError, QuotaError
from kvfs.layouts.prefix import number
from tests.unit.test_check import look
from tests.unit.world import World, world

run = trio.run
ROOT = prefix.root_key("a fingerprint")
SPACE = b"ns"


def chain(count: int, before: bytes = ROOT, *, salt: int = 0) -> list[bytes]:
    """Keys of blocks that follow each other."""
    return prefix.block_keys(before, [salt] * count, 1)


def directory(made: World, key: bytes) -> int:
    """Its inode; 0 if it is not there."""
    entry = made.catalog.lookup(made.find(SPACE).ino, key.hex().encode())
    return 0 if entry is None else entry.ino


def path(parent: bytes, key: bytes, shard: str = "") -> bytes:
    return SPACE + b"/" + prefix.path(parent, key, shard).encode()


async def write(made: World, keys: list[bytes], before: bytes = ROOT, *, shard: str = "") -> None:
    for parent, key in zip([before, *keys], keys, strict=False):
        await made.make_file(path(parent, key, shard), key)


def there(made: World, keys: list[bytes], before: bytes = ROOT) -> list[int]:
    return [
        at
        for at, (parent, key) in enumerate(zip([before, *keys], keys, strict=False))
        if (above := directory(made, parent)) and made.tree.entry(above, key.hex().encode())
    ]


def names(made: World) -> set[bytes]:
    """Of all that is in the namespace's directory."""
    ino = made.find(SPACE).ino
    return {entry.name for entry in made.catalog.entries_after(ino, 0, 1 << 20)}


def hexes(*keys: bytes) -> set[bytes]:
    return {key.hex().encode() for key in keys}


def unlink(made: World, parent: bytes, key: bytes, shard: str = "") -> None:
    made.tree.unlink(directory(made, parent), prefix.name(key, shard).encode())


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as found:
        found.namespace("ns", prefix="on")
        found.mkdir(SPACE + b"/" + ROOT.hex().encode())
        found.placement.sizes.learn(found.find(SPACE).ino, ("kvfs-prefix", ""), 4096)  # in RAM
        yield found


def test_a_block_brings_its_directory(made: World) -> None:
    async def case() -> None:
        keys = chain(3)
        for at, key in enumerate(keys):
            parent = ROOT if not at else keys[at - 1]
            held = await made.create(prefix.name(key).encode(), b"x", directory(made, parent))
            assert made.tree.inode(directory(made, key)).key == number(key), "before it is closed"
            await made.close(held, writable=True)
            made.check_names()
        assert names(made) == hexes(ROOT, *keys)
        assert made.tree.inode(made.find(SPACE).ino).nlink == 2 + 4
        with pytest.raises(NotFoundError):
            await made.make_file(path(b"\1" * 16, b"\2" * 16), b"x")

    run(case)


def test_its_directory_is_as_the_one_before_it(made: World) -> None:
    async def case() -> None:
        made.attributes.change(directory(made, ROOT), mode=0o2770, uid=5, gid=6)
        (key,) = chain(1)
        await write(made, [key])
        found = made.tree.inode(directory(made, key))
        assert (stat.S_IMODE(found.mode), found.uid, found.gid) == (0o2770, 5, 6)

    run(case)


@pytest.mark.parametrize("how", ["rename", "link", "publish"])
def test_unpublished_block_has_no_directory(made: World, how: str) -> None:
    async def case() -> None:
        (key,) = chain(1)
        above, name = directory(made, ROOT), prefix.name(key).encode()
        if how == "publish":
            made.tell("ns", publish="close")
            held = await made.create(name, b"x", above)
            assert names(made) == hexes(ROOT)
            await made.close(held, writable=True)
        else:
            await made.make_file(path(ROOT, key) + b".0a1b.tmp", b"x")
            assert names(made) == hexes(ROOT)
            temporary = name + b".0a1b.tmp"
            if how == "rename":
                made.renames.rename(above, temporary, above, name, 0)
            else:
                made.tree.link(made.find(temporary, above).ino, above, name)
                made.tree.unlink(above, temporary)
        assert names(made) == hexes(ROOT, key)
        made.check_names()
        made.check_accounts()
        space = made.ledger.namespaces.own(made.find(SPACE).ino)
        assert space is not None
        assert space.blocks is not None
        assert space.blocks.value(number(key), 0) >= ONE_FILE

    run(case)


def test_all_that_follows_goes_with_a_block(made: World) -> None:
    async def case() -> None:
        keys = chain(6)
        await write(made, keys)
        other = chain(2, keys[1], salt=1)
        await write(made, other, keys[1])
        unlink(made, keys[1], keys[2])
        made.check_names()
        await made.close_prefixes()
        assert names(made) == hexes(ROOT, *keys[:2], *other)
        assert made.ledger.counters["dropped_incomplete"] == len(keys[3:])
        unlink(made, ROOT, keys[0])
        await made.close_prefixes()
        assert made.ledger.counters["dropped"] == len([*keys[3:], keys[1], *other])
        assert names(made) == hexes(ROOT), "what mkdir made stays"
        made.check_names()
        await made.check_at_rest()

    run(case)


def test_the_last_shard_takes_the_directory_along(made: World) -> None:
    async def case() -> None:
        keys = chain(2)
        await write(made, keys, shard="0")
        await write(made, keys, shard="1")
        unlink(made, ROOT, keys[0], "0")
        assert names(made) == hexes(ROOT, *keys)
        unlink(made, ROOT, keys[0], "1")
        await made.close_prefixes()
        assert names(made) == hexes(ROOT)
        made.check_names()
        await made.check_at_rest()

    run(case)


def test_an_empty_directory_goes_at_once(made: World) -> None:
    async def case() -> None:
        keys = chain(2)
        await write(made, keys)
        made.gone.clear()
        ino = directory(made, keys[1])
        unlink(made, keys[0], keys[1])
        assert names(made) == hexes(ROOT, keys[0])
        assert made.gone == [(made.find(SPACE).ino, keys[1].hex().encode(), ino)]
        made.check_names()

    run(case)


def test_block_that_comes_back_keeps_the_blocks_after_it(made: World) -> None:
    async def case() -> None:
        keys = chain(3)
        await write(made, keys)
        unlink(made, ROOT, keys[0])
        await write(made, keys[:1])
        assert not made.ledger.prefixes.going
        await made.close_prefixes()
        assert there(made, keys) == [0, 1, 2]
        made.check_names()

    run(case)


def test_replaced_block_keeps_its_directory(made: World) -> None:
    async def case() -> None:
        keys = chain(3)
        await write(made, keys)
        await made.make_file(path(ROOT, keys[0]) + b".r.tmp", b"new")
        above, name = directory(made, ROOT), prefix.name(keys[0]).encode()
        made.renames.rename(above, name + b".r.tmp", above, name, 0)
        assert not made.ledger.prefixes.going
        assert there(made, keys) == [0, 1, 2]
        made.check_names()
        made.check_accounts()

    run(case)


def test_block_moved_away_and_back_keeps_its_directory(made: World) -> None:
    async def case() -> None:
        keys = chain(2)
        await write(made, keys)
        above, name = directory(made, ROOT), prefix.name(keys[0]).encode()
        made.renames.rename(above, name, ROOT_INO, b"aside", 0)
        assert directory(made, keys[0]) in made.ledger.prefixes.going
        made.check_accounts()
        made.renames.rename(ROOT_INO, b"aside", above, name, 0)
        assert not made.ledger.prefixes.going
        made.check_accounts()
        made.check_names()

    run(case)


def test_open_block_of_a_removed_prefix_goes_at_its_close(made: World) -> None:
    async def case() -> None:
        keys = chain(2)
        await write(made, keys)
        above = directory(made, keys[0])
        held = await made.objects.open(made.find(keys[1].hex().encode(), above).ino, writable=False)
        unlink(made, ROOT, keys[0])
        await made.close_prefixes()
        assert names(made) == hexes(ROOT)
        assert made.content(held) == keys[1]
        await made.close(held, writable=False)
        await made.check_at_rest()

    run(case)


def test_a_directory_of_mkdir_becomes_its_block_s(made: World) -> None:
    async def case() -> None:
        keys = chain(2)
        for key in keys:
            made.mkdir(SPACE + b"/" + key.hex().encode())
        assert not made.tree.inode(directory(made, keys[0])).key
        await write(made, keys)
        made.check_names()
        unlink(made, ROOT, keys[0])
        await made.close_prefixes()
        assert names(made) == hexes(ROOT)

    run(case)


def test_paths_are_prefixes_from_the_beginning_or_never(made: World) -> None:
    async def case() -> None:
        with pytest.raises(ConfigError, match="namespace ns has entries, expected a new or empty"):
            made.tell("ns", prefix="off")
        made.tell("ns", prefix="off", version="2")
        made.tell("ns", prefix="on")
        with pytest.raises(ConfigError, match="the mount itself has none"):
            made.tell(".", prefix="on")
        made.mkdir(b"plain")
        await made.make_file(b"plain/x", b"x")
        with pytest.raises(ConfigError, match="has entries"):
            made.tell("plain", prefix="on")
        made.namespace("other")
        made.mkdir(SPACE + b"/" + ROOT.hex().encode())
        await write(made, chain(2))
        made.check_names()
        made.drop("ns")
        await made.walk()
        await made.check_at_rest()

    run(case)


def inode(made: World, parent: bytes, key: bytes) -> Inode:
    return made.find(key.hex().encode(), directory(made, parent))


def test_leaves_are_evicted_first(made: World) -> None:
    """This holds for blocks from before a restart, too, and from any tier."""
    keys = chain(12)

    async def before() -> None:
        await write(made, keys)
        for parent, key in zip([ROOT, *keys], keys, strict=False):
            await made.demote(inode(made, parent, key).ino)
        shrink(11, 8)
        await made.dispatcher.trash.empty()

    def shrink(most: int, least: int) -> None:
        for left in range(most, least, -1):
            made.quota.trim(made.tell("ns", quota_objects=str(left)))
            assert there(made, keys) == list(range(left))
            made.check()
            made.check_names()

    async def after() -> None:
        await made.census()
        shrink(8, 4)
        with pytest.raises(QuotaError):
            await write(made, keys[5:6], keys[4])
        assert there(made, keys) == list(range(5)), "what is made does not push out what it follows"
        made.tell("ns", quota_objects="7")
        await write(made, keys[5:7], keys[4])  # RAM has what follows what is on NVMe
        assert there(made, keys) == list(range(7))
        assert not made.room.victims.evict(on_nvme, made.disk, "lose")
        shrink(6, 2)

    run(before)
    made.restart(lose_ram=True)
    run(after)


def test_a_death_leaves_marks_that_are_followed(made: World) -> None:
    async def before() -> None:
        keys = chain(5)
        await write(made, keys)
        for key, parent in zip(keys, [ROOT, *keys], strict=False):
            await made.demote(made.find(key.hex().encode(), directory(made, parent)).ino)
        unlink(made, keys[0], keys[1])
        assert made.ledger.prefixes.going

    async def after() -> None:
        await made.census()
        await made.close_prefixes()
        assert names(made) == hexes(ROOT, chain(1)[0])
        made.check_names()
        await made.check_at_rest()

    run(before)
    made.restart(crash=True)
    run(after)


def test_block_lost_with_ram_removes_the_blocks_after_it(made: World) -> None:
    async def before() -> None:
        keys = chain(4)
        await write(made, keys)
        for at in (0, 2, 3):
            parent = ROOT if not at else keys[at - 1]
            await made.demote(made.find(keys[at].hex().encode(), directory(made, parent)).ino)

    async def after() -> None:
        await made.census()
        await made.close_prefixes()
        assert names(made) == hexes(ROOT, chain(1)[0])
        made.check_names()
        await made.check_at_rest()

    run(before)
    made.restart(lose_ram=True, crash=True)
    run(after)


@pytest.mark.parametrize("live", [False, True])
def test_a_directory_without_its_block_is_found(made: World, live: bool) -> None:  # noqa: FBT001
    async def case() -> None:
        keys = chain(3)
        await write(made, keys)
        assert (await look(made, live=live))[0] == []
        above, name = directory(made, ROOT), keys[0].hex().encode()
        entry = made.catalog.lookup(above, name)
        assert entry is not None
        complete_batch, made.catalog.complete_batch = made.catalog.complete_batch, lambda _: None
        made.tree.unlink(above, name)
        made.catalog.complete_batch = complete_batch
        found, _ = await look(made, live=live)
        assert [(one.kind, one.what) for one in found] == [("prefix", "its block is not there")]
        await look(made, live=live, repair=True)
        assert (await look(made, live=live))[0] == []
        await made.close_prefixes()
        assert names(made) == hexes(ROOT)
        with made.catalog.batch() as batch:
            batch.mark(GOING, 12345)
        found, _ = await look(made, live=live, repair=True)
        assert [(one.kind, one.ino) for one in found] == [("mark", 12345)]
        assert (await look(made, live=live))[0] == []
        await made.check_at_rest()

    run(case)


@pytest.mark.parametrize("seed", range(12))
def test_random_walks(made: World, seed: int) -> None:
    """After each step names, directories, marks, accounts and the index say the same."""
    dice = random.Random(seed)
    roots = [ROOT, prefix.root_key("another")]
    made.mkdir(SPACE + b"/" + roots[1].hex().encode())

    def known() -> list[tuple[bytes, bytes]]:
        """Name and parent of each file."""
        return [
            (entry.name, bytes.fromhex(above.decode()))
            for above in sorted(names(made))
            for entry in made.catalog.entries_after(
                directory(made, bytes.fromhex(above.decode())), 0, 100
            )
        ]

    async def step() -> None:
        files = known()
        act = dice.randrange(10)
        name, parent = dice.choice(files) if files else (b"", ROOT)
        if act < 5 or not files:
            before = bytes.fromhex(dice.choice(sorted(names(made))).decode())
            keys = chain(dice.randint(1, 4), before, salt=dice.randrange(4))
            shard = dice.choice(["", "", "0", "1"])
            for parent, key in zip([before, *keys], keys, strict=False):
                path_ = path(parent, key, shard)
                if not made.tree.entry(directory(made, parent), path_.rpartition(b"/")[2]):
                    await made.make_file(path_, key)
            return
        ino = directory(made, parent)
        inode = made.find(name, ino)
        if act == 5:
            made.tree.unlink(ino, name)
        elif act == 6:
            (other,) = hexes(*chain(1, parent, salt=9))
            made.renames.rename(ino, name, ino, dice.choice([other, name + b".0.tmp"[:6]]), 0)
        elif act == 7:
            await made.demote(inode.ino)
        elif act == 8:
            made.ledger.removals.drop(inode, "lost")
        else:
            with contextlib.suppress(QuotaError):
                made.quota.keep(made.tell("ns", quota_objects=str(dice.randint(5, 40))), 0)
            made.tell("ns", quota_objects="0")

    async def life() -> None:
        await made.census()
        for _ in range(60):
            with contextlib.suppress(NotFoundError):
                await step()
            made.check()
            made.check_names()
            if not dice.randrange(8):
                await made.close_prefixes()
        await made.close_prefixes()
        made.check_names()
        await made.check_at_rest()

    run(life)
    made.restart(lose_ram=dice.random() < 0.5, crash=True)
    run(life)
