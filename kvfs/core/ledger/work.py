"""A signal: there is work for the movers, or for the task that empties the trash.

Contract: `wake` may be called at any time; the one task that waits begins anew by `rearm`.
"""

import trio


class Work:
    """`event` is set when there is something to do."""

    def __init__(self) -> None:
        self.event = trio.Event()

    def wake(self) -> None:
        self.event.set()

    def rearm(self) -> None:
        """Wait from now on for what comes next. What is there by now, the caller does."""
        self.event = trio.Event()
