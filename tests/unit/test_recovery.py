"""Recovery of objects that were about to be written when the daemon died."""

# ruff: noqa: ASYNC240 - files of a few bytes, in a loop that nobody waits for

import os
import random
from pathlib import Path

import pytest
import trio

from kvfs.catalog import Inode
from kvfs.core.ledger import recovery
from kvfs.errors import NotFoundError
from tests.unit.world import World, world

BYTES = random.Random(1).randbytes(50_000)


def about_to_be_written(made: World, inode: Inode) -> Path:
    """Marked, and each copy renamed, as a death leaves it just before the record is changed."""
    with made.catalog.batch() as batch:
        batch.mark_unfinished(inode.ino)
    for tier in made.ledger.tiers.holders(inode):
        tier.rename(inode.ino, inode.version, inode.version + 1)
    return Path(made.tiers[-1].path(inode.ino, inode.version + 1))


@pytest.mark.parametrize("where", [0, 1])
def test_a_file_gets_its_name_back(tmp_path: Path, where: int) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.tiers[where])
        about_to_be_written(made, inode)
        made.restart(crash=True)
        assert made.catalog.unfinished() == []
        await made.census()
        assert await made.read(inode.ino) == BYTES
        assert made.ledger.counters["missing"] == 0
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)


def test_recovery_may_run_twice(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES)
        about_to_be_written(made, inode)
        for _ in range(2):
            recovery.give_name_back(made.ledger, inode)
            await made.census()
            assert await made.read(inode.ino) == BYTES

    with world(tmp_path) as made:
        trio.run(case, made)


def test_a_file_that_has_its_name_is_left_alone(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        Path(made.disk.path(inode.ino, inode.version + 1)).write_bytes(b"left over")
        recovery.give_name_back(made.ledger, inode)
        assert await made.read(inode.ino) == BYTES
        made.restart(crash=True)
        await made.census()
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)


@pytest.mark.parametrize(
    ("settled", "written", "kept"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_after_a_power_loss_only_the_digest_can_tell(
    tmp_path: Path, *, settled: bool, written: bool, kept: bool
) -> None:
    """The record of a later version may be lost though its first bytes are on the disk."""

    async def case(made: World) -> None:
        inode = await made.store(b"a", BYTES, made.disk)
        if settled:
            await made.settle(inode.ino)
        made.restart()
        await made.census()
        path = about_to_be_written(made, made.tree.inode(inode.ino))
        if written:
            before = path.stat()
            with path.open("r+b") as file:
                file.write(b"torn")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        made.restart(crash=True, reboot=True)
        await made.census()
        if kept:
            assert await made.read(inode.ino) == BYTES
        else:
            with pytest.raises(NotFoundError):
                await made.read(inode.ino)
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)
