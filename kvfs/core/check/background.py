"""A check beside a mount: a job, started by one request and looked at by others.

Contract: one check at a time, without a number. At most FINDINGS_MAX findings wait for a request;
then the check waits, too. The check ends when no request has come for PATIENCE seconds. A check
that fails does not stop the mount.
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from kvfs.core.check.check import check
from kvfs.core.check.survey import Finding, Survey
from kvfs.core.jobs.job import Job, Jobs
from kvfs.core.ledger.ledger import Ledger
from kvfs.errors import ConfigError, ControlError, KvfsError
from kvfs.movement.movers import MoverPool
from kvfs.movement.remote import Remote

log = logging.getLogger(__name__)

FINDINGS_MAX = 1000  # in one answer
PATIENCE = 10.0  # s that a check goes on after the last request


class CheckJob(Job):
    """A check as a job. `findings` are those that no request has got yet."""

    def __init__(self, survey: Callable[[Callable[[Finding], Awaitable[None]]], Survey]) -> None:
        """survey: makes a survey of the whole mount; its argument takes each finding."""
        super().__init__(())
        self.survey = survey(self.tell)
        self.findings: list[Finding] = []
        self.failed = ""
        self.room = trio.Event()
        self.scope = trio.CancelScope()

    async def tell(self, finding: Finding) -> None:
        if finding.state == "repaired":
            log.warning(
                "check: %s (inode %d): %s; repaired: %s",
                *(finding.path, finding.ino, finding.what, finding.cure),
            )
        while len(self.findings) >= FINDINGS_MAX:
            self.room = trio.Event()
            await self.room.wait()
        self.findings.append(finding)

    async def run(self) -> None:
        try:
            await check(self.survey)
        except (KvfsError, OSError) as error:
            self.failed = str(error)
            log.error("check: the check cannot go on, start it again: %s", error)
        except Exception as error:
            self.failed = f"{error!r}; the daemon's log has more"
            log.exception("check: a defect of kvfs")

    def describe(self) -> dict[str, Any]:
        """Return the progress, and the findings since the last request."""
        found, self.findings = self.findings, []
        self.room.set()
        return self.survey.answer(found, ended=self.over, failed=self.failed)


class Background:
    """The checks of a mount. Run `run()` as long as the mount lives."""

    def __init__(
        self, ledger: Ledger, movers: MoverPool, jobs: set[int], remote: Remote | None = None
    ) -> None:
        self._ledger = ledger
        self._movers = movers
        self._busy = jobs
        self._remote = remote
        self._jobs = Jobs[CheckJob](kept=1)
        self._last: CheckJob | None = None

    async def run(self) -> None:
        while True:
            job = await self._jobs.next()
            job.scope.deadline = trio.current_time() + PATIENCE
            with job.scope:
                await job.run()
            if job.scope.cancelled_caught:
                job.failed = f"nobody has asked for the check in {PATIENCE:.0f} s"
                log.warning("check: %s", job.failed)
            self._jobs.end(job)

    # Requests of clients

    async def start(self, *, repair: bool, hashes: bool, bucket: bool = False) -> dict[str, Any]:
        """Begin a check. Raises ControlError if one is running, ConfigError without a bucket."""
        if bucket and self._remote is None:
            raise ConfigError("--bucket: this mount has no bucket; mount it with s3=")
        if self._jobs.alive:
            raise ControlError(
                "a check is running already: wait for it, or end its command and wait "
                f"{PATIENCE:.0f} s"
            )
        survey = partial(
            Survey,
            *(self._ledger, self._movers, self._busy),
            repair=repair,
            hashes=hashes,
            live=True,
            remote=self._remote if bucket else None,
        )
        self._last = CheckJob(survey)
        self._jobs.begin(self._last)
        return {}

    async def look(self) -> dict[str, Any]:
        """Return the progress, and the findings since the last request. Raises ControlError."""
        if self._last is None:
            raise ControlError(
                "no check was started since this daemon began, which took over: begin it again"
            )
        self._last.scope.deadline = trio.current_time() + PATIENCE
        return self._last.describe()
