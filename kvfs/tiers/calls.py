"""Is a tier's disk well? And system calls that may wait for it, in threads, but not without end.

Contract: `call` answers within its patience or raises TierError, and at once while the tier is
stuck. The threads are the tier's own, so that a disk that hangs takes none from anybody else. A
thread cannot be interrupted: one that is given up goes on, and what it brings when the disk answers
after all is taken back by `late`, in that thread. Not for movers, nor for saying what a failure
means.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, TypeVar

import trio

from kvfs.errors import TierError

log = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["healthy", "suspect", "down"]

DEADLINE = 10.0  # s; a busy disk answers within 1 or 2, Linux gives up a request after 30
SYNC_DEADLINE = 60.0  # s; a sync also waits for what others have written to that file system
PROBE_DEADLINE = 30.0  # s; it syncs, on a disk to which movers may write all the while
SLOWEST = 8 << 20  # bytes/s of a disk that is slow but not ill
THREADS = 40  # as many as trio allows for the whole process
PROBE_PERIOD = 1.0  # s between two probes of a tier that is not healthy
DOWN_AFTER = 2  # probes in a row that failed: one may have met a moment, as of a disk replugged
HEALTHY_AFTER = 3  # probes in a row that went well: a disk that flaps is not yet trusted
HEALTHY_PROBES = 10  # times as much for one that is: with passthrough kvfs sees no failing read


def sync_patience(size: int) -> float:
    """Seconds in which so many bytes are to be on the device."""
    return SYNC_DEADLINE + size / SLOWEST


def _nothing(*_: object) -> None:
    """What most calls leave to be taken back."""


class Health:
    """What failures, silence and probes make of a disk: a state machine without a clock of its own.

    One failure makes a healthy tier `suspect`, which changes nothing but that it is probed each
    second: the probe decides. A file in a bad place of a good disk fails for ever and probes go
    well, so nothing else suffers. `down` is a tier whose probe failed again, or where something got
    no answer; nothing new goes there. `stuck` says that it was silence: then nobody may call it,
    since each caller would wait as well. A full disk is not ill. `failed` may be called from any
    thread, the rest from the daemon's loop. Not for deciding what a state means for objects.

    `since` is the time of the last change of `state`, `why` the last thing that went wrong.
    """

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.state: State = "healthy"
        self.why = ""
        self.since = now
        self.stuck = False
        self._good = self._bad = 0  # probes in a row
        self.told: Callable[[State], object] = _nothing  # of each change, with the state before

    @property
    def down(self) -> bool:
        return self.state == "down"

    def failed(self, now: float, why: str) -> None:
        """An operation was answered with an error that is the disk's."""
        self._good = 0
        if not self.down:  # what brought it down says more than what follows from it
            self.why = why
        if self.state == "healthy":
            self._become("suspect", now)

    def unanswered(self, now: float, why: str) -> None:
        """Something was not answered within its time."""
        self._good = 0
        self.stuck = True
        self.why = why
        if not self.down:
            self._become("down", now)

    def probed(self, now: float, failure: str = "") -> None:
        """A probe was answered, with a failure or without."""
        self.stuck = False
        if failure:
            self._good = 0
            self._bad += 1
            self.why = failure
            if self.state == "healthy":
                self._become("suspect", now)
            if self.state == "suspect" and self._bad >= DOWN_AFTER:
                self._become("down", now)
            return
        self._bad = 0
        self._good += 1
        if self.down:
            self._become("suspect", now)
        elif self.state == "suspect" and self._good >= HEALTHY_AFTER:
            self.why = ""
            self._become("healthy", now)

    def _become(self, state: State, now: float) -> None:
        if state == "down":
            log.warning("%s is down, nothing new goes there: %s", self.name, self.why)
        elif self.down:
            log.info("%s answers again after %.1f s", self.name, now - self.since)
        elif state == "healthy":
            log.info("%s is healthy again", self.name)
        before, self.state = self.state, state
        self.since = now
        self.told(before)


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
