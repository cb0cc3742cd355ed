"""Threads of one cache: blocks of a call side by side, and whole calls in the background.

Contract: calls and their blocks have threads of their own, so that a call that waits for blocks
delays no other. Bytes move with the GIL released. Signal handlers run in the main thread only.
Their exceptions can come between any two steps, and would leave locks taken and descriptors open.
So another thread does the main thread's calls, while the main thread waits. Not for the work
itself.
"""

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

# s until the main thread looks for a signal that came just before it began to wait, and so did not
# wake it.
_LOOK = 0.1


class Threads:
    """`count` threads for blocks, and as many for calls."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._blocks = ThreadPoolExecutor(count, "kvfs-block")
        self._calls = ThreadPoolExecutor(count, "kvfs-call")
        self._aside = _Aside()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in the background. Raises ValueError after `close`."""
        try:
            return self._calls.submit(call, *args, **kwargs)
        except RuntimeError as error:
            raise ValueError(f"the cache is being closed: {error}") from None

    def call(self, work: Callable[[], T]) -> T:
        """Do the work, and return its result or raise its error.

        An interrupt of the main thread is raised when the work has ended. That is soon, because
        `leading` begins nothing more. A second interrupt meanwhile is raised immediately.
        """
        if threading.current_thread() is not threading.main_thread():
            return work()
        return self._aside.do(work)

    def leading(
        self, count: int, work: Callable[[int], bool], *, stop: Callable[[], None] = lambda: None
    ) -> int:
        """Do `work(0)`, `work(1)` and so on side by side; return the successes from the first.

        No work begins after a failure. An exception of `work` is raised when all work has ended.
        `stop` is called before that, so that no work waits for another that will not come.
        """
        turn = _Turn(count, self._aside.current())

        def run() -> None:
            try:
                while (at := turn.next_index()) is not None:
                    if not work(at):
                        turn.end(at)
            except BaseException:
                turn.end(0)
                stop()
                raise

        others: list[Future[None]] = []
        try:
            with suppress(RuntimeError):  # during `close` this thread does all of the work
                others.extend(self._blocks.submit(run) for _ in range(min(self.count, count) - 1))
            run()  # the calling thread works as well
        finally:
            begun = [other for other in others if not other.cancel()]
            wait(begun)
        for other in begun:
            other.result()
        return turn.count

    def close(self) -> None:
        """Wait for all running work."""
        self._calls.shutdown()
        self._blocks.shutdown()


class _InterruptibleCall(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self.interrupted = False
        self._work = work
        self._begun = self._done = False
        self._told: SimpleQueue[None] = SimpleQueue()
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        if self._begun:
            return
        self._begun = True
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 (raised again in the caller)
            self._error = error
        self._done = True
        self._told.put(None)

    def wait(self) -> None:
        while not self._done:  # an interrupt may have lost the message
            with suppress(Empty):
                self._told.get(timeout=_LOOK)

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return cast("T", self._result)


class _Aside:
    """A thread for the main thread's calls. It ends when no caller is left.

    It uses only attributes and SimpleQueue, which is written in C: a signal handler leaves them
    whole.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[_InterruptibleCall[object] | None] = SimpleQueue()
        self._current = threading.local()
        threading.Thread(
            target=_serve, args=(self._asked, self._current), name="kvfs-main", daemon=True
        ).start()  # now: an interrupt in here would leave half a thread behind
        weakref.finalize(self, self._asked.put, None).atexit = False

    def current(self) -> "_InterruptibleCall[object] | None":
        return getattr(self._current, "call", None)

    def do(self, work: Callable[[], T]) -> T:
        call = _InterruptibleCall(work)
        try:
            self._asked.put(cast("_InterruptibleCall[object]", call))
            call.wait()
        except BaseException:
            call.interrupted = True
            self._asked.put(
                cast("_InterruptibleCall[object]", call)
            )  # in case it was not put; it runs once
            call.wait()
            raise
        return call.result()


def _serve(
    asked: "SimpleQueue[_InterruptibleCall[object] | None]", current: threading.local
) -> None:
    while (call := asked.get()) is not None:
        current.call = call
        call.run()
        current.call = None
        del call  # it has the result


class _Turn:
    def __init__(self, count: int, call: _InterruptibleCall[object] | None) -> None:
        self.count = count
        self._call = call
        self._next = 0
        self._lock = threading.Lock()

    def next_index(self) -> int | None:
        with self._lock:
            if self._call is not None and self._call.interrupted:
                self.count = min(self.count, self._next)
            if self._next >= self.count:
                return None
            self._next += 1
            return self._next - 1

    def end(self, at: int) -> None:
        with self._lock:
            self.count = min(self.count, at)


async def awaited(future: Future[T]) -> T:
    """Wait for a future in the running loop, asyncio's or trio's; trio need not be installed.

    A cancelled task returns only when the call has ended, or never begins: until then the call
    fills memory of the caller.
    """
    trio = _running_trio()
    if trio is not None:
        return cast("T", await trio.to_thread.run_sync(future.result))
    waiter = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        if not future.cancel():
            await asyncio.wait([waiter])
        raise


def _running_trio() -> Any:  # noqa: ANN401 (a module)
    """Return the trio module, if this is called in one of its tasks."""
    trio = sys.modules.get("trio")
    if trio is None:
        return None
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return None
    return trio
