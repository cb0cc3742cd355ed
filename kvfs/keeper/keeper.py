"""The keeper's loop: it keeps a mount served.

Contract: one thread, one loop. The loop stops for long steps such as a daemon's start. Each of
these steps has a time limit. If several daemons in a row die soon after
their start, the keeper logs the reason and unmounts. Then
clients get an error, and do not hang for ever.

There are two states: a daemon serves, or its successor is being started. Beside the daemon, a
standby has loaded all its code, because loading takes longer than a takeover (ARCHITECTURE.md,
"Measured").
"""

import json
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvfs import own_files, runtime
from kvfs.clock import REAL
from kvfs.control import peer
from kvfs.control.channel import PROTOCOL
from kvfs.errors import ConfigError, KvfsError
from kvfs.keeper import device
from kvfs.keeper.notify import Notify
from kvfs.keeper.process import DaemonFailed, Process

log = logging.getLogger("kvfs.keeper")

LOAD, START, HAND_OVER = 60.0, 60.0, 2.0  # s that a daemon may take for each
UPGRADE_START = 10.0  # s that the new version has before the old one returns
SHORT_LIFE = 0.25  # s; a daemon that dies sooner after its start counts towards the limit
DEATHS = 8  # in a row, before the keeper unmounts
BACK_OFF = 0.05  # s before the second start in a row, doubled for each further one
STANDBY_PAUSE = 30.0  # s until a standby that failed to load is tried again
CLIENT = 2.0  # s for a client's request; the loop does nothing else meanwhile
REQUEST_MAX = 1 << 20  # bytes
_CONFIG = "the options of this mount"
_CONFIG_CURE = "run kvfs set again; until then the options of the mount hold"
REFUSED = 2  # the exit code of a command whose options a daemon refused
NICENESS = 10  # of a process that loads while another one serves


class Keeper:
    """The keeper of one mount. `run` returns the exit code once the mount is gone."""

    def __init__(self, config: dict[str, Any], command: Sequence[str], stderr: int) -> None:
        self.config = config
        self.clock = REAL
        self.mountpoint = Path(config["mountpoint"])
        self.directory = runtime.runtime_dir(self.mountpoint)
        self.command = tuple(command)
        self.notify = Notify()
        self.takeovers = 0
        self.device = -1
        self.file_system = ""  # MAJOR:MINOR, by which others recognise files of this mount
        self.daemon: Process | None = None
        self.standby: Process | None = None
        self._stderr = stderr
        self._standby_after = 0.0
        self._deaths = 0
        self._wake, self._signals = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watchdog = 0.0

    # Signals

    def _catch(self) -> None:
        signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        # A terminal was closed, or a "reload" was asked for: there is nothing to read anew.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _signalled(self) -> None:
        with suppress(BlockingIOError):
            numbers = os.read(self._wake, 64)
            log.info("%s: unmounting on %s", self.mountpoint, signal.strsignal(numbers[-1]))
            self.notify.say(STOPPING="1", STATUS="unmounting")
            self._unmount()

    def _unmount(self) -> None:
        if refusal := device.unmount(self.mountpoint, lazy=False):
            log.info("%s: detached, it ends with the last open file: %s", self.mountpoint, refusal)
            device.unmount(self.mountpoint, lazy=True)

    # Starting

    def _spawn(self, command: Sequence[str], *, low_priority: bool) -> Process:
        process = Process(command, self._stderr, self._ping)
        if low_priority and os.geteuid() == 0:  # only root can lower the niceness again
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        return process

    def _serve(
        self, process: Process, config: dict[str, Any], *, patience: float, why: str = ""
    ) -> None:
        """Let a process serve the mount, and mount it if needed. Raises DaemonFailed, KvfsError.

        why: the reason of a takeover, for the events of the mount.
        """
        loaded = process.expect("loaded", LOAD)
        if loaded["protocol"] != PROTOCOL:
            raise DaemonFailed(
                f"kvfs {loaded['version']} speaks protocol {loaded['protocol']} with its keeper, "
                f"expected {PROTOCOL}: unmount, and mount with the new version"
            )
        deadline = self.clock.now() + patience
        process.tell(
            "serve",
            config=config,
            takeover=self.device >= 0,
            takeovers=self.takeovers + (self.device >= 0),
            keeper_pid=os.getpid(),
            why=why,
        )
        process.expect("prepared", patience)
        takeover = self.device >= 0
        if not takeover:
            self.device = device.mount(
                self.mountpoint, config["mount_flags"], allow_other=config["allow_other"]
            )
            mounted = runtime.mount_at(self.mountpoint)
            self.file_system = mounted.device if mounted else ""
        process.tell("device", descriptor=self.device)
        ready = process.expect("ready", deadline - self.clock.now())
        self.takeovers += takeover
        process.started = process.heard = self.clock.now()
        self.daemon, self.config, self._watchdog = process, config, ready["watchdog"]

    def start(self) -> None:
        """Mount. Raises DaemonFailed or KvfsError, and then nothing is mounted."""
        self._catch()
        process = self._spawn(self.command, low_priority=False)
        try:
            self._serve(process, self.config, patience=START)
        except (DaemonFailed, KvfsError):
            if self.device >= 0:
                device.unmount(self.mountpoint, lazy=True)
            else:
                process.dismiss()
            process.end()
            raise

    # The loop

    def run(self, control: socket.socket) -> int:
        """Serve until unmounted. `control` is a listening socket."""
        self.notify.ready(self._status_line())
        while True:
            daemon = self.daemon
            if daemon is not None and daemon.over:
                return self._ended(daemon)
            if daemon is None or daemon.closed or self._end_if_silent(daemon):
                if not self._replace(self._bury()):
                    return 1
                continue
            self._keep_standby()
            Process.reap_left()
            watched: list[Any] = [daemon.channel, control, self._wake]
            watched += [self.standby.channel] if self.standby is not None else []
            ready, _, _ = select.select(watched, [], [], self._next_look())
            if self._wake in ready:
                self._signalled()
            daemon.listen()
            if self.standby is not None:
                self.standby.listen()
            if control in ready:
                self._converse(control)
            self._ping()

    def _ended(self, daemon: Process) -> int:
        """End the processes after the end of the mount. Returns the exit code."""
        ended = "ended" in daemon.last_messages
        if not ended:
            self._say_late(daemon)
        daemon.end()
        self._end_standby()
        return 0 if ended else 1

    def _say_late(self, daemon: Process) -> None:
        """Say what holds up a daemon that has not ended, as far as the kernel tells."""
        if daemon.waits_for_disk():
            log.error(
                "%s: the daemon %d waits for a disk after umount --now, and is killed: it keeps "
                "its locks until the disk answers",
                *(self.mountpoint, daemon.pid),
            )
        else:
            log.error(
                "%s: the daemon %d has not ended in time after umount --now, and is killed: it "
                "hangs, or waits for a processor",
                *(self.mountpoint, daemon.pid),
            )

    def _next_look(self) -> float:
        left = self.daemon.seconds_left if self.daemon is not None else 5.0
        return max(0.0, min(5.0, left, self.notify.watchdog or 5.0, self._watchdog / 4 or 5.0))

    def _ping(self) -> None:
        """Tell systemd that the keeper lives. The loop and each bounded wait call it."""
        self.notify.alive(self._status_line())

    def _status_line(self) -> str:
        pid = self.daemon.pid if self.daemon else "none"
        return f"{self.mountpoint}: daemon {pid}, {self.takeovers} takeovers"

    def _end_if_silent(self, daemon: Process) -> bool:
        """Make a daemon that has stopped answering log where it hangs, and end.

        Returns whether it had stopped answering.
        """
        silence = self.clock.now() - daemon.heard
        if not self._watchdog or silence < self._watchdog:
            return False
        log.error(
            "the daemon %d has not answered for %.1f s: the keeper replaces it", daemon.pid, silence
        )
        with suppress(ProcessLookupError):
            os.kill(daemon.pid, signal.SIGCONT)
            os.kill(daemon.pid, signal.SIGABRT)
        daemon.silence = silence
        daemon.death()
        return True

    # Successors

    def _keep_standby(self) -> None:
        if self.standby is not None and self.standby.closed:
            log.warning("the standby daemon %s; a takeover takes longer", self.standby.death())
            if "loaded" not in self.standby.last_messages:
                self._standby_after = self.clock.now() + STANDBY_PAUSE
            self._end_standby()
        if self.standby is None and self.clock.now() >= self._standby_after:
            self.standby = self._spawn(self.command, low_priority=True)

    def _end_standby(self) -> None:
        if self.standby is not None:
            self.standby.end()
            self.standby = None

    def _successor(self) -> Process:
        process, self.standby = self.standby, None
        if process is not None:
            process.listen()
            if not process.closed:
                return process
            process.end()
        return self._spawn(self.command, low_priority=False)

    def _replace(self, cause: str) -> bool:
        """Start daemons until one serves. If none does, unmount and return False."""
        why = cause
        config = self._current_config()
        while self._deaths < DEATHS:
            if self._deaths:
                self.clock.sleep(BACK_OFF * 2 ** (self._deaths - 1))
            process = self._successor()
            try:
                self._serve(process, config, patience=START, why=cause)
            except (DaemonFailed, KvfsError) as error:
                self._deaths += 1
                why = str(error)
                process.end()
                if process.last_messages.get("error", {}).get("config") and config != self.config:
                    log.error("options that were set since the mount are lost: %s", why)
                    config = self.config
                log.error("takeover failed (%d of %d): %s", self._deaths, DEATHS, why)
            else:
                log.info("%s: daemon %d took over", self.mountpoint, process.pid)
                self.notify.say(STATUS=self._status_line())
                return True
        self._give_up(why)
        return False

    def _bury(self) -> str:
        """End the movers of the dead daemon. Returns how the daemon died."""
        daemon, self.daemon = self.daemon, None
        if daemon is None:
            return "no daemon"
        why = f"daemon {daemon.pid} {daemon.death()}"
        short = self.clock.now() - daemon.started < SHORT_LIFE
        self._deaths = self._deaths + 1 if short else 0
        log.warning("daemon (%d) %s: another daemon takes over", daemon.pid, daemon.death())
        daemon.end()
        return why

    def _give_up(self, why: str) -> None:
        """Unmount, so that waiting clients get an error instead of no answer."""
        log.critical(
            "%s: given up after %d daemons died in a row (the last: %s), and unmounted; sealed "
            "objects are safe: mount it again",
            self.mountpoint,
            self._deaths,
            why,
        )
        self.notify.say(STATUS=f"given up: {why}", STOPPING="1")
        device.unmount(self.mountpoint, lazy=True)
        self._end_standby()

    def _current_config(self) -> dict[str, Any]:
        """Return the configuration of the mount with the later changes of `kvfs set`."""
        path = self.directory / "config"
        try:
            found = own_files.read_table(path, _CONFIG, _CONFIG_CURE) or {}
            if found.get("mountpoint") != self.config["mountpoint"]:
                raise own_files.wrong(path, str(found), _CONFIG, _CONFIG_CURE)
        except ConfigError as error:
            log.error("options that were set since the mount are lost: %s", error)
            return self.config
        return found

    # Control

    def _converse(self, control: socket.socket) -> None:
        """Answer one request, one line of JSON, of a client that has CLIENT seconds in all."""
        connection, _ = control.accept()
        with connection, suppress(OSError):
            asked, deadline = b"", self.clock.now() + CLIENT
            while not asked.endswith(b"\n") and len(asked) < REQUEST_MAX:
                connection.settimeout(max(0.001, deadline - self.clock.now()))
                if not (more := connection.recv(REQUEST_MAX)):
                    break
                asked += more
            connection.settimeout(CLIENT)
            answer = self._answer(connection, asked)
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, connection: peer.Connected, asked: bytes) -> dict[str, Any]:
        verbs: dict[str, Callable[..., dict[str, Any]]] = {
            "status": self._status,
            "upgrade": self._upgrade,
        }
        try:
            request = peer.asked(connection, asked, verbs)
            return verbs[request.verb](**request.arguments)
        except (DaemonFailed, KvfsError, TypeError, ValueError, OSError) as error:
            # A wrong option, or a wrong user. ValueError, OSError: the command cannot be run.
            callers = isinstance(error, ConfigError) or getattr(error, "exit", 1) == REFUSED
            return {"error": str(error), **({"invalid": True} if callers else {})}

    def _status(self) -> dict[str, Any]:
        return {
            "keeper_pid": os.getpid(),
            "daemon_pid": self.daemon.pid if self.daemon else 0,
            "standby_pid": self.standby.pid if self.standby else 0,
            "standby_loaded": self.standby is not None and "loaded" in self.standby.last_messages,
            "takeovers": self.takeovers,
            "file_system": self.file_system,
            "unmounted": self.daemon is not None and "unmounted" in self.daemon.last_messages,
        }

    def _upgrade(self, command: list[str], config: dict[str, Any]) -> dict[str, Any]:
        """Hand over to another version of kvfs. If it does not serve, this one serves again."""
        old = self.daemon
        if old is None:
            raise DaemonFailed("no daemon serves at this moment: try again")
        candidate = self._spawn(command, low_priority=True)
        try:
            loaded = candidate.expect("loaded", LOAD)
            before = old.last_messages["loaded"]
            if loaded["format"] < before["format"]:
                raise DaemonFailed(
                    f"kvfs {loaded['version']} reads catalogs up to format {loaded['format']}, "
                    f"this one has format {before['format']}: nothing is changed"
                )
            if loaded["protocol"] != PROTOCOL:
                raise DaemonFailed(
                    f"kvfs {loaded['version']} needs another keeper (protocol {loaded['protocol']},"
                    f" this one speaks {PROTOCOL}): unmount, and mount with it; nothing is changed"
                )
        except DaemonFailed:
            candidate.end()
            raise
        began = self.clock.now()
        self.notify.reloading(f"{self.mountpoint}: upgrading to kvfs {loaded['version']}")
        self._hand_over(old)
        try:
            why = f"upgrade from kvfs {before['version']} to {loaded['version']}"
            self._serve(candidate, config, patience=UPGRADE_START, why=why)
        except (DaemonFailed, KvfsError) as error:
            candidate.end()
            self.daemon = None
            log.error("upgrade to kvfs %s failed: %s", loaded["version"], error)
            if not self._replace(f"upgrade to kvfs {loaded['version']} failed: {error}"):
                raise DaemonFailed(
                    f"{error}; and the former version did not come back: mount again"
                ) from error
            self.notify.ready(self._status_line())
            raise DaemonFailed(
                f"{error}; kvfs {before['version']} serves again, nothing is changed",
                error.exit if isinstance(error, DaemonFailed) else 1,
            ) from error
        self.command = tuple(command)
        own_files.write(self.directory / "config", json.dumps(config))
        self._end_standby()  # this standby is of the former version
        log.info("%s: upgraded to kvfs %s", self.mountpoint, loaded["version"])
        self.notify.ready(self._status_line())
        return {
            "from": before["version"],
            "to": loaded["version"],
            "seconds": round(self.clock.now() - began, 3),
        }

    def _hand_over(self, old: Process) -> None:
        """Ask a daemon to finish its operations and end. Kill it after HAND_OVER seconds."""
        with suppress(DaemonFailed):
            old.tell("hand_over")
            old.expect("handed_over", HAND_OVER)
        old.end()
