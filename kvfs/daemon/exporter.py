"""A process beside the daemon that shows metrics, or the page: its socket, start, successors.

Contract: the daemon takes the socket before it mounts, and refuses the mount if it cannot. A daemon
that takes over goes on without the socket and tries again. The process is in the daemon's group, so
it ends with the daemon for any cause of death; the next daemon starts its own. Each option has its
own process, so that browsers do not delay the answer to a scrape.
"""

import logging
import os
import socket
import sys
from pathlib import Path

import trio

from kvfs.config import Config
from kvfs.errors import ConfigError
from kvfs.metrics.address import Address

log = logging.getLogger(__name__)

PAUSE = 1.0  # s until the next try for the address, or the next start of the process


SHOWN = {"metrics": "metrics", "web": "web pages"}  # by option; the package has the same name


class Exporter:
    """The process of one option of a mount."""

    def __init__(self, option: str, address: Address, mountpoint: Path) -> None:
        self.option = option
        self.what = SHOWN[option]
        self.address = address
        self.mountpoint = mountpoint
        self.why = ""  # the reason why nothing is shown at the moment
        self._socket: socket.socket | None = None

    @classmethod
    def prepare(cls, config: Config, *, takeover: bool) -> "list[Exporter]":
        """Make one for each given option. Raises ConfigError, but not at a takeover."""
        made: list[Exporter] = []
        for option, address in config.addresses.items():
            one = cls(option, address, config.mountpoint)
            try:
                one.listen()
            except ConfigError as error:
                if not takeover:
                    for other in made:
                        other.close(ended=True)
                    raise
                one.why = str(error)
                log.warning("no %s for the moment: %s", one.what, error)
            made.append(one)
        return made

    def listen(self) -> None:
        """Listen on the address. Raises ConfigError."""
        self._socket = self.address.listen(self.option)
        self.why = ""
        log.info(
            "%s: shown at %s, to %s",
            self.what,
            self.address,
            "this machine" if self.address.private else "everybody who reaches that address",
        )

    async def run(self) -> None:
        """Run the process again and again, until cancelled."""
        while True:
            if self._socket is None:
                try:
                    self.listen()
                except ConfigError as error:
                    self.why = str(error)
                    log.debug("still no %s: %s", self.what, error)
            if self._socket is not None:
                code = await self._show(self._socket.fileno())
                log.warning("the process that shows %s ended with %d: again", self.what, code)
            await trio.sleep(PAUSE)

    async def _show(self, listening: int) -> int:
        """Run the process once; the end of this daemon closes its standard input and ends it."""
        module = f"kvfs.{self.option}"
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        try:
            done = await trio.run_process(
                [sys.executable, "-m", module, str(self.mountpoint), str(listening)],
                stdin=theirs,
                pass_fds=[listening],
                check=False,
                deliver_cancel=_kill,
            )
        finally:
            os.close(theirs)
            os.close(ours)
        return done.returncode

    def close(self, *, ended: bool) -> None:
        """Close the socket. `ended`: the file system was unmounted; else a successor takes it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if ended:
                self.address.remove()


async def _kill(process: trio.Process) -> None:
    """Kill the process: it has nothing to finish, and ignores softer signals."""
    process.kill()
