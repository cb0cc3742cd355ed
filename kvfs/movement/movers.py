"""The mover processes, seen from the daemon.

Contract: `copy` and `read_through` run one job in a worker process and return what it found. The
death of a worker fails no job: it is run again in another one, a few times. Workers take a token
each, so that no more jobs run than were asked for. Not for deciding what to move.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio
import trio_parallel  # type: ignore[import-untyped]

from kvfs.errors import TierError
from kvfs.movement import copying
from kvfs.movement.copying import Moved, SourceChangedError

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 3  # deaths of workers that one job survives
IDLE_SECONDS = 600.0  # a worker without work ends after this


class MoverFailedError(TierError):
    """Worker processes died over one job again and again."""


class Movers:
    """Use inside `Movers.open(...)`."""

    def __init__(
        self, context: trio_parallel.WorkerContext, workers: int, counters: Counter[str]
    ) -> None:
        self._context = context
        self.workers = workers
        self._limiter = trio.CapacityLimiter(workers)
        self.counters = counters
        self.running = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, workers: int, counters: Counter[str]) -> AsyncIterator["Movers"]:
        async with trio_parallel.open_worker_context(
            idle_timeout=IDLE_SECONDS, grace_period=5.0, init=copying.give_way
        ) as context:
            yield cls(context, workers, counters)

    async def copy(
        self, source: str, destination: str, size: int, *, sync: bool, cold: bool
    ) -> Moved:
        """See `copying.copy`. Raises OSError, SourceChangedError, MoverFailedError."""
        return await self._run(
            copying.copy, source, destination, size, options={"sync": sync, "cold": cold}
        )

    async def copy_all(
        self, items: list[tuple[str, str, int]]
    ) -> list[Moved | OSError | SourceChangedError]:
        """See `copying.copy_all`. Raises OSError, MoverFailedError."""
        return await self._run(copying.copy_all, items, options={})

    async def read_through(self, source: str, size: int, *, sync: bool) -> Moved:
        """See `copying.read_through`. Raises OSError, SourceChangedError, MoverFailedError."""
        return await self._run(copying.read_through, source, size, options={"sync": sync})

    async def _run(self, job: Callable[..., T], *arguments: object, options: dict[str, bool]) -> T:
        self.running += 1
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    moved: T = await self._context.run_sync(
                        copying.call, job, arguments, options, limiter=self._limiter
                    )
                except trio_parallel.BrokenWorkerError as error:
                    self.counters["mover_failures"] += 1
                    log.warning(
                        "a mover died over %s %s (attempt %d of %d): %s",
                        job.__name__,
                        arguments[0],
                        attempt,
                        ATTEMPTS,
                        error,
                    )
                else:
                    return moved
            raise MoverFailedError(f"{job.__name__} {arguments[0]}: {ATTEMPTS} movers died")
        finally:
            self.running -= 1


__all__ = ["Moved", "MoverFailedError", "Movers", "SourceChangedError"]
