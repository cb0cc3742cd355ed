"""System calls that may wait for a disk: each in a thread, and none waited for without end.

Contract: `call` answers within its patience or raises TierError, and at once while the tier is
stuck. The threads are the tier's own, so that a disk that hangs takes none from anybody else. A
thread cannot be interrupted: one that is given up goes on, and what it brings when the disk answers
after all is taken back by `late`, in that thread. Not for movers, nor for saying what a failure
means.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import trio

from kvfs.errors import TierError
from kvfs.tiers.health import Health

T = TypeVar("T")

DEADLINE = 10.0  # s; a busy disk answers within 1 or 2, Linux gives up a request after 30
SYNC_DEADLINE = 60.0  # s; a sync also waits for what others have written to that file system
PROBE_DEADLINE = 30.0  # s; it syncs, on a disk to which movers may write all the while
SLOWEST = 8 << 20  # bytes/s of a disk that is slow but not ill
THREADS = 40  # as many as trio allows for the whole process
PROBE_PERIOD = 1.0  # s between two probes of a tier that is not healthy
HEALTHY_PROBES = 10  # times as much for one that is: with passthrough kvfs sees no failing read


def sync_patience(size: int) -> float:
    """Seconds in which so many bytes are to be on the device."""
    return SYNC_DEADLINE + size / SLOWEST


def _nothing(*_: object) -> None:
    """What most calls leave to be taken back."""


class OverdueError(TierError):
    """It was given up, but may be carried out yet; then `late` takes it back."""


@dataclass(frozen=True)
class Job(Generic[T]):
    """What is called, under which name, and what takes its answer back if nobody waits for it."""

    what: str
    do: Callable[[], T]
    late: Callable[[T], object] = _nothing
    end: Callable[[], object] = _nothing  # called once, whether or not it was done
    patience: float | None = None  # s, if not DEADLINE

    @classmethod
    def on_file(
        cls, what: str, fd: int, do: Callable[[int], T], patience: float | None = None
    ) -> "Job[T]":
        """With a duplicate of an open file: its number may mean another one by then."""
        own = os.dup(fd)
        return Job(what, partial(do, own), end=partial(os.close, own), patience=patience)

    def __call__(self) -> T:
        try:
            return self.do()
        finally:
            self.end()


class _Call(Generic[T]):
    """A job in a thread: its answer is for who waits, or for `late` if nobody does any more."""

    def __init__(self, job: Job[T]) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._begun = self._abandoned = False
        self._answer: list[T] = []

    def run(self) -> T:
        with self._lock:
            if self._abandoned:
                raise TierError("given up before it began")
            self._begun = True
        answer = self._job()
        if not self._delivered(answer):
            self._job.late(answer)
        return answer

    def _delivered(self, answer: T) -> bool:
        with self._lock:
            if not self._abandoned:
                self._answer.append(answer)
            return not self._abandoned

    @property
    def begun(self) -> bool:
        return self._begun

    def abandon(self) -> None:
        """Nobody waits any more. The answer may have come in this very moment."""
        with self._lock:
            self._abandoned = True
            begun, answers = self._begun, self._answer
        if not begun:
            self._job.end()
        for answer in answers:
            self._job.late(answer)


class Calls:
    """The calls on one tier, with its threads."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self._threads = trio.CapacityLimiter(THREADS)
        self._background = trio.CapacityLimiter(THREADS)
        self._probes = 0  # that were passed over since the last one

    async def call(self, job: Callable[[], T]) -> T:
        """What the job returns or raises. Raises OverdueError, or TierError if it is not begun."""
        job = job if isinstance(job, Job) else Job("a call", job)
        if self.health.stuck:
            job.end()
            raise TierError(f"{self.health.name}: {job.what} is not tried: {self.health.why}")
        patience = DEADLINE if job.patience is None else job.patience
        one = _Call(job)
        with trio.move_on_after(patience):
            try:
                return await trio.to_thread.run_sync(
                    one.run, limiter=self._threads, abandon_on_cancel=True
                )
            except trio.Cancelled:
                one.abandon()
                raise
        why = f"{job.what} has no answer after {patience:.1f} s"
        self.health.unanswered(time.monotonic(), why)
        raise (OverdueError if one.begun else TierError)(f"{self.health.name}: {why}")

    async def wait(self, job: Callable[[], T]) -> T:
        """What nobody waits for: however long it takes, and not overtaken by what comes after."""
        return await trio.to_thread.run_sync(job, limiter=self._background, abandon_on_cancel=True)

    async def probe(self, job: Callable[[], str]) -> None:
        """To be called every PROBE_PERIOD. `job` returns what is wrong, and is not given up."""
        self._probes += 1
        if self.health.state == "healthy" and self._probes < HEALTHY_PROBES:
            return
        self._probes = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._alarm)
            failure = await self.wait(job)
            nursery.cancel_scope.cancel()
        self.health.probed(time.monotonic(), failure)

    async def _alarm(self) -> None:
        await trio.sleep(PROBE_DEADLINE)
        why = f"a probe has no answer after {PROBE_DEADLINE:.1f} s"
        self.health.unanswered(time.monotonic(), why)
