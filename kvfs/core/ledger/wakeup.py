"""A signal that wakes the dispatcher's loop, which starts movers and empties the trash.

Contract: `wake` may be called at any time, also before the loop waits. Only the loop calls `rearm`.
"""

import trio


class Wakeup:
    """The signal. The loop waits for `event`, which is set while something is to do."""

    def __init__(self) -> None:
        self.event = trio.Event()

    def wake(self) -> None:
        self.event.set()

    def rearm(self) -> None:
        """Make a new event. The loop calls this first, and then looks for something to do."""
        self.event = trio.Event()
