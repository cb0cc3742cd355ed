"""Do the work for a key once at a time, and let all callers that need it wait for it.

Contract: a caller first looks with `get` for work of its key that has begun. If there is none, the
caller begins it. All callers wait for `ended` of the same `SharedWork`. The work runs in a task of
its own. So if a caller is cancelled, or stops waiting, the other callers notice nothing. An error
of the work is never raised: it becomes the `problem` of the `SharedWork`, for all callers. `stop`
cancels all work, and leaves a `problem` as well. When `ended` is set, the `SharedWork` is no longer
in `WorkByKey`, and the next caller begins new work. All functions are synchronous, except for the
work itself and for waiting.
Not a lock: callers do not exclude each other.
"""

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator
from functools import partial
from typing import Generic, TypeVar

import trio

from kvfs.errors import KvfsError, NotFoundError, StaleError, TierError
from kvfs.tiers.calls import Health

log = logging.getLogger(__name__)

GLANCE = 0.5  # s between two checks of an open whether the tier that it waits for is down


class SharedWork:
    """Work of one key that several callers may wait for.

    problem: why the work failed; None once it has succeeded.
    """

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.problem: KvfsError | OSError | None = TierError("it was given up")

    def end(self) -> None:
        """Wake all callers that wait."""
        self.ended.set()

    def expect_done(self, named: object) -> None:
        """Raise NotFoundError, a miss, if the work failed; StaleError if the object changed."""
        if isinstance(self.problem, StaleError):  # its name may mean another file by now
            raise StaleError(str(self.problem)) from self.problem
        if self.problem is not None:
            raise NotFoundError(f"{named}: {self.problem}") from self.problem


K = TypeVar("K", bound=Hashable)
W = TypeVar("W", bound=SharedWork)


def start_task(title: str, work: Callable[[], Awaitable[None]]) -> None:
    """Begin a task that outlives its caller. A defect in `work` ends this task only.

    title: the name of the work in the log. The task belongs to the loop, because the synchronous
    callers have no nursery. pyfuse3's nursery ends with the first failure, and a request's nursery
    ends with the request. The loop cancels the task when the loop ends.
    """
    trio.lowlevel.spawn_system_task(_guarded, title, work)


async def _guarded(title: str, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except Exception:
        log.exception("%s failed: a defect of kvfs", title)


class WorkByKey(Generic[K, W]):
    """The shared work that has not ended, by key."""

    def __init__(self, defect: Callable[[K, Exception], None]) -> None:
        """defect: called with the key and an error that the work must not raise; logs it."""
        self._begun: dict[K, W] = {}
        self.defect = defect

    def __len__(self) -> int:
        return len(self._begun)

    def __iter__(self) -> Iterator[W]:
        return iter(self._begun.values())

    def get(self, key: K) -> W | None:
        """Return the work that has begun for a key, or None."""
        return self._begun.get(key)

    def begin(self, key: K, shared: W, work: Callable[[], Awaitable[None]]) -> W:
        """Begin the work of a key for which none has begun."""
        start_task(f"the work for {key}", partial(self._run, key, self.enter(key, shared), work))
        return shared

    def enter(self, key: K, shared: W) -> W:
        """Like `begin`, but the caller does the work itself, and must always call `end`."""
        self._begun[key] = shared
        return shared

    def end(self, key: K) -> None:
        """Remove the work of a key, and wake the callers that wait for it."""
        self._begun.pop(key).end()

    def stop(self) -> None:
        """Cancel all work at the unmount."""
        for shared in self:
            shared.scope.cancel()

    async def _run(self, key: K, shared: W, work: Callable[[], Awaitable[None]]) -> None:
        try:
            with shared.scope:
                await work()
                shared.problem = None
        except (KvfsError, OSError) as error:
            shared.problem = error
        except Exception as error:  # noqa: BLE001 (`defect` logs it)
            shared.problem = TierError(f"a defect of kvfs: {error!r}")
            self.defect(key, error)
        finally:
            self.end(key)


async def wait_while_up(event: trio.Event, until: float, health: Health) -> None:
    """Wait until the event is set, the time is `until` (of trio's clock), or the tier is down."""
    with trio.move_on_at(until):
        while not event.is_set() and not health.down:
            with trio.move_on_after(GLANCE):
                await event.wait()
