"""A signal: there is work for the movers, or for the task that empties the trash.

Contract: `wake` may be called at any time. The one task that waits calls `rearm` to wait again.
"""

import trio


class Work:
    """The signal. `event` is set when there is work."""

    def __init__(self) -> None:
        self.event = trio.Event()

    def wake(self) -> None:
        self.event.set()

    def rearm(self) -> None:
        """Make a new event for the next work. The caller does the work that is there by now."""
        self.event = trio.Event()
