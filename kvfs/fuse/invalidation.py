"""Telling the kernel that names are gone.

Contract: `gone` never blocks and may be called from the loop. The kernel takes directory locks for
a notification, which a request that waits for the loop may hold, so a thread of its own sends
them. The queue is bounded: what does not fit is left to the kernel's own timeout, since an open of
a name that is gone is answered ESTALE anyway.
"""

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

QUEUE_MAX = 65536


class Invalidation:
    """`send(parent, name)` tells the kernel; FileNotFoundError means that it did not know."""

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self._send = send
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(QUEUE_MAX)
        self._thread = threading.Thread(target=self._run, name="invalidation", daemon=True)
        self.lost = 0

    def start(self) -> None:
        self._thread.start()

    def gone(self, parent: int, name: bytes, ino: int) -> None:
        del ino
        try:
            self._queue.put_nowait((parent, name))
        except queue.Full:
            self.lost += 1

    def stop(self) -> None:
        """To be called when the mount is gone: what is still queued fails at once."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._send(*item)
            except FileNotFoundError:
                continue  # the kernel had no such entry
            except OSError as error:
                log.debug("entry %r in %d was not invalidated: %s", item[1], item[0], error)
