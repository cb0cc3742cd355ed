"""Circuit breaker: counts failed jobs, tells the disk's health, and logs each kind once.

Contract: a failure pauses demotions for a moment, since all of them go to the same disk. The job
that copies calls `over` after a success. Not for deciding whether a failure matters.
"""

import errno
import logging
import time
from collections import Counter

import trio

from kvfs.movement.movers import MoverOverdueError
from kvfs.tiers import NvmeTier

log = logging.getLogger(__name__)

PAUSE = 1.0  # s without demotions after one failed


class CircuitBreaker:
    """`failures` in a row, of demotions and other jobs; `reason` of the last one."""

    def __init__(self, nvme: NvmeTier, counters: Counter[str]) -> None:
        self.nvme = nvme
        self.counters = counters
        self.failures = 0
        self.reason = ""
        self._quiet_until = 0.0
        self._logged = ""  # the last failure that was logged

    @property
    def down(self) -> bool:
        """Whether NVMe is down. Then kvfs moves and unlinks nothing: both need NVMe."""
        return self.nvme.health.down

    @property
    def pausing(self) -> bool:
        """Whether no demotion should begin now."""
        return trio.current_time() < self._quiet_until

    def failed(self, what: str, named: object, error: Exception) -> None:
        self.counters["job_failures"] += 1
        self._tell_health(what, error)
        kind = f"{what}: {type(error).__name__} {getattr(error, 'errno', '')}"
        self.pause(f"{what} of {named} failed, nothing is changed: {error}", kind)

    def pause(self, reason: str, kind: str = "", *, counts: bool = True) -> None:
        """Pause demotions and log the reason; at DEBUG if the last one had the same kind."""
        self._quiet_until = trio.current_time() + PAUSE
        self.failures += counts
        self.reason = reason
        kind = kind or reason
        log.log(logging.DEBUG if kind == self._logged else logging.WARNING, "%s", reason)
        self._logged = kind

    def over(self) -> None:
        """A job went well."""
        self.failures, self._logged = 0, ""

    def _tell_health(self, what: str, error: Exception) -> None:
        """Tell the health of NVMe: all movers use it, and RAM can only be full."""
        code = error.errno if isinstance(error, OSError) else None
        if code in {errno.ENOSPC, errno.EDQUOT, errno.ENOENT}:
            return
        if code is not None or isinstance(error, MoverOverdueError):
            kind = "no answer" if code is None else errno.errorcode.get(code, str(code))
            self.nvme.health.failed(time.monotonic(), f"{what}: {kind}")
