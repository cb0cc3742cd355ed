"""Telling systemd: readiness, status and watchdog, as sd_notify(3) and sd_watchdog_enabled(3) say.

Contract: without NOTIFY_SOCKET all of it does nothing. The protocol is a datagram of lines.
"""

import math
import os
import socket
import time


class Notify:
    """Reports to systemd. `watchdog`: seconds between two signs of life, 0 if it wants none."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        theirs = os.environ.pop("WATCHDOG_PID", "")
        microseconds = os.environ.pop("WATCHDOG_USEC", "0")
        ours = not theirs or int(theirs) == os.getpid()
        self.watchdog = int(microseconds) / 2e6 if ours else 0.0
        self._alive = math.inf  # the time of the last sign of life

    def say(self, **state: str) -> None:
        """Send READY="1", STATUS="..." and the like. If systemd is gone, the keeper goes on."""
        if not self._address:
            return
        lines = "\n".join(f"{name}={value}" for name, value in state.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            try:
                to.sendto(lines.encode(), self._address)
            except OSError:
                self._address = ""

    def ready(self, status: str) -> None:
        """Say that the mount answers, or answers again; from now on systemd waits for `alive`."""
        self.say(READY="1", STATUS=status)
        self._alive = -math.inf

    def alive(self, status: str) -> None:
        """Send a sign of life, if the last one is `watchdog` seconds old.

        A loop may call it often.
        """
        now = time.monotonic()
        if self.watchdog and now - self._alive >= self.watchdog:
            self.say(WATCHDOG="1", STATUS=status)
            self._alive = now

    def reloading(self, status: str) -> None:
        """Say that the mount is reloading, until `ready`."""
        clock = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.say(RELOADING="1", MONOTONIC_USEC=str(clock), STATUS=status)
