"""The mover processes, as the daemon uses them.

Contract: `copy` and the other methods run one job in a worker process and return its result. If a
worker dies, another worker runs the job again, up to ATTEMPTS times. Each running job has a token,
so that no more than `workers` jobs run at once. If a job takes much longer than its bytes need, the
daemon stops waiting and kills the worker. A worker that waits for a disk in the kernel dies only
when the disk answers, and keeps its token until then. No other job could use that token, because
every job needs that disk. Not for deciding what to move.
"""

import logging
import multiprocessing
import multiprocessing.util
import os
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

PATIENCE = 60.0  # s for a job without bytes: workers have a low priority, and wait for syncs
SLOWEST = 4 << 20  # bytes/s of a copy on a busy machine, to a slow disk
SLOWEST_ZEROS = 1 << 30  # bytes/s of hashing zeros; 50 GB/s on an idle machine
ATTEMPTS = 3  # workers that may die over one job, before the job fails
GRACE = 5.0  # s for workers to end with the mount
IDLE_SECONDS = 600.0  # a worker without work ends after this
BY_DESCRIPTOR = "/proc/self/fd/"
REAP_PERIOD = 5.0  # s; the library reaps an ended worker only at the next job


class MoverFailedError(TierError):
    """Worker processes died over one job again and again."""


class MoverOverdueError(TierError):
    """A job took too long: the disk does not answer."""


class MoverPool:
    """The workers. Use inside `MoverPool.open(...)`."""

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
    ) -> AsyncIterator["MoverPool"]:
        """Start the workers. They are forks of one process, which loads the modules `preloaded`."""
        kind = trio_parallel.WorkerType.FORKSERVER if preloaded else trio_parallel.WorkerType.SPAWN
        if preloaded:
            _shorten_address()
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
        except trio_parallel.BrokenWorkerError as error:  # a busy machine, or a hanging store
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
        """See `copying.copy`. `data` of its bytes are outside holes; None: all.

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
        """See `packing.unpack`. Raises OSError, TierError.

        An open waits for this job. So it has tokens of its own, and does not wait for copies. The
        end of the mount cancels it.
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

    async def read_all_through(
        self, items: list[tuple[str, int, bool]], data: Sequence[int]
    ) -> list[Moved | OSError | SourceChangedError]:
        """See `copying.read_all_through`; `data` as in `copy`. Raises MoverFailedError."""
        longest = PATIENCE + sum(
            patience_for(size, of_it, sparse=sparse) - PATIENCE
            for (_, size, sparse), of_it in zip(items, data, strict=True)
        )
        return await self.run(copying.read_all_through, items, patience=longest)

    async def run(
        self,
        job: Callable[..., T],
        *arguments: object,
        options: Mapping[str, bool] = {},
        patience: float = PATIENCE,
        destinations: Sequence[str] = (),
        limiter: trio.CapacityLimiter | None = None,
    ) -> T:
        """Run a job in a worker; return its result or raise its exception.

        limiter: the job takes a token of this limiter, and may be cancelled. None: it takes a token
        for copies between tiers, and cannot be cancelled.
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
        """Run a job in a worker within `patience` seconds.

        shield: no cancellation ends the job, because it would leave a copy half made. Without a
        shield, a cancellation kills the worker.
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
            except Exception as error:  # noqa: BLE001 (raised below, where the daemon waits for it)
                failures.append(error)
            finally:
                ended.set()
            if given_up.cancelled_caught:  # the worker is dead then
                remove = partial(remove_parts, destinations)
                try:
                    await trio.to_thread.run_sync(remove, abandon_on_cancel=True)
                except OSError as error:
                    log.warning(
                        "the next mount will remove the unfinished copy of a mover: %s", error
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


def _shorten_address() -> None:
    """Let the forkserver listen below a TMPDIR of any length: its address has at most 107 bytes.

    Only this process binds and connects, so it names the directory by a descriptor of its own.
    """
    folder = multiprocessing.util.get_temp_dir()
    if not folder.startswith(BY_DESCRIPTOR):
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # for as long as it lives
        # Python 3.14 takes /tmp instead; the versions before have no public way.
        config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001
        config["tempdir"] = f"{BY_DESCRIPTOR}{fd}"


def scratch() -> str:
    """Return the directory of the forkserver's socket, which a killed process leaves behind."""
    return os.path.realpath(multiprocessing.util.get_temp_dir())


async def _reap(reaping: trio.CancelScope) -> None:
    """Reap ended workers, so that none stays a zombie while no job comes."""
    with reaping:
        while True:
            await trio.sleep(REAP_PERIOD)
            multiprocessing.active_children()  # waits for ended ones only


def patience_for(size: int, data: int | None = None, *, sparse: bool = False) -> float:
    """Seconds that a job may take for `size` bytes, of which `data` are outside holes.

    Only a digest that is not `sparse` takes time for holes, which it hashes from memory.
    """
    data = size if data is None else min(data, size)
    return PATIENCE + data / SLOWEST + (0 if sparse else (size - data) / SLOWEST_ZEROS)


__all__ = [
    "LostError",
    "Moved",
    "MoverFailedError",
    "MoverOverdueError",
    "MoverPool",
    "Repacked",
    "SourceChangedError",
    "patience_for",
]
