"""The command line's end of the control socket; it imports nothing of the daemon."""

import json
import socket
from pathlib import Path
from typing import Any

from kvfs import runtime
from kvfs.errors import ControlError

PATIENCE = 30.0  # s that a client waits for an answer, and the daemon for a request


def request(mountpoint: Path, verb: str, **arguments: object) -> dict[str, Any]:
    """Ask the daemon behind a mount point. Raises ControlError with the daemon's own reason."""
    path = runtime.socket_path(mountpoint)
    line = json.dumps({"verb": verb, "arguments": arguments}).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(str(path))
            connection.sendall(line)
            with connection.makefile("rb") as stream:
                reply = stream.readline()
    except OSError as error:
        raise ControlError(
            f"no daemon answers for {mountpoint} ({path}: {error}): is it a kvfs mount?"
        ) from error
    if not reply:
        raise ControlError(f"the daemon of {mountpoint} closed the connection without an answer")
    answer: dict[str, Any] = json.loads(reply)
    if "error" in answer:
        raise ControlError(answer["error"])
    return answer
