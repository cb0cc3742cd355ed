"""The messages between the keeper and a daemon: JSON datagrams, some with an open file.

Contract: a message arrives whole or not at all. After the end of one side, the other side gets
`Closed`. PROTOCOL names the version that both understand; the keeper starts no daemon of another
one.

    daemon to keeper                         keeper to daemon
    loaded     version, protocol, format     serve     config, directory, takeover, ...
    prepared                                 device    with the mounted /dev/fuse

    ready      watchdog                      hand_over
    alive
    error      error, exit
    ended      the mount is gone, all is saved
    handed_over
"""

import array
import json
import os
import socket
from typing import Any

PROTOCOL = 1
MESSAGE_MAX = 64 << 10  # bytes

Message = dict[str, Any]


class Closed(Exception):  # noqa: N818 (it is no error: every channel ends so)
    """The other side is gone."""


class Channel:
    """One end of a pair of SOCK_SEQPACKET sockets."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, what: str, *, descriptor: int | None = None, **facts: object) -> None:
        """Send a message. Raises Closed; BlockingIOError if a non-blocking socket is full."""
        extra = []
        if descriptor is not None:
            rights = array.array("i", [descriptor])
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        try:
            self.socket.sendmsg([json.dumps({"what": what, **facts}).encode()], extra)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def receive(self) -> tuple[Message, int]:
        """Return the next message, and the descriptor that came with it or -1. Raises Closed.

        A side that sends anything but a message counts as closed.
        """
        try:
            text, descriptors, _, _ = socket.recv_fds(self.socket, MESSAGE_MAX, 1)
        except ConnectionResetError as error:
            raise Closed from error
        if not text:
            raise Closed
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("what"), str):
            for descriptor in descriptors:
                os.close(descriptor)
            raise Closed
        return message, descriptors[0] if descriptors else -1

    def close(self) -> None:
        self.socket.close()
