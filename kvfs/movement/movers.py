"""The mover processes, seen from the daemon.

Contract: `copy` and `read_through` run one job in a worker process and return what it found. The
death of a worker fails no job: it is run again in another one, a few times. Workers take a token
each, so that no more jobs run than were asked for. A job that takes much longer than its bytes can
is given up and its worker killed; one that waits for a disk in the kernel dies when the disk
answers, and keeps its token until then: every job needs that disk, so the token would be of no use
to another. Not for deciding what to move.
"""

import logging
import multiprocessing
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import trio
import trio_parallel  # type: ignore[import-untyped]

from kvfs.catalog import PackedCopy
from kvfs.errors import TierError
from kvfs.movement import copying, packing
from kvfs.movement.copying import NICENESS, LostError, Moved
from kvfs.movement.files import SourceChangedError, remove_parts
from kvfs.movement.packing import Repacked

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = 60.0  # s for a job without bytes: they run with little of a CPU, and sync
SLOWEST = 4 << 20  # bytes/s of a copy on a machine that is busy, to a disk that is slow
SLOWEST_ZEROS = 1 << 30  # bytes/s of zeros that are hashed; 50 GB/s on a machine that is not
ATTEMPTS = 3  # deaths of workers that one job survives
GRACE = 5.0  # s that workers have to end with the mount
IDLE_SECONDS = 600.0  # a worker without work ends after this
REAP_PERIOD = 5.0  # s; the library waits for one that has ended with the next job, if there is one


class MoverFailedError(TierError):
    """Worker processes died over one job again and again."""


class MoverOverdueError(TierError):
    """A job was given up: the disk does not answer."""


class Movers:
    """Use inside `Movers.open(...)`."""

    def __init__(
        self,
        context: trio_parallel.WorkerContext,
        nursery: trio.Nursery,
        workers: int,
        counters: Counter[str],
    ) -> None:
        self._context = context
        self._nursery = nursery
        self.workers = workers
        self._limiter = trio.CapacityLimiter(workers)
        self._unpacking = trio.CapacityLimiter(workers)
        self.counters = counters
        self.running = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        workers: int,
        counters: Counter[str],
        *,
        niceness: int = NICENESS,
        preloaded: Sequence[str] = (),
    ) -> AsyncIterator["Movers"]:
        """preloaded: modules that one process loads for all workers, which are its forks."""
        kind = trio_parallel.WorkerType.FORKSERVER if preloaded else trio_parallel.WorkerType.SPAWN
        if preloaded:
            multiprocessing.set_forkserver_preload(list(preloaded))
        done = False
        try:
            async with (
                trio_parallel.open_worker_context(
                    idle_timeout=IDLE_SECONDS,
                    grace_period=GRACE,
                    init=partial(copying.give_way, niceness),
                    worker_type=kind,
                ) as context,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(_reap, reaping := trio.CancelScope())
                yield cls(context, nursery, workers, counters)
                done = True
                reaping.cancel()
        except trio_parallel.BrokenWorkerError as error:  # a busy machine, or a store that hangs
            if not done:
                raise
            log.info("movers that had not ended within %.0f s were killed: %s", GRACE, error)

    async def copy(
        self,
        source: str,
        destination: str,
        size: int,
        *,
        sync: bool,
        cold: bool,
        sparse: bool = False,
        data: int | None = None,
    ) -> Moved:
        """See `copying.copy`; `data` of its bytes are in no hole, all if that is not said.

        Raises OSError, SourceChangedError, MoverFailedError.
        """
        return await self.run(
            copying.copy,
            source,
            destination,
            size,
            options={"sync": sync, "cold": cold, "sparse": sparse},
            patience=patience_for(size, data, sparse=sparse),
            destinations=[destination],
        )

    async def copy_all(
        self, items: list[tuple[str, str, int, bool]], data: Sequence[int]
    ) -> list[Moved | OSError | SourceChangedError]:
        """See `copying.copy_all`; `data` as in `copy`. Raises OSError, MoverFailedError."""
        longest = sum(
            patience_for(size, of_it, sparse=sparse) - PATIENCE
            for (_, _, size, sparse), of_it in zip(items, data, strict=True)
        )
        longest += PATIENCE
        destinations = [destination for _, destination, _, _ in items]
        return await self.run(copying.copy_all, items, patience=longest, destinations=destinations)

    async def pack(
        self, source: str, destination: str, size: int, element_size: int | None
    ) -> Repacked:
        """See `packing.pack`. Raises OSError, SourceChangedError, TierError."""
        return await self.run(
            *(packing.pack, source, destination, size, element_size),
            patience=patience_for(size),
            destinations=[destination],
        )

    async def unpack(
        self,
        source: str,
        destination: str,
        packed: PackedCopy,
        size: int,
        digest: bytes,
        *,
        sync: bool,
    ) -> Repacked:
        """See `packing.unpack`. Raises OSError, TierError. An open waits for it, not for copies.

        It is given up if the mount ends.
        """
        return await self.run(
            *(packing.unpack, source, destination, packed, size, digest),
            options={"sync": sync},
            patience=patience_for(size),
            destinations=[destination],
            limiter=self._unpacking,
        )

    async def unpacked_digest(self, source: str, packed: PackedCopy, size: int) -> bytes:
        """See `packing.unpacked_digest`. Raises OSError, TierError."""
        return await self.run(
            *(packing.unpacked_digest, source, packed, size),
            patience=patience_for(size),
        )

    async def read_through(
        self,
        source: str,
        size: int,
        *,
        sync: bool,
        sparse: bool = False,
        data: int | None = None,
    ) -> Moved:
        """See `copying.read_through`; `data` as in `copy`.

        Raises OSError, SourceChangedError, MoverFailedError.
        """
        return await self.run(
            *(copying.read_through, source, size),
            options={"sync": sync, "sparse": sparse},
            patience=patience_for(size, data, sparse=sparse),
        )

    async def run(
        self,
        job: Callable[..., T],
        *arguments: object,
        options: Mapping[str, bool] = {},
        patience: float = PATIENCE,
        destinations: Sequence[str] = (),
        limiter: trio.CapacityLimiter | None = None,
    ) -> T:
        """What a job returns or raises in a worker.

        limiter: it takes a token of that, not of those between tiers, and may be cancelled.
        """
        self.running += 1
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    moved = await self._within(
                        *(patience, partial(job, *arguments, **options), destinations),
                        limiter=limiter or self._limiter,
                        shield=limiter is None,
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

    async def _within(
        self,
        patience: float,
        job: Callable[[], T],
        destinations: Sequence[str],
        *,
        limiter: trio.CapacityLimiter,
        shield: bool,
    ) -> T:
        """What a worker answers in time.

        shield: not to be cancelled, a copy would be left half made. Else its worker is killed.
        """
        ended = trio.Event()
        given_up = trio.CancelScope()
        answers: list[T] = []
        failures: list[Exception] = []

        async def work() -> None:
            try:
                with given_up:
                    answers.append(
                        await self._context.run_sync(job, kill_on_cancel=True, limiter=limiter)
                    )
            except Exception as error:  # noqa: BLE001 (it is raised below, where it is waited for)
                failures.append(error)
            finally:
                ended.set()
            if given_up.cancelled_caught:  # and the worker is dead
                remove = partial(remove_parts, destinations)
                try:
                    await trio.to_thread.run_sync(remove, abandon_on_cancel=True)
                except OSError as error:
                    log.warning(
                        "the next mount will remove what a mover has left half made: %s", error
                    )

        self._nursery.start_soon(work)
        try:
            with trio.move_on_after(patience, shield=shield):
                await ended.wait()
        except trio.Cancelled:
            given_up.cancel()
            raise
        if failures:
            raise failures[0]
        if answers:
            return answers[0]
        given_up.cancel()
        raise MoverOverdueError(f"a mover has no answer after {patience:.0f} s, it is given up")


async def _reap(reaping: trio.CancelScope) -> None:
    """Wait for workers that have ended, so that none stays a zombie while nothing is moved."""
    with reaping:
        while True:
            await trio.sleep(REAP_PERIOD)
            multiprocessing.active_children()  # waits for those that have ended, and for no other


def patience_for(size: int, data: int | None = None, *, sparse: bool = False) -> float:
    """Seconds that a job with so many bytes may take, of which `data` are in no hole.

    Only a digest that is not `sparse` takes time for the rest, which is hashed from memory.
    """
    data = size if data is None else min(data, size)
    return PATIENCE + data / SLOWEST + (0 if sparse else (size - data) / SLOWEST_ZEROS)


__all__ = [
    "LostError",
    "Moved",
    "MoverFailedError",
    "MoverOverdueError",
    "Movers",
    "Repacked",
    "SourceChangedError",
    "patience_for",
]
