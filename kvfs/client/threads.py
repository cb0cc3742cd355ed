"""Threads of one cache: blocks of a call side by side, and whole calls in the background.

Contract: calls and their blocks have threads of their own, so that a call that waits for blocks
holds up none. Bytes move with the GIL released. Not for what is done.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """`count` threads for blocks, and as many for calls."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._blocks = ThreadPoolExecutor(count, "kvfs-block")
        self._calls = ThreadPoolExecutor(count, "kvfs-call")

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._calls.submit(call, *args, **kwargs)

    def beside(self, call: Callable[[], None]) -> Future[None]:
        """Do it on a thread for blocks: before all that is begun after it."""
        return self._blocks.submit(call)

    def later(self, call: Callable[[], None]) -> None:
        """Do it in the background, or now if the threads end."""
        try:
            self._calls.submit(call)
        except RuntimeError:
            call()

    def leading(
        self, count: int, work: Callable[[int], bool], *, stop: Callable[[], None] = lambda: None
    ) -> int:
        """Do `work(0)`, `work(1)` and so on side by side; return how many from the first succeeded.

        None is begun after one that has failed. What `work` raises, and an interrupt, is raised
        when all have ended; `stop` is called before, lest one waits for another that will not come.
        """
        turn = _Turn(count)

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
            others += (self._blocks.submit(run) for _ in range(min(self.count, count) - 1))
            run()  # the thread that asks works as well
        except BaseException:
            turn.end(0)
            stop()
            raise
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


class _Turn:
    def __init__(self, count: int) -> None:
        self.count = count
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> int | None:
        with self._lock:
            if self._next >= self.count:
                return None
            self._next += 1
            return self._next - 1

    def end(self, at: int) -> None:
        with self._lock:
            self.count = min(self.count, at)
