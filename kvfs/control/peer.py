"""Checks the peer of a control socket: root and the user of the mount, in one JSON line.

Contract: the kernel names the user that connected, independent of the modes of the socket and its
directories. A request may have the keeper run a program, so no other user's request is read. Not
for permission to use the mount: that is `allow_other`, and file modes.
"""

import json
import os
import socket
import struct
from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

from kvfs.errors import ConfigError, ControlError

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: process, user, group


class Connected(Protocol):
    """A connected socket, Python's or trio's."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


class ControlRequest(NamedTuple):
    """One request. `again`: it was made before, to a daemon that died without an answer."""

    verb: str
    arguments: dict[str, Any]
    again: bool


def asked(connection: Connected, line: bytes, verbs: Collection[str]) -> ControlRequest:
    """Return the request of a line. ControlError: malformed. ConfigError: refused by `check`."""
    check(connection)
    try:
        found = json.loads(line)
        request = ControlRequest(
            found["verb"], found.get("arguments", {}), found.get("again") is True
        )
        known = request.verb in verbs
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        known = False
    if not known:
        raise ControlError(
            f"request {line[:80]!r}: expected a line with one JSON object, and in it a verb of "
            + ", ".join(sorted(verbs))
        )
    return request


def check(connection: Connected) -> None:
    """Raises ConfigError for a peer that gets no answer."""
    _, user, _ = _credentials(connection)
    if user not in {0, os.geteuid()}:
        raise ConfigError(
            f"uid {user} may not ask this mount: expected root, or uid {os.geteuid()} that "
            "mounted it"
        )


def process(connection: Connected) -> int:
    """Return the number of the process that connected; 0: it is not visible from here."""
    return _credentials(connection)[0]


def _credentials(connection: Connected) -> tuple[int, int, int]:
    """Return the process, the user and the group that connected."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(found)
    return process, user, group
