"""A listing lets other tasks run, even if it skips many entries that no look-up finds."""

import errno
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.names.tree import COOKIE_PARENT, HIDDEN_STEP
from tests.unit.test_request_paths import CALLER
from tests.unit.world import World, world

import kvfs.fuse.passthrough  # isort: skip  # noqa: F401 (the C part, before pyfuse3)
import pyfuse3  # isort: skip
from kvfs.fuse import operations  # isort: skip

FILES = 10 * HIDDEN_STEP
BUFFER = 30  # entries that a reply takes


def run(case: Callable[[World], Awaitable[None]], tmp_path: Path) -> None:
    with world(tmp_path) as made:
        trio.run(case, made)


class Requests:
    """A kernel that asks for the first time, each time."""

    number = 0

    def request(self) -> tuple[int, bool]:
        self.number += 1
        return self.number, False

    def changed(self, ino: int) -> None:
        """It has no attributes."""


class Listing:
    """A kernel that lists with several READDIRs, and the turns of other tasks meanwhile."""

    def __init__(self, made: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = made
        self.operations = operations.Operations(
            made.tree,
            made.objects,
            made.lifecycle,
            cast("operations.FuseKernel", Requests()),
            slots=10,
            timeout=1.0,
        )
        self.replied: list[tuple[bytes, int]] = []
        self.most = 0  # that went between two turns of another task
        monkeypatch.setattr(pyfuse3, "readdir_reply", self._reply)

    def _reply(self, _token: object, name: bytes, _attributes: object, cookie: int) -> bool:
        if len(self.replied) == BUFFER:
            return False
        self.replied.append((name, cookie))
        return True

    async def names(self, directory: Inode) -> list[bytes]:
        found: list[bytes] = []
        cookie = COOKIE_PARENT
        while True:
            self.replied = []
            await self._watched(self.operations.readdir(directory.ino, cookie, cast("Any", None)))
            if not self.replied:
                return found
            found += [name for name, _ in self.replied]
            cookie = self.replied[-1][1]

    async def _watched(self, operation: Awaitable[None]) -> None:
        """Beside a task that counts what has gone since its last turn."""
        counters = self.made.ledger.counters

        async def count() -> None:
            while True:
                before, said = counters["dropped"], len(self.replied)
                await trio.lowlevel.checkpoint()
                self.most = max(self.most, counters["dropped"] - before)
                assert len(self.replied) == said or not said, "a reply is one moment"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            await trio.lowlevel.checkpoint()
            await operation
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()


async def fill(made: World, expired: Callable[[int], bool]) -> tuple[list[bytes], Inode]:
    """Names of those that are to be found, and their directory."""
    space = made.namespace("a", ttl="100")
    left = []
    for number in range(FILES):
        inode = await made.make_file(b"a/%03d" % number, b"x")
        if expired(number):
            made.attributes.change(inode.ino, mtime_ns=time.time_ns() - 200 * 10**9)
        else:
            left.append(b"%03d" % number)
    return left, made.tree.inode(space.ino)


@pytest.mark.parametrize(
    "expired",
    [
        lambda _: True,
        lambda _: False,
        lambda number: number % 2,
        lambda number: number % (HIDDEN_STEP + 2),
        lambda number: number < FILES - 2,
        lambda number: number > 2,
        lambda number: number not in (0, FILES // 2),
    ],
)
def test_a_step_passes_few_by_and_no_name_is_lost_or_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expired: Callable[[int], bool]
) -> None:
    async def case(made: World) -> None:
        left, directory = await fill(made, expired)
        listing = Listing(made, monkeypatch)
        assert await listing.names(directory) == left
        # Two steps between two turns of the other task, and the first behind a full buffer.
        assert listing.most <= 3 * HIDDEN_STEP
        assert made.ledger.counters["dropped"] == FILES - len(left)
        await made.check_at_rest()

    run(case, tmp_path)


def test_open_files_are_skipped_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(made: World) -> None:
        _, directory = await fill(made, lambda _: False)
        held = []
        for entry in made.catalog.entries_after(directory.ino, 0, FILES)[: FILES - 1]:
            held.append(await made.objects.open(entry.ino, writable=False))
            made.attributes.change(entry.ino, mtime_ns=time.time_ns() - 200 * 10**9)
        assert await Listing(made, monkeypatch).names(directory) == [b"%03d" % (FILES - 1)]
        for one in held:
            await made.close(one, writable=False)

    run(case, tmp_path)


@pytest.mark.parametrize("left", [0, 1])
def test_directory_of_expired_entries_is_removed_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    async def case(made: World) -> None:
        _, directory = await fill(made, lambda number: number < FILES - left)
        listing = Listing(made, monkeypatch)
        rmdir = listing.operations.rmdir(ROOT_INO, b"a", CALLER)
        if left:
            with pytest.raises(pyfuse3.FUSEError) as caught:
                await rmdir
            assert caught.value.errno == errno.ENOTEMPTY
        else:
            await listing._watched(rmdir)
            assert made.tree.inode(directory.ino).links == ()
            assert listing.most <= 2 * HIDDEN_STEP
        assert made.ledger.counters["dropped"] == FILES - left

    run(case, tmp_path)
