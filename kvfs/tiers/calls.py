"""The health of a tier's disk, and system calls in threads with a limit on their waiting time.

Contract: `call` returns within its patience or raises TierError, and raises at once while the tier
is stuck. Each tier has threads of its own, so a hanging disk takes no thread from other tiers. A
thread cannot be interrupted: after `call` has stopped waiting, the thread continues. If the disk
answers later, `TierCall.late` undoes the call, in that thread. Not for movers, nor for deciding
what a failure means for objects.
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
HealthState = Literal["healthy", "suspect", "down"]

DEADLINE = 10.0  # s; a busy disk answers within 2 s, and Linux fails a request after 30 s
SYNC_DEADLINE = 60.0  # s; a sync also waits for writes of other programs to that file system
PROBE_DEADLINE = 30.0  # s; a probe syncs, while movers may write to the disk
SLOWEST = 8 << 20  # bytes/s of a disk that is slow but healthy
THREADS = 40  # as many as trio allows for the whole process
PROBE_PERIOD = 1.0  # s between two probes of a tier that is not healthy
DOWN_AFTER = 2  # probes in a row that failed; one may fail while a disk is plugged in again
HEALTHY_AFTER = 3  # probes in a row that succeeded; a disk may fail again after one success
# A healthy tier gets one probe in so many periods. Probes are needed there: with passthrough kvfs
# sees no failed read.
HEALTHY_PROBES = 10


def sync_patience(size: int) -> float:
    """Seconds within which this many bytes must reach the device."""
    return SYNC_DEADLINE + size / SLOWEST


def _nothing(*_: object) -> None:
    """The default `late`: most calls need no undoing."""


class Health:
    """The health of a disk, from failures, timeouts and probes: a state machine without a clock.

    One failure makes a healthy tier `suspect`. This changes only the period of the probes, to one
    second: the probes decide. A bad sector under one file always fails, but the probes succeed, so
    other files stay usable. A tier is `down` after DOWN_AFTER failed probes, or after a call
    without an answer; kvfs writes nothing new there. `stuck` is true from a call without an answer
    to the next answered probe. While it is true, no thread may call the tier, because each caller
    would wait as well. A full disk is healthy. Any thread may call `failed`; only the daemon's loop
    may call the rest. Not for deciding what a state means for objects.

    `since` is the time of the last change of `state`, `why` the last failure.
    """

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.state: HealthState = "healthy"
        self.why = ""
        self.since = now
        self.stuck = False
        self._good = self._bad = 0  # probes in a row
        # Called at each change of `state`, with the state before.
        self.on_change: Callable[[HealthState], object] = _nothing

    @property
    def down(self) -> bool:
        return self.state == "down"

    def failed(self, now: float, why: str) -> None:
        """Record that an operation failed with an error of the disk."""
        self._good = 0
        if not self.down:  # keep the first cause: later failures follow from it
            self.why = why
        if self.state == "healthy":
            self._become("suspect", now)

    def unanswered(self, now: float, why: str) -> None:
        """Record that a call was not answered within its time."""
        self._good = 0
        self.stuck = True
        self.why = why
        if not self.down:
            self._become("down", now)

    def probed(self, now: float, failure: str = "") -> None:
        """Record a probe's answer. failure: the reason; "" is a success."""
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

    def _become(self, state: HealthState, now: float) -> None:
        if state == "down":
            log.warning("%s is down, nothing new goes there: %s", self.name, self.why)
        elif self.down:
            log.info("%s answers again after %.1f s", self.name, now - self.since)
        elif state == "healthy":
            log.info("%s is healthy again", self.name)
        before, self.state = self.state, state
        self.since = now
        self.on_change(before)


class OverdueError(TierError):
    """The call took too long, and the disk may still carry it out; then `late` undoes it."""


@dataclass(frozen=True)
class TierCall(Generic[T]):
    """A call with its name `what`, for messages."""

    what: str
    do: Callable[[], T]
    late: Callable[[T], object] = _nothing  # undoes the call, if its caller stopped waiting
    end: Callable[[], object] = _nothing  # called once, even if `do` was never called
    patience: float | None = None  # s; None: DEADLINE

    @classmethod
    def on_file(
        cls, what: str, fd: int, do: Callable[[int], T], patience: float | None = None
    ) -> "TierCall[T]":
        """A call on a duplicate of `fd`: the number `fd` itself may soon mean another file."""
        own = os.dup(fd)
        return TierCall(what, partial(do, own), end=partial(os.close, own), patience=patience)

    def __call__(self) -> T:
        try:
            return self.do()
        finally:
            self.end()


class _ThreadCall(Generic[T]):
    """A call in a thread. The caller gets its answer, or `late` if the caller stopped waiting."""

    def __init__(self, job: TierCall[T]) -> None:
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
        """Stop waiting. If the answer has come in this moment, undo the call."""
        with self._lock:
            self._abandoned = True
            begun, answers = self._begun, self._answer
        if not begun:
            self._job.end()
        for answer in answers:
            self._job.late(answer)


class Calls:
    """The system calls on one tier, in threads of the tier."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self._threads = trio.CapacityLimiter(THREADS)
        self._background = trio.CapacityLimiter(THREADS)
        self._probes = 0  # calls of `probe` since the last probe that ran

    async def call(self, job: Callable[[], T]) -> T:
        """Run a job in a thread, and return its result or raise its exception.

        Raises OverdueError if the job takes too long, TierError if it did not begin.
        """
        job = job if isinstance(job, TierCall) else TierCall("a call", job)
        if self.health.stuck:
            job.end()
            raise TierError(f"{self.health.name}: {job.what} is not tried: {self.health.why}")
        patience = DEADLINE if job.patience is None else job.patience
        one = _ThreadCall(job)
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

    async def run_unlimited(self, job: Callable[[], T]) -> T:
        """Run a job in a thread, without a time limit. It takes no thread from `call`."""
        return await trio.to_thread.run_sync(job, limiter=self._background, abandon_on_cancel=True)

    async def probe(self, job: Callable[[], str]) -> None:
        """Run the probe `job`, if one is due. Callers call `probe` every PROBE_PERIOD.

        `job` returns the failure, "" for none. If it has no answer after PROBE_DEADLINE, the tier
        is down, and `probe` waits on.
        """
        self._probes += 1
        if self.health.state == "healthy" and self._probes < HEALTHY_PROBES:
            return
        self._probes = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._alarm)
            failure = await self.run_unlimited(job)
            nursery.cancel_scope.cancel()
        self.health.probed(time.monotonic(), failure)

    async def _alarm(self) -> None:
        await trio.sleep(PROBE_DEADLINE)
        why = f"a probe has no answer after {PROBE_DEADLINE:.1f} s"
        self.health.unanswered(time.monotonic(), why)
