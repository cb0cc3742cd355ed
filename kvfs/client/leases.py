"""Blocks that the mount opens or makes many at a time: one question, descriptors by a socket.

Contract: `ask` has descriptors of as many blocks as the mount lends, from the first on, be it none:
what it does not lend is opened, or made, by name. Each is a lease until it is given back: as long,
what it reads is there and is counted, as with a file that is open; what was made is sealed when it
is `done`, and gone when it is given back instead. What the mount can not answer (another
file system, a server of NFS, an older kvfs) is asked once, and then no more; what it does not
answer any more, once for each load. Never raises OSError.
All questions are asked by one thread, which no signal handler breaks into. To give back is to put
something into its queue: a finalizer may, whatever its thread is doing.
Not for the order in which blocks are needed (`kvfs.client.leased`).
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
# s until what has ended is given back: others end with it, and who loads has better things to do.
PAUSE = 0.002


class _Question(NamedTuple):
    request: leasing.Request
    answer: Callable[[Lent], None]


class _Ended(NamedTuple):
    leases: tuple[int, ...]
    told: SimpleQueue[None] | None = None  # at once, and then this one is told


class _Done(NamedTuple):
    lease: int
    answer: Callable[[bool], None]


# What there is to do; to close is a queue that is told when it is done, and None that nobody asks.
_Work = SimpleQueue["_Question | _Done | _Ended | SimpleQueue[None] | None"]


class Leases:
    """Of one directory. Any number of threads."""

    def __init__(self, directory: str) -> None:
        self._lender = _Lender(directory)
        self._work: _Work = SimpleQueue()
        self._starting = threading.Lock()
        self._begun = False
        weakref.finalize(self, self._work.put, None).atexit = False

    @property
    def offered(self) -> bool:
        """Until it turns out not to be."""
        return self._lender.offered

    @property
    def makes(self) -> bool:
        """The same for blocks that are to be made."""
        return self._lender.offered and self._lender.makes

    def ask(self, request: leasing.Request, answer: Callable[[Lent], None]) -> None:
        """`answer` gets what is lent of it, in a thread in which it must not wait."""
        with self._starting:
            if not self._begun:
                threading.Thread(
                    target=_serve, args=(self._lender, self._work), name="kvfs-lease", daemon=True
                ).start()
                self._begun = True
        self._work.put(_Question(request, answer))

    def done(self, lease: int, answer: Callable[[bool], None]) -> None:
        """What it made is written; `answer` gets whether it is sealed, and all others of then."""
        self._work.put(_Done(lease, answer))

    def give_back(self, leases: Iterable[int]) -> None:
        """They end soon."""
        if some := tuple(leases):
            self._work.put(_Ended(some))

    def drop(self, leases: Iterable[int]) -> None:
        """They have ended when this returns: what they made and did not write is gone."""
        if some := tuple(leases):
            told: SimpleQueue[None] = SimpleQueue()
            self._work.put(_Ended(some, told))
            told.get()

    def close(self) -> None:
        """No more questions are answered; what is lent is kept until it is given back."""
        done: SimpleQueue[None] = SimpleQueue()
        with self._starting:
            if not self._begun:
                return
        self._work.put(done)
        done.get()


def _serve(lender: "_Lender", work: _Work) -> None:
    """Until nobody can ask any more, and all that was lent has been given back."""
    ended: list[int] = []
    done: list[_Done] = []
    dropped = False
    while lender.held or not dropped:
        if done and work.empty():  # what was done meanwhile goes with it
            _finish(lender, done)
            done = []
        try:
            one = work.get(timeout=PAUSE if ended else None)
        except Empty:
            lender.give_back(ended)
            ended = []
            continue
        if isinstance(one, _Question):
            found: Lent = []
            try:
                found = lender.ask(one.request)
            finally:  # somebody waits for it
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
    finally:  # somebody waits for it
        for one in done:
            one.answer(sealed)


class _Lender:
    """The mount's side of it, as the one thread that asks sees it."""

    def __init__(self, directory: str) -> None:
        self.offered = self.makes = True
        self._closed = False
        self.held: set[int] = set()
        self._directory = directory
        self._path = f"{directory}/{matching.NAME}"
        self._fd = -1
        self._inode = 0  # of the directory that it is of
        self._peers: tuple[socket.socket, socket.socket] | None = None
        self._asked = 0

    def ask(self, request: leasing.Request) -> Lent:
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
        """No more is asked for."""
        self.offered, self._closed = False, True
        self.give_back(ended)

    def give_back(self, ended: Iterable[int]) -> None:
        there = sorted(self.held.intersection(ended))
        self.held.difference_update(there)
        try:
            for start in range(0, len(there), leasing.CLOSED_MAX):
                some = there[start : start + leasing.CLOSED_MAX]
                os.pwrite(self._fd, leasing.pack_close(some), 0)
        except OSError as error:  # of a mount that is gone, or whose namespace is
            log.debug("%s: %s", self._path, error)
            self.let_go()
        if self._closed and not self.held:
            self.let_go()

    def done(self, leases: list[int]) -> bool:
        """Whether all are sealed."""
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
        """Of the mount, which ends all leases."""
        fd, self._fd, peers, self._peers = self._fd, -1, self._peers, None
        self.held.clear()
        if fd >= 0:
            with suppress(OSError):  # of a mount that is gone; the number is free again
                os.close(fd)
        for peer in peers or ():
            peer.close()

    def _ask(self, request: leasing.Request) -> Lent:
        question = leasing.pack_request(request)
        inode = os.stat(self._directory).st_ino  # 2 us: the kernel knows
        if self._inode != inode:  # it has been renamed, and this is another
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
            raise OSError(errno.EMFILE, f"{error}: too many are open?") from None
        leases = range(answer.first, answer.first + answer.blocks)
        self.held.update(leases)
        return list(zip(descriptors, leases, strict=True))
