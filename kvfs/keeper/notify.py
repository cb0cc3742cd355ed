"""Telling systemd: readiness, status and watchdog, as sd_notify(3) and sd_watchdog_enabled(3) say.

Contract: without NOTIFY_SOCKET all of it does nothing. The protocol is a datagram of lines.
"""

import os
import socket


class Notify:
    """`watchdog` is how often (s) systemd wants to hear of us, 0 if it does not."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        theirs = os.environ.pop("WATCHDOG_PID", "")
        microseconds = os.environ.pop("WATCHDOG_USEC", "0")
        ours = not theirs or int(theirs) == os.getpid()
        self.watchdog = int(microseconds) / 2e6 if ours else 0.0

    def say(self, **state: str) -> None:
        """Send READY="1", STATUS="..." and the like. A systemd that is gone is no reason to end."""
        if not self._address:
            return
        lines = "\n".join(f"{name}={value}" for name, value in state.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            try:
                to.sendto(lines.encode(), self._address)
            except OSError:
                self._address = ""
