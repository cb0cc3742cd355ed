"""Blocks that the mount opens or makes many at a time: one question, descriptors by a socket.

Contract: `ask` returns descriptors for the longest leading run that the mount lends. The run may be
empty. The caller opens, or makes, all other blocks by name. Each descriptor is a lease until it is
given back. As long, a read block stays and counts as open. A made block is sealed when it is
`done`, and is gone when it is given back instead.

If the mount cannot lend (another file system, an NFS server, an older kvfs), the client asks once,
and then no more. If the mount stops answering, the client asks once for each load. Never raises
OSError.

One thread asks all questions, and no signal handler interrupts it. To give back is to put something
into its queue; a finalizer may do so at any time. Not for the order in which blocks are needed
(`kvfs.client.leased`).
"""

import array
import errno
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from kvfs import leasing, matching

log = logging.getLogger(__name__)

Lent = list[tuple[int, int]]  # (descriptor, lease) of each block

_NEVER = {
    *(errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTDIR),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}
# s until ended leases are given back: others end with them, and the loading thread has other work.
PAUSE = 0.002


class _LeaseQuestion(NamedTuple):
    request: leasing.LeaseRequest
    answer: Callable[[Lent], None]


class _Ended(NamedTuple):
    leases: tuple[int, ...]
    told: SimpleQueue[None] | None = None  # give back at once, and then tell this queue


class _Done(NamedTuple):
    lease: int
    answer: Callable[[bool], None]


# The work of the thread. A queue closes, and is told when that is done. None: no user is left.
_Work = SimpleQueue["_LeaseQuestion | _Done | _Ended | SimpleQueue[None] | None"]


class LeaseClient:
    """The leases of one directory. Any number of threads."""

    def __init__(self, directory: str) -> None:
        self._lender = _Lender(directory)
        self._work: _Work = SimpleQueue()
        self._starting = threading.Lock()
        self._begun = False
        weakref.finalize(self, self._work.put, None).atexit = False

    @property
    def offered(self) -> bool:
        """Return whether the mount lends blocks, as far as is known."""
        return self._lender.offered

    @property
    def makes(self) -> bool:
        """Return whether the mount makes blocks, as far as is known."""
        return self._lender.offered and self._lender.makes

    def ask(self, request: leasing.LeaseRequest, answer: Callable[[Lent], None]) -> None:
        """Ask the mount; a thread calls `answer` with the lent blocks, and must not wait in it."""
        with self._starting:
            if not self._begun:
                threading.Thread(
                    target=_serve, args=(self._lender, self._work), name="kvfs-lease", daemon=True
                ).start()
                self._begun = True
        self._work.put(_LeaseQuestion(request, answer))

    def done(self, lease: int, answer: Callable[[bool], None]) -> None:
        """Say that a made block is written; `answer` gets whether all done by then are sealed."""
        self._work.put(_Done(lease, answer))

    def give_back(self, leases: Iterable[int]) -> None:
        """Give leases back soon."""
        if some := tuple(leases):
            self._work.put(_Ended(some))

    def drop(self, leases: Iterable[int]) -> None:
        """Give leases back and wait for that; a made block that is not written is gone then."""
        if some := tuple(leases):
            told: SimpleQueue[None] = SimpleQueue()
            self._work.put(_Ended(some, told))
            told.get()

    def close(self) -> None:
        """Answer no more questions; lent blocks stay until they are given back."""
        done: SimpleQueue[None] = SimpleQueue()
        with self._starting:
            if not self._begun:
                return
        self._work.put(done)
        done.get()


def _serve(lender: "_Lender", work: _Work) -> None:
    """Do the work until no user is left and all leases have been given back."""
    ended: list[int] = []
    done: list[_Done] = []
    dropped = False
    while lender.held or not dropped:
        if done and work.empty():  # include all blocks that were done meanwhile
            _finish(lender, done)
            done = []
        try:
            one = work.get(timeout=PAUSE if ended else None)
        except Empty:
            lender.give_back(ended)
            ended = []
            continue
        if isinstance(one, _LeaseQuestion):
            found: Lent = []
            try:
                found = lender.ask(one.request)
            finally:  # a caller waits for it
                one.answer(found)
        elif isinstance(one, _Done):
            done.append(one)
        elif isinstance(one, _Ended):
            ended.extend(one.leases)
            if one.told is not None:
                lender.give_back(ended)
                ended = []
                one.told.put(None)
        else:
            _finish(lender, done)
            done = []
            lender.close(ended)
            ended = []
            if one is None:
                dropped = True
            else:
                one.put(None)
    lender.let_go()


def _finish(lender: "_Lender", done: list[_Done]) -> None:
    sealed = False
    try:
        sealed = not done or lender.done([one.lease for one in done])
    finally:  # a caller waits for it
        for one in done:
            one.answer(sealed)


class _Lender:
    """The mount's side of leases, for the one thread that asks."""

    def __init__(self, directory: str) -> None:
        self.offered = self.makes = True
        self._closed = False
        self.held: set[int] = set()
        self._directory = directory
        self._path = f"{directory}/{matching.NAME}"
        self._fd = -1
        self._inode = 0  # of the present directory
        self._peers: tuple[socket.socket, socket.socket] | None = None
        self._asked = 0

    def ask(self, request: leasing.LeaseRequest) -> Lent:
        if not self.offered:
            return []
        self._asked += 1
        try:
            return self._ask(request._replace(number=self._asked))
        except OSError as error:
            log.debug("%s lends nothing: %s", self._path, error)
            if request.mode >= 0 and error.errno == errno.EINVAL:  # an older kvfs
                self.makes = False
                return []
            self.offered = error.errno not in _NEVER
            self.let_go()
            return []

    def close(self, ended: Iterable[int]) -> None:
        """Ask for no more blocks."""
        self.offered, self._closed = False, True
        self.give_back(ended)

    def give_back(self, ended: Iterable[int]) -> None:
        there = sorted(self.held.intersection(ended))
        self.held.difference_update(there)
        try:
            for start in range(0, len(there), leasing.CLOSED_MAX):
                some = there[start : start + leasing.CLOSED_MAX]
                os.pwrite(self._fd, leasing.pack_close(some), 0)
        except OSError as error:  # the mount, or its namespace, is gone
            log.debug("%s: %s", self._path, error)
            self.let_go()
        if self._closed and not self.held:
            self.let_go()

    def done(self, leases: list[int]) -> bool:
        """Return whether all are sealed."""
        self.held.difference_update(leases)
        try:
            for start in range(0, len(leases), leasing.CLOSED_MAX):
                some = leases[start : start + leasing.CLOSED_MAX]
                os.pwrite(self._fd, leasing.pack_close(some, leasing.DONE), 0)
        except OSError as error:
            log.debug("%s: %s", self._path, error)
            if error.errno != errno.ESTALE:
                self.let_go()
            return False
        return True

    def let_go(self) -> None:
        """Close the control file, which ends all leases."""
        fd, self._fd, peers, self._peers = self._fd, -1, self._peers, None
        self.held.clear()
        if fd >= 0:
            with suppress(OSError):  # the mount is gone; the number is free again
                os.close(fd)
        for peer in peers or ():
            peer.close()

    def _ask(self, request: leasing.LeaseRequest) -> Lent:
        question = leasing.pack_request(request)
        inode = os.stat(self._directory).st_ino  # 2 us: the kernel knows
        if self._inode != inode:  # the directory was renamed, and this is another one
            self.let_go()
        if self._fd < 0:
            self._inode = inode
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
        return self._receive(request.number)

    def _offer(self) -> None:
        if self._peers is not None:
            for peer in self._peers:
                peer.close()
        self._peers = _, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.pwrite(self._fd, leasing.pack_socket(theirs.fileno()), 0)

    def _receive(self, number: int) -> Lent:
        assert self._peers is not None
        descriptors = array.array("i")
        room = socket.CMSG_SPACE(descriptors.itemsize * leasing.BLOCKS_MAX)
        data, rights, flags, _ = self._peers[0].recvmsg(
            leasing.ANSWER_SIZE, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        )
        for _, _, some in rights:
            descriptors.frombytes(some[: len(some) - len(some) % descriptors.itemsize])
        try:
            answer = leasing.unpack_answer(data)
            if answer.number != number:
                raise ValueError(f"an answer to question {answer.number}, expected {number}")
            if flags & socket.MSG_CTRUNC or answer.blocks != len(descriptors):
                raise ValueError(f"{len(descriptors)} descriptors of {answer.blocks}")
        except ValueError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(errno.EMFILE, f"{error}: are too many files open?") from None
        leases = range(answer.first, answer.first + answer.blocks)
        self.held.update(leases)
        return list(zip(descriptors, leases, strict=True))
