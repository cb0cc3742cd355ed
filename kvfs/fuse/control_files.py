"""`/.kvfs`: what the daemon knows of itself, as files that any program can read.

Contract: a directory at the top of the mount that no listing shows, with one file for each of
`contents`. It is not in the catalog: no namespace, tier, check or bucket ever meets it. The content
of a file is made when it is opened and kept in a file of the runtime directory until it is closed,
so that a reader sees one whole, also from the next daemon. A catalog of an earlier version may have
a real `.kvfs` at the top: that one is served then, and these files are not there. Not for asking
anything with an argument: that is the control socket.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from pyfuse3 import EntryAttributes, FUSEError, RequestContext

from kvfs.catalog import ROOT_INO, Catalog
from kvfs.core.names.tree import RESERVED
from kvfs.fuse.virtual_files import FIRST_VIRTUAL, Kind

log = logging.getLogger(__name__)

Contents = Mapping[bytes, Callable[[], bytes]]


class ControlFiles(Kind):
    """The directory is `first`, its files follow."""

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
        """Sizes are 0, as in /proc: nobody knows them before an open."""
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
