"""The files of `pool_tls=` and `pool_credentials=`: kvfs reads them again when they change.

Contract: `run` looks at the files each LOOK_S, and raises nothing. nginx and the connections to the
index use renewed files from then on, and connections that stand go on. Files that do not fit
together change nothing, nor does a password before the index takes it: `certificate_problem` and
`password_problem` say why. The movers read the certificates on their own (`kvfs.pool.peer_file`).
`validity` is that of the certificate in use.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from kvfs.core.pool.news import News
from kvfs.errors import ConfigError, KvfsError
from kvfs.pool import certificates, credentials
from kvfs.pool.certificates import Validity
from kvfs.pool.errors import IndexDownError
from kvfs.pool.member import Membership
from kvfs.pool.servers import Servers

log = logging.getLogger(__name__)

LOOK_S = 5.0  # s between two looks at the files
SOON_S, SOON_SHARE = 14 * 86400.0, 5  # the end of a certificate is near: s, and its last fifth
SAID_S = 86400.0  # s between two warnings of it


class Renewal:
    """The files of one node. `reload` has nginx read the certificates again; it blocks."""

    def __init__(
        self, member: Membership, servers: Servers, news: News, reload: Callable[[], None]
    ) -> None:
        self.member = member
        self.servers = servers
        self.news = news
        self.reload = reload
        self.validity: Validity | None = None
        self.certificate_problem = self.password_problem = ""  # why a change is not used
        self._certificates: certificates.State = ()
        self._password: tuple[int, ...] = ()
        self._said_at = float("-inf")

    async def run(self) -> None:
        """Look at the files, for ever."""
        while True:
            await self.look()
            await trio.sleep(LOOK_S)

    async def look(self) -> None:
        """Look at the files, and use those that have changed. The first look uses them all."""
        if self.member.tls is not None:
            await self._look_at_certificates(self.member.tls)
        if self.member.credentials_file is not None:
            await self._look_at_password(self.member.credentials_file)

    async def _look_at_certificates(self, folder: Path) -> None:
        state = await trio.to_thread.run_sync(certificates.state, folder)
        # A certificate that is refused may become valid: its clock was ahead of ours.
        if state != self._certificates or self.certificate_problem:
            known, self._certificates = self._certificates, state
            try:
                self.validity = await self._renew(folder)
            except (KvfsError, OSError) as error:
                if state != known or str(error) != self.certificate_problem:
                    self.news.tell("certificate refused", why=str(error))
                    log.warning("kvfs cannot use the certificate of this node: %s", error)
                self.certificate_problem = str(error)
            else:
                self.certificate_problem = ""
                if known:
                    self._say_renewed(folder, self.validity)
        self._warn(folder)

    def _say_renewed(self, folder: Path, validity: Validity) -> None:
        self.news.tell("certificate renewed", until=validity.until)
        log.info(
            "kvfs uses the new files of pool_tls=%s: the certificate of this node is valid until "
            "%s",
            *(folder, date(validity.until)),
        )

    async def _renew(self, folder: Path) -> Validity:
        """Use the certificates as they are now. Raises ConfigError, KvfsError, OSError."""
        validity = await trio.to_thread.run_sync(certificates.expect_match, folder)
        if self.member.place.tls:
            self.servers.use(tls=await trio.to_thread.run_sync(certificates.of_index, folder))
        await trio.to_thread.run_sync(self.reload)
        return validity

    def _warn(self, folder: Path) -> None:
        """Say once a day that the certificate ends soon, or has ended."""
        now = trio.current_time()
        if self.validity is None or not self.ends_soon or now < self._said_at + SAID_S:
            return
        self._said_at = now
        self.news.tell("certificate ends", until=self.validity.until)
        log.warning(
            "the certificate of this node ends at %s: write a new one to pool_tls=%s",
            *(date(self.validity.until), folder),
        )

    @property
    def refused(self) -> bool:
        """Whether files that have changed are not used."""
        return bool(self.certificate_problem or self.password_problem)

    @property
    def ends_soon(self) -> bool:
        """Whether the certificate is in the last fifth of its time, and in its last 14 days."""
        if self.validity is None:
            return False
        since, until = self.validity
        return until - time.time() < min(SOON_S, (until - since) / SOON_SHARE)

    async def _look_at_password(self, file: Path) -> None:
        state = await trio.to_thread.run_sync(certificates.state_of, file)
        if state == self._password and not self.password_problem:
            return
        known, self._password = self._password, state
        try:
            found = await trio.to_thread.run_sync(credentials.read, file, os.environ)
            if found != self.servers.credentials:
                await self.servers.expect_login(found)
        except (ConfigError, IndexDownError) as error:
            if state != known or str(error) != self.password_problem:
                self.news.tell("password refused", why=str(error))
                log.warning("the password of the index stays as it was: %s", error)
            self.password_problem = str(error)
            return
        self.password_problem = ""
        if found != self.servers.credentials:
            self.servers.use(credentials=found)
            self.news.tell("password renewed")
            log.info("the index takes the new password of pool_credentials=%s", file)

    def describe(self) -> Mapping[str, Any] | None:
        """The certificate, for `kvfs status`; None without `pool_tls`."""
        if self.member.tls is None:
            return None
        since, until = self.validity or (None, None)
        return {
            "since": since,
            "until": until,
            "ends_soon": self.ends_soon,
            "problem": self.certificate_problem,
        }


def date(seconds: float) -> str:
    """Return a time in s since 1970 as a person reads it."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
