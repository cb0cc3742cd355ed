"""`/.kvfs`: what the daemon knows of itself, as files that any program can read.

Contract: a directory at the top of the mount that no listing shows, with one file for each of
`contents`. It is not in the catalog: no namespace, tier, check or bucket ever meets it. The content
of a file is made when it is opened and kept in a file of the runtime directory until it is closed,
so that a reader sees one whole, also from the next daemon. Nothing in it can be changed, nothing
gets its name: EPERM. A catalog of an earlier version may have a real `.kvfs` at the top: that one
is served then, and these files are not there. Not for asking anything with an argument: that is the
control socket.
"""

import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext

from kvfs import kept, runtime
from kvfs.catalog import ROOT_INO
from kvfs.core.names.tree import COOKIE_PARENT, COOKIE_SELF, RESERVED
from kvfs.fuse.operations import Operations

log = logging.getLogger(__name__)

FIRST = runtime.FIRST_CONTROL  # inode and handle numbers; the catalog and the slots end before
REFUSED = (
    *("setattr", "mkdir", "symlink", "mknod", "link", "unlink", "rmdir", "rename", "create"),
    *("setxattr", "removexattr"),
)

Contents = Mapping[bytes, Callable[[], bytes]]


class ControlFiles:
    """`directory` keeps what is open; it is on a tmpfs."""

    def __init__(self, contents: Contents, directory: Path, *, takeover: bool) -> None:
        self.contents = dict(contents)
        self.names = sorted(contents)
        self.directory = directory
        kept.folder(directory)
        for path in () if takeover else list(directory.iterdir()):
            path.unlink()

    def number(self, name: bytes) -> int:
        """An inode's."""
        return FIRST + 1 + self.names.index(name)

    def open(self, inode: int) -> int:
        """The number of a new handle."""
        content = self.contents[self.names[inode - FIRST - 1]]()
        handle = FIRST + time.time_ns() % FIRST  # no daemon before us has given it out
        while (path := self._path(handle)).exists():
            handle += 1
        path.write_bytes(content)
        return handle

    def read(self, handle: int, offset: int, size: int) -> bytes:
        with self._path(handle).open("rb") as file:
            return os.pread(file.fileno(), size, offset)

    def release(self, handle: int) -> None:
        self._path(handle).unlink(missing_ok=True)  # it may come again

    def _path(self, handle: int) -> Path:
        return self.directory / str(handle)

    def attributes(self, inode: int) -> EntryAttributes:
        """Sizes are 0, as in /proc: nobody knows them before an open."""
        entry = EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(inode)
        kind = stat.S_IFDIR | 0o500 if inode == FIRST else stat.S_IFREG | 0o400
        entry.st_mode = pyfuse3.ModeT(kind)
        entry.st_nlink = 2 if inode == FIRST else 1
        entry.st_uid, entry.st_gid = os.geteuid(), os.getegid()
        entry.entry_timeout = entry.attr_timeout = 0
        return entry


class Controlled(Operations):
    """Operations, and those of control files."""

    def __init__(self, *args: Any, control: ControlFiles, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self.control = control
        if self._is_real():
            log.warning(
                "a file or directory %s at the top hides the control files: rename it",
                os.fsdecode(RESERVED),
            )

    def _is_real(self) -> bool:
        return self.tree.catalog.lookup(ROOT_INO, RESERVED) is not None

    def touched(self, args: tuple[object, ...]) -> bool:
        """Whether a request is about a control file, by its number or its name."""
        for at, word in enumerate(args):
            if word == RESERVED:
                return args[at - 1] == ROOT_INO and not self._is_real()
            if type(word) is int and word >= FIRST:
                return True
        return False

    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if name == RESERVED and parent_inode == ROOT_INO and not self._is_real():
            return self.control.attributes(FIRST)
        if parent_inode < FIRST:
            return await super().lookup(parent_inode, name, ctx)
        if name in {b".", b".."}:  # a server of NFS that has a handle
            raise FUSEError(errno.ESTALE)
        if parent_inode > FIRST or name not in self.control.contents:
            raise FUSEError(errno.ENOENT)
        return self.control.attributes(self.control.number(name))

    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        if inode < FIRST:
            return await super().getattr(inode, ctx)
        return self.control.attributes(inode)

    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        return inode if inode == FIRST else await super().opendir(inode, ctx)

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        if fh < FIRST:
            await super().readdir(fh, start_id, token)
            return
        entries = [(b".", FIRST), (b"..", ROOT_INO)]
        entries += [(name, self.control.number(name)) for name in self.control.names]
        for cookie, (name, inode) in enumerate(entries, COOKIE_SELF):
            if cookie <= start_id:
                continue
            entry = self.control.attributes(FIRST if cookie <= COOKIE_PARENT else inode)
            entry.st_ino = pyfuse3.InodeT(inode)
            if not pyfuse3.readdir_reply(token, name, entry, cookie):
                return

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if inode < FIRST:
            return await super().open(inode, flags, ctx)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise FUSEError(errno.EPERM)
        try:
            handle = self.control.open(inode)
        except Exception:
            log.exception("a control file cannot be made: a defect of kvfs, or /run is full")
            raise FUSEError(errno.EIO) from None
        return FileInfo(fh=pyfuse3.FileHandleT(handle), direct_io=True, keep_cache=False)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        if fh < FIRST:
            return await super().read(fh, off, size)
        try:
            return self.control.read(fh, off, size)
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None

    async def flush(self, fh: int) -> None:
        if fh < FIRST:
            await super().flush(fh)

    async def fsync(self, fh: int, datasync: bool) -> None:  # noqa: FBT001 (pyfuse3's)
        if fh < FIRST:
            await super().fsync(fh, datasync)

    async def release(self, fh: int) -> None:
        if fh < FIRST:
            await super().release(fh)
            return
        with suppress(OSError):
            self.control.release(fh)

    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        if inode < FIRST:
            return await super().getxattr(inode, name, ctx)
        raise FUSEError(errno.ENODATA)

    async def listxattr(self, inode: int, ctx: RequestContext) -> Any:  # noqa: ANN401 - pyfuse3's
        return await super().listxattr(inode, ctx) if inode < FIRST else []


def _refusing(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    async def refusing(self: Controlled, *args: Any) -> Any:  # noqa: ANN401 - any operation
        if self.touched(args):
            raise FUSEError(errno.EPERM)
        return await operation(self, *args)

    return refusing


for _name in REFUSED:
    setattr(Controlled, _name, _refusing(getattr(Operations, _name)))
