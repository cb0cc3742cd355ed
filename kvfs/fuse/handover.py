"""Pass descriptors to a process through a socket of its own, which the process names.

Contract: the daemon takes the socket from the descriptor table of the thread that sent the request.
So the socket needs no path, and the process may be in another network or mount namespace. The
process is responsible for the number that it gives: it gets its descriptors, or nothing. Raises
OSError: EPERM if this daemon may not (Yama may forbid it to a daemon without root), ENOSYS before
Linux 5.6. No call waits. Not for choosing the descriptors, nor for permissions.
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
    """Send a message with descriptors. Raises OSError, also if the peer has not read for long."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    peer.sendmsg(
        [message], [rights] if descriptors else [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
    )
