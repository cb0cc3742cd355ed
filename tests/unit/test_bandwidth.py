"""Each read or write waits once for its share of the mount's bandwidth; without a kernel."""

import errno
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from kvfs.catalog import ROOT_INO
from kvfs.fairness.fair_queue import Shares
from kvfs.fuse.processes import killed
from tests.unit.world import World, world

import kvfs.fuse.passthrough  # isort: skip  # noqa: F401 (the C part, before pyfuse3)
import pyfuse3  # isort: skip
from kvfs.fuse import operations  # isort: skip

SIZE = 1000  # bytes of an object, and of what may be moved in a second
LATE = 0.05  # s that an idle time saves up


class Requests:
    """A kernel that asks for the first time, each time."""

    number = 0

    def request(self) -> tuple[int, bool]:
        self.number += 1
        return self.number, False

    def changed(self, ino: int) -> None:
        """It has no attributes."""

    def bind(self, slot: object, *, noflush: bool) -> None:
        """It knows the handle."""

    def set_state(self, handle: int, state: object) -> None:
        """Nor does it die."""


class Caller:
    """The calling process."""

    pid = uid = gid = 0


class Mount:
    """A mount's operations, as the kernel calls them for a process."""

    def __init__(self, made: World) -> None:
        self.caller = cast("pyfuse3.RequestContext", Caller())
        self.made = made
        kernel = cast("operations.FuseKernel", Requests())
        self.operations = operations.Operations(
            made.tree, made.objects, made.lifecycle, kernel, slots=10, timeout=1.0
        )

    async def create(self, name: bytes) -> int:
        flags = os.O_CREAT | os.O_WRONLY
        info, _ = await self.operations.create(ROOT_INO, name, 0o644, flags, self.caller)
        return info.fh

    async def open(self, name: bytes) -> int:
        inode = self.made.find(name)
        return (await self.operations.open(inode.ino, os.O_RDONLY, self.caller)).fh

    async def write(self, handle: int, size: int = SIZE, at: int = 0) -> None:
        await self.operations.write(handle, at, b"x" * size)

    async def store(self, name: bytes) -> float:
        """When its writer's close(2) returns."""
        handle = await self.create(name)
        await self.write(handle)
        await self.operations.flush(handle)
        closed = trio.current_time()
        await self.operations.release(handle)
        return closed


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Mount], Awaitable[None]]], None]:
    """Run a case on a mount with a bandwidth, on a clock that jumps."""

    async def served(made: World, case: Callable[[Mount], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            made.ledger.namespaces.share(Shares(nursery, SIZE))
            await case(Mount(made))
            nursery.cancel_scope.cancel()

    def runs(case: Callable[[Mount], Awaitable[None]]) -> None:
        with world(tmp_path) as made:
            trio.run(served, made, case, clock=MockClock(autojump_threshold=0))

    return runs


def debt(mount: Mount) -> float:
    """Seconds that the next one waits."""
    shares = mount.made.ledger.namespaces.shares
    assert shares is not None
    return shares.total._paid_at - trio.current_time()


def test_writers_wait_at_their_close_and_are_charged_there_once(
    run: Callable[[Callable[[Mount], Awaitable[None]]], None],
) -> None:
    async def case(mount: Mount) -> None:
        begun = trio.current_time()
        closed = [await mount.store(name) - begun for name in (b"a", b"b", b"c")]
        assert closed == pytest.approx([0, 1 - LATE, 2 - LATE])
        await mount.open(b"a")
        assert trio.current_time() - begun == pytest.approx(3 - LATE), "what is owed is one object"

    run(case)


def test_write_after_a_close_is_charged_once(
    run: Callable[[Callable[[Mount], Awaitable[None]]], None],
) -> None:
    async def case(mount: Mount) -> None:
        handle = await mount.create(b"a")
        await mount.write(handle)
        await mount.operations.flush(handle)  # of a duplicate
        assert debt(mount) == pytest.approx(1 - LATE)
        await mount.operations.flush(handle)
        await mount.write(handle, 500, SIZE)
        await mount.operations.flush(handle)
        assert debt(mount) == pytest.approx(0.5)
        await mount.write(handle, 200, SIZE + 500)
        await mount.operations.release(handle)
        assert debt(mount) == pytest.approx(0.7), "no close has waited for it"

    run(case)


def test_write_that_never_waited_is_charged_at_the_release(
    run: Callable[[Callable[[Mount], Awaitable[None]]], None],
) -> None:
    async def case(mount: Mount) -> None:
        handle = await mount.create(b"a")
        await mount.write(handle)
        await mount.operations.release(handle)
        assert debt(mount) == pytest.approx(1 - LATE)

    run(case)


def test_an_open_ends_when_its_process_is_killed_and_is_not_charged(
    run: Callable[[Callable[[Mount], Awaitable[None]]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def case(mount: Mount) -> None:
        await mount.store(b"a")
        dead = set[int]()
        monkeypatch.setattr("kvfs.fuse.processes.killed", dead.__contains__)
        monkeypatch.setattr(mount.caller, "pid", 7)

        async def refused() -> None:
            with pytest.raises(pyfuse3.FUSEError) as raised:
                await mount.open(b"a")
            assert raised.value.errno == errno.EINTR

        shares = mount.made.ledger.namespaces.shares
        assert shares is not None
        shares.total.rate = 1  # 950 s of debt
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.operations.waits.watch)
            async with trio.open_nursery() as waiting:
                waiting.start_soon(refused)
                await trio.sleep(5)
                assert shares._queue.waiting == 1
                dead.add(7)
            assert shares._queue.waiting == 0
            nursery.cancel_scope.cancel()

    run(case)


def test_living_or_unknown_process_counts_as_not_killed() -> None:
    assert not killed(os.getpid())
    assert not killed(0)
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)  # a signal that waits, and ends nothing
        assert not killed(process.pid)
        process.kill()
