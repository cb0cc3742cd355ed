"""A daemon process as the keeper sees it: its start, its messages, and its end.

Contract: a daemon leads a process group of its own, in which its movers are too. The daemon counts
as dead when its end of the channel is closed. A thread that waits in the kernel may keep the
process alive for longer. It must not delay the next daemon.
"""

import math
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from kvfs.control.channel import Channel, Closed, Message

SLICE = 0.1  # s; after each slice of a wait, the keeper tells systemd that it lives
REAP = 0.5  # s of waiting for a killed process group; movers that wait for a disk take longer


class DaemonFailed(Exception):  # noqa: N818 (the daemon did, not we)
    """The expected message will not come; the text says why. `exit` is the command's exit code."""

    def __init__(self, why: str, code: int = 1) -> None:
        super().__init__(why)
        self.exit = code


class Process:
    """A daemon that is loading, standing by, or serving."""

    _left: ClassVar[list["Process"]] = []  # killed processes whose groups had not ended

    def __init__(
        self, command: Sequence[str], stderr: int, waiting: Callable[[], None] = lambda: None
    ) -> None:
        """Start the process. While the keeper waits for it, it calls `waiting` every SLICE."""
        self._waiting = waiting
        self.channel, theirs = Channel.pair()
        self._popen = subprocess.Popen(
            [*command, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            cwd="/",  # keeps no directory busy, and Python imports nothing from the caller's
            start_new_session=True,
        )
        theirs.close()
        self.pid = self._popen.pid
        self.closed = False
        self.started = self.heard = time.monotonic()
        self.silence = 0.0  # s without a message, after which the keeper ended it; 0: it did not
        self.last_messages: dict[str, Message] = {}  # the last message of each kind

    def listen(self, seconds: float = 0.0) -> None:
        """Receive the process's messages. Wait at most this many seconds for the first one."""
        while not self.closed and select.select([self.channel], [], [], max(0.0, seconds))[0]:
            try:
                message, _ = self.channel.receive()
            except Closed:
                self.closed = True
                return
            self.heard, seconds = time.monotonic(), 0.0
            self.last_messages[message["what"]] = message

    @property
    def seconds_left(self) -> float:
        """The seconds until the process's own deadline for its end. Infinite if it set none."""
        ending = self.last_messages.get("ending")
        return math.inf if ending is None else self.heard + ending["seconds"] - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether the mount has ended, or the daemon's deadline for the end has passed."""
        if "ending" not in self.last_messages:
            return self.closed and "ended" in self.last_messages
        return self.closed or "ended" in self.last_messages or self.seconds_left <= 0

    def expect(self, what: str, seconds: float) -> Message:
        """Wait for the message `what`, and return it.

        Raises DaemonFailed if the process reports an error, dies or is silent.
        """
        deadline = time.monotonic() + seconds
        while what not in self.last_messages:
            if error := self.last_messages.get("error"):
                raise DaemonFailed(error["error"], error.get("exit", 1))
            if self.closed:
                raise DaemonFailed(f"the daemon {self.death()} before it was {what}")
            if time.monotonic() > deadline:
                raise DaemonFailed(f"the daemon was not {what} within {seconds:.0f} s")
            self._waiting()
            self.listen(min(SLICE, deadline - time.monotonic()))
        return self.last_messages[what]

    def tell(self, what: str, *, descriptor: int | None = None, **facts: object) -> None:
        """Send it a message. Raises DaemonFailed if it is gone."""
        try:
            self.channel.send(what, descriptor=descriptor, **facts)
        except Closed:
            self.closed = True
            raise DaemonFailed(f"the daemon {self.death()}") from None

    def dismiss(self) -> None:
        """Let it end by itself: it removes the RAM tier that it made for a mount that failed."""
        self.channel.close()
        self.closed, deadline = True, time.monotonic() + REAP
        while not self.reaped() and time.monotonic() < deadline:
            time.sleep(0.002)

    def end(self) -> None:
        """Kill it and its movers, and wait a moment until they are gone."""
        deadline = time.monotonic() + REAP
        while not self.reaped() and time.monotonic() < deadline:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                break
            time.sleep(0.002)
        if not self.reaped():
            self._left.append(self)
        self.closed = True
        self.channel.close()
        if scratch := self.last_messages.get("ready", {}).get("scratch"):
            shutil.rmtree(scratch, ignore_errors=True)  # there is none after a proper end

    def waits_for_disk(self) -> bool:
        """Return whether a thread of its group waits in the kernel, mostly for a disk.

        That is state D of proc_pid_stat(5); the group is the third field behind the name.
        """
        for path in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
            try:
                state, _, group, *_ = path.read_text("ascii", "replace").rpartition(")")[2].split()
            except (OSError, ValueError):
                continue  # it has just ended
            if state == "D" and int(group) == self.pid:
                return True
        return False

    @classmethod
    def reap_left(cls) -> None:
        """Reap the killed processes that have ended since. Nothing blocks."""
        cls._left[:] = [one for one in cls._left if not one.reaped()]

    def reaped(self) -> bool:
        """Return whether no process of its group is left among our children."""
        while True:
            try:
                pid, status = os.waitpid(-self.pid, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.pid:
                self._popen.returncode = os.waitstatus_to_exitcode(status)

    def death(self) -> str:
        """Say how it ended, in words that follow 'the daemon'."""
        deadline = time.monotonic() + REAP
        while not self.reaped() and self._popen.returncode is None and time.monotonic() < deadline:
            time.sleep(0.002)
        code = self._popen.returncode
        if code is None:
            how = "closed its channel"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with {code}"
        return f"{how}, after {self.silence:.1f} s without an answer" if self.silence else how
