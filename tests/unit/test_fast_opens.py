"""Fast opens: each counts once, whatever becomes of its object; and a gate without its thread."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from kvfs.catalog import Inode
from tests.unit.fast_gate import TableGate
from tests.unit.world import World, world


class NoThread(TableGate):
    """A gate without memory for its table."""

    def turn(self, *, on: bool) -> None:
        if on:
            raise OSError(12, "Cannot allocate memory")


def test_without_a_thread_the_daemon_answers(tmp_path: Path) -> None:
    async def close_and_open(made: World) -> None:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            made.ledger.fast_opens.start(NoThread(made))
        assert made.ledger.fast_opens.gate is None
        held = await made.create(b"a", b"content")
        await made.close(held, writable=True)
        assert not made.ledger.fast_opens.waiting
        assert await made.read(held.inode.ino) == b"content"
        made.check()
        await made.check_at_rest()

    with world(tmp_path, passthrough=True) as made:
        trio.run(close_and_open, made)


async def unlink(made: World, _: Inode) -> None:
    made.tree.unlink(made.at(b"engine").ino, b"a")


async def rename(made: World, _: Inode) -> None:
    parent = made.at(b"engine").ino
    made.renames.rename(parent, b"a", parent, b"b", 0)


async def move(made: World, _: Inode) -> None:
    """Into another namespace, which has none of the opens before."""
    parent, other = made.at(b"engine").ino, made.at(b"other").ino
    made.renames.rename(parent, b"a", other, b"a", 0)


async def replace(made: World, _: Inode) -> None:
    parent = made.at(b"engine").ino
    made.renames.rename(parent, b"part", parent, b"a", 0)


async def rewrite(made: World, inode: Inode) -> None:
    held = await made.objects.open(inode.ino, writable=True, truncate=True)
    await made.close(held, writable=True)


async def write_on(made: World, inode: Inode) -> None:
    held = await made.objects.open(inode.ino, writable=True)
    made.write(held, b"more")
    await made.close(held, writable=True)


async def lose(made: World, inode: Inode) -> None:
    made.ledger.removals.lose(inode, made.fast)


async def drop(made: World, inode: Inode) -> None:
    made.ledger.removals.drop(inode, "stale")


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize(
    "change",
    [unlink, rename, move, replace, rewrite, write_on, lose, drop],
    ids=lambda change: change.__name__,
)
def test_opens_count_for_the_namespace_of_their_time(
    tmp_path: Path, change: Callable[[World, Inode], Awaitable[None]], *, is_open: bool
) -> None:
    async def open_and_change(made: World) -> None:
        engine, other = made.namespace("engine"), made.namespace("other")
        made.answer_fast()
        await made.store(b"engine/part", b"new content")
        inode = await made.store(b"engine/a", b"content", made.fast)
        assert await made.read(inode.ino) == b"content"
        before = engine.counters["read_ram"]
        gate = made.gate
        assert gate is not None
        handles = [gate.open(inode.ino) for _ in range(100)]
        assert all(handles)
        for handle in handles[is_open:]:
            assert gate.release(handle)
        await change(made, inode)
        made.ledger.namespaces.show_opens()
        assert engine.counters["read_ram"] == before + 100
        assert engine.opens_timed == 100
        assert other.counters["read_ram"] == 0
        for handle in handles[:is_open]:
            if not gate.release(handle):
                await made.close(gate.adopted[handle], writable=False)
        made.check()
        made.ledger.fast_opens.stop()
        await made.check_at_rest()

    with world(tmp_path, passthrough=True) as made:
        trio.run(open_and_change, made)


def test_copy_that_a_mover_ends_while_a_fast_open_reads_is_recorded(tmp_path: Path) -> None:
    """The daemon learns of the open when it asks whether the object is open."""

    async def open_and_copy(made: World) -> None:
        made.answer_fast()
        inode = await made.store(b"engine/a", b"content", made.fast)
        assert await made.read(inode.ino) == b"content"
        gate, nvme = made.gate, made.nvme
        assert gate is not None
        assert nvme is not None
        handle = gate.open(inode.ino)
        current = made.dispatcher.transfers.still_current(inode.ino, inode.version)
        assert current is made.ledger.table.inode(inode.ino)
        await made.dispatcher.transfers.copy([inode], made.fast, nvme, "demoted")
        await made.close(gate.adopted[handle], writable=False)
        kept = made.catalog.inode(inode.ino)
        assert kept is not None
        assert kept.on_nvme
        made.check()
        made.ledger.fast_opens.stop()
        await made.check_at_rest()

    with world(tmp_path, passthrough=True) as made:
        trio.run(open_and_copy, made)


@pytest.mark.parametrize("change", [drop, unlink, lose], ids=lambda change: change.__name__)
def test_nothing_stays_of_an_object_that_went_while_the_gate_had_it_open(
    tmp_path: Path, change: Callable[[World, Inode], Awaitable[None]]
) -> None:
    """The caller has a record of its own, as a task has that looked it up before an answer."""

    async def open_and_change(made: World) -> None:
        made.answer_fast()
        stored = await made.store(b"engine/a", b"content", made.fast)
        gate = made.gate
        assert gate is not None
        assert await made.read(stored.ino) == b"content"
        handle = gate.open(stored.ino)
        assert handle
        await change(made, made.tree.inode(stored.ino))
        held = made.ledger.table.open[stored.ino]
        assert held.inode.links == ()
        gate.release(handle)
        await made.close(held, writable=False)
        made.ledger.uses.commit()
        made.ledger.removals.forgotten(stored.ino)
        made.ledger.removals.purge_forgotten()
        assert made.catalog.inode(stored.ino) is None
        assert made.catalog.unfinished() == []
        assert not list(made.fast.files())
        made.check()
        await made.check_at_rest()

    with world(tmp_path, passthrough=True) as made:
        made.namespace("engine")
        trio.run(open_and_change, made)
