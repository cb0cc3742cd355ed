"""Virtual files, which are beside the tree: their table, and the control files in `/.kvfs`.

Contract: virtual files are in no catalog, and no listing of the tree shows them: no namespace, tier
or check ever meets them. Their inode and handle numbers begin at FIRST_VIRTUAL, beyond those of the
catalog and of the slots. So one comparison keeps ordinary requests out of the table. Each kind has
SPAN numbers. No operation changes a virtual file or takes its name: EPERM. A file in the kind's
directory stands for each open handle, also for the next daemon. Not for names of the tree, nor for
its errors (`operations`).
"""

import errno
import logging
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyfuse3
from pyfuse3 import EntryAttributes, FUSEError, RequestContext

from kvfs import own_files, runtime
from kvfs.catalog import ROOT_INO, Catalog
from kvfs.core.names.tree import COOKIE_SELF, RESERVED

log = logging.getLogger(__name__)

FIRST_VIRTUAL = runtime.FIRST_CONTROL
SPAN = FIRST_VIRTUAL >> 1  # numbers of one kind

Contents = Mapping[bytes, Callable[[], bytes]]


class VirtualFileKind(ABC):
    """One kind of virtual file, found by `name` in some directories of the tree.

    `first` is its first number. `directory` is on a tmpfs. By default each operation is refused.
    """

    name: bytes
    first: int

    def __init__(self, directory: Path, *, takeover: bool) -> None:
        self.directory = directory
        own_files.ensure_folder(directory)
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
        """Attributes that the kernel must not cache."""
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
        """Find `self.name` in one of its directories, or any name below a virtual inode."""

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
        """Bytes of an open handle's content."""

    async def write(self, handle: int, offset: int, data: bytes) -> int:  # noqa: ARG002 (protocol)
        raise FUSEError(errno.EPERM)

    async def release(self, handle: int) -> None:
        self.path(handle).unlink(missing_ok=True)  # the request may come again


class VirtualFiles:
    """All kinds of a mount."""

    def __init__(self, *kinds: VirtualFileKind) -> None:
        self._kinds = sorted(kinds, key=lambda kind: kind.first, reverse=True)
        self.names = {kind.name: kind for kind in kinds}

    def _named(self, directory: int, name: bytes) -> VirtualFileKind | None:
        kind = self.names.get(name)
        return kind if kind is not None and kind.is_in(directory) else None

    def of(self, number: int) -> VirtualFileKind:
        """The kind of an inode or a handle from FIRST_VIRTUAL on."""
        return next(kind for kind in self._kinds if number >= kind.first)

    def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes | None:
        """The attributes of a virtual name; None if the tree has the name, or there is none."""
        if parent < FIRST_VIRTUAL:
            kind = self._named(parent, name)
            return None if kind is None else kind.lookup(parent, name, ctx)
        if name in {b".", b".."}:  # from an NFS server that has a handle
            raise FUSEError(errno.ESTALE)
        return self.of(parent).lookup(parent, name, ctx)

    def readdir(self, inode: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        kind = self.of(inode)
        for cookie, (name, number) in enumerate(kind.entries(), COOKIE_SELF):
            if cookie <= start_id:
                continue
            entry = kind.getattr(max(number, kind.first))  # `..` has the attributes of `.`
            entry.st_ino = pyfuse3.InodeT(number)
            if not pyfuse3.readdir_reply(token, name, entry, cookie):
                return

    def refuse(self, inode: int, name: bytes = b"") -> None:
        """Refuse a change of a virtual inode, of what is below it, or of a virtual name."""
        if inode >= FIRST_VIRTUAL or self._named(inode, name) is not None:
            raise FUSEError(errno.EPERM)


class ControlFiles(VirtualFileKind):
    """`/.kvfs`: the daemon's state, as files that any program can read.

    The directory is `first`, with one file for each of `contents`. Opening a file makes its
    content, and a file of the runtime directory keeps it until the close. So a reader sees one
    complete content, also from the next daemon. A catalog of an earlier version may have a real
    `.kvfs` at the top. Then that one is served, and these files do not exist. Not for questions
    with an argument: those go to the control socket.
    """

    name, first = RESERVED, FIRST_VIRTUAL

    def __init__(
        self, contents: Contents, directory: Path, catalog: Catalog, *, takeover: bool
    ) -> None:
        super().__init__(directory, takeover=takeover)
        self.numbers = {name: at for at, name in enumerate(sorted(contents), self.first + 1)}
        self.contents = {self.numbers[name]: content for name, content in contents.items()}
        self.catalog = catalog
        if not self.is_in(ROOT_INO):
            log.warning(
                "a file or directory %s at the top hides the control files: rename it",
                os.fsdecode(RESERVED),
            )

    def is_in(self, directory: int) -> bool:
        return directory == ROOT_INO and self.catalog.lookup(ROOT_INO, RESERVED) is None

    def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:  # noqa: ARG002
        if parent < self.first:
            return self.getattr(self.first)
        if parent > self.first or name not in self.numbers:
            raise FUSEError(errno.ENOENT)
        return self.getattr(self.numbers[name])

    def getattr(self, inode: int) -> EntryAttributes:
        """Attributes with size 0, as in /proc: the size is unknown before an open."""
        mode = stat.S_IFDIR | 0o500 if inode == self.first else stat.S_IFREG | 0o400
        return self.entry(inode, mode, os.geteuid(), os.getegid())

    def entries(self) -> list[tuple[bytes, int]]:
        return [(b".", self.first), (b"..", ROOT_INO), *self.numbers.items()]

    def open(self, inode: int, flags: int, ctx: RequestContext) -> int:  # noqa: ARG002 (protocol)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise FUSEError(errno.EPERM)
        try:
            content = self.contents[inode]()
            handle = self.new_handle()
            self.path(handle).write_bytes(content)
        except Exception:
            log.exception("a control file cannot be made: a defect of kvfs, or /run is full")
            raise FUSEError(errno.EIO) from None
        return handle

    def read(self, handle: int, offset: int, size: int) -> bytes:
        try:
            with self.path(handle).open("rb") as file:
                return os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None
