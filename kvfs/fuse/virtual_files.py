"""The table of virtual files: `/.kvfs` and `NAMESPACE/.match`, which are beside the tree.

Contract: virtual files are in no catalog, and no listing of the tree shows them. Their inode and
handle numbers begin at FIRST_VIRTUAL, beyond those of the catalog and of the slots, so one
comparison keeps ordinary requests out of the table. Each kind has SPAN numbers. Nothing changes a
virtual file or gets its name: EPERM. A file of the kind's directory stands for each open handle,
also for the next daemon. Not for names of the tree, nor for its errors (`operations`).
"""

import errno
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import pyfuse3
from pyfuse3 import EntryAttributes, FUSEError, RequestContext

from kvfs import kept, runtime
from kvfs.core.names.tree import COOKIE_SELF

FIRST_VIRTUAL = runtime.FIRST_CONTROL
SPAN = FIRST_VIRTUAL >> 1  # numbers of one kind


class Kind(ABC):
    """One kind of virtual file, found by `name` in some directories of the tree.

    `first` is its first number. `directory` is on a tmpfs. The defaults refuse.
    """

    name: bytes
    first: int

    def __init__(self, directory: Path, *, takeover: bool) -> None:
        self.directory = directory
        kept.folder(directory)
        for path in () if takeover else list(directory.iterdir()):
            path.unlink()

    def new_handle(self) -> int:
        """Return a number that neither this daemon nor an earlier one has in use."""
        handle = self.first + time.time_ns() % SPAN
        while self.path(handle).exists():
            handle += 1
        return handle

    def path(self, handle: int) -> Path:
        return self.directory / str(handle)

    @staticmethod
    def entry(inode: int, mode: int, uid: int, gid: int) -> EntryAttributes:
        """Attributes that the kernel does not keep."""
        entry = EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(inode)
        entry.st_mode = pyfuse3.ModeT(mode)
        entry.st_nlink = 2 if stat.S_ISDIR(mode) else 1
        entry.st_uid, entry.st_gid = uid, gid
        entry.entry_timeout = entry.attr_timeout = 0
        return entry

    @abstractmethod
    def is_in(self, directory: int) -> bool:
        """Whether `name` in a directory of the tree is of this kind."""

    @abstractmethod
    def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        """Of `self.name` in a directory that it is in, or of any name below a virtual inode."""

    @abstractmethod
    def getattr(self, inode: int) -> EntryAttributes:
        """Attributes by `entry`."""

    def entries(self) -> Sequence[tuple[bytes, int]]:
        """Names and inode numbers in the directory `first`, if that is one, with `.` and `..`."""
        return ()

    @abstractmethod
    def open(self, inode: int, flags: int, ctx: RequestContext) -> int:
        """Return a new handle."""

    @abstractmethod
    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Some bytes of what an open handle shows."""

    async def write(self, handle: int, offset: int, data: bytes) -> int:  # noqa: ARG002 (protocol)
        raise FUSEError(errno.EPERM)

    async def release(self, handle: int) -> None:
        self.path(handle).unlink(missing_ok=True)  # the request may come again


class VirtualFiles:
    """All kinds of a mount."""

    def __init__(self, *kinds: Kind) -> None:
        self._kinds = sorted(kinds, key=lambda kind: kind.first, reverse=True)
        self.names = {kind.name: kind for kind in kinds}

    def _named(self, directory: int, name: bytes) -> Kind | None:
        kind = self.names.get(name)
        return kind if kind is not None and kind.is_in(directory) else None

    def of(self, number: int) -> Kind:
        """The kind of an inode or a handle from FIRST_VIRTUAL on."""
        return next(kind for kind in self._kinds if number >= kind.first)

    def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes | None:
        """None if the tree has the name, or nothing has."""
        if parent < FIRST_VIRTUAL:
            kind = self._named(parent, name)
            return None if kind is None else kind.lookup(parent, name, ctx)
        if name in {b".", b".."}:  # a server of NFS that has a handle
            raise FUSEError(errno.ESTALE)
        return self.of(parent).lookup(parent, name, ctx)

    def readdir(self, inode: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        kind = self.of(inode)
        for cookie, (name, number) in enumerate(kind.entries(), COOKIE_SELF):
            if cookie <= start_id:
                continue
            entry = kind.getattr(max(number, kind.first))  # the one above is shown like itself
            entry.st_ino = pyfuse3.InodeT(number)
            if not pyfuse3.readdir_reply(token, name, entry, cookie):
                return

    def refuse(self, inode: int, name: bytes = b"") -> None:
        """Refuse a change of a virtual inode, of what is below it, or of a virtual name."""
        if inode >= FIRST_VIRTUAL or self._named(inode, name) is not None:
            raise FUSEError(errno.EPERM)
