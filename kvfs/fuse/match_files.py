"""`NAMESPACE/.match`: how much of a prefix is cached, in one question and one answer.

Contract: the file is in each directory of a namespace with prefix=on, for every user who may search
that. No listing shows it. Each open descriptor has a question of its own: the bytes written to it
from offset 0 on, in one call or several. When the question is complete kvfs answers it, and reads
find the answer. A malformed question is EINVAL at the write.

Each user has a portion (`fairness/portions.py`) of the descriptors and of the bytes of questions.
Beyond that is EDQUOT; if the mount has none left, ENFILE. A descriptor survives the daemon, an
answer does not: ESTALE says to ask again. NFS servers do not find the file, because they may use
several descriptors for one client's calls. Not for the form of questions and answers
(`kvfs.matching`), nor for finding answers (`core/lending`).
"""

import errno
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from pyfuse3 import EntryAttributes, FUSEError, RequestContext

from kvfs import leasing, matching, own_files
from kvfs.core.lending.matching import Matching
from kvfs.core.lending.read_leases import NOBODY, ReadLeases, Who
from kvfs.core.lending.write_leases import WriteLeases
from kvfs.core.names.tree import Tree
from kvfs.core.namespaces.open_order import caller
from kvfs.core.objects.objects import Objects
from kvfs.errors import (
    ConfigError,
    InvalidError,
    KvfsError,
    NotFoundError,
    StaleError,
    TooManyOpenError,
    UnsupportedError,
    UserLimitError,
)
from kvfs.fairness.portions import Portions
from kvfs.fuse import handover
from kvfs.fuse.operations import FuseKernel, count_opens
from kvfs.fuse.processes import is_nfs_server
from kvfs.fuse.virtual_files import FIRST_VIRTUAL, SPAN, VirtualFileKind

HANDLES_MAX = 4096  # of all users
PENDING_MAX = 64 << 20  # bytes of incomplete questions, of all users
LOGGED_AGAIN = 60.0  # s until it is logged again that a user has his part

_RECORD, _CURE = "an inode, a user and a group", "nothing, its client opens the file anew"
_PATTERN = re.compile(r"[0-9]{1,19}( -?[0-9]{1,10} -?[0-9]{1,10})?")  # alone before 1.0
_NAME = re.compile(r"[0-9]{1,19}")
log = logging.getLogger(__name__)


class _Asked:
    """The state of one descriptor; `ino` is the namespace, `who` has opened it."""

    def __init__(self, ino: int, who: Who) -> None:
        self.ino = ino
        self.who = who
        self.question = bytearray()
        self.answer: bytes | None = None
        self.peer: socket.socket | None = None
        self.leases: set[int] = set()
        self.released = False


def _remembered(path: Path) -> _Asked | None:
    """A descriptor of an earlier daemon.

    None if its record is damaged: its questions are ESTALE.
    """
    try:
        text = own_files.read(path, _RECORD, _CURE)
        if text is None or not _PATTERN.fullmatch(text) or not _NAME.fullmatch(path.name):
            raise own_files.wrong(path, text or "", _RECORD, _CURE)
    except ConfigError as error:
        log.warning(
            "a descriptor of %s is lost, its client must open it again: %s", matching.NAME, error
        )
        return None
    ino, *who = map(int, text.split(" "))
    return _Asked(ino, Who(*who) if who else NOBODY)


class MatchFiles(VirtualFileKind):
    """All `.match` files. An inode's number is its namespace's, added to `first`."""

    name, first = matching.NAME.encode(), FIRST_VIRTUAL + SPAN

    def __init__(
        self, directory: Path, tree: Tree, objects: Objects, kernel: FuseKernel, *, takeover: bool
    ) -> None:
        super().__init__(directory, takeover=takeover)
        self.tree = tree
        self.kernel = kernel
        self.matching = Matching(tree)
        self.leases = ReadLeases(objects, partial(count_opens, tree, kernel))
        self.saves = WriteLeases(tree, objects, self.leases.numbers, kernel.changed)
        self.handles = Portions(f"descriptors of {matching.NAME}", HANDLES_MAX)
        self.pending = Portions("bytes of questions that are not whole", PENDING_MAX)
        self._logged: dict[type[KvfsError], float] = {}
        self._open: dict[int, _Asked] = {}
        for path in list(directory.iterdir()):
            if asked := _remembered(path):
                self._open[int(path.name)] = asked
                self.handles.add(asked.who.uid, 1)

    def _asked(self, handle: int) -> _Asked:
        found = self._open.get(handle)
        if found is None:
            raise StaleError(f"handle {handle} of {matching.NAME} is not known")
        return found

    def _take_part(self, portions: Portions, uid: int, amount: int = 1) -> None:
        """Take from a portion.

        The errno tells the client which limit it is; the log has the user.
        """
        try:
            portions.charge(uid, amount)
        except (UserLimitError, TooManyOpenError) as error:
            kind, now = type(error), time.monotonic()
            if now - self._logged.get(kind, -LOGGED_AGAIN) >= LOGGED_AGAIN:
                self._logged[kind] = now
                log.warning("%s: %s (said once in %.0f s)", matching.NAME, error, LOGGED_AGAIN)
            raise

    def is_in(self, directory: int) -> bool:
        return self.matching.is_asked(directory)

    def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:  # noqa: ARG002
        if parent >= self.first:
            raise FUSEError(errno.ENOENT)
        if is_nfs_server(ctx.pid):
            raise NotFoundError(f"{matching.NAME} is not for servers of NFS")
        return self.getattr(self.first + parent)

    def getattr(self, inode: int) -> EntryAttributes:
        directory = self.tree.directory(inode - self.first)
        entry = self.entry(inode, stat.S_IFREG | 0o666, directory.uid, directory.gid)
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = directory.ctime_ns
        return entry

    def open(self, inode: int, flags: int, ctx: RequestContext) -> int:
        directory, who = inode - self.first, Who(ctx.uid, ctx.gid)
        if not self.is_in(directory):
            raise StaleError(f"{self.tree.catalog.named(directory)} is no namespace with prefix=on")
        if flags & os.O_ACCMODE != os.O_RDWR:
            raise InvalidError(f"{matching.NAME} opened with flags {flags:#o}, expected O_RDWR")
        self._take_part(self.handles, who.uid)
        try:
            handle = self.new_handle()
            self.path(handle).write_text(f"{directory} {who.uid} {who.gid}", "ascii")
        except OSError as error:
            self.handles.add(who.uid, -1)
            raise FUSEError(error.errno or errno.EIO) from None
        self._open[handle] = _Asked(directory, who)
        return handle

    def read(self, handle: int, offset: int, size: int) -> bytes:
        answer = self._asked(handle).answer
        if answer is None:
            raise StaleError(f"handle {handle} of {matching.NAME} has no answer: ask again")
        return answer[offset : offset + size]

    async def write(self, handle: int, offset: int, data: bytes) -> int:
        asked = self._asked(handle)
        if not offset and leasing.is_question(data):
            await self._lend(asked, data)
            return len(data)
        try:
            request = self._take(asked, offset, data)
        except InvalidError:
            self._forget(asked)
            raise
        if request is not None:
            asked.answer = matching.pack_answer(await self.matching.answer(asked.ino, request))
        return len(data)

    async def release(self, handle: int) -> None:
        asked = self._open.pop(handle, None)
        await super().release(handle)
        if asked is None:
            return
        self._forget(asked)
        self.handles.add(asked.who.uid, -1)
        asked.released = True
        if asked.peer is not None:
            asked.peer.close()
        await self._end(asked.leases)

    def _take(self, asked: _Asked, offset: int, data: bytes) -> matching.MatchRequest | None:
        """Add bytes to a question; return the question if it is complete, else None.

        Raises InvalidError, UserLimitError, TooManyOpenError.
        """
        if not offset:
            self._forget(asked)
            asked.answer = None
            if len(data) >= matching.request_size(data):
                return matching.unpack_request(data)
        elif offset != len(asked.question):
            raise InvalidError(f"write at {offset} of a question of {len(asked.question)} bytes")
        if not asked.released:  # its last close may come first; that has returned the portion
            self._take_part(self.pending, asked.who.uid, len(data))
        asked.question += data
        size = matching.request_size(bytes(asked.question[: matching.HEADER.size]))
        if len(asked.question) < size:
            return None
        question = bytes(asked.question)
        self._forget(asked)
        return matching.unpack_request(question)

    def _forget(self, asked: _Asked) -> None:
        """Discard an incomplete question."""
        if not asked.released:
            self.pending.add(asked.who.uid, -len(asked.question))
        asked.question.clear()

    async def _lend(self, asked: _Asked, question: bytes) -> None:
        """Answer a request of `kvfs.leasing`."""
        if question.startswith((leasing.OPEN, leasing.MAKE)):
            await self._hand_over(asked, leasing.unpack_request(question))
        elif question.startswith(leasing.DONE):
            named = leasing.unpack_close(question)
            ended = [lease for lease in named if lease in asked.leases]
            asked.leases.difference_update(ended)
            sealed = await self.saves.done(ended)
            await self.leases.close(ended)
            if not sealed or len(ended) < len(named):
                raise StaleError(f"not all of {len(named)} blocks could be sealed")
        elif question.startswith(leasing.CLOSE):
            ended = [one for one in leasing.unpack_close(question) if one in asked.leases]
            asked.leases.difference_update(ended)
            await self._end(ended)
        else:
            number = leasing.unpack_socket(question)
            if not self.tree.ledger.tiers.ram.lends:
                raise UnsupportedError("this mount lends nothing")
            try:
                peer = handover.socket_of(self.kernel.requester(), number)
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    raise TooManyOpenError(f"descriptor {number}: {error}") from None
                raise UnsupportedError(f"descriptor {number}: {error}") from None
            if asked.peer is not None:
                asked.peer.close()
            asked.peer = peer

    async def _hand_over(self, asked: _Asked, request: leasing.LeaseRequest) -> None:
        if asked.peer is None:
            raise StaleError("blocks are to be lent, and there is no socket to hand them over")
        caller.set(self.kernel.requester())
        made: list[int] = []
        if request.mode < 0:
            question = leasing.OPEN
            first, blocks = self.leases.open(asked.ino, request, asked.who)
        else:
            question = leasing.MAKE
            first, made = await self.saves.make(asked.ino, request, asked.who)
            blocks = made
        leases = range(first, first + len(blocks))
        answer = leasing.LeaseAnswer(request.number, len(blocks), first)
        try:
            if asked.released or asked.peer is None:
                raise OSError(errno.EBADF, "who asked has gone")
            handover.send(asked.peer, leasing.pack_answer(answer, question), blocks)
            asked.leases.update(leases)
        except OSError as error:
            await self._end(leases)
            raise StaleError(f"nothing can be handed over: {error}") from None
        finally:
            for fd in made:
                os.close(fd)

    async def _end(self, leases: Iterable[int]) -> None:
        await self.leases.close(leases)
        await self.saves.close(leases)
