"""`NAMESPACE/.match`: how much of a prefix is cached, in one question and one answer.

Contract: a file that no listing shows, in each directory of a namespace with prefix=on, for
whoever may search that. Each open descriptor has a question of its own: what is written to it from
offset 0 on, in one call or several; when it is whole it is answered, and reads find the answer.
What is no question is EINVAL at the write. It is not in the catalog, nothing gets its name: EPERM.
Of descriptors and of bytes of questions one user has a portion (`fairness/portions.py`), beyond
which is EDQUOT; ENFILE is where the mount has none left. A descriptor outlives the daemon, an
answer does not: ESTALE says to ask again. Servers of NFS do not find it, since they need not have
one descriptor for a client's calls.
Not for what is asked and answered (`kvfs.matching`), nor for finding that (`core/lending`).
"""

import errno
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext

from kvfs import kept, leasing, matching
from kvfs.core.lending.leases import NOBODY, Leases, Who
from kvfs.core.lending.matching import Matching
from kvfs.core.lending.saves import Saves
from kvfs.core.namespaces.open_order import caller
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
from kvfs.fuse.control_files import Controlled
from kvfs.fuse.nfs_servers import is_nfs_server
from kvfs.fuse.operations import answering

NAME = matching.NAME.encode()
# Inode numbers, behind those of the control files; an inode's own is the namespace's added to it.
FIRST = 3 << 61
HANDLES_MAX = 4096  # of all users
PENDING_MAX = 64 << 20  # bytes of questions that are not whole yet, of all users
SAID_AGAIN = 60.0  # s until it is logged again that somebody has his part


_RECORD, _CURE = "an inode, a user and a group", "nothing, its client opens the file anew"
_PATTERN = re.compile(r"[0-9]{1,19}( -?[0-9]{1,10} -?[0-9]{1,10})?")  # alone before 1.0
_NAME = re.compile(r"[0-9]{1,19}")
log = logging.getLogger(__name__)


class _Asked:
    """Of one descriptor; `ino` is the namespace, `who` has opened it."""

    def __init__(self, ino: int, who: Who) -> None:
        self.ino = ino
        self.who = who
        self.question = bytearray()
        self.answer: bytes | None = None
        self.peer: socket.socket | None = None
        self.leases: set[int] = set()
        self.released = False


def _remembered(path: Path) -> _Asked | None:
    """A descriptor of a daemon before; None if its record is damaged: its questions are ESTALE."""
    try:
        text = kept.read(path, _RECORD, _CURE)
        if text is None or not _PATTERN.fullmatch(text) or not _NAME.fullmatch(path.name):
            raise kept.wrong(path, text or "", _RECORD, _CURE)
    except ConfigError as error:
        log.warning("a descriptor of %s is forgotten: %s", matching.NAME, error)
        return None
    ino, *who = map(int, text.split(" "))
    return _Asked(ino, Who(*who) if who else NOBODY)


class MatchFiles:
    """`directory` remembers which descriptors there are; it is on a tmpfs."""

    def __init__(self, directory: Path, *, takeover: bool) -> None:
        self.directory = directory
        kept.folder(directory)
        self.open_: dict[int, _Asked] = {}
        self.handles = Portions(f"descriptors of {matching.NAME}", HANDLES_MAX)
        self.pending = Portions("bytes of questions that are not whole", PENDING_MAX)
        for path in list(directory.iterdir()):
            if not takeover:
                path.unlink()
            elif asked := _remembered(path):
                self.open_[int(path.name)] = asked
                self.handles.add(asked.who.uid, 1)

    def open(self, ino: int, who: Who) -> int:
        """The number of a new handle. Raises OSError, UserLimitError, TooManyOpenError."""
        self.handles.take(who.uid)
        handle = FIRST + time.time_ns() % FIRST
        while handle in self.open_:
            handle += 1
        try:
            (self.directory / str(handle)).write_text(f"{ino} {who.uid} {who.gid}", "ascii")
        except OSError:
            self.handles.add(who.uid, -1)
            raise
        self.open_[handle] = _Asked(ino, who)
        return handle

    def release(self, handle: int) -> set[int]:
        """Return the leases that end with it."""
        asked = self.open_.pop(handle, None)
        (self.directory / str(handle)).unlink(missing_ok=True)
        if asked is None:
            return set()
        self.forget(asked)
        self.handles.add(asked.who.uid, -1)
        asked.released = True
        if asked.peer is not None:
            asked.peer.close()
        return asked.leases

    def take(self, asked: _Asked, offset: int, data: bytes) -> matching.Request | None:
        """Some of a question; the whole of it when nothing lacks.

        Raises InvalidError, UserLimitError, TooManyOpenError.
        """
        if not offset:
            self.forget(asked)
            asked.answer = None
            if len(data) >= matching.request_size(data):
                return matching.unpack_request(data)
        elif offset != len(asked.question):
            raise InvalidError(f"write at {offset} of a question of {len(asked.question)} bytes")
        if not asked.released:  # its last close may come first, and has given all back
            self.pending.take(asked.who.uid, len(data))
        asked.question += data
        size = matching.request_size(bytes(asked.question[: matching.HEADER.size]))
        if len(asked.question) < size:
            return None
        question = bytes(asked.question)
        self.forget(asked)
        return matching.unpack_request(question)

    def forget(self, asked: _Asked) -> None:
        """What was written of its question, if it was no whole one."""
        if not asked.released:
            self.pending.add(asked.who.uid, -len(asked.question))
        asked.question.clear()


class Matched(Controlled):
    """Operations with control files, and those of these."""

    def __init__(self, *args: Any, matches: MatchFiles, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self.matches = matches
        self._said: dict[type[KvfsError], float] = {}
        self.matching = Matching(self.tree)
        self.leases = Leases(self.objects, self.opened)
        self.saves = Saves(self.tree, self.objects, self.leases.numbers, self.kernel.changed)

    def _asked(self, handle: int) -> _Asked:
        found = self.matches.open_.get(handle)
        if found is None:
            raise StaleError(f"handle {handle} of {matching.NAME} is not known")
        return found

    def _say_limit(self, error: KvfsError) -> None:
        """An errno tells its client which limit it is; the log says whose, and how much that is."""
        kind, now = type(error), time.monotonic()
        if now - self._said.get(kind, -SAID_AGAIN) >= SAID_AGAIN:
            self._said[kind] = now
            log.warning("%s: %s (said once in %.0f s)", matching.NAME, error, SAID_AGAIN)

    def touched(self, args: tuple[object, ...]) -> bool:
        for above, word in pairwise(args):
            if word == NAME and isinstance(above, int):
                return self.matching.is_asked(above)
        return super().touched(args)

    def _attributes_of(self, inode: int) -> EntryAttributes:
        directory = self.tree.directory(inode - FIRST)
        entry = EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(inode)
        entry.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o666)
        entry.st_nlink = 1
        entry.st_uid, entry.st_gid = directory.uid, directory.gid
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = directory.ctime_ns
        entry.entry_timeout = entry.attr_timeout = 0
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if name == NAME and self.matching.is_asked(parent_inode):
            return await self._lookup_match(parent_inode, ctx)
        return await super().lookup(parent_inode, name, ctx)

    @answering
    async def _lookup_match(self, directory: int, ctx: RequestContext) -> EntryAttributes:
        if is_nfs_server(ctx.pid):
            raise NotFoundError(f"{matching.NAME} is not for servers of NFS")
        return self._attributes_of(FIRST + directory)

    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        if inode < FIRST:
            return await super().getattr(inode, ctx)
        return await self._getattr_match(inode)

    @answering
    async def _getattr_match(self, inode: int) -> EntryAttributes:
        return self._attributes_of(inode)

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if inode < FIRST:
            return await super().open(inode, flags, ctx)
        return await self._open_match(inode, flags, Who(ctx.uid, ctx.gid))

    @answering
    async def _open_match(self, inode: int, flags: int, who: Who) -> FileInfo:
        if not self.matching.is_asked(inode - FIRST):
            raise StaleError(f"directory {inode - FIRST} is no namespace with prefix=on")
        if flags & os.O_ACCMODE != os.O_RDWR:
            raise InvalidError(f"{matching.NAME} opened with flags {flags:#o}, expected O_RDWR")
        try:
            handle = self.matches.open(inode - FIRST, who)
        except (UserLimitError, TooManyOpenError) as error:
            self._say_limit(error)
            raise
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None
        return FileInfo(fh=pyfuse3.FileHandleT(handle), direct_io=True, keep_cache=False)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        if fh < FIRST:
            return await super().write(fh, off, buf)
        return await self._ask(fh, off, buf)

    @answering
    async def _ask(self, fh: int, off: int, buf: bytes) -> int:
        asked = self._asked(fh)
        if not off and leasing.is_question(buf):
            await self._lend(asked, buf)
            return len(buf)
        try:
            request = self.matches.take(asked, off, buf)
        except InvalidError:
            self.matches.forget(asked)
            raise
        except (UserLimitError, TooManyOpenError) as error:
            self._say_limit(error)
            raise
        if request is not None:
            asked.answer = matching.pack_answer(await self.matching.answer(asked.ino, request))
        return len(buf)

    async def _lend(self, asked: _Asked, question: bytes) -> None:
        """See `kvfs.leasing`."""
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
            if self.ledger.tiers.ram is None or not self.ledger.tiers.ram.lends:
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

    async def _hand_over(self, asked: _Asked, request: leasing.Request) -> None:
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
        answer = leasing.Answer(request.number, len(blocks), first)
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

    async def read(self, fh: int, off: int, size: int) -> bytes:
        if fh < FIRST:
            return await super().read(fh, off, size)
        return await self._answer(fh, off, size)

    @answering
    async def _answer(self, fh: int, off: int, size: int) -> bytes:
        answer = self._asked(fh).answer
        if answer is None:
            raise StaleError(f"handle {fh} of {matching.NAME} has no answer: ask again")
        return answer[off : off + size]

    async def release(self, fh: int) -> None:
        if fh < FIRST:
            await super().release(fh)
            return
        await self._end(self.matches.release(fh))
