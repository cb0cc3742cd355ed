"""Waits that end when the process for which they are is killed.

Contract: the kernel asks for a thread, and waits for the answer even when that thread is killed, so
a wait that may take long goes on only as long as somebody wants its end. Looked at once a second,
in /proc: libfuse keeps FUSE_INTERRUPT to itself, and that comes for any signal, also one with a
handler, after which open(2) is expected to go on. A thread that the daemon does not see (of another
PID namespace, or with hidepid) waits to the end. Not for a FLUSH: it does not say whose it is.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import trio

PERIOD = 1.0  # s
_PENDING = 28  # place of the pending signals in /proc/TID/stat, counted behind the name
_KILL = 1 << signal.SIGKILL - 1


def killed(thread: int) -> bool:
    """Whether a signal will end it: SIGKILL, which the kernel makes of others but to dump core."""
    try:
        text = Path(f"/proc/{thread}/stat").read_text("ascii", "replace")
    except OSError:
        return False  # not seen from here
    return bool(int(text.rpartition(")")[2].split()[_PENDING]) & _KILL)


class Waits:
    """Those under way."""

    def __init__(self) -> None:
        self._threads: dict[trio.CancelScope, int] = {}

    @contextlib.contextmanager
    def unless_killed(self, thread: int) -> Iterator[trio.CancelScope]:
        """Wait in the block; its scope says whether it was cut short."""
        with trio.CancelScope() as scope:
            self._threads[scope] = thread
            try:
                yield scope
            finally:
                del self._threads[scope]

    async def watch(self) -> None:
        """End those that nobody wants any more; as long as the mount."""
        while True:
            await trio.sleep(PERIOD)
            for scope, thread in list(self._threads.items()):
                if killed(thread):
                    scope.cancel()
                await trio.lowlevel.checkpoint()
