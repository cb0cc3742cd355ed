"""Who asks on a control socket: root, and who mounted.

Contract: the kernel says who connected, whatever the modes of the socket and its directories have
become. A request may have the keeper run a program; so nobody else's is read.
Not for who may use the mount: that is `allow_other`, and file modes.
"""

import os
import socket
import struct
from typing import Protocol

from kvfs.errors import ControlError

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: process, user, group


class _Connected(Protocol):
    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


def check(connection: _Connected) -> None:
    """Raises ControlError for a peer that gets no answer."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user not in {0, os.geteuid()}:
        raise ControlError(
            f"uid {user} may not ask this mount: expected root or uid {os.geteuid()}, "
            "who mounted it"
        )
