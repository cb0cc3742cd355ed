"""The command line's end of the control socket; it imports nothing of the daemon."""

import errno
import json
import os
import pwd
import socket
import struct
import time
from pathlib import Path
from typing import Any

from kvfs import runtime
from kvfs.errors import ConfigError, ControlError

PATIENCE = 30.0  # s that a client waits for an answer, and the daemon for a request
TAKEOVER = 10.0  # s that a client waits for a daemon to take over from a dead one
DISREGARDED = 60.0  # s in which the lookups of a command are no misses, from its last word on
RETRY = 0.02  # s
UNHEARD = (FileNotFoundError, ConnectionRefusedError)  # no process has taken the request


def request(mountpoint: Path, verb: str, **arguments: object) -> dict[str, Any]:
    """Ask the daemon behind a mount point. Raises ControlError or ConfigError with its own reason.

    If the daemon dies meanwhile, the client asks its successor again, and says so: the dead daemon
    may have done the work. No request does harm when it is made twice.
    """
    return request_within(mountpoint, PATIENCE, verb, **arguments)


def request_within(
    mountpoint: Path, patience: float, verb: str, **arguments: object
) -> dict[str, Any]:
    """Ask as `request` does, but wait this many seconds in all, at least RETRY."""
    began = time.monotonic()
    deadline = began + min(TAKEOVER, patience)
    again = False
    while True:
        try:
            left = max(RETRY, began + patience - time.monotonic())
            return _ask(runtime.socket_path(mountpoint), left, verb, arguments, again=again)
        except OSError as error:
            again |= not isinstance(error, UNHEARD)
            if time.monotonic() > deadline or not _keeper_listens(mountpoint):
                raise unanswered(mountpoint, error) from error
        time.sleep(RETRY)


def _keeper_listens(mountpoint: Path) -> bool:
    """Whether a keeper is there, which replaces a daemon that has died."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(0)
        try:
            connection.connect(str(runtime.keeper_path(mountpoint)))
        except BlockingIOError:  # it has not accepted others yet
            return True
        except OSError:
            return False
    return True


def unanswered(mountpoint: Path, error: OSError) -> ConfigError | ControlError:
    """Return the error for a daemon that does not answer. ConfigError: another user mounted it."""
    return of_another_user(mountpoint) or ControlError(
        f"no daemon answers for {mountpoint} ({error}): {_advice(mountpoint, error)}"
    )


def of_another_user(mountpoint: Path) -> ConfigError | None:
    """Return the error for a mount that another user made; None for one's own, or without one."""
    mount = runtime.mount_at(mountpoint)
    user = "" if mount is None else mount.owner.removeprefix("user_id=")
    if not user.isdecimal() or int(user) == os.geteuid():
        return None
    cure = "use sudo" if user == "0" else f"run this as that user: sudo --user '#{user}' kvfs"
    return ConfigError(
        f"uid {os.geteuid()} may not ask {mountpoint}, it was mounted by {_user(int(user))}: {cure}"
    )


def _advice(mountpoint: Path, error: OSError) -> str:
    mount = runtime.mount_at(mountpoint)
    if mount is None or mount.fstype != runtime.FSTYPE:
        return "give a mount point of kvfs"
    if not isinstance(error, FileNotFoundError):
        return f"if its daemon has died: kvfs umount {mountpoint}"
    return (
        f"its sockets are not in {runtime.runtime_dir(mountpoint)}. Run this as the mounting user "
        f"({mount.owner}) in the same container. If that fails, its daemon is dead, or its sockets "
        f"were deleted: kvfs umount {mountpoint}"
    )


def _user(uid: int) -> str:
    if not uid:
        return "root"
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"uid {uid}"


def request_keeper(
    mountpoint: Path, verb: str, *, patience: float = PATIENCE, **arguments: object
) -> dict[str, Any]:
    """Ask the keeper of a mount. Raises ControlError."""
    try:
        return _ask(runtime.keeper_path(mountpoint), patience, verb, arguments)
    except OSError as error:
        raise ControlError(
            f"no keeper answers for {mountpoint} ({error}): if it is dead, unmount, and mount again"
        ) from error


def _ask(
    path: Path, patience: float, verb: str, arguments: dict[str, object], *, again: bool = False
) -> dict[str, Any]:
    """Ask once. Raises ControlError or ConfigError with the other side's reason.

    Raises OSError without an answer.
    """
    asked: dict[str, object] = {"verb": verb, "arguments": arguments}
    if again:
        asked["again"] = True
    line = json.dumps(asked).encode() + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _connect(connection, path, patience)
        connection.settimeout(patience)
        connection.sendall(line)
        with connection.makefile("rb") as stream:
            reply = stream.readline()
    return read_answer(path, reply)


def _connect(connection: socket.socket, path: Path, patience: float) -> None:
    """Connect, and wait this many seconds while the queue of the listener is full. Raises OSError.

    A keeper accepts nobody while a daemon takes over, and clients ask it each RETRY (`request`). A
    connection with a timeout of Python's refuses at once then: it is one that does not wait.
    """
    seconds, rest = divmod(patience, 1)
    wait = struct.pack("@ll", int(seconds), max(1, int(rest * 1e6)))  # a struct timeval
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
    connection.connect(str(path))


def read_answer(path: Path, reply: bytes) -> dict[str, Any]:
    """Return the answer of a reply. Raises ControlError or ConfigError with the reason.

    Raises OSError without an answer.
    """
    if not reply.endswith(b"\n"):  # the process died while it answered
        raise ConnectionResetError(errno.ECONNRESET, f"{path}: closed without an answer")
    try:
        answer = json.loads(reply)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ControlError(
            f"{path}: answered {reply[:80]!r}, expected a JSON object: is this kvfs?"
        )
    if "error" in answer:
        raise (ConfigError if answer.get("invalid") else ControlError)(answer["error"])
    return answer
