"""Workers that take turns, over a socket in place of the device, as pyfuse3's session loop does."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from select import select

import pytest
import trio

from kvfs.fuse.readers import TURN, Readers, Workers

Handler = Callable[[bytes], Awaitable[None]]


class Session:
    """pyfuse3's loop (internal.pxi) in a few lines: `handle` gets one byte for a request."""

    def __init__(self, handle: Handler, *, idle: int = 8) -> None:
        self.kernel, self.device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.device.settimeout(0)
        self.handle = handle
        self.idle = idle
        self.trio = Readers(lambda: bool(select([self.device], [], [], 0)[0]))
        self.lock = self.trio.Lock()
        self.waiting = 0
        self.made = 0
        self.ended = 0
        self.over = trio.Event()

    def ask(self, requests: bytes) -> None:
        for at in range(len(requests)):
            self.kernel.send(requests[at : at + 1])

    async def work(self, nursery: Workers) -> None:
        while not self.over.is_set():
            if self.waiting > self.idle:
                break
            self.waiting += 1
            try:
                async with self.lock:
                    if not self.over.is_set():
                        await self.trio.lowlevel.wait_readable(self.device.fileno())
            except self.trio.ClosedResourceError:
                break
            finally:
                self.waiting -= 1
            if self.over.is_set():
                break
            request = self.device.recv(1)
            if not self.waiting:
                self.start(nursery)
            await self.handle(request)
        self.ended += 1

    def start(self, nursery: Workers) -> None:
        self.made += 1
        nursery.start_soon(self.work, nursery, name=f"worker {self.made}")

    async def run(self) -> None:
        with self.kernel, self.device:
            async with self.trio.open_nursery() as nursery:
                self.start(nursery)

    def stop(self) -> None:
        self.over.set()
        self.trio.notify_closing(self.device.fileno())


@asynccontextmanager
async def serving(session: Session) -> AsyncIterator[None]:
    """Stopped at the end, which all workers must come to."""
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run)
            yield
            session.stop()
    assert session.ended == session.made


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.lowlevel.checkpoint()


def test_worker_that_does_not_wait_reads_on_alone() -> None:
    tasks, seen = set(), bytearray()

    async def handle(request: bytes) -> None:
        tasks.add(trio.lowlevel.current_task())
        seen.extend(request)

    async def main() -> None:
        session = Session(handle)
        async with serving(session):
            for goal in range(3, 63, 3):
                session.ask(b"abc")
                await until(lambda goal=goal: len(seen) == goal)  # type: ignore[misc]
                assert session.made <= 7, "those of the first requests, before one could sleep"

    trio.run(main)
    assert seen == b"abc" * 20
    assert len(tasks) == 1


def test_others_read_while_some_wait() -> None:
    """And who waits is answered when it may go on, in any order."""
    seen = bytearray()
    gates = {letter: trio.Event() for letter in b"ABCDEFGHIJKL"}

    async def handle(request: bytes) -> None:
        if (gate := gates.get(request[0])) is not None:
            await gate.wait()
        seen.extend(request)

    async def main() -> None:
        session = Session(handle, idle=2)
        async with serving(session):
            session.ask(b"aABbCDcEFdGHeIJfKLg")
            await until(lambda: len(seen) == 7)
            assert seen == b"abcdefg"
            for letter in b"LAKBJCIDHEGF":
                gates[letter].set()
                await until(lambda letter=letter: letter in seen)  # type: ignore[misc]
                session.ask(b"x")
                await until(lambda: seen.endswith(b"x"))
            assert session.ended >= 12 - 3, "idle ones have ended"

    trio.run(main)


def test_the_loop_has_its_turn() -> None:
    """However many requests wait: others run after so many of them."""
    seen = bytearray()
    passes = []

    async def handle(request: bytes) -> None:
        seen.extend(request)

    async def main() -> None:
        session = Session(handle)
        session.ask(bytes(8 * TURN))
        async with serving(session):
            while len(seen) < 8 * TURN:
                passes.append(len(seen))
                await trio.lowlevel.checkpoint()
        passes.append(len(seen))

    trio.run(main)
    assert max(after - before for before, after in pairwise(passes)) <= 2 * TURN


def test_an_error_of_a_handler_ends_all() -> None:
    async def handle(request: bytes) -> None:
        if request == b"!":
            raise ValueError(request)
        await trio.sleep_forever()

    async def main() -> None:
        session = Session(handle)
        session.ask(b"abc!")
        with trio.fail_after(30):
            await session.run()

    with pytest.RaisesGroup(ValueError):
        trio.run(main)


def test_a_worker_is_cancelled_wherever_it_is() -> None:
    undone = []

    async def handle(request: bytes) -> None:
        try:
            await trio.sleep_forever()
        finally:
            undone.append(request)

    async def main() -> None:
        session = Session(handle)
        session.ask(b"ab")
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.run)
                await until(lambda: session.made == 3)
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert sorted(undone) == [b"a", b"b"]


def test_handlers_get_values_and_errors_of_their_waits() -> None:
    """Values and errors of what a handler waits for come through to it."""
    seen = []

    async def handle(request: bytes) -> None:
        with trio.move_on_after(0.001) as scope:
            await trio.sleep_forever()
        assert scope.cancelled_caught
        seen.append(await trio.to_thread.run_sync(lambda: request * 2))

    async def main() -> None:
        session = Session(handle)
        async with serving(session):
            session.ask(b"ab")
            await until(lambda: len(seen) == 2)

    trio.run(main)
    assert sorted(seen) == [b"aa", b"bb"]
