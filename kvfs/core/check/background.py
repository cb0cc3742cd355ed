"""A check beside a mount: started by one request, looked at by others.

Contract: one at a time. Findings wait for who asks, so many at most, and the check waits with them;
it ends when nobody has asked for a while. Whatever happens to it, the mount goes on.
"""

import logging
import math
from typing import Any

import trio

from kvfs.core.check.check import check
from kvfs.core.check.survey import Finding, Survey
from kvfs.core.ledger.ledger import Ledger
from kvfs.errors import ConfigError, ControlError, KvfsError
from kvfs.movement.movers import Movers
from kvfs.movement.remote import Remote

log = logging.getLogger(__name__)

FINDINGS_MAX = 1000  # in one answer
PATIENCE = 10.0  # s that a check goes on after somebody last asked for it


class Background:
    """Run `run()` as long as the mount lives."""

    def __init__(
        self, ledger: Ledger, movers: Movers, jobs: set[int], remote: Remote | None = None
    ) -> None:
        self._ledger = ledger
        self._movers = movers
        self._jobs = jobs
        self._remote = remote
        self._wanted = trio.Event()
        self._survey: Survey | None = None
        self._findings: list[Finding] = []
        self._room = trio.Event()
        self._scope = trio.CancelScope()
        self._ended = True
        self._failed = ""

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            assert self._survey is not None
            with trio.CancelScope(deadline=trio.current_time() + PATIENCE) as self._scope:
                await self._check(self._survey)
            if self._scope.cancelled_caught:
                self._failed = f"nobody has asked for the check in {PATIENCE:.0f} s"
                log.warning("check: %s", self._failed)
            self._ended = True

    async def _check(self, survey: Survey) -> None:
        try:
            await check(survey)
        except (KvfsError, OSError) as error:
            self._failed = str(error)
            log.error("check: it cannot go on: %s", error)
        except Exception as error:
            self._failed = f"{error!r}; the daemon's log has more"
            log.exception("check: a defect of kvfs")

    async def _tell(self, finding: Finding) -> None:
        if finding.state == "repaired":
            log.warning(
                "check: inode %d %s: %s; repaired: %s",
                finding.ino,
                finding.path,
                finding.what,
                finding.cure,
            )
        while len(self._findings) >= FINDINGS_MAX:
            self._room = trio.Event()
            await self._room.wait()
        self._findings.append(finding)

    # What clients ask

    async def start(self, *, repair: bool, hashes: bool, bucket: bool = False) -> dict[str, Any]:
        """Begin a check. Raises ControlError if there is one, ConfigError if there is no bucket."""
        if bucket and self._remote is None:
            raise ConfigError("--bucket: this mount has no bucket; mount it with s3=")
        if not self._ended:
            raise ControlError(
                "a check is running already: wait for it, or end its command and wait "
                f"{PATIENCE:.0f} s"
            )
        self._survey = Survey(
            self._ledger,
            self._movers,
            self._jobs,
            self._tell,
            repair=repair,
            hashes=hashes,
            live=True,
            remote=self._remote if bucket else None,
        )
        self._findings, self._failed, self._ended = [], "", False
        self._scope = trio.CancelScope(deadline=math.inf)
        self._wanted.set()
        return {}

    async def look(self) -> dict[str, Any]:
        """How far it is, and what was found since somebody last asked."""
        if self._survey is None:
            raise ControlError(
                "no check was started since this daemon began, which took over: begin it again"
            )
        self._scope.deadline = trio.current_time() + PATIENCE
        found, self._findings = self._findings, []
        self._room.set()
        return self._survey.answer(found, ended=self._ended, failed=self._failed)
