"""Threads of one cache: blocks of a call side by side, and whole calls in the background.

Contract: calls and their blocks have threads of their own, so that a call that waits for blocks
holds up none. Bytes move with the GIL released. Signal handlers run in the main thread only, and
what they raise, be it between any two steps, would leave locks taken and descriptors open: so what
the main thread calls is done by another one, for which it waits. Not for what is done.
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

# s until the main thread looks whether a signal has come just before it began to wait, which would
# not wake it.
_LOOK = 0.1


class Threads:
    """`count` threads for blocks, and as many for calls."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._blocks = ThreadPoolExecutor(count, "kvfs-block")
        self._calls = ThreadPoolExecutor(count, "kvfs-call")
        self._aside = _Aside()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Raises ValueError when they have been closed."""
        try:
            return self._calls.submit(call, *args, **kwargs)
        except RuntimeError as error:
            raise ValueError(f"the cache is being closed: {error}") from None

    def call(self, work: Callable[[], T]) -> T:
        """Do it, and return or raise what it does.

        An interrupt of the main thread is raised when it has ended, which is soon: `leading` begins
        nothing more. A second one meanwhile is raised at once.
        """
        if threading.current_thread() is not threading.main_thread():
            return work()
        return self._aside.do(work)

    def leading(
        self, count: int, work: Callable[[int], bool], *, stop: Callable[[], None] = lambda: None
    ) -> int:
        """Do `work(0)`, `work(1)` and so on side by side; return how many from the first succeeded.

        None is begun after one that has failed. What `work` raises is raised when all have ended;
        `stop` is called before, lest one waits for another that will not come.
        """
        turn = _Turn(count, self._aside.current())

        def run() -> None:
            try:
                while (at := turn.take()) is not None:
                    if not work(at):
                        turn.end(at)
            except BaseException:
                turn.end(0)
                stop()
                raise

        others: list[Future[None]] = []
        try:
            with suppress(RuntimeError):  # the cache is being closed: this thread does all of it
                others.extend(self._blocks.submit(run) for _ in range(min(self.count, count) - 1))
            run()  # the thread that asks works as well
        finally:
            begun = [other for other in others if not other.cancel()]
            wait(begun)
        for other in begun:
            other.result()
        return turn.count

    def close(self) -> None:
        """Wait for all that was begun."""
        self._calls.shutdown()
        self._blocks.shutdown()


class _Call(Generic[T]):
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
        except BaseException as error:  # noqa: BLE001 (it is raised where it was asked for)
            self._error = error
        self._done = True
        self._told.put(None)

    def wait(self) -> None:
        while not self._done:  # what has been told may have been lost with an interrupt
            with suppress(Empty):
                self._told.get(timeout=_LOOK)

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return cast("T", self._result)


class _Aside:
    """A thread for what the main thread calls. It goes when nobody can call any more.

    With what a signal handler leaves whole: attributes, and SimpleQueue, which is written in C.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Call[object] | None] = SimpleQueue()
        self._current = threading.local()
        threading.Thread(
            target=_serve, args=(self._asked, self._current), name="kvfs-main", daemon=True
        ).start()  # now: an interrupt in here would leave half a thread behind
        weakref.finalize(self, self._asked.put, None).atexit = False

    def current(self) -> "_Call[object] | None":
        return getattr(self._current, "call", None)

    def do(self, work: Callable[[], T]) -> T:
        call = _Call(work)
        try:
            self._asked.put(cast("_Call[object]", call))
            call.wait()
        except BaseException:
            call.interrupted = True
            self._asked.put(cast("_Call[object]", call))  # lest it was not; it runs once
            call.wait()
            raise
        return call.result()


def _serve(asked: "SimpleQueue[_Call[object] | None]", current: threading.local) -> None:
    while (call := asked.get()) is not None:
        current.call = call
        call.run()
        current.call = None
        del call  # it has the result


class _Turn:
    def __init__(self, count: int, call: _Call[object] | None) -> None:
        self.count = count
        self._call = call
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> int | None:
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
    """Wait in whichever loop runs, asyncio's or trio's, which is not needed.

    Who is cancelled goes only when the call has ended, or has not begun and never will: until then
    it fills memory of the caller's.
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
    """The module, if this is called in one of its tasks."""
    trio = sys.modules.get("trio")
    if trio is None:
        return None
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return None
    return trio
