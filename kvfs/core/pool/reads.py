"""The reads of other nodes here, as nginx reports them: counts, and uses of the objects.

Contract: `run` makes the socket and reads it, as long as the mount. Without a socket it ends, and
the node still serves. A read by another node is a use of the object, as an open is: the object goes
last in its orders of eviction, and its time of access moves. A read of an object that is handed
over is no use (`leaves`). No read is an open of its namespace, so hit ratios leave it out. A turn
of the loop takes at most AT_ONCE reports. nginx never waits: a report
for which the socket has no room is lost, so the counts may be too low. A datagram that is no report
is counted, and nothing else. The lease tells the other nodes the `load`.
"""

import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from http import HTTPStatus
from pathlib import Path

import trio
import trio.lowlevel

from kvfs.catalog import Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.errors import CatalogError, ConfigError
from kvfs.pool import nginx
from kvfs.pool.nginx import Report

log = logging.getLogger(__name__)

AT_ONCE = 256  # reports in a turn of the loop
LOAD_S = 10.0  # s over which the load is averaged: a lease has it up to 9 s later
LONGEST = 4096  # bytes of a datagram; nginx sends 2048 at most
SENT = (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT)


class PeerReads:
    """The reads of one mount's objects by other nodes."""

    def __init__(self, ledger: Ledger, path: Path, leaves: Callable[[Inode], bool]) -> None:
        """path: of the socket, see `Served.reports`. leaves: whether an object is handed over."""
        self.ledger = ledger
        self.path = path
        self.leaves = leaves
        self.counters = Counter(
            {"served": 0, "served_bytes": 0, "served_failed": 0, "reports_wrong": 0}
        )
        self._recent, self._at = 0.0, time.monotonic()  # bytes, each less by exp(-age / LOAD_S)

    @property
    def load(self) -> float:
        """Bytes/s that other nodes have read lately: an exponential average."""
        return self._recent * math.exp((self._at - time.monotonic()) / LOAD_S) / LOAD_S

    async def run(self) -> None:
        """Count the reports, for ever."""
        try:
            reports = await trio.to_thread.run_sync(self._listen)
        except (OSError, ConfigError) as error:
            log.warning("reads by other nodes are not counted: %s", error)
            return
        with reports:
            while True:
                await trio.lowlevel.wait_readable(reports)
                self.take(_waiting(reports))
                await trio.lowlevel.checkpoint()

    def _listen(self) -> socket.socket:
        """Make the socket, to which only nginx's user can write. Raises OSError, ConfigError."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return nginx.listen(self.path, nginx.account().pw_uid)

    def take(self, datagrams: Iterable[bytes]) -> None:
        """Count some reports, and their objects as used."""
        used: dict[int, Inode] = {}
        before = self.counters["served_bytes"]
        for datagram in datagrams:
            report = nginx.read_report(datagram)
            if report is None:
                self.counters["reports_wrong"] += 1
            elif report.status not in SENT:
                self.counters["served_failed"] += 1
            else:
                self.counters["served"] += 1
                self.counters["served_bytes"] += report.sent
                if (inode := self._object(report)) is not None and not self.leaves(inode):
                    used[inode.ino] = inode
        self._recent = self.load * LOAD_S + self.counters["served_bytes"] - before
        self._at = time.monotonic()
        for inode in used.values():
            self.ledger.accounts.touch(inode)
        now = time.time_ns()
        self.ledger.uses.note_closed(self.ledger.namespaces.unused(used.values(), now), now)

    def _object(self, report: Report) -> Inode | None:
        """The object of a report; None if it has gone, or is another version now."""
        ledger = self.ledger
        ino, version = (int(number, 16) for number in report.file.split("."))
        if ino >= 1 << 64 or ino in ledger.table.staging:
            return None
        try:
            inode = ledger.table.inode(ino)
        except CatalogError as error:
            log.debug("a read by another node is no use of its object: %s", error)
            return None
        same = inode is not None and inode.version == version and ledger.accounts.accounted(inode)
        return inode if same else None


def _waiting(reports: socket.socket) -> Iterable[bytes]:
    """Give the datagrams that wait, at most AT_ONCE."""
    for _ in range(AT_ONCE):
        try:
            yield reports.recv(LONGEST)
        except BlockingIOError:
            return
