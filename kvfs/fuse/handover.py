"""Descriptors for a process that asks: it names a socket of its own, and they come out of it.

Contract: the socket is taken out of the table of the very thread whose request it is, so that
nothing need be reachable by a path, or from the same network or mount namespace. What it names is
its own affair: it gets what it asks for, or nothing. Raises OSError: EPERM where this daemon may
not (who mounts without being root may be kept from it by Yama), ENOSYS before Linux 5.6. Nothing
waits.
Not for what is handed over, nor for who may have it.
"""

import array
import ctypes
import os
import socket
import threading
from collections.abc import Sequence

_PIDFD_GETFD = 438  # the number of pidfd_getfd(2), the same on all architectures
_PIDFD_THREAD = os.O_EXCL  # of pidfd_open(2), since Linux 6.9
_libc = ctypes.CDLL(None, use_errno=True)


def socket_of(thread: int, number: int) -> socket.socket:
    """The Unix socket that is descriptor `number` of a thread. Raises OSError."""
    process = os.pidfd_open(thread, _PIDFD_THREAD)
    try:
        taken = _libc.syscall(_PIDFD_GETFD, process, number, 0)
        if taken < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"of thread {thread}: {os.strerror(code)}")
    finally:
        os.close(process)
    try:
        found = socket.socket(fileno=taken)
    except OSError:
        # It may be a file of this very mount, whose close waits for an answer of this daemon.
        threading.Thread(target=os.close, args=(taken,), daemon=True).start()
        raise
    if found.family != socket.AF_UNIX or found.type != socket.SOCK_SEQPACKET:
        found.close()
        raise OSError(f"expected a Unix socket of packets, got {found.family.name}")
    return found


def send(peer: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    """Raises OSError, also where the other end has not read for long."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    peer.sendmsg(
        [message], [rights] if descriptors else [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
    )
