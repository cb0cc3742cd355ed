"""Is a tier's disk well? What failures, silence and probes make of that.

Contract: a state machine without a clock or a disk of its own. One failure makes a healthy tier
`suspect`, which changes nothing but that it is probed each second: the probe decides. A file in
a bad place of a good disk fails for ever and probes go well, so nothing else suffers. `down` is a
tier whose probe failed again, or where something got no answer; nothing new goes there. `stuck`
says that it was silence: then nobody may call it, since each caller would wait as well. A full
disk is not ill. `failed` may be called from any thread, the rest from the daemon's loop.
Not for deciding what a state means for objects: that is above.
"""

import logging
from collections.abc import Callable
from typing import Literal

log = logging.getLogger(__name__)

State = Literal["healthy", "suspect", "down"]

DOWN_AFTER = 2  # probes in a row that failed: one may have met a moment, as of a disk replugged
HEALTHY_AFTER = 3  # probes in a row that went well: a disk that flaps is not yet trusted


def _nobody(_before: State) -> None:
    """No one wants to know."""


class Health:
    """`since` is the time of the last change of `state`, `why` the last thing that went wrong."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.state: State = "healthy"
        self.why = ""
        self.since = now
        self.stuck = False
        self._good = self._bad = 0  # probes in a row
        self.told: Callable[[State], None] = _nobody  # of each change, with the state before

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
