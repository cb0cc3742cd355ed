"""Clearing of dropped trees in the background, with any content, and with programs in them."""

import stat
from pathlib import Path

import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.catalog import ROOT_INO
from kvfs.core.admin.lifecycle import Lifecycle
from kvfs.core.names.walks import STEP, Walks
from tests.unit.world import World, world

FILES = 3 * STEP + 1


async def populate(made: World, top: int, depth: int) -> list[int]:
    """More files than a step takes in a directory, and two directories in each; their numbers."""
    found = []
    for at in range(FILES):
        held = await made.create(b"%d.kv" % at, b"x", top)
        await made.close(held, writable=True)
        found.append(held.inode.ino)
    for name in (b"one", b"two") if depth else ():
        below = made.tree.make(top, name, stat.S_IFDIR | 0o755, 0, 0)
        found += await populate(made, below.ino, depth - 1)
    return found


def test_dropped_tree_is_cleared_except_files_in_use(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        lifecycle = Lifecycle(
            made.tree, invalidate_tree=lambda *_: None, warmer=made.dispatcher.warm
        )
        space = lifecycle.make("kv", {}, uid=0, gid=0)
        inos = await populate(made, space.ino, 2)
        reader = await made.objects.open(inos[STEP], writable=False)
        await made.ledger.table._lock(inos[-1])  # its backing is being opened, say
        lifecycle.drop(lifecycle.directory("kv"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Walks(made.tree, made.quota).run)
            while space.objects > len(inos) - FILES + 1:  # the rest of its directory goes
                await trio.lowlevel.checkpoint()
            made.ledger.table._unlock(inos[-1])
            while space.ino in made.ledger.namespaces.dropped:
                await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert made.content(reader) == b"x"
        await made.close(reader, writable=False)
        made.ledger.removals.purge(inos[STEP])  # the kernel forgets it
        assert [inode.ino for inode in made.inodes()] == [ROOT_INO]
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)
