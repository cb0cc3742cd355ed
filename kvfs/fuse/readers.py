"""The reading of requests: one of pyfuse3's workers at a time, without the loop where possible.

Contract: `Readers` stands where pyfuse3 expects trio, as its own pyfuse3.asyncio does. A worker
that has answered without any wait reads on by itself, and the others sleep. When it waits or ends,
another worker is called. After `TURN` requests in a row the loop has its turn. With trio's lock a
request costs two more switches of tasks and one more call of epoll. That was a third of the
daemon's time for an open and its close (90 to 105 us before, 60 to 76 so).

Invariant: a worker holds the turn across the wait for a request, and across nothing else. A worker
that has released the turn comes back, waits or ends. In the latter two cases another worker is
called. So there is always one that reads, unless all are busy: then pyfuse3 makes one more. Not for
the meaning of a request.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from types import TracebackType, coroutine
from typing import Any

import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

TURN = 16  # requests, some 0.5 ms
Worker = Callable[..., Coroutine[Any, Any, None]]


class ReaderTurn:
    """pyfuse3's lock: its holder waits for a request."""

    def __init__(self) -> None:
        self._taken = False
        self._asleep: deque[Task] = deque()
        self._called = False
        self.in_a_row = 0  # requests that were read without the loop

    async def __aenter__(self) -> None:
        while self._taken:
            await self._sleep()
        self._taken = True
        if self.in_a_row < TURN:
            return
        self.in_a_row = 0
        try:
            await trio.lowlevel.checkpoint()  # with the turn: else all idle ones had theirs as well
        except BaseException:
            self._taken = False
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._taken = False

    async def _sleep(self) -> None:
        task = current_task()

        def abort(_raise: object) -> Abort:
            self._asleep.remove(task)
            return Abort.SUCCEEDED

        self._asleep.append(task)
        await wait_task_rescheduled(abort)
        self._called = False

    def call(self) -> None:
        """Wake the next reader, because a worker that does not read waits or has ended."""
        if self._asleep and not self._taken and not self._called:
            self._called = True
            reschedule(self._asleep.popleft())


class Workers:
    """pyfuse3's nursery. `waits()` is called when a worker gives way to other tasks, or ends."""

    def __init__(self, nursery: trio.Nursery, waits: Callable[[], None]) -> None:
        self._nursery = nursery
        self._waits = waits

    def start_soon(self, work: Worker, *args: object, name: str) -> None:
        self._nursery.start_soon(self._run, work, args, name=name)

    async def _run(self, work: Worker, args: tuple[object, ...]) -> None:
        try:
            await _watched(work(*args), self._waits)
        finally:
            self._waits()


@coroutine
def _watched(
    work: Coroutine[Any, Any, None], waits: Callable[[], None]
) -> Generator[Any, Any, None]:
    """Run `work` to its end; call `waits` each time that it stops for the loop."""
    step: Callable[[Any], Any] = work.send
    given: Any = None
    while True:
        try:
            trap = step(given)
        except StopIteration:
            return
        waits()
        try:
            given, step = (yield trap), work.send
        except BaseException as error:  # noqa: BLE001 (raised where the work has stopped)
            given, step = error, work.throw


class Readers:
    """The parts of trio that pyfuse3 uses. `readable` says whether a request is there.

    See `Passthrough`.
    """

    ClosedResourceError = trio.ClosedResourceError
    current_task = staticmethod(trio.lowlevel.current_task)
    current_trio_token = staticmethod(trio.lowlevel.current_trio_token)
    notify_closing = staticmethod(trio.lowlevel.notify_closing)

    def __init__(self, readable: Callable[[], bool]) -> None:
        self.lowlevel = self
        self._readable = readable
        self._turn = ReaderTurn()

    def Lock(self) -> ReaderTurn:  # noqa: N802 (trio's name)
        return self._turn

    @asynccontextmanager
    async def open_nursery(self) -> AsyncIterator[Workers]:
        async with trio.open_nursery() as nursery:
            yield Workers(nursery, self._turn.call)

    async def wait_readable(self, device: int) -> None:
        """Wait for a request; pyfuse3 has just checked for its end, so the loop need not run."""
        if self._readable():
            self._turn.in_a_row += 1
            return
        self._turn.in_a_row = 0
        await trio.lowlevel.wait_readable(device)
