"""Do work that several callers wait for only once for a key at a time.

Contract: a caller that finds no flight of its key begins one. Later callers find the flight by
`get`, and wait for its `ended`. The work runs in a task of its own: a caller that is cancelled, or
has waited long enough, changes nothing for the others. An error of the work becomes the `problem`
of its flight, for all callers that wait; nothing else is raised. `stop` cancels all work; then the
problem says that the work was cancelled. When `ended` is set the flight has left, and the next
caller begins anew. Synchronous, except for the work itself and for waiting.
Not for locks: callers do not exclude others.
"""

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator
from functools import partial
from typing import Generic, TypeVar

import trio

from kvfs.errors import KvfsError, NotFoundError, StaleError, TierError
from kvfs.tiers.calls import Health

log = logging.getLogger(__name__)

GLANCE = 0.5  # s between two looks whether the tier that an open waits for is down


class Flight:
    """Work that is under way. `problem`: why it failed; None once it has succeeded."""

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
F = TypeVar("F", bound=Flight)


def start_task(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Begin a task that outlives its caller. A defect ends the task, and nothing else.

    The task belongs to the loop, because the synchronous callers have no nursery. pyfuse3's nursery
    ends with the first failure, and a request's nursery ends with the request. The loop cancels the
    task at its own end.
    """
    trio.lowlevel.spawn_system_task(_guarded, what, work)


async def _guarded(what: str, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except Exception:
        log.exception("%s failed: a defect of kvfs", what)


class SingleFlight(Generic[K, F]):
    """The flights that have not ended, by key."""

    def __init__(self, defect: Callable[[K, Exception], None]) -> None:
        """defect: logs an error that the work must not raise."""
        self._flights: dict[K, F] = {}
        self.defect = defect

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[F]:
        return iter(self._flights.values())

    def get(self, key: K) -> F | None:
        """Return the flight that the caller can wait for, or None."""
        return self._flights.get(key)

    def begin(self, key: K, flight: F, work: Callable[[], Awaitable[None]]) -> F:
        """Begin the work of a key that has no flight."""
        start_task(f"the work for {key}", partial(self._run, key, self.enter(key, flight), work))
        return flight

    def enter(self, key: K, flight: F) -> F:
        """As `begin`, but the caller does the work, and must always call `end`."""
        self._flights[key] = flight
        return flight

    def end(self, key: K) -> None:
        self._flights.pop(key).end()

    def stop(self) -> None:
        """Cancel all work at the unmount."""
        for flight in self:
            flight.scope.cancel()

    async def _run(self, key: K, flight: F, work: Callable[[], Awaitable[None]]) -> None:
        try:
            with flight.scope:
                await work()
                flight.problem = None
        except (KvfsError, OSError) as error:
            flight.problem = error
        except Exception as error:  # noqa: BLE001 (`defect` logs it)
            flight.problem = TierError(f"a defect of kvfs: {error!r}")
            self.defect(key, error)
        finally:
            self.end(key)


async def wait_while_up(event: trio.Event, until: float, health: Health) -> None:
    """Wait for an event until a time, or until the tier is down."""
    with trio.move_on_at(until):
        while not event.is_set() and not health.down:
            with trio.move_on_after(GLANCE):
                await event.wait()
