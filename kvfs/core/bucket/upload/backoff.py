"""Backoff: delays requests after failures of the store, longer each time, with jitter.

Contract: the backoff delays uploads and deletions, for which no operation waits. They begin only
while the backoff is `ready`: its pause is over, and neither the bucket nor NVMe is down. A task
calls `worked` when an upload has succeeded, and `reset` when the store answers again. `failed`
counts a failure, tells the bucket's health of it, and logs each kind of failure once. Synchronous.
Not for failures of single objects, nor for the health of the store (`core/bucket/node.py`).
"""

import logging
import random

import trio

from kvfs.core.moves.breaker import CircuitBreaker
from kvfs.tiers import Bucket

log = logging.getLogger(__name__)

LONGEST_PAUSE = 20.0  # s without requests, after many failures in a row


class Backoff:
    """The delay. `refused`: the last upload failed. `breaker` knows whether NVMe is down."""

    def __init__(self, bucket: Bucket, breaker: CircuitBreaker) -> None:
        self.bucket = bucket
        self.breaker = breaker
        self.refused = False
        self._failures = 0  # in a row
        self._quiet_until = 0.0
        self._logged = ""

    @property
    def ready(self) -> bool:
        """Whether kvfs may send requests to the store now."""
        if self.bucket.terms is None or self.bucket.health.down or self.breaker.down:
            return False
        return trio.current_time() >= self._quiet_until

    def failed(self, what: str, error: Exception, of: str = "") -> float:
        """Note a failure of the store (not of one object). Returns the pause in seconds.

        Each further failure makes the pause longer.
        """
        self.bucket.failed(what, error)
        kind = type(error).__name__
        level, self._logged = logging.DEBUG if kind == self._logged else logging.WARNING, kind
        self._failures += 1
        pause = min(LONGEST_PAUSE, 2.0 ** min(self._failures - 1, 10)) * random.uniform(0.5, 1.0)  # noqa: S311 (jitter)
        self._quiet_until = max(self._quiet_until, trio.current_time() + pause)
        told = (self.bucket.place, what, of, pause, error)
        log.log(level, "%s: the %s%s is tried again in %.1f s: %s", *told)
        return pause

    def worked(self) -> None:
        """Note that an upload succeeded."""
        self._failures, self._logged, self.refused = 0, "", False

    def reset(self) -> None:
        """End the pause: the store answers."""
        self._failures, self._quiet_until, self.refused = 0, 0.0, False
