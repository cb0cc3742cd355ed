"""Events about a pool, for people: its nodes, its index, nginx and conflicts.

Contract: synchronous; `on_event` takes the events, of kind `pool`, and may change. `what` says what
has happened (docs/commands.md). A change of state is told each time. A thing that may happen to
many objects is told once in SELDOM_S for each cause. Not for the log: the callers write it.
"""

from collections.abc import Callable

import trio

SELDOM_S = 600.0  # s
CAUSES = 1000  # that are remembered


class News:
    """The events of one pool."""

    def __init__(self) -> None:
        self.on_event: Callable[..., None] = lambda *_, **__: None
        self._told: dict[str, float] = {}  # when each cause was told, the oldest first

    def tell(self, what: str, **facts: object) -> None:
        """Make an event. facts: plain values."""
        self.on_event("pool", what=what, **facts)

    def tell_seldom(self, what: str, cause: str, **facts: object) -> bool:
        """Make an event, and return True, unless there was one of this cause lately."""
        now = trio.current_time()
        if now - self._told.get(cause, float("-inf")) < SELDOM_S:
            return False
        self._told.pop(cause, None)
        self._told[cause] = now
        if len(self._told) > CAUSES:
            del self._told[next(iter(self._told))]
        self.tell(what, **facts)
        return True
