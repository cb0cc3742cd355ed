"""Walks in the background: what a step does, and what it leaves to others."""

import random
import stat
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.catalog import ROOT_INO
from kvfs.core.names import walks
from kvfs.errors import CatalogError
from tests.unit.world import World, world

BYTES = b"k" * 10_000


def run(case: Callable[[World], Awaitable[None]], tmp_path: Path) -> None:
    with world(tmp_path) as made:
        trio.run(case, made)


async def tree(made: World, path: bytes) -> None:
    """Files, directories, links within it, a fifo, a symbolic link."""
    for deep in (b"", b"/d", b"/d/e", b"/f"):
        if deep:
            made.mkdir(path + deep)
        directory = made.at(path + deep).ino
        for number in range(5):
            inode = await made.make_file(path + deep + b"/%d" % number, BYTES)
            made.tree.link(inode.ino, directory, b"again-%d" % number)
        made.tree.make(directory, b"fifo", stat.S_IFIFO | 0o600, 0, 0)
        made.tree.make(directory, b"link", stat.S_IFLNK | 0o777, 0, 0, target=b"nowhere")
    made.tree.link(made.at(path + b"/d/0").ino, made.at(path + b"/f").ino, b"elsewhere")


@pytest.mark.parametrize("step", [1, 3, 16])
def test_cleared_tree_leaves_no_record(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds no matter which names of one file come in the same step."""
    monkeypatch.setattr(walks, "STEP", step)

    async def case(made: World) -> None:
        made.namespace("a")
        await tree(made, b"a")
        made.attributes.set_xattr(made.at(b"a/d").ino, b"user.x", b"1")
        made.drop("a")
        await made.walk()
        assert [inode.ino for inode in made.inodes()] == [ROOT_INO]
        for kind in (b"n", b"r", b"t", b"x", b"c", b"d", b"o"):
            assert list(made.catalog.records(kind)) == [], kind
        await made.check_at_rest()

    run(case, tmp_path)


@pytest.mark.parametrize("step", [1, 3, 16])
def test_all_of_a_moved_tree_is_accounted_anew(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walks, "STEP", step)

    async def case(made: World) -> None:
        a, b = made.namespace("a"), made.namespace("b")
        made.mkdir(b"a/t")
        await tree(made, b"a/t")
        made.renames.rename(a.ino, b"t", b.ino, b"t", 0)
        await made.walk()
        assert (a.objects, b.objects) == (0, 20)
        assert {inode.namespace for inode in made.inodes()} == {ROOT_INO, a.ino, b.ino}
        assert sum(inode.namespace == a.ino for inode in made.inodes()) == 1
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_walk_lets_others_in_after_each_step(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        space = made.namespace("a")
        for number in range(3 * walks.STEP):
            await made.make_file(b"a/%d" % number, BYTES)
        made.drop("a")
        seen = [space.objects]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.walks.run)
            while made.ledger.namespaces.dropped:
                await trio.lowlevel.checkpoint()
                seen.append(space.objects)
            nursery.cancel_scope.cancel()
        # Between two turns of this task the walk may have had two.
        assert max(before - after for before, after in pairwise(seen)) <= 2 * walks.STEP

    run(case, tmp_path)


def test_a_walk_waits_for_the_trash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "TRASH_MAX", 20)

    async def case(made: World) -> None:
        made.namespace("a", media="nvme")
        for number in range(100):
            await made.make_file(b"a/%d" % number, BYTES)
        made.drop("a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.walks.run)
            await wait_all_tasks_blocked()
            assert 20 < len(made.ledger.trash.files) <= 20 + walks.STEP
            while made.ledger.namespaces.dropped:
                await made.dispatcher.trash.empty()
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await made.check_at_rest()

    run(case, tmp_path)


def test_object_that_is_being_opened_is_cleared_later(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a")
        inode = await made.make_file(b"a/x", BYTES)
        await made.make_file(b"a/y", BYTES)
        await made.ledger.table._lock(inode.ino)
        made.drop("a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.walks.run)
            while made.ledger.accounts.objects > 1:
                await trio.lowlevel.checkpoint()
            for _ in range(10):
                await trio.lowlevel.checkpoint()
            assert made.tree.inode(inode.ino).links
            made.ledger.table._unlock(inode.ino)
            while made.ledger.namespaces.dropped:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_step_that_is_refused_has_changed_nothing_and_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(made: World) -> None:
        a, b = made.namespace("a"), made.namespace("b")
        made.mkdir(b"a/t")
        await tree(made, b"a/t")
        held = await made.objects.open(made.at(b"a/t/0").ino, writable=False)
        made.renames.rename(a.ino, b"t", b.ino, b"t", 0)
        commit = made.catalog.commit
        dice = random.Random(1)

        def refuse(*arguments: object, **options: object) -> None:
            if dice.random() < 0.1:
                raise CatalogError("full")
            commit(*arguments, **options)  # type: ignore[arg-type]

        for dropped in (False, True):
            if dropped:
                made.drop("b")
            with monkeypatch.context() as patch:
                patch.setattr(made.catalog, "commit", refuse)
                while made.ledger.namespaces.unaccounted or made.ledger.namespaces.dropped:
                    try:
                        await some_steps(made)
                    except CatalogError:
                        made.check()
        await made.close(held, writable=False)
        assert made.ledger.accounts.objects == 0
        await made.check_at_rest()

    run(case, tmp_path)


async def some_steps(made: World) -> None:
    """As `run` walks, in this task."""
    for ino in list(made.ledger.namespaces.unaccounted):
        await made.walks._account_anew(ino)
    for ino in list(made.ledger.namespaces.dropped):
        await made.walks._clear(ino)
