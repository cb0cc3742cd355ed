"""Blocks that the mount opens many at a time: one question, and their descriptors come by a socket.

Contract: `ask` gives descriptors of as many blocks as the mount lends, from the first on, be it
none: what it does not lend is opened by name. Each is a lease until it is given back: as long, what
it reads is there and is counted, as with a file that is open. A mapping keeps its lease. What the
mount can not answer (another file system, a server of NFS, an older kvfs) is asked once, and then
no more; what it does not answer any more, once for each load. Never raises OSError.
Not for the order in which blocks are needed (`kvfs.client.chain`).
"""

import array
import errno
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from kvfs import leasing, matching

log = logging.getLogger(__name__)

_NEVER = {errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTDIR, errno.EACCES, errno.EPERM}
_GIVEN_BACK_AT_ONCE = 32


class Leases:
    """Of one directory. Any number of threads, which take turns."""

    def __init__(self, directory: str) -> None:
        self._path = f"{directory}/{matching.NAME}"
        self._lock = threading.Lock()
        self._fd = -1
        self._peers: tuple[socket.socket, socket.socket] | None = None
        self._held: set[int] = set()
        self._ended: deque[int] = deque()
        self._process = os.getpid()
        self._due = self._closed = False
        self.offered = True  # until it turns out not to be

    def ask(self, request: leasing.Request) -> list[tuple[int, int]]:
        """(descriptor, lease) of each block, from the first on, that the mount lends."""
        with self._lock:
            if not self.offered or self._closed:
                return []
            try:
                found = self._ask(leasing.pack_open(request))
            except OSError as error:
                log.debug("%s lends nothing: %s", self._path, error)
                self.offered = error.errno not in _NEVER
                self._let_go()
                return []
        self._tidy()
        return found

    def give_back(self, leases: Iterable[int], *, now: bool = True) -> None:
        """now: else with others, unless there are none to wait for. Finalizers may call this."""
        self._ended.extend(leases)
        self._due = self._due or now
        self._tidy()

    def close(self) -> None:
        """No more questions; what is lent is kept until it is given back."""
        self._closed = self._due = True
        self._tidy()

    def _tidy(self) -> None:
        """Say what has ended, if it is worth a question, and nobody has a turn who will.

        Without waiting for the turn: a finalizer may run in the thread that has it.
        """
        if os.getpid() != self._process:
            return
        while self._is_worth_it() and self._lock.acquire(blocking=False):
            try:
                self._due = False
                self._give_back()
            finally:
                self._lock.release()

    def _is_worth_it(self) -> bool:
        some = min(_GIVEN_BACK_AT_ONCE, max(1, len(self._held)))
        return self._due or len(self._ended) >= some

    def _give_back(self) -> None:
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        ended = [lease for lease in ended if lease in self._held]
        self._held.difference_update(ended)
        if self._closed and not self._held:
            self._let_go()
            return
        try:
            for start in range(0, len(ended), leasing.CLOSED_MAX):
                some = ended[start : start + leasing.CLOSED_MAX]
                os.pwrite(self._fd, leasing.pack_close(some), 0)
        except OSError as error:  # of a mount that is gone, or whose namespace is
            log.debug("%s: %s", self._path, error)
            self._let_go()

    def _ask(self, question: bytes) -> list[tuple[int, int]]:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        if self._peers is None:
            self._offer()
        try:
            os.pwrite(self._fd, question, 0)
        except OSError as error:
            if error.errno != errno.ESTALE:  # another daemon, which knows of no socket
                raise
            self._offer()
            os.pwrite(self._fd, question, 0)
        return self._receive()

    def _offer(self) -> None:
        if self._peers is not None:
            for peer in self._peers:
                peer.close()
        self._peers = _, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.pwrite(self._fd, leasing.pack_socket(theirs.fileno()), 0)

    def _receive(self) -> list[tuple[int, int]]:
        assert self._peers is not None
        numbers = array.array("i")
        room = socket.CMSG_SPACE(numbers.itemsize * leasing.BLOCKS_MAX)
        data, rights, flags, _ = self._peers[0].recvmsg(
            leasing.ANSWER_SIZE, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        )
        for _, _, some in rights:
            numbers.frombytes(some[: len(some) - len(some) % numbers.itemsize])
        try:
            blocks, first = leasing.unpack_answer(data)
            if flags & socket.MSG_CTRUNC or blocks != len(numbers):
                raise ValueError(f"{len(numbers)} descriptors of {blocks}: too many are open")
        except ValueError as error:
            for number in numbers:
                os.close(number)
            raise OSError(errno.EMFILE, str(error)) from None
        leases = range(first, first + blocks)
        self._held.update(leases)
        return list(zip(numbers, leases, strict=True))

    def _let_go(self) -> None:
        """Of the mount, which ends all leases."""
        fd, self._fd, peers, self._peers = self._fd, -1, self._peers, None
        self._held.clear()
        if fd >= 0:
            with suppress(OSError):  # of a mount that is gone; the number is free again
                os.close(fd)
        for peer in peers or ():
            peer.close()
