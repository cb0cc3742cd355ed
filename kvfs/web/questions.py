"""What the page asks of the daemon beside its status: rankings of objects, and one object's life.

Contract: of each ranking there is one answer in RANKED seconds, whoever asks; single objects are
asked for EACH times a second at most in all: a question that had to wait longer than LONGEST is
refused. So a browser, or a thousand, costs the daemon next to nothing. Not for HTTP.
"""

import threading
import time
from pathlib import Path
from typing import Any

from kvfs.control import request_within
from kvfs.errors import KvfsError
from kvfs.web.serving import Snapshot

RANKED = 5.0  # s
COUNT = 50
EACH = 10.0  # a second
LONGEST = 1.0  # s that a question waits for its turn
PATIENCE = 5.0  # s
ORDERS = ("hot", "large")


class BusyError(KvfsError):
    """So much is asked at the moment that this question is not."""


class Questions:
    """To the daemon of one mount."""

    def __init__(self, mountpoint: Path) -> None:
        self.mountpoint = mountpoint
        self._rankings = {order: self._ranking(order) for order in ORDERS}
        self._lock = threading.Lock()
        self._next = 0.0

    def _ranking(self, order: str) -> Snapshot:
        def ask(seconds: float) -> dict[str, Any] | None:
            try:
                return request_within(self.mountpoint, seconds, "objects", order=order, count=COUNT)
            except KvfsError:  # what there is to say about it is in the daemon's log
                return None

        return Snapshot(ask, RANKED)

    def ranking(self, order: str) -> dict[str, Any] | None:
        """The first COUNT objects; None without an answer. KeyError for no order."""
        return self._rankings[order].look(PATIENCE)

    def object(self, path: str) -> dict[str, Any]:
        """One file or directory, by a path on the mount or below its top. Raises KvfsError."""
        self._wait_turn()
        below = path.removeprefix(f"{self.mountpoint}/")
        below = "" if below == str(self.mountpoint) else below
        return request_within(self.mountpoint, PATIENCE, "stat", path=below)

    def _wait_turn(self) -> None:
        """Raises BusyError if that were too long."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            if turn - now > LONGEST:
                raise BusyError("too many questions at the moment: ask again in a second")
            self._next = turn + 1 / EACH
        time.sleep(turn - now)
